"""Ctrl-C, for a main thread that waits inside compiled code.

Python runs a signal's handler in the main thread, between two of its steps. While that thread waits in
TensorFlow for an element, no step comes, and a read from a stalled channel could not be interrupted. But the
interpreter writes the number of every signal to its wake-up descriptor at the moment it arrives (`signal`,
set_wakeup_fd). So a reading thread that has nothing to read can learn of a SIGINT and end its stream; the
call in the main thread then returns, and Python raises KeyboardInterrupt there.

Before it waits there, and while it does, that thread may also run Python: a step, the making of the
exception in which the call ends, or what the call wants to know of its arguments. Those are the first chance
for the signal's handler, and the worst: a KeyboardInterrupt does not pass compiled code (nor a `__del__`),
where it is lost or becomes something else. So the handler is ours. It does what Python's does, but in such a
place it waits, by a trace function, until the call is over.

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
_called: set[str] = set()
_lock = threading.Lock()
_last = float("-inf")
"""When a SIGINT was last seen. Every stream that was open then ends, for any may be the one waited for."""


def watch(*called: str) -> None:
    """Take SIGINT and the wake-up descriptor if nobody has them. Does nothing outside the main thread.

    `called`: files whose functions are called by compiled code, or as an object ends, and must not be
    interrupted.
    """
    global _ends  # noqa: PLW0603 - one per process, as the descriptor is
    if threading.current_thread() is not threading.main_thread():
        return
    _called.update(called)
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
    outside = None
    inner = frame
    while inner is not None:
        if inner.f_code.co_filename in _called:
            outside = inner.f_back
        inner = inner.f_back
    if outside is None or sys.gettrace() is not None:
        signal.default_int_handler(number, frame)
        return
    outside.f_trace = _raise
    sys.settrace(lambda *_: None)


def _raise(*_: object) -> TraceFunction:
    sys.settrace(None)
    raise KeyboardInterrupt
