"""The timer of a body: it ends after silence, and does not cost a timer for each piece."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import TypeVarTuple

import pytest

from streamer.errors import ErrorContext, Transient
from streamer.s3.client.stall import within_stall

_Arguments = TypeVarTuple("_Arguments")

PIECES = 10_000
WHERE = ErrorContext("b", "k", 0, 1)


class Counting(asyncio.SelectorEventLoop):
    """An event loop that counts its timers."""

    timers = 0

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Arguments], object],
        *arguments: *_Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        self.timers += 1
        return super().call_at(when, callback, *arguments, context=context)


async def receive(pieces: int) -> None:
    async with within_stall(600, WHERE) as stall:
        for _ in range(pieces):
            stall.moved()


async def fall_silent() -> None:
    async with within_stall(0.05, WHERE) as stall:
        stall.moved()
        stall.pause()
        stall.moved()
        await asyncio.get_running_loop().create_future()


def test_a_piece_costs_no_timer() -> None:
    with asyncio.Runner(loop_factory=Counting) as runner:
        runner.run(receive(PIECES))
        loop = runner.get_loop()
        assert isinstance(loop, Counting)
        assert loop.timers < PIECES / 100


def test_silence_after_a_pause_ends() -> None:
    with pytest.raises(Transient, match=r"no byte for 0\.05 s"):
        asyncio.run(fall_silent())
