"""Files that a user names and that are FIFOs: no command waits for one without a word."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from sidecar.process.exits import Exit
from tests.kit.harness import fill
from tests.kit.processes import job, penstock, write_job
from tests.kit.stub import S3Stub

FILES = [
    "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE", "AWS_CREDENTIAL_FILE", "BOTO_CONFIG",
]  # fmt: skip


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("name", FILES)
def test_a_fifo_as_a_file_of_credentials_is_refused_by_name(
    stub: S3Stub, fifo: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv(name, fifo)
    ended = penstock("cat", "s3://b/data/", "--endpoint-url", stub.url, "--path-style")
    assert ended.returncode == Exit.DENIED
    assert f"cannot read {fifo} ({name}): no regular file" in ended.stderr


def test_keys_of_the_environment_need_no_token_file(
    stub: S3Stub, fifo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = fill(stub, [100])
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", fifo)
    ended = penstock("cat", "s3://b/data/", "--endpoint-url", stub.url, "--path-style", text=False)
    assert (ended.returncode, ended.stdout) == (Exit.OK, expected)


def test_certificates_in_a_fifo_are_refused_by_name(fifo: str) -> None:
    ended = penstock("cat", "s3://b/k", "--endpoint-url", "https://127.0.0.1:1", "--ca-bundle", fifo)
    assert ended.returncode == Exit.CONFIG
    assert f"cannot read {fifo}: no regular file" in ended.stderr


def test_a_job_file_may_come_from_a_process(stub: S3Stub, fifo: str, tmp_path: Path) -> None:
    text = Path(write_job(tmp_path / "job.yaml", job(stub.url, None, "train"))).read_text()
    writer = threading.Thread(target=Path(fifo).write_text, args=(text,))
    writer.start()
    assert penstock("check", "-c", fifo).returncode == Exit.OK
    writer.join()
