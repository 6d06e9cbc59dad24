"""Blocking work beside the loop."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


async def in_thread(call: Callable[..., T], *arguments: object) -> T:
    """Run `call` in a worker thread. When cancelled, wait for its end: nobody cleans up beneath it."""
    running = asyncio.get_running_loop().run_in_executor(None, partial(call, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # it is nobody's any more; the cancellation is what counts
        raise
