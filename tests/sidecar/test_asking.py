"""Sources of credentials that ask a person: `cat` in a terminal lets them, and `run` never does."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.kit.processes import PENSTOCK, job, write_job
from tests.kit.stub import S3Stub
from tests.kit.terminal import terminal


def test_run_in_a_terminal_asks_nobody_and_cat_does(
    stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that gives keys reads standard input: that of `run` is empty, and it has no terminal."""
    stub.objects["b/train/0"] = b"bytes of a text\n"
    program, config = tmp_path / "give", tmp_path / "config"
    keys = '{"Version": 1, "AccessKeyId": "AKID0", "SecretAccessKey": "s"}'
    program.write_text(
        f"#!/bin/sh\nread code\n[ \"$code\" = 4711 ] || exit 1\n: </dev/tty || exit 1\necho '{keys}'\n"
    )
    program.chmod(0o700)
    config.write_text(f"[default]\ncredential_process = {program}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    environment = {"AWS_CONFIG_FILE": str(config), "HOME": str(tmp_path)}
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/", GiveUpAfter=60))
    with terminal([*PENSTOCK, "run", "-c", path], columns=200, rows=40, **environment) as shown:
        shown.wait_for(lambda screen: "waiting for credentials" in screen.text)
        shown.process.send_signal(signal.SIGTERM)
        assert shown.end() == 0
    cat = [*PENSTOCK, "cat", "s3://b/train/", "--endpoint-url", stub.url, "--path-style"]
    with terminal(cat, columns=200, rows=40, **environment) as shown:
        shown.press("4711\r")
        assert shown.end() == 0
        assert "bytes of a text" in shown.screen.text
