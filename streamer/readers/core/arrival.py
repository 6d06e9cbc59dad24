"""Waits until a path exists.

Contract §1.2: "If the file for a given epoch doesn't exist yet, your code may need to retry until the pipe is
created." inotify on the directory wakes the waiter when the FIFO is made; polling would cost latency or CPU.
Without inotify (the directory does not exist yet, or the kernel, a sandbox or a limit forbids inotify) the
waiter checks the path ten times a second. With inotify it still checks once a second, for file systems that
send no events.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import TYPE_CHECKING

from streamer.linux import watch_for_arrivals

if TYPE_CHECKING:
    from collections.abc import Callable

_CHECK_S = 1.0
_CHECK_WITHOUT_INOTIFY_S = 0.1


class Arrival:
    """Waits until one path exists, in one call of `wait` or several. The caller closes it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._inotify = -1
        """The inotify descriptor, or -1 while there is none."""

    def wait(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Wait at most `seconds` until the path exists, or until `until` is true; return whether it is so."""
        deadline = time.monotonic() + seconds
        while True:
            self._start_inotify()  # before the check, so that no event is missed between the two
            if until() if until is not None else os.path.exists(self._path):
                return True
            if (left := deadline - time.monotonic()) <= 0:
                return False
            self._wait(min(left, _CHECK_WITHOUT_INOTIFY_S if self._inotify < 0 else _CHECK_S))

    def close(self) -> None:
        """Close the inotify descriptor. Safe to call again."""
        fd, self._inotify = self._inotify, -1
        if fd >= 0:
            os.close(fd)

    def _start_inotify(self) -> None:
        if self._inotify >= 0:
            return
        fd = watch_for_arrivals(os.path.dirname(self._path) or ".")
        if fd is not None:
            self._inotify = fd

    def _wait(self, seconds: float) -> None:
        poller = select.poll()
        if self._inotify >= 0:
            poller.register(self._inotify, select.POLLIN)
        if poller.poll(seconds * 1000):
            with contextlib.suppress(BlockingIOError):
                os.read(self._inotify, 1 << 16)
