"""The first byte of a stream whose reader waits: few requests come before it, all others right after it."""

from __future__ import annotations

import asyncio
import os

import pytest

from streamer.plan import S3Uri
from streamer.relay.once import stream_once
from streamer.relay.statistics import ChannelCounters
from streamer.relay.transport import TransportSpec, Wish, open_transport
from streamer.retry import RetryPolicy
from streamer.s3.client.doubt import DOUBTED
from streamer.s3.pages.pages import open_pages
from streamer.s3.pages.sources import Sources
from streamer.schedule.window import FIRST_REQUESTS
from streamer.sink.outlet import PipeOutlet
from tests.kit.harness import clients_of, fill
from tests.kit.pipes import eventually
from tests.kit.stub import S3Stub, stalls

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")

PART = 40_000
REQUESTS = FIRST_REQUESTS + 5


@pytest.mark.parametrize("wish", ["splice", "buffered"])
async def test_all_requests_follow_the_first_byte(stub: S3Stub, wish: Wish) -> None:
    """They do not wait for the end of the first part, which may take long."""
    truth = fill(stub, [REQUESTS * PART])
    stub.script(stalls(stub, after=DOUBTED + 100), first=0, key="b/data/0000")
    stub.script(*[stalls(stub) for _ in range(REQUESTS)])
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    os.set_blocking(read_end, True)
    async with clients_of(stub) as clients:
        with open_pages(clients) as pages:
            plan = await Sources(pages, [S3Uri("b", "data/")]).plan()
        spec = TransportSpec(
            buckets={"b"},
            channels=[None],
            budget=1 << 26,
            wish=wish,
            requests_in_flight=REQUESTS,
            part_size=PART,
        )
        async with open_transport(clients, spec) as transport, asyncio.TaskGroup() as tasks:
            stream = stream_once(
                plan,
                transport.source,
                transport.stages(),
                policy=RetryPolicy(give_up_after=5),
                counters=ChannelCounters(),
                open_outlet=lambda on_gone: PipeOutlet(write_end, on_gone=on_gone),
            )
            tasks.create_task(stream)
            await eventually(lambda: len(stub.seen) == REQUESTS)
            stub.release()
            with open(read_end, "rb") as reader:
                assert await asyncio.to_thread(reader.read) == truth
