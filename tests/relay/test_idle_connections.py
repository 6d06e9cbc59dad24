"""Idle connections: a firewall or NAT gateway may have forgotten all of them without a word."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from streamer.s3.pages.object_info import open_inspector
from tests.kit.harness import clients_of
from tests.kit.stub import Answer, S3Stub

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking", "credentials")

KEYS = [f"data/{number}" for number in range(6)]


async def test_connections_that_were_forgotten_cost_one_wait(stub: S3Stub) -> None:
    """The first one that brings no response stands for all: each would take the whole stall timeout."""
    stub.objects |= {f"b/{key}": b"12345" for key in KEYS}
    stub.together = {f"head b/{key}" for key in KEYS}
    forgotten: set[asyncio.Transport | None] = set()
    unanswered = 0

    async def answered(answer: Answer) -> web.StreamResponse:
        forgotten.add(answer.request.transport)
        return web.Response(headers=answer.headers)

    async def unless_forgotten(answer: Answer) -> web.StreamResponse:
        nonlocal unanswered
        if answer.request.transport in forgotten:
            unanswered += 1
            await stub.released.wait()
        return web.Response(headers=answer.headers)

    for key in KEYS:
        stub.script_head(answered, key=f"b/{key}")
    async with clients_of(stub, stall_timeout=2) as clients:
        with open_inspector(clients, give_up_after=60) as inspector:
            await asyncio.gather(*(inspector.stat("b", key) for key in KEYS))
            assert len(forgotten) == len(KEYS), "as many connections are idle now"
            stub.together = set()
            stub.script_head(*[unless_forgotten] * 20, key="b/data/0")
            assert (await inspector.stat("b", "data/0")).size == 5
    assert unanswered == 1
