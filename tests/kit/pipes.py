"""The trainer's side of a FIFO, for tests: real opens and reads, off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def read_all(path: Path) -> bytes:
    """Open, read to end of file, close; as `cat` does."""
    with open(path, "rb", buffering=0) as file:
        chunks = []
        while chunk := file.read(1 << 20):
            chunks.append(chunk)
        return b"".join(chunks)


def read_some(path: Path, count: int) -> bytes:
    """Open, read `count` bytes, close: an early close."""
    with open(path, "rb") as file:
        return file.read(count)


def read_exactly(path: Path, count: int) -> bytes:
    """`read_some`, but take no byte past those."""
    with open(path, "rb", buffering=0) as file:
        taken = b""
        while piece := file.read(count - len(taken)):
            taken += piece
        return taken


def probe(path: Path) -> None:
    """Open and close without reading, as TensorFlow's repeat does with the epoch after the last."""
    os.close(os.open(path, os.O_RDONLY))


async def off_loop(function: Callable[..., T], *args: object) -> T:
    """Run a blocking reader in a thread, for which nobody waits if the test has failed meanwhile.

    The loop's own executor would be joined at its end, and so would a reader of a FIFO that nobody writes.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(error)

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = function(*args)
        except BaseException as caught:  # noqa: BLE001 - raised where it is awaited
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: the test has failed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=f"off loop: {function}", daemon=True).start()
    return await outcome


async def eventually(condition: Callable[[], object] | Callable[[], Awaitable[object]]) -> None:
    """Wait until `condition()` is true, or the test's deadline; the one place in the tests that polls."""
    try:
        while True:
            outcome = condition()
            if asyncio.iscoroutine(outcome):
                outcome = await outcome
            if outcome:
                return
            await asyncio.sleep(0.02)
    except asyncio.CancelledError as error:
        error.add_note(f"never true: {condition}")
        raise


async def until_equal(expected: object, value: Callable[[], object]) -> None:
    """Wait until `value()` equals `expected`, or the test's deadline.

    A request may be counted after the FIFO's last byte: the task that sent it runs later than delivery.
    """
    try:
        await eventually(lambda: value() == expected)
    except asyncio.CancelledError as error:
        error.add_note(f"expected {expected}, and it is {value()}")
        raise
