"""What a cluster is given: kustomize and helm make it of deploy/, and examples are taken as they are."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from tests.operate.containers import SCRIPTS
from tests.operate.promql import ROOT

KUBERNETES = ROOT / "deploy/kubernetes"
CHART = ROOT / "deploy/helm/penstock"
OVERLAYS = ("base", *(f"overlays/{path.name}" for path in sorted((KUBERNETES / "overlays").iterdir())))
RULES = "components/prometheus-rule"
EXAMPLES = sorted(path.name for path in (KUBERNETES / "examples").iterdir())
EVERYTHING = {
    "hosts": 4,
    "activeDeadlineSeconds": 86400,
    "credentials": {"roleArn": "arn:aws:iam::111122223333:role/digits"},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {
        "enabled": True,
        "runbook": "https://docs.example/runbook.html",
        "labels": {"release": "prometheus"},
    },
    "networkPolicy": {"enabled": True, "podIdentity": True},
    "podLabels": {"team": "vision"},
    "podAnnotations": {"note": "x"},
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}
    },
    "priorityClassName": "training",
    "imagePullSecrets": [{"name": "registry"}],
    "keeper": {"enabled": True},
    "resume": {"claim": "digits-checkpoints"},
    "admin": {"tokenSecret": "digits-admin", "protect": "all"},
    "sidecar": {"env": [{"name": "AWS_CA_BUNDLE", "value": "/etc/ca.pem"}]},
    "trainer": {
        "command": ["python", "-m", "examples.demo.train"],
        "env": [{"name": "TF_CPP_MIN_LOG_LEVEL", "value": "2"}],
        "resources": {"limits": {"nvidia.com/gpu": "1", "memory": "4Gi"}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    },
    "volumes": {"extra": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]},
}
CHARTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "secret": {
        "credentials": {"kind": "secret", "secretName": "digits-s3"},
        "serviceAccount": {"create": False},
    },
}
SOURCES = (
    *OVERLAYS,
    "demo",
    RULES,
    *(f"examples/{name}" for name in EXAMPLES),
    *(f"chart {name}" for name in CHARTS),
)
"""Every way to get manifests from this repository."""
WITH_SIDECAR = tuple(source for source in SOURCES if source not in ("demo", RULES))
WITH_KEEPER = ("overlays/keeper", "chart everything")


@functools.cache
def documents(source: str) -> tuple[dict[str, Any], ...]:
    """The objects that a source makes, in order."""
    if source.startswith("chart "):
        done = chart(CHARTS[source.removeprefix("chart ")])
        assert done.returncode == 0, done.stderr
        text = done.stdout
    elif source.startswith("examples/"):
        text = (KUBERNETES / source).read_text(encoding="utf-8")
    else:
        text = kustomized(source)
    return tuple(filter(None, yaml.safe_load_all(text)))


def kustomized(directory: str) -> str:
    """What kustomize makes of a directory."""
    done = subprocess.run(
        [os.path.join(SCRIPTS, "kubectl"), "kustomize", str(KUBERNETES / directory)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def chart(values: dict[str, Any], *, release: str = "digits") -> subprocess.CompletedProcess[str]:
    """`helm template` with these values."""
    return subprocess.run(
        [os.path.join(SCRIPTS, "helm"), "template", release, str(CHART), "--values", "-"],
        input=yaml.safe_dump(values), capture_output=True, text=True, check=False,
    )  # fmt: skip


def of_kind(source: str, kind: str) -> list[dict[str, Any]]:
    return [document for document in documents(source) if document["kind"] == kind]


def job_file(source: str) -> str:
    """The text of the job file in the source's ConfigMap."""
    (config,) = of_kind(source, "ConfigMap")
    text: str = config["data"]["job.yaml"]
    return text


@dataclass(frozen=True)
class Pod:
    """A pod template, and the Job that it is in."""

    job: dict[str, Any]

    @property
    def template(self) -> dict[str, Any]:
        template: dict[str, Any] = self.job["spec"]["template"]
        return template

    @property
    def spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.template["spec"]
        return spec

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.template["metadata"]["labels"]
        return labels

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    @property
    def sidecar(self) -> dict[str, Any]:
        return next(each for each in self.spec["initContainers"] if each["name"] == "penstock")

    @property
    def keeper(self) -> dict[str, Any] | None:
        return next((each for each in self.spec["initContainers"] if each["name"] == "keeper"), None)


def jobs(source: str) -> Iterator[dict[str, Any]]:
    """Every batch/v1 Job, those inside JobSets and training runtimes too."""
    for document in documents(source):
        spec = document.get("spec", {})
        if document["kind"] == "Job":
            yield document
        elif document["kind"] in ("JobSet", "TrainingRuntime"):
            inner = spec if document["kind"] == "JobSet" else spec["template"]["spec"]
            for replicated in inner["replicatedJobs"]:
                yield {"apiVersion": "batch/v1", "kind": "Job"} | {"metadata": {}} | replicated["template"]


def training_pod(source: str) -> Pod:
    (job,) = jobs(source)
    return Pod(job)


def hosts(source: str) -> int:
    """How many pods the source starts."""
    if runtimes := of_kind(source, "TrainingRuntime"):
        counts = {runtimes[0]["spec"]["mlPolicy"]["numNodes"]}
        counts |= {train["spec"]["trainer"]["numNodes"] for train in of_kind(source, "TrainJob")}
        (count,) = counts
        return int(count)
    spec = training_pod(source).job["spec"]
    assert spec.get("parallelism", 1) == spec.get("completions", 1)
    return int(spec.get("completions", 1))


def keys(document: Any, place: str = "") -> set[str]:
    """The dotted paths of all mappings' keys; not into lists."""
    if not isinstance(document, dict):
        return set()
    found = set()
    for key, inner in document.items():
        found |= {f"{place}{key}"} | keys(inner, f"{place}{key}.")
    return found
