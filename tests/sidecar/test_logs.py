"""Every line on standard error is one of ours, whoever wrote it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.harness import fill
from tests.kit.pipes import read_all
from tests.kit.processes import PENSTOCK, job, write_job
from tests.kit.stub import S3Stub

PROGRAM = """
import asyncio, logging, sys, warnings
from sidecar.process.logs import configure, log

configure(level=sys.argv[1], json_lines=True)
import aiobotocore, aiohttp, botocore  # noqa: what brings loggers of its own
log.debug("ours", channel="train")
log.info("ours", channel="train")
for name in "botocore.retryhandler aiobotocore.session aiohttp.server asyncio urllib3 anything".split():
    logging.getLogger(name).info("chatter")
    logging.getLogger(name).debug("credentials")
    logging.getLogger(name).warning("from %s", name)
warnings.warn("careful", UserWarning)

async def main():
    async def forgotten():
        raise ValueError("nobody awaits me")
    task = asyncio.create_task(forgotten())
    await asyncio.sleep(0)
    del task

asyncio.run(main())
"""


@pytest.mark.parametrize("level", ["debug", "info", "warning"])
def test_every_line_parses_whoever_wrote_it(level: str) -> None:
    """Libraries, warnings, and tasks that failed unseen; the flag is for our own lines alone."""
    ran = subprocess.run(
        [sys.executable, "-W", "always::UserWarning", "-c", PROGRAM, level],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = [json.loads(line) for line in ran.stderr.splitlines()]
    ours = [line["level"] for line in lines if line["event"] == "ours"]
    assert ours == {"debug": ["debug", "info"], "info": ["info"], "warning": []}[level]
    foreign = [line for line in lines if line["event"] != "ours"]
    assert {line["logger"] for line in foreign} == {
        "botocore.retryhandler", "aiobotocore.session", "aiohttp.server", "asyncio", "urllib3", "anything",
        "py.warnings",
    }  # fmt: skip
    assert {line["level"] for line in foreign} == {"warning", "error"}
    assert all({"timestamp", "level", "event"} <= line.keys() for line in lines)
    (unseen,) = [line for line in foreign if line["level"] == "error"]
    assert "nobody awaits me" in unseen["exception"]


BUG = """
import sys
from sidecar import cli
from sidecar.admin import client

client.why_not_ready = None
sys.argv = ["penstock", "probe"]
cli.main()
"""


def test_a_bug_in_a_command_without_a_log_is_one_line() -> None:
    ran = subprocess.run([sys.executable, "-c", BUG], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    line = json.loads(ran.stderr)
    assert (line["event"], line["level"]) == ("unexpected error; please report it", "error")
    assert line["exception"].endswith("TypeError: 'NoneType' object is not callable")


def test_a_log_that_nobody_reads_stops_no_stream(stub: S3Stub, tmp_path: Path) -> None:
    """Behind `| less` lines are dropped, and their number of bytes is reported once there is room."""
    truth = fill(stub, [1000], prefix="b/train/")
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    with (
        open(read_end, "rb", buffering=0) as reader,
        subprocess.Popen([*PENSTOCK, "run", "-c", path], stderr=write_end) as process,
    ):
        os.close(write_end)
        log = b""
        while b'"event": "ready"' not in log:
            log += reader.read(4096)
        for epoch in range(40):
            assert read_all(tmp_path / "ml/input/data" / f"train_{epoch}") == truth
        log += reader.read(4096)
        process.send_signal(signal.SIGTERM)
        while piece := reader.read(4096):
            log += piece
        assert process.wait() == 0
    events = [json.loads(line) for line in log.splitlines()]
    (lost,) = [each for each in events if "was dropped" in each["event"]]
    assert lost["bytes"] > 4096
    assert events[-1]["event"] == "ended"


def test_a_line_is_written_though_poll_is_refused() -> None:
    """Under a limit of no open file poll(2) has EINVAL; out of memory it has ENOMEM."""
    code = (
        "import resource, sys; from sidecar.process import streams; streams.guard();"
        "_, most = resource.getrlimit(resource.RLIMIT_NOFILE);"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (0, most)); print('a line', file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "a line\n"
