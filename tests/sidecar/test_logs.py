"""Every line on standard error is one of ours, whoever wrote it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

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
from sidecar.admin import probe

probe.why_not_ready = None
sys.argv = ["penstock", "probe"]
cli.main()
"""


def test_a_bug_in_a_command_without_a_log_is_one_line() -> None:
    ran = subprocess.run([sys.executable, "-c", BUG], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    line = json.loads(ran.stderr)
    assert (line["event"], line["level"]) == ("unexpected error; please report it", "error")
    assert line["exception"].endswith("TypeError: 'NoneType' object is not callable")
