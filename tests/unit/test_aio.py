"""Helpers of `streamer.aio`: which errors leave a task group, and when a cancelled call in a thread ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence

import pytest

from streamer.aio import TaskGroup, WorkerThread, in_thread, task_group, time_limit
from streamer.plan import Entries, ObjectRef
from streamer.plan.record_order import Deal, RecordOrder
from streamer.plan.record_plan import RecordPlan
from streamer.plan.record_table import FixedRecords


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


async def fail() -> None:
    raise ValueError("of a task")


async def test_the_owner_of_a_group_that_failed_goes_on_with_timeouts() -> None:
    """Before Python 3.13 it counts as cancelled for ever after."""
    with pytest.raises(ExceptionGroup):
        async with TaskGroup() as tasks:
            tasks.create_task(fail())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await asyncio.Event().wait()
    owner = asyncio.current_task()
    assert owner is not None
    assert not owner.cancelling()


@pytest.mark.parametrize("cancels", [1, 2])
async def test_a_limit_of_time_holds_while_its_task_ends(cancels: int) -> None:
    """A second request to cancel ends what the first one has begun."""
    steps = []

    async def own() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            steps.append("ends")
            try:
                async with time_limit(0.01 if cancels == 1 else None):
                    await asyncio.Event().wait()
            except TimeoutError:
                steps.append("too late")

    owner = asyncio.create_task(own())
    for _ in range(cancels):
        await asyncio.sleep(0)
        owner.cancel()
    await asyncio.wait([owner])
    assert owner.cancelled()
    assert steps == ["ends", "too late"][: 3 - cancels]


@pytest.mark.parametrize("in_block", [False, True])
async def test_the_owner_that_is_cancelled_while_a_task_fails_ends_at_its_next_await(in_block: bool) -> None:
    async def fail_late() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await fail()

    async def own() -> None:
        try:
            async with TaskGroup() as tasks:
                tasks.create_task(fail_late())
                begun.set()
                if in_block:
                    await asyncio.Event().wait()
        except* ValueError:
            pass
        await asyncio.Event().wait()

    begun = asyncio.Event()
    owner = asyncio.create_task(own())
    await begun.wait()
    owner.cancel()
    await asyncio.wait([owner])
    assert owner.cancelled()


@pytest.mark.parametrize("run", [in_thread, WorkerThread("test").run])
async def test_a_call_in_a_thread_ends_before_its_task_however_often_that_is_cancelled(
    run: Callable[..., Awaitable[object]],
) -> None:
    """The caller closes what the thread writes to, and the kernel gives the descriptor's number away anew."""
    may_end = threading.Event()

    async def call() -> None:
        await run(may_end.wait, 60)

    task = asyncio.create_task(call())
    for _ in range(3):
        for _ in range(5):  # the cancellation reaches the task, and the task its next wait
            await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_without_a_further_thread_calls_run_in_the_pool_once_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await in_thread(threading.get_ident)  # the pool has a thread
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith("inflate"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    worker = WorkerThread("inflate")
    calls: list[int] = []
    for number in range(3):
        await worker.run(calls.append, number)
    monkeypatch.undo()
    await worker.run(calls.append, 3)
    assert calls == [0, 1, 2, 3]
    worker.close()


class Started(FixedRecords):
    """Records of a byte each; sets an event of the loop when the first of them are looked up."""

    def __init__(self, entries: Entries) -> None:
        super().__init__(entries, 1)
        self.event = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()

    def borders(self, entry: int, first: int, end: int) -> Sequence[int]:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.event.set)
            self._loop = None
        return super().borders(entry, first, end)


@pytest.mark.parametrize("seed", [None, 7])
async def test_sums_that_would_take_years_end_when_their_task_is_cancelled(seed: int | None) -> None:
    """So a sidecar that computes them ends when it is stopped. In one run of 2^50 records, or in 2^34."""
    entries = Entries()
    entries.add(ObjectRef("b", "k", 1 << 50, "e"))
    table = Started(entries)
    order = RecordOrder(table.counts, entries.sizes, seed=seed, block=1 << 16)
    plan = RecordPlan(entries, table, order, Deal(1 << 16, 1, 0, 1))
    task = asyncio.create_task(in_thread(plan.total_bytes, 0))
    await table.event.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
