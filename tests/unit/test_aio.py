"""Task groups of `streamer.aio`: which errors leave them, and in what."""

from __future__ import annotations

import asyncio

import pytest

from streamer.aio import task_group


async def test_an_error_of_the_block_is_raised_itself_after_the_tasks_have_ended() -> None:
    ended = asyncio.Event()

    async def task() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    error = ValueError("of the block")
    with pytest.raises(ValueError, match="of the block") as caught:
        async with task_group() as tasks:
            running = tasks.create_task(task())
            await asyncio.sleep(0)  # it has begun
            try:
                raise error
            finally:
                running.cancel()
    assert caught.value is error
    assert caught.value.__context__ is None
    assert ended.is_set()


async def test_an_error_of_a_task_cancels_the_block_and_is_raised_in_a_group() -> None:
    async def task() -> None:
        raise ValueError("of a task")

    with pytest.raises(ExceptionGroup) as caught:
        async with task_group() as tasks:
            tasks.create_task(task())
            await asyncio.Event().wait()
    assert [str(error) for error in caught.value.exceptions] == ["of a task"]
