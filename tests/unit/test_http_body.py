"""The body of a response: calls to its stage after a failure."""

from __future__ import annotations

import asyncio
import socket

import pytest

from streamer.aio import FairPoller
from streamer.errors import ErrorContext, Truncated
from streamer.s3.http.body import HttpBody
from streamer.s3.http.connection import Connection
from tests.kit.stub import turns


@pytest.mark.usefixtures("no_leaks")
async def test_a_hushed_body_calls_nobody() -> None:
    """The failed body is hushed before the call that it owes: the stage has no body any more."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    poller = FairPoller()
    poller.open()
    body = HttpBody(Connection(ours, poller), 10, ErrorContext("b", "k"), stall_timeout=5, give_back=None)
    theirs.close()
    with pytest.raises(Truncated):
        body.read_into(memoryview(bytearray(10)))
    calls: list[str] = []
    body.notify(lambda: calls.append("hushed"))
    body.hush()
    await turns()
    assert not calls
    body.notify(lambda: calls.append("called"))
    await turns()
    assert calls == ["called"]
    body.close()
    poller.close()
    await asyncio.sleep(0)
