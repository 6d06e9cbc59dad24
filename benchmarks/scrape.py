"""What a scrape costs the event loop: `python -m benchmarks.scrape`, of twenty channels that do nothing.

The loop that moves bytes stands still while the lines are written; the aim is less than 5 ms.
"""

from __future__ import annotations

import asyncio
import statistics
import time

from sidecar.collector import exposition
from sidecar.config import Job
from sidecar.identity import Hosts
from sidecar.runtime import Layout
from sidecar.supervisor import Supervisor
from streamer.plan import ObjectRef, Plan
from streamer.relay.allotment import Allotment
from streamer.relay.channel import Channel
from streamer.relay.memory import MemoryStages
from streamer.relay.pace import Pace
from streamer.source.ranges import RangeSource, Receiver
from streamer.source.retry import RetryPolicy
from streamer.units import MIB

CHANNELS, ROUNDS = 20, 200


class _Nothing(RangeSource):
    name = "none"

    async def fetch(self, into: Receiver, *, attempt: int) -> None:
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
    supervisor = Supervisor(job, Layout("/nowhere"), Hosts(0, ("algo-1",)), default_admin_port=0)
    supervisor.allotment = allotment = Allotment(512 * MIB, Pace(64, MIB), members=CHANNELS)
    plan = Plan.of([ObjectRef("b", f"key-{number}", 1000, "etag") for number in range(1000)])
    for name in names:
        stages = MemoryStages(allotment.share(), None)
        channel = Channel(
            name,
            plan,
            _Nothing(),
            stages,
            directory="/nowhere",
            policy=RetryPolicy(),
            on_verdict=lambda _: None,
        )
        supervisor.channels[name] = channel
    supervisor.pulse.take()
    times, text = [], ""
    for _ in range(ROUNDS):
        began = time.perf_counter()
        text = exposition(supervisor)
        times.append(time.perf_counter() - began)
    print(
        f"{CHANNELS} channels, {text.count(chr(10))} lines, {len(text) // 1000} kB: median "
        f"{statistics.median(times) * 1e3:.2f} ms, worst {max(times) * 1e3:.2f} ms"
    )


if __name__ == "__main__":
    asyncio.run(main())
