"""The keeper as a container of its own: the manifests' very commands, and a sidecar that is killed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit.harness import fill
from tests.kit.processes import PENSTOCK, Sidecar, job, write_job
from tests.kit.stub import S3Stub
from tests.kit.trailers import published_trailer
from tests.operate.containers import SERVICES, STAGES
from tests.operate.manifests import WITH_KEEPER, job_file, training_pod

SIZES = [7_000_000, 1, 9_000_000, 4_000_000]
"""Bytes of an epoch: several times what FIFO and keeper hold."""


def in_the_pod(source: str) -> tuple[list[str], list[str], str, list[str]]:
    """Command of keeper and of sidecar, path of the socket's volume, and the probe for it."""
    if source == "compose":
        keeper, serving = SERVICES["keeper"], SERVICES["sidecar"]
        return keeper["command"], serving["command"], "/run/penstock", keeper["healthcheck"]["test"][1:]
    pod = training_pod(source)
    assert pod.keeper is not None
    probe = pod.keeper["startupProbe"]["exec"]["command"]
    (mount,) = pod.keeper["volumeMounts"]
    return pod.keeper["args"], pod.sidecar["args"], mount["mountPath"], probe


@pytest.mark.parametrize("source", WITH_KEEPER)
def test_the_keeper_starts_first_and_has_nothing_that_it_does_not_need(source: str) -> None:
    pod = training_pod(source)
    containers = pod.spec["initContainers"]
    assert [each["name"] for each in containers] == ["keeper", "penstock"]
    assert {each["restartPolicy"] for each in containers} == {"Always"}
    assert pod.keeper is not None
    assert pod.keeper["image"] == pod.sidecar["image"]
    assert pod.keeper["resources"]["limits"] == {"memory": "64Mi"}
    assert "env" not in pod.keeper
    assert "envFrom" not in pod.keeper
    (mount,) = pod.keeper["volumeMounts"]
    assert mount in pod.sidecar["volumeMounts"]
    assert mount["name"] not in {each["name"] for each in pod.spec["containers"][0]["volumeMounts"]}
    assert "emptyDir" in next(each for each in pod.spec["volumes"] if each["name"] == mount["name"])


def test_compose_gives_the_keeper_no_network_and_starts_it_first() -> None:
    keeper, serving = SERVICES["keeper"], SERVICES["sidecar"]
    assert keeper["network_mode"] == "none"
    assert keeper["build"] == serving["build"]
    assert "environment" not in keeper
    assert serving["depends_on"]["keeper"] == {"condition": "service_healthy"}
    assert set(keeper["volumes"]) <= set(serving["volumes"])
    assert not set(keeper["volumes"]) & set(SERVICES["trainer"]["volumes"])
    # A new named volume takes over the owner of the image's directory.
    assert any("/run/penstock" in text for how, text in STAGES["runtime"].lines if how == "RUN")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("source", [*WITH_KEEPER, "compose"])
def test_a_sidecar_killed_for_memory_is_a_pause(stub: S3Stub, tmp_path: Path, source: str) -> None:
    """SIGKILL in the middle of an epoch; the command runs again, and the reader's hash is right."""
    content = fill(stub, SIZES, prefix="b/train/")
    keeper, serving, volume, probe = in_the_pod(source)
    (tmp_path / "run").mkdir()
    state = tmp_path / "state.json"  # absent, as before the first checkpoint
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))

    def here(words: Any) -> list[Any]:
        return [
            re.sub(r"^/checkpoints/.*", str(state), each)
            .replace(volume, str(tmp_path / "run"))
            .replace("/etc/penstock/job.yaml", path)
            for each in words
        ]

    assert serving[:2] == ["run", "-c"]
    command = here(serving)[2:]
    holding = subprocess.Popen([*PENSTOCK, *here(keeper)], stdout=subprocess.PIPE, text=True)
    assert holding.stdout is not None
    try:
        assert holding.stdout.readline() == "ready\n"
        assert subprocess.run(here(probe), check=False).returncode == 0
        first = Sidecar(*command)
        digest = hashlib.sha256()
        try:
            assert first.wait_for("keeper")["pid"] == holding.pid
            first.wait_for("ready")
            fifo = open(tmp_path / "ml/input/data/train_0", "rb", buffering=0)  # noqa: SIM115 - closed below
            digest.update(fifo.read(1 << 16))
        finally:
            os.kill(first.process.pid, signal.SIGKILL)
            assert first.wait() == -signal.SIGKILL
        with fifo:
            again = Sidecar(*command)
            try:
                while chunk := fifo.read(1 << 16):
                    digest.update(chunk)
                again.wait_for("epoch complete", epoch=0)
            finally:
                assert again.end() == 0
        assert digest.hexdigest() == hashlib.sha256(content).hexdigest()
        trailer = published_trailer(tmp_path / "ml/input/data", "train", 0)
        assert (trailer.state, trailer.bytes_delivered) == ("complete", len(content))
        holding.terminate()  # as the kubelet does, after the sidecar
        assert holding.wait() == 0
        assert os.listdir(tmp_path / "run") == []
    finally:
        if holding.poll() is None:
            holding.kill()
            holding.wait()
        holding.stdout.close()


def test_a_job_file_of_the_chart_says_nothing_of_a_keeper() -> None:
    """It is an option of the command, so that one job file serves with and without."""
    assert "keeper" not in json.dumps(yaml.safe_load(job_file("chart everything")))
