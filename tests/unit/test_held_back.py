"""When ranks of a shared stream are separated: the decision, and its clock in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from streamer.relay.deliver.held_back import FifoProgress, HeldBack, HeldBackWatch, held_back
from tests.kit.virtual import virtual

BUSY = "busy"
"""It has a reader, and bytes."""


def rank(*fifos: tuple[str, str]) -> list[FifoProgress]:
    return [FifoProgress(name, state == "waits", state == "stops") for name, state in fifos]


@pytest.mark.parametrize(
    ("ranks", "by"),
    [
        ([rank(("0", "stops")), rank(("1", "waits"))], ("0",)),
        ([rank(("0", "stops")), rank(("1", "waits")), rank(("2", "stops"))], ("0", "2")),
        ([rank(("0", "stops")), rank(("1", BUSY))], ()),
        ([rank(("0", "waits")), rank(("1", "waits"))], ()),
        ([rank(("0", "stops")), rank(("1", "stops"))], ()),
        # Copies cannot be separated: another rank must wait.
        ([rank(("0", "stops"), ("1", "waits")), rank(("2", BUSY), ("3", BUSY))], ()),
        ([rank(("0", "stops"), ("1", "waits")), rank(("2", BUSY), ("3", "waits"))], ("0",)),
        ([], ()),
    ],
)
def test_who_holds_back_whom(ranks: list[list[FifoProgress]], by: tuple[str, ...]) -> None:
    assert held_back(ranks) == by


class Clocked:
    """A watch with a grace of 10 s, and what holds back others now."""

    def __init__(self) -> None:
        self.by: tuple[str, ...] = ()
        self.found: list[HeldBack] = []
        self.watch = HeldBackWatch(lambda: self.by, self.found.append, grace=10)


def on_virtual_time(test: Callable[[Clocked], Coroutine[Any, Any, None]]) -> list[HeldBack]:
    async def run() -> list[HeldBack]:
        clocked = Clocked()
        with contextlib.closing(clocked.watch):
            await test(clocked)
        return clocked.found

    with virtual(1) as loop:
        return loop.run_until_complete(run())


def test_a_rank_that_holds_back_others_for_the_grace() -> None:
    async def test(clocked: Clocked) -> None:
        clocked.by = ("train-0",)
        clocked.watch.wait()
        await asyncio.sleep(9)
        assert clocked.found == []
        await asyncio.sleep(2)
        assert len(clocked.found) == 1
        await asyncio.sleep(100)

    (found,) = on_virtual_time(test)
    assert found.by == ("train-0",)
    assert 10 <= found.seconds < 11


def test_waits_that_end_in_time_add_up_to_nothing() -> None:
    async def test(clocked: Clocked) -> None:
        clocked.by = ("train-0",)
        for _ in range(20):
            clocked.watch.wait()
            await asyncio.sleep(9)
            clocked.watch.go_on()

    assert on_virtual_time(test) == []


def test_a_long_pause_of_all_ranks_separates_nobody_as_they_go_on() -> None:
    """The others have bytes; they are out of bytes for a moment before the one that was late goes on."""

    async def test(clocked: Clocked) -> None:
        clocked.watch.wait()
        await asyncio.sleep(1000)
        clocked.by = ("train-0",)
        await asyncio.sleep(4)
        clocked.by = ()
        await asyncio.sleep(1000)

    assert on_virtual_time(test) == []


def test_others_that_run_out_of_bytes_later() -> None:
    async def test(clocked: Clocked) -> None:
        clocked.watch.wait()
        await asyncio.sleep(1001)
        clocked.by = ("train-0",)
        await asyncio.sleep(20)

    (found,) = on_virtual_time(test)
    assert 1005 <= found.seconds < 1020
