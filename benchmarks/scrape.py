"""Measures the cost of a scrape for the event loop: `python -m benchmarks.scrape`, with twenty idle channels.

A scrape blocks the loop that moves bytes; it should take less than 5 ms.
"""

from __future__ import annotations

import asyncio
import statistics
import time

from sidecar.config.hosts import Hosts
from sidecar.config.job import Job
from sidecar.observe.collector import exposition
from sidecar.observe.state import JobState
from streamer.plan import ObjectRef, Plan
from streamer.relay.channel import Channel
from streamer.relay.channel_spec import ChannelSpec
from streamer.relay.staging.buffers import BufferPool, BufferStages
from streamer.retry import RetryPolicy
from streamer.s3.ranges import Body, RangeRequest
from streamer.schedule.budget import MemoryBudget
from streamer.schedule.concurrency import ConcurrencyController
from streamer.units import MIB

CHANNELS, ROUNDS = 20, 200


class _NoSource:
    """The transport of channels that never start."""

    name = "none"
    span_size = 0

    async def open(self, request: RangeRequest) -> Body:
        raise NotImplementedError


async def main() -> None:
    names = [f"channel-{number}" for number in range(CHANNELS)]
    document = {
        "InputDataConfig": [
            {
                "ChannelName": name,
                "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://b/"}},
            }
            for name in names
        ]
    }
    job = Job.model_validate(document)
    state = JobState(job, Hosts(0, ("algo-1",)))
    state.memory_budget = memory_budget = MemoryBudget(
        512 * MIB, ConcurrencyController(64, MIB), members=CHANNELS
    )
    buffers = BufferPool()
    plan = Plan.of([ObjectRef("b", f"key-{number}", 1000, "etag") for number in range(1000)])
    for name in names:
        stages = BufferStages(memory_budget.quota(), buffers)
        spec = ChannelSpec(name=name, plan=plan, directory="/nowhere", retry=RetryPolicy())
        state.channels[name] = Channel(spec, _NoSource(), stages)
    state.history.take()
    times, text = [], ""
    for _ in range(ROUNDS):
        began = time.perf_counter()
        text = exposition(state)
        times.append(time.perf_counter() - began)
    print(
        f"{CHANNELS} channels, {text.count(chr(10))} lines, {len(text) // 1000} kB: median "
        f"{statistics.median(times) * 1e3:.2f} ms, worst {max(times) * 1e3:.2f} ms"
    )


if __name__ == "__main__":
    asyncio.run(main())
