"""Handles Ctrl-C while the main thread waits in TensorFlow.

Python runs a signal's handler in the main thread, between two of its bytecodes. While that thread waits in
TensorFlow for an element, the handler does not run. But the interpreter writes the number of every signal to
its wake-up descriptor as soon as the signal arrives (`signal.set_wakeup_fd`). A thread of a reader that has
no bytes reads that descriptor and, after a SIGINT, ends its stream with an error. The call in the main thread
then returns, and Python raises KeyboardInterrupt there.

docs/how-to/tensorflow.md promises that Ctrl-C ends a waiting read with KeyboardInterrupt. That needs the
descriptor and a handler. Without this module, Ctrl-C has no effect while a channel is stalled. With the
descriptor alone, 27 of 28 interrupts became a RuntimeError: the handler runs first in the Python code that
TensorFlow calls to make its exception, and a KeyboardInterrupt there does not pass compiled code (nor a
`__del__`). So this module sets a handler that raises KeyboardInterrupt as Python's does, but inside the given
files defers it, by a trace function, until the call has returned.

A process has one wake-up descriptor and one handler of SIGINT. If another module has the descriptor (an
asyncio loop in the main thread), or SIGINT has another handler than Python's own, nothing is done.
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

_wakeup_pipe: tuple[int, int] | None = None
_called: set[str] = set()
_lock = threading.Lock()
_last = float("-inf")
"""Time of the last SIGINT, which ends every stream open then: the main thread may be waiting for any."""


def watch(*called: str) -> None:
    """Take SIGINT and the wake-up descriptor if they are free. Does nothing outside the main thread.

    `called`: files whose functions must not be interrupted, because compiled code or a `__del__` calls them.
    """
    global _wakeup_pipe  # noqa: PLW0603 - one per process, as the descriptor is
    if threading.current_thread() is not threading.main_thread():
        return
    _called.update(called)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle)
    if _wakeup_pipe is None:
        _wakeup_pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    others = signal.set_wakeup_fd(_wakeup_pipe[1], warn_on_full_buffer=False)
    if others not in {-1, _wakeup_pipe[1]}:
        signal.set_wakeup_fd(others)


def now() -> float:
    """Return the time from which `interrupted` counts; earlier signals have been handled."""
    interrupted(0.0)
    return time.monotonic()


def interrupted(since: float) -> bool:
    """Return whether SIGINT came after `since`, a time of `now()`, and has our handler."""
    global _last  # noqa: PLW0603 - one per process, as the signal is
    if _wakeup_pipe is None or signal.getsignal(signal.SIGINT) is not _handle:
        return False
    with _lock:
        with contextlib.suppress(BlockingIOError):
            if signal.SIGINT in os.read(_wakeup_pipe[0], 1 << 16):
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
