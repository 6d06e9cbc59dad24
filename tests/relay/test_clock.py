"""A machine whose clock is wrong, or jumps: signatures that S3 refuses, and nothing else."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from streamer.errors import ClockSkew
from streamer.relay.transport import Wish
from tests.kit.harness import fill, running_channel
from tests.kit.pipes import off_loop, read_all
from tests.kit.stub import S3Stub, error
from tests.test_docs import ROOT

pytestmark = pytest.mark.usefixtures("no_leaks")

HOUR = 3600.0
ALLOWED = 900
"""Seconds, S3's own."""


class Clock:
    """The server's clock, which is ahead of ours; its judgement of every signature."""

    def __init__(self, ahead: float, *, until: int | None = None) -> None:
        """`until`: the number of refusals after which somebody sets the clock."""
        self.ahead = ahead
        self.refused = 0
        self._until = until

    def __call__(self, *_: object) -> Callable[[Any], Coroutine[Any, Any, web.Response]]:
        return self.judge

    async def judge(self, answer: Any) -> web.Response:
        if self.refused == self._until:
            self.ahead = 0.0
        now = time.time() + self.ahead
        signed = datetime.strptime(answer.request.headers["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        if abs(signed.timestamp() - now) > ALLOWED:
            self.refused += 1
            return error(403, "RequestTimeTooSkewed", Date=formatdate(now, usegmt=True))
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)


@pytest.mark.parametrize("transport", ["splice", "buffered"])
@pytest.mark.parametrize("ahead", [HOUR, -HOUR])
async def test_an_hour_off_is_corrected(stub: S3Stub, tmp_path: Path, transport: Wish, ahead: float) -> None:
    """And only the requests that were under way when it showed are refused."""
    truth = fill(stub, [200_000] * 6)
    stub.weather = clock = Clock(ahead)
    async with running_channel(stub, tmp_path, transport=transport, requests_in_flight=4) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        assert running.channel.statistics().counts["retries"]["skewed"] == clock.refused
    assert 1 <= clock.refused <= 4


async def test_it_jumps_in_mid_stream(stub: S3Stub, tmp_path: Path) -> None:
    """There and back again."""
    truth = fill(stub, [200_000] * 6)
    stub.weather = clock = Clock(0)
    async with running_channel(stub, tmp_path, transport="buffered") as running:
        for ahead in (0, HOUR, -HOUR, 0):
            clock.ahead = ahead
            assert await off_loop(read_all, running.fifo(len(running.states))) == truth
    assert clock.refused >= 3
    assert {state.state for state in running.states} == {"complete"}


async def test_what_cannot_be_corrected_is_waited_for(stub: S3Stub, tmp_path: Path) -> None:
    """botocore signs by the clock, so somebody has to set it; the error says how far it is off."""
    truth = fill(stub, [200_000] * 2)
    stub.weather = Clock(HOUR, until=9)
    async with running_channel(stub, tmp_path, transport="aiobotocore") as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        notes = {note.kind: note.text for note in running.channel.statistics().errors}
    text = notes[ClockSkew.kind].replace("3599", "3600").replace("3601", "3600")
    assert "(S3 responded 403 RequestTimeTooSkewed); this machine's clock is off" in text
    assert "set the time; it is 3600 s behind the endpoint's" in text


def test_no_duration_is_taken_from_the_wall_clock() -> None:
    """It is read to sign requests, to date what is shown, and to compare with the endpoint and with files."""
    found = set()
    for path in sorted([*ROOT.glob("streamer/**/*.py"), *ROOT.glob("sidecar/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "time.time_ns"):
                found.add(str(path.relative_to(ROOT)))
    assert found == {
        "sidecar/admin/status.py",
        "sidecar/job/reader_state.py",
        "sidecar/observe/state.py",
        *(f"sidecar/upload/{name}.py" for name in ("checkpoints", "journal", "store", "watch")),
        "streamer/relay/statistics.py",
        "streamer/s3/client/faults.py",
        "streamer/s3/signing/requests.py",
        "streamer/s3/signing/sigv4.py",
    }
