"""An admin server that cannot be loaded ends the job, and a client that connects early is answered."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.kit.processes import Sidecar, job, sidecar, write_job
from tests.kit.stub import S3Stub
from tests.sidecar.test_progress import shuffled, slow

__all__ = ["slow"]
BROKEN = "cannot load a module (planted)"


@pytest.fixture
def loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A FIFO: the import of the admin server waits until something is written there, and fails then."""
    fifo = tmp_path / "loading"
    os.mkfifo(fifo)
    package = tmp_path / "path" / "prometheus_client"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"open({str(fifo)!r}).read(); raise ImportError('planted')")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    return fifo


def ended(running: Sidecar) -> None:
    assert running.wait() == 7
    assert BROKEN in running.wait_for("ended", code=7)["error"]


def test_a_server_that_cannot_be_loaded_ends_a_job_that_is_ready(
    stub: S3Stub, tmp_path: Path, loading: Path
) -> None:
    stub.objects["b/train/0"] = b"bytes"
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    with sidecar(path, cold=True) as running:
        running.wait_for("ready")
        loading.write_text("go on")
        ended(running)


def test_a_server_that_cannot_be_loaded_ends_a_job_that_plans(
    slow: S3Stub, tmp_path: Path, loading: Path
) -> None:
    with sidecar(shuffled(slow, tmp_path), cold=True) as running:
        address = urlsplit(running.url)
        with socket.create_connection((address.hostname, address.port)):
            loading.write_text("go on")
            ended(running)
        assert not (tmp_path / "ml").exists()
        slow.release()


def test_exec_ends_a_trainer_whose_sidecar_fails(stub: S3Stub, tmp_path: Path, loading: Path) -> None:
    """A trainer that is left alone would take the end of its FIFO for the end of the data."""
    stub.objects["b/train/0"] = b"bytes"
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    trainer = ["sh", "-c", f"echo $$ > {tmp_path}/pid; echo go on > {loading}; exec sleep 1000"]
    done = subprocess.run(
        [sys.executable, "-m", "sidecar", "exec", "-c", path, *trainer],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 7
    assert "ending the trainer, because the sidecar ends" in done.stderr
    assert BROKEN in done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_client_that_connects_while_the_job_plans_is_answered(slow: S3Stub, tmp_path: Path) -> None:
    with sidecar(shuffled(slow, tmp_path), cold=True) as running:
        assert running.get("/livez") == (200, "alive\n")
        assert running.get("/readyz")[0] == 503
        assert "penstock_" in running.get("/metrics")[1]
        slow.release()
        running.wait_for("ready")
        assert running.get("/readyz") == (200, "ready\n")
        assert running.end() == 0
