"""Waiting until a path exists.

Contract §1.2: "If the file for a given epoch doesn't exist yet, your code may need to retry until the
pipe is created." inotify on the directory wakes the waiter at the moment the FIFO is made, where a loop
of naps would cost either latency or CPU. Two cases have no such bell: the directory itself is not there
yet, and a kernel or sandbox without inotify (or with its instances used up). There it looks ten times a
second. With a bell it still looks once a second, for file systems that do not ring it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import time

_IN_MOVED_TO = 0x80
_IN_CREATE = 0x100
_IN_ONLYDIR = 0x1000000
_LOOK = 1.0
_LOOK_WITHOUT_BELL = 0.1


class Arrival:
    """Waits for one path to exist; close it when done. May be waited on in several steps."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._bell = -1
        """The inotify descriptor, or -1 while there is none."""

    def wait(self, seconds: float) -> bool:
        """Whether the path exists, now or within `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            self._hang_bell()  # before the look, so that nothing can fall between the two
            if os.path.exists(self._path):
                return True
            if (left := deadline - time.monotonic()) <= 0:
                return False
            self._listen(min(left, _LOOK_WITHOUT_BELL if self._bell < 0 else _LOOK))

    def close(self) -> None:
        """Let go of the inotify descriptor. Safe to call again."""
        bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)

    def _hang_bell(self) -> None:
        if self._bell >= 0:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            return
        directory = os.fsencode(os.path.dirname(self._path) or ".")
        if libc.inotify_add_watch(fd, directory, _IN_CREATE | _IN_MOVED_TO | _IN_ONLYDIR) < 0:
            os.close(fd)
            return
        self._bell = fd

    def _listen(self, seconds: float) -> None:
        poller = select.poll()
        if self._bell >= 0:
            poller.register(self._bell, select.POLLIN)
        if poller.poll(seconds * 1000):
            with contextlib.suppress(BlockingIOError):
                os.read(self._bell, 1 << 16)
