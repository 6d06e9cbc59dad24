"""Calls that callbacks leave to the task that owns them, because they must wait.

A callback of a socket may not wait, and starts no task of its own, which nobody would end. So it adds a call,
and the owner makes all calls at once whenever it waits for something itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from streamer.aio import TaskGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any


class OwnerCalls:
    """Coroutine functions that the owner calls in `make_until`."""

    def __init__(self) -> None:
        self._calls: dict[Callable[[], Coroutine[Any, Any, None]], bool] = {}
        """Calls to make; true: early ones."""
        self._news = asyncio.Event()

    def add(self, function: Callable[[], Coroutine[Any, Any, None]], *, early: bool) -> None:
        """Have the owner call `function`. It is called again if it was cancelled (`make_until`)."""
        self._calls[function] = early
        self.wake()

    def wake(self) -> None:
        """Have the owner look at `done` again."""
        self._news.set()

    async def make_until(self, done: Callable[[], bool], *, early: bool = False) -> None:
        """Make all calls that are added until `done`, at once. `early`: only those that were added as such.

        Calls that are not over then are cancelled, and made again by the next `make_until`.
        """
        while not done():
            if not self._due(early=early):
                self._news.clear()
                await self._news.wait()
                continue
            running = {}
            async with TaskGroup() as tasks:
                while not done():
                    for call in self._due(early=early):
                        running[tasks.create_task(call())] = call, self._calls.pop(call)
                    self._news.clear()
                    await self._news.wait()
                for each in running:
                    each.cancel()
            self._calls |= dict(call for each, call in running.items() if each.cancelled())

    def _due(self, *, early: bool) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        return [call for call, is_early in self._calls.items() if is_early or not early]
