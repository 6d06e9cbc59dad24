"""The manifests: valid without a cluster, and what they say is what the sidecar takes, answers and does."""

from __future__ import annotations

import functools
import json
import os
import re
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from botocore import session
from botocore.validate import ParamValidator

from examples.demo.server import free_ports
from sidecar.cli import cli
from sidecar.config.hosts import identify
from sidecar.config.job import Job, load_job
from streamer.finish import PROGRAM
from streamer.units import MIB
from tests.kit.harness import fill
from tests.kit.pipes import read_all
from tests.kit.processes import sidecar, write_job
from tests.kit.stub import S3Stub
from tests.operate import manifests
from tests.operate.containers import SCRIPTS, STAGES
from tests.operate.manifests import (
    CHART,
    KUBERNETES,
    SOURCES,
    WITH_KEEPER,
    WITH_SIDECAR,
    documents,
    of_kind,
    training_pod,
)
from tests.operate.promql import ROOT

OLDEST, NEWEST = "1.29", "1.37"
"""Native sidecars are on by default from the one; the other is the newest whose schema the validator has."""
EXTENSIONS = {"PodMonitor", "PrometheusRule", "JobSet", "TrainingRuntime", "TrainJob"}
UNIT = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def each_source(sources: tuple[str, ...] | list[Any] = SOURCES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("source", sources)


def size(quantity: str) -> float:
    return float(quantity[:-2]) * UNIT[quantity[-2:]]


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    """The source's job file, as its sidecar reads it."""
    (tmp_path / "job.yaml").write_text(manifests.job_file(request.getfixturevalue("source")))
    return load_job(tmp_path / "job.yaml")


# Valid


@each_source()
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_is_valid(source: str, version: str) -> None:
    """Strictly: an unknown key is an error. Of extensions, the Jobs within."""
    found = [document for document in documents(source) if document["kind"] not in EXTENSIONS | {"Job"}]
    for document in [*found, *manifests.jobs(source)]:
        validate(json.dumps(document), version)


@functools.cache
def validate(document: str, version: str) -> None:
    """Overlays have most objects in common, and a schema takes long to load."""
    kubernetes_validate.validate(json.loads(document), version, strict=True)


def test_a_misspelt_key_is_noticed() -> None:
    broken = json.loads(json.dumps(next(iter(manifests.jobs("examples/jobset.yaml")))))
    broken["spec"]["template"]["spec"]["initContainers"][0]["restartPolcy"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError, match="restartPolcy"):
        kubernetes_validate.validate(broken, NEWEST, strict=True)


def test_the_chart_passes_helms_linter() -> None:
    ran = subprocess.run(
        [os.path.join(SCRIPTS, "helm"), "lint", "--strict", str(CHART)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout


def test_every_value_of_the_chart_is_in_its_schema() -> None:
    """So that a misspelt value is refused at every level where names are fixed."""
    schema = json.loads((CHART / "values.schema.json").read_text())

    def allowed(inner: Any, place: str = "") -> Iterator[Any]:
        for key, found in inner.get("properties", {}).items():
            yield f"{place}{key}"
            yield from allowed(found, f"{place}{key}.")

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    free = ("job.", "sidecar.resources.", "keeper.resources.", "trainer.resources.")
    given = {key for key in manifests.keys(values) if not key.startswith(free)}
    assert given == {key for key in allowed(schema) if not key.startswith(free)} - {"global"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"nonsense": 1}, "nonsense is not allowed"),
        ({"trainer": {"imgae": "x"}}, "imgae is not allowed"),
        ({"credentials": {"kind": "secret"}}, "secretName"),
        ({"credentials": {"roleArn": "digits"}}, "roleArn"),
        ({"hosts": 0}, "hosts"),
        ({"hosts": 2, "job": {"ResourceConfig": {"InstanceCount": 3}}}, "asks for 3 hosts, and hosts is 2"),
        ({"job": {"ResourceConfig": {"InstanceCount": 3}}}, "asks for 3 hosts, and hosts is 1"),
        ({"job": {"Penstock": {"Admin": {"Port": 1}}}}, "Penstock.Admin is set by the chart"),
        ({"admin": {"protect": "all"}}, "tokenSecret"),
        ({"job": {"CheckpointConfig": {"LocalPath": "/data"}}}, "LocalPath is not below /opt/ml"),
        ({"volumes": {"output": 0}}, "output"),
    ],
)
def test_values_that_contradict_are_refused(values: Any, words: str) -> None:
    ran = manifests.chart(values)
    assert ran.returncode != 0
    assert words in ran.stderr


