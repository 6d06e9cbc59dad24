"""Ctrl-C, for a main thread that waits inside compiled code.

Python runs a signal's handler in the main thread, between two of its steps. While that thread waits in
TensorFlow for an element, no step comes, and a read from a stalled channel could not be interrupted. But the
interpreter writes the number of every signal to its wake-up descriptor at the moment it arrives (`signal`,
set_wakeup_fd). So a reading thread that has nothing to read can learn of a SIGINT and end its stream; the
call in the main thread then returns, and Python raises KeyboardInterrupt there.

TensorFlow turns the end of the stream into an exception, and runs a little Python for that, in the main
thread: the first chance for the signal's handler, and the worst, for a KeyboardInterrupt inside the making of
another exception comes out as neither (pybind11 makes a RuntimeError of it). So the handler is ours: it does
what Python's does, but there it waits, by a trace function, until the exception is made.

There is one wake-up descriptor per process, and one handler. Where somebody else has the descriptor (an
asyncio loop in the main thread), or SIGINT is not handled by Python's own handler, nothing is done.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

    from _typeshed import TraceFunction

_ends: tuple[int, int] | None = None
_made_in = ""
_lock = threading.Lock()
_last = float("-inf")
"""When a SIGINT was last seen. Every stream that was open then ends, for any may be the one waited for."""


def watch(makes_exceptions: str) -> None:
    """Take SIGINT and the wake-up descriptor if nobody has them. Does nothing outside the main thread.

    `makes_exceptions`: the file whose code must not be interrupted.
    """
    global _ends, _made_in  # noqa: PLW0603 - one per process, as the descriptor is
    if threading.current_thread() is not threading.main_thread():
        return
    _made_in = makes_exceptions
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle)
    if _ends is None:
        _ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    others = signal.set_wakeup_fd(_ends[1], warn_on_full_buffer=False)
    if others not in {-1, _ends[1]}:
        signal.set_wakeup_fd(others)


def now() -> float:
    """The moment from which `interrupted` may count: what came before has had its answer."""
    interrupted(0.0)
    return time.monotonic()


def interrupted(since: float) -> bool:
    """Whether SIGINT came after `since`, as of `now()`, and is Python's to handle."""
    global _last  # noqa: PLW0603 - one per process, as the signal is
    if _ends is None or signal.getsignal(signal.SIGINT) is not _handle:
        return False
    with _lock:
        with contextlib.suppress(BlockingIOError):
            if signal.SIGINT in os.read(_ends[0], 1 << 16):
                _last = time.monotonic()
        return _last > since


def _handle(number: int, frame: FrameType | None) -> None:
    caller = None if frame is None else frame.f_back
    if frame is None or caller is None or frame.f_code.co_filename != _made_in or sys.gettrace() is not None:
        signal.default_int_handler(number, frame)
        return
    caller.f_trace = _raise_once_made
    sys.settrace(lambda *_: None)


def _raise_once_made(_: FrameType, event: str, __: object) -> TraceFunction:
    if event == "exception":
        sys.settrace(None)
        raise KeyboardInterrupt
    return _raise_once_made
