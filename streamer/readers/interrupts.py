"""Ctrl-C, for a main thread that waits inside compiled code.

Python runs a signal's handler in the main thread, between two of its steps. While that thread waits in
TensorFlow for an element, no step comes, and a read from a stalled channel could not be interrupted. But the
interpreter writes the number of every signal to its wake-up descriptor at the moment it arrives (`signal`,
set_wakeup_fd). So a reading thread that has nothing to read can learn of a SIGINT and end its stream; the
call in the main thread then returns, and Python raises KeyboardInterrupt there.

There is one such descriptor per process. Where somebody else has it (an asyncio loop in the main thread), or
SIGINT has another handler than Python's own, nothing is done.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

_ends: tuple[int, int] | None = None
_lock = threading.Lock()
_last = float("-inf")
"""When a SIGINT was last seen. Every stream that was open then ends, for any may be the one waited for."""


def watch() -> None:
    """Take the wake-up descriptor if nobody has it. Does nothing outside the main thread."""
    global _ends  # noqa: PLW0603 - one per process, as the descriptor is
    if threading.current_thread() is not threading.main_thread():
        return
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
    if _ends is None or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    with _lock:
        with contextlib.suppress(BlockingIOError):
            if signal.SIGINT in os.read(_ends[0], 1 << 16):
                _last = time.monotonic()
        return _last > since