@pytest.mark.parametrize(
    ("volumes", "rate", "limit", "grace"),
    [
        ({}, 100, "2Gi", 82),
        ({"model": 140, "checkpoints": 1800.5, "files": 20}, 250.5, "1961.5Gi", 8383),
        ({"model": 0.1, "output": 0.2}, 1, "0.3Gi", 383),
    ],
)
def test_sizes_and_times_are_computed(volumes: dict[str, float], rate: float, limit: str, grace: int) -> None:
    """Grace: 60 s and model, output and checkpoints. A start may take a day, however large its files are."""
    ran = manifests.chart({"volumes": volumes, "sidecar": {"megabytesPerSecond": rate}})
    assert ran.returncode == 0, ran.stderr
    pod = manifests.Pod(next(each for each in yaml.safe_load_all(ran.stdout) if each["kind"] == "Job"))
    (ml,) = (each for each in pod.spec["volumes"] if each["name"] == "ml")
    assert ml["emptyDir"] == {"sizeLimit": limit}
    assert pod.sidecar["startupProbe"]["failureThreshold"] == 86400
    assert pod.spec["terminationGracePeriodSeconds"] == grace


def test_instance_groups_count_as_hosts(tmp_path: Path) -> None:
    groups = [
        {"InstanceGroupName": name, "InstanceType": "ml.p5.48xlarge", "InstanceCount": count}
        for name, count in (("a", 1), ("b", 2))
    ]
    ran = manifests.chart({"hosts": 3, "job": {"ResourceConfig": {"InstanceGroups": groups}}})
    assert ran.returncode == 0, ran.stderr
    config = next(each for each in yaml.safe_load_all(ran.stdout) if each and each["kind"] == "ConfigMap")
    (tmp_path / "job.yaml").write_text(config["data"]["job.yaml"])
    assert identify(load_job(tmp_path / "job.yaml"), environment={"JOB_COMPLETION_INDEX": "2"}).index == 2


@pytest.mark.parametrize(
    ("hosts", "resume", "state"),
    [
        (1, {"claim": "digits-checkpoints"}, "/checkpoints/state.json"),
        (4, {"claim": "digits-checkpoints"}, "/checkpoints/state-$(JOB_COMPLETION_INDEX).json"),
        (4, {"claim": "digits-checkpoints", "state": "/checkpoints/run 7/"}, "/checkpoints/run 7/"),
        (4, {"state": "s3://my-bucket/run/state.json"}, "s3://my-bucket/run/state.json"),
    ],
)
def test_a_pod_resumes_at_its_state(hosts: int, resume: dict[str, str], state: str) -> None:
    ran = manifests.chart({"hosts": hosts, "resume": resume})
    assert ran.returncode == 0, ran.stderr
    job = next(each for each in yaml.safe_load_all(ran.stdout) if each and each["kind"] == "Job")
    pod = manifests.Pod(job)
    assert [each["name"] for each in pod.containers] == ["penstock", "trainer"]
    words = pod.sidecar["args"]
    assert words[words.index("--resume") + 1] == state
    assert state_mounts(pod) == (
        [("/checkpoints", True), ("/checkpoints", False)] if "claim" in resume else []
    )


