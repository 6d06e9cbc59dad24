"""Waiting for what this machine refuses now: space for a trailer, a descriptor for a FIFO, a file system.

Such a refusal passes: somebody removes files, connections close, a permission is given back. Until then a
FIFO stays as it is, since to close it would look like an end to its reader.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypeVar

from streamer.errors import Shortage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from streamer.retry import RetryPolicy

T = TypeVar("T")


async def retry_while_refused(
    step: Callable[[], Awaitable[T]], policy: RetryPolicy, on_wait: Callable[[Shortage], None]
) -> T:
    """What `step` returns, repeated for as long as the policy allows while this machine refuses something.

    `on_wait` is told of the first such failure. Raises SinkError.
    """
    began, failures = time.monotonic(), 0
    while True:
        try:
            return await step()
        except Shortage as error:
            if time.monotonic() - began >= policy.give_up_after:
                raise
            if not failures:
                on_wait(error)
        await asyncio.sleep(policy.wait(failures, None))
        failures += 1
