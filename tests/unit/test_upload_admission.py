"""The limit of all uploads' bytes per second: it holds from the first part on, and parts keep their order."""

from __future__ import annotations

import asyncio
import time

from sidecar.upload.admission import Admission
from streamer.schedule.bandwidth import BURST

LIMIT, PART = 1_000_000, 50_000


async def test_parts_wait_for_their_turn() -> None:
    admission = Admission(LIMIT)
    admitted: list[int] = []

    async def send(part: int) -> None:
        await admission.admit(PART)
        admitted.append(part)

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for part in range(12):
            group.create_task(send(part))
    spent = time.monotonic() - began
    assert admitted == list(range(12))
    assert spent >= (11 * PART - PART) / LIMIT - BURST, "the last part waits for those before it"


async def test_a_part_that_is_cancelled_is_not_counted() -> None:
    admission = Admission(LIMIT)
    await admission.admit(200_000)
    waiting = asyncio.create_task(admission.admit(10**12))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    await asyncio.wait_for(admission.admit(1), 5)


async def test_without_a_limit_nothing_waits() -> None:
    admission = Admission()
    async with asyncio.timeout(5):
        for _ in range(1000):
            await admission.admit(1 << 40)