@pytest.mark.parametrize(
    ("source", "state", "mounted"),
    [
        ("overlays/resume", "/checkpoints/", True),
        ("examples/jobset.yaml", "/checkpoints/state-$(JOB_COMPLETION_INDEX).json", True),
        ("examples/trainjob.yaml", "s3://my-bucket/digits/state-$(JOB_COMPLETION_INDEX).json", False),
    ],
)
def test_overlay_and_examples_resume(source: str, state: str, mounted: bool) -> None:
    pod = training_pod(source)
    words = pod.sidecar["args"]
    assert words[words.index("--resume") + 1] == state
    assert state_mounts(pod) == ([("/checkpoints", True), ("/checkpoints", False)] if mounted else [])


def state_mounts(pod: manifests.Pod) -> list[tuple[str, bool]]:
    """Path, and whether it is read-only, of each mount of the checkpoints: the sidecar's, the trainer's."""
    return [
        (mount["mountPath"], mount.get("readOnly", False))
        for container in pod.containers
        for mount in container["volumeMounts"]
        if mount["name"] == "checkpoints"
    ]


def test_the_admin_token_is_the_secret_s(tmp_path: Path) -> None:
    pod = training_pod("chart everything")
    (tmp_path / "job.yaml").write_text(manifests.job_file("chart everything"))
    admin = load_job(tmp_path / "job.yaml").penstock.admin
    assert admin.protect == "all"
    assert admin.token_file is not None
    directory, name = os.path.split(admin.token_file)
    assert {"name": "admin-token", "mountPath": directory, "readOnly": True} in pod.sidecar["volumeMounts"]
    assert name == "token"
    (volume,) = (each for each in pod.spec["volumes"] if each["name"] == "admin-token")
    assert volume["secret"] == {"secretName": "digits-admin", "defaultMode": 0o440}
    (monitor,) = of_kind("chart everything", "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"] == {"credentials": {"name": "digits-admin", "key": "token"}}
    for container in pod.containers:
        assert container is pod.sidecar or "admin-token" not in str(container)


# Safe


@each_source([source for source in SOURCES if source != manifests.RULES])
def test_every_container_is_confined(source: str) -> None:
    pods = [document["spec"]["template"]["spec"] for document in of_kind(source, "Deployment")]
    pods += [job["spec"]["template"]["spec"] for job in manifests.jobs(source)]
    assert pods
    for pod in pods:
        assert pod["automountServiceAccountToken"] is False
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] == context["runAsGroup"] == 65534
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*pod.get("initContainers", ()), *pod["containers"]]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]
            paths = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert ("/tmp" in paths) == (container["name"] != "keeper")
            names = {volume["name"] for volume in pod["volumes"]}
            assert {mount["name"] for mount in container["volumeMounts"]} <= names


@each_source(WITH_SIDECAR)
def test_the_sidecar_alone_has_credentials(source: str) -> None:
    """Neither from the manifest nor from what EKS puts into pods."""
    pod = training_pod(source)
    skipped = pod.template["metadata"]["annotations"]["eks.amazonaws.com/skip-containers"].split(",")
    trainers = [container for container in pod.containers if container is not pod.sidecar]
    assert skipped == [trainer["name"] for trainer in trainers]
    for trainer in trainers:
        assert "envFrom" not in trainer
        assert not [each for each in trainer.get("env", ()) if each["name"].startswith("AWS_")]


