"""Whichever comes first."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine


async def first_of(*runners: Coroutine[Any, Any, object]) -> None:
    """Run all of them until one has ended, and cancel the others. Raises as a TaskGroup does."""
    async with asyncio.TaskGroup() as group:
        tasks = {group.create_task(runner) for runner in runners}
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