@pytest.mark.parametrize(
    ("source", "secret"), [("overlays/secret", "digits-s3"), ("chart secret", "digits-s3")]
)
def test_the_secret_reaches_the_sidecar(source: str, secret: str) -> None:
    assert training_pod(source).sidecar["envFrom"] == [{"secretRef": {"name": secret}}]
    (made,) = of_kind("demo", "Secret")
    assert made["metadata"]["name"] == secret
    assert {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= made["data"].keys()


# Fitting


@each_source(WITH_SIDECAR)
def test_the_sidecar_starts_before_the_trainer_and_is_given_what_it_takes(source: str, job: Job) -> None:
    pod = training_pod(source)
    serving = pod.sidecar
    assert serving["restartPolicy"] == "Always"
    assert pod.spec["restartPolicy"] == "Never"
    words = serving["args"]
    with cli.make_context("penstock", list(words)) as context:
        _, command, rest = cli.resolve_command(context, list(words))
        assert command is not None
        with command.make_context(words[0], rest, parent=context) as parsed:
            path = parsed.params["path"]
    mounts = {mount["name"]: mount["mountPath"] for mount in serving["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    assert os.path.split(path) == (mounts["job"], "job.yaml")
    (config,) = of_kind(source, "ConfigMap")
    assert volumes["job"]["configMap"] == {"name": config["metadata"]["name"]}
    assert json.loads(STAGES["sidecar"].last("CMD")) == ["run", "-c", path]
    base = job.penstock.base_directory or "/opt/ml"
    for container in pod.containers:
        streams = container != pod.keeper
        assert ({"name": "ml", "mountPath": base} in container["volumeMounts"]) == streams
    assert (pod.keeper is not None) == (source in WITH_KEEPER)
    assert "emptyDir" in volumes["ml"]
    assert pod.spec["securityContext"]["fsGroup"] == pod.spec["securityContext"]["runAsGroup"]
    results = size(volumes["ml"]["emptyDir"]["sizeLimit"]) / 1e8  # seconds to S3
    assert pod.spec["terminationGracePeriodSeconds"] >= job.penstock.drain_for + 40 + results
    assert size(serving["resources"]["limits"]["memory"]) >= job.budget + 256 * MIB
    assert "cpu" not in serving["resources"]["limits"]


@each_source([source for source in WITH_SIDECAR if source != "chart everything"])
def test_the_trainer_ends_with_the_proof_that_its_results_are_in_s3(source: str, job: Job) -> None:
    """`penstock-finish` is on the volume, and starts what the image would have started."""
    (trainer,) = training_pod(source).spec["containers"]
    base = job.penstock.base_directory or "/opt/ml"
    assert trainer["command"][:2] == [f"{base}/input/config/{PROGRAM}", "--"]
    assert trainer["command"][2:] == json.loads(STAGES["trainer"].last("ENTRYPOINT"))
    assert job.output_data_config is not None


@each_source(WITH_SIDECAR)
def test_each_pod_is_one_host_and_all_of_them_read_everything_once(source: str, job: Job) -> None:
    count = manifests.hosts(source)
    indexed = training_pod(source).job["spec"].get("completionMode") == "Indexed"
    assert indexed == (count > 1)
    shards = set()
    for index in range(count):
        environment = {"JOB_COMPLETION_INDEX": str(index)} if indexed else {}
        found = identify(job, environment=environment)
        assert (found.index, len(found.names)) == (index, count)
        train = next(one for one in job.input_data_config if one.channel_name == "train")
        shard = found.shard(train.source)
        assert shard is not None
        shards.add((shard.index, shard.count))
        if source == "overlays/indexed" or source.startswith("examples/"):
            assert train.source.sharded
            assert shard.count == count
    assert len(shards) == (count if train.source.sharded else 1)


@each_source([source for source in WITH_SIDECAR if source != "base"])
def test_who_watches_and_who_may_reach_what(source: str, job: Job) -> None:
    """Selectors select the pod, ports are the sidecar's, and S3's port is open."""
    pod = training_pod(source)
    ports = {port["name"]: port["containerPort"] for port in pod.sidecar["ports"]}
    assert ports == {"admin": job.penstock.admin.port}
    assert job.penstock.admin.host == "0.0.0.0"
    for monitor in of_kind(source, "PodMonitor"):
        assert monitor["spec"]["selector"]["matchLabels"].items() <= pod.labels.items()
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert (endpoint["port"], endpoint["path"]) == ("admin", "/metrics")
    for policy in of_kind(source, "NetworkPolicy"):
        spec = policy["spec"]
        assert spec["podSelector"]["matchLabels"].items() <= pod.labels.items()
        assert {"protocol": "TCP", "port": "admin"} in spec["ingress"][0]["ports"]
        opened = {port["port"] for rule in spec["egress"] for port in rule.get("ports", ())}
        url = job.penstock.endpoint.url
        assert {53, int(url.rsplit(":", 1)[1]) if url else 443} <= opened
    for service in of_kind(source, "Service"):
        assert service["spec"]["selector"].items() <= pod.labels.items()
        assert pod.spec["subdomain"] == service["metadata"]["name"]
    if source.startswith("overlays/"):
        assert of_kind(source, "PodMonitor")
        assert of_kind(source, "NetworkPolicy")


def test_the_rules_are_those_that_prometheus_loads() -> None:
    """In kustomize to the letter, in the chart but for the address of the runbook; only if asked for."""
    text = (ROOT / "dashboards/rules.yaml").read_text()
    (rule,) = of_kind(manifests.RULES, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(text)
    (rule,) = of_kind("chart everything", "PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    elsewhere = text.replace("docs/how-to/runbook.md#", "https://docs.example/runbook.html#")
    assert rule["spec"] == yaml.safe_load(elsewhere)
    assert elsewhere.count("https://docs.example/runbook.html#penstock") == elsewhere.count("alert: ")
    others = [source for source in SOURCES if source not in (manifests.RULES, "chart everything")]
    assert not [source for source in others if of_kind(source, "PrometheusRule")]


def test_the_demo_is_what_the_overlay_asks_for(tmp_path: Path) -> None:
    """Server, bucket and data are those of the job file; the seed makes the records that are expected."""
    (tmp_path / "job.yaml").write_text(manifests.job_file("overlays/secret"))
    job = load_job(tmp_path / "job.yaml")
    compose = load_job(ROOT / "deploy/compose/job.yaml")
    assert job.input_data_config == tuple(
        one.model_copy(update={"data_source": compose.input_data_config[i].data_source})
        for i, one in enumerate(job.input_data_config)
    )
    assert job.hyper_parameters == compose.hyper_parameters
    (service,) = of_kind("demo", "Service")
    (server,) = of_kind("demo", "Deployment")
    name, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
    assert job.penstock.endpoint.url == f"http://{name}:{port}"
    assert service["spec"]["selector"].items() <= server["spec"]["template"]["metadata"]["labels"].items()
    (container,) = server["spec"]["template"]["spec"]["containers"]
    assert f"-s3.port={port}" in container["args"]
    bucket = next(each["value"] for each in container["env"] if each["name"] == "S3_BUCKET")
    assert bucket == job.input_data_config[0].source.uri.bucket
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    (seed,) = manifests.jobs("demo")
    assert seed["spec"]["template"]["spec"]["containers"][0]["args"] == services["seed"]["command"]
    assert container["args"] == services["seaweedfs"]["command"]


# Alive


@pytest.mark.parametrize("source", ["examples/jobset.yaml", "chart everything"])
def test_the_probes_and_the_shard_of_a_real_sidecar(
    stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """The pod's own job file and environment; only where S3 and the tree are is another."""
    document = yaml.safe_load(manifests.job_file(source))
    pod, count = training_pod(source), manifests.hosts(source)
    fill(stub, [2500] * 8, prefix="my-bucket/train/")
    fill(stub, [10], prefix="my-bucket/eval/")
    base, [admin] = tmp_path / "ml", free_ports(1)
    document["Penstock"] |= {
        "BaseDirectory": str(base),
        "Endpoint": {"Url": stub.url, "PathStyle": True},
        "Admin": {"Host": "127.0.0.1", "Port": admin},
    }
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    with sidecar(write_job(tmp_path / "job.yaml", document)) as running:
        running.wait_for("host", index=1, of=count)
        running.wait_for("ready")
        assert running.url.endswith(f":{admin}")
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            found = pod.sidecar[probe]["httpGet"]
            assert found["port"] == "admin"
            assert running.get(found["path"])[0] == 200, probe
        for name in ("train_0", "eval_0"):
            assert stat.S_ISFIFO(os.stat(base / "input/data" / name).st_mode)
        train = document["InputDataConfig"][0]["DataSource"]["S3DataSource"]
        mine = 8 // count if train.get("S3DataDistributionType") == "ShardedByS3Key" else 8
        assert len(read_all(base / "input/data/train_0")) == mine * 2500
        running.wait_for("epoch complete", channel="train")
        assert running.get("/metrics")[0] == 200
        assert running.end() == 0  # as the kubelet does when the trainer has ended


# AWS


def test_policies_are_valid_and_allow_what_they_say(tmp_path: Path) -> None:
    policies = {path.stem: json.loads(path.read_text()) for path in (ROOT / "deploy/aws").glob("*.json")}
    rules = policies.pop("lifecycle")["Rules"]
    resources = {
        "Bucket": {
            "Type": "AWS::S3::BucketPolicy",
            "Properties": {"Bucket": "my-bucket", "PolicyDocument": policies["bucket-policy"]},
        }
    } | {
        name.title().replace("-", ""): {
            "Type": "AWS::IAM::Role",
            "Properties": {
                "AssumeRolePolicyDocument": policies[name],
                "Policies": [
                    {"PolicyName": kind, "PolicyDocument": policies[f"{kind}-policy"]}
                    for kind in ("read", "write")
                ],
            },
        }
        for name in ("trust-irsa", "trust-pod-identity")
    }
    rule = rules[0] | {"Id": rules[0]["ID"], "Prefix": rules[0]["Filter"]["Prefix"]}
    del rule["ID"], rule["Filter"]  # CloudFormation's names
    resources["Uploads"] = {
        "Type": "AWS::S3::Bucket", "Properties": {"LifecycleConfiguration": {"Rules": [rule]}},
    }  # fmt: skip
    template = tmp_path / "template.json"
    template.write_text(json.dumps({"AWSTemplateFormatVersion": "2010-09-09", "Resources": resources}))
    ran = subprocess.run(
        [os.path.join(SCRIPTS, "cfn-lint"), str(template)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout
    reads = {"s3:ListBucket", "s3:GetObject", "s3:GetObjectVersion", "kms:Decrypt"}
    writes = {"s3:PutObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts", "kms:GenerateDataKey"}
    versions = {"s3:GetObjectVersion"}  # of manifests
    for name, due in (
        ("read-policy", reads),
        ("bucket-policy", reads - {"kms:Decrypt"}),
        ("write-policy", reads - versions | writes),
    ):
        allowed: set[str] = set()
        for statement in policies[name]["Statement"]:
            actions = statement["Action"]
            if statement["Effect"] == "Allow":
                allowed.update([actions] if isinstance(actions, str) else actions)
                assert statement["Resource"] != "*"
        assert allowed == due
    request = session.Session().get_service_model("s3").operation_model("PutBucketLifecycleConfiguration")
    given = {"Bucket": "b", "LifecycleConfiguration": {"Rules": rules}}
    assert not ParamValidator().validate(given, request.input_shape).has_errors()
    reported = {
        place
        for text in policies["read-policy"]["Statement"]
        for place in re.findall(r"s3:::([^\"']+)", str(text))
    }
    text = yaml.safe_load((KUBERNETES / "base/penstock.yaml").read_text())
    written = re.findall(r"s3:::([^\"']+)/\*", str(policies["write-policy"]["Statement"][0]))
    assert text["OutputDataConfig"]["S3OutputPath"].removeprefix("s3://") in written
    uris = [one["DataSource"]["S3DataSource"]["S3Uri"] for one in text["InputDataConfig"]]
    assert {f"{uri.removeprefix('s3://')}*" for uri in uris} | {"my-bucket"} == reported
    subject = next(iter(policies["trust-irsa"]["Statement"]))["Condition"]["StringEquals"]
    account = yaml.safe_load((KUBERNETES / "base/service-account.yaml").read_text())["metadata"]["name"]
    assert any(value.endswith(f":{account}") for value in subject.values())
