"""epoll of the keeper, and acts that are repeated until they succeed.

An `Act` is a function and its subject. A failed act is repeated after RETRY seconds; until then the loop does
not watch the descriptors of its subject, because an event that nothing handles would wake it at once again.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable
from typing import Any, Protocol

RETRY = 0.1
"""Seconds until a failed act is repeated."""


class Subject(Protocol):
    """What an act is about."""

    def pause(self) -> tuple[int, ...]:
        """Note that an act has failed; return the descriptors not to be watched until it is repeated."""


Act = tuple[Callable[[Any], None], Subject]
"""A function to call, and its argument."""


class EventLoop:
    """The descriptors that the keeper watches, and the acts that it repeats."""

    def __init__(self, epoll: select.epoll) -> None:
        self.watched: dict[int, int] = {}
        """The events that epoll watches for, by descriptor of a channel or the sidecar."""
        self._again: dict[Act, None] = {}
        """Acts to repeat: those that failed, and those that must run without an event."""
        self._again_at = 0.0
        self._epoll = epoll
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self.wake_fd, select.EPOLLIN)

    def poll(self, timeout: float | None) -> list[tuple[int, int]]:
        """Wait at most `timeout` seconds for events; return descriptors and events. Raises OSError."""
        return self._epoll.poll(timeout)

    def perform(self, act: Act) -> None:
        """Run one act; if it fails, repeat it later. Other acts are not affected."""
        function, subject = act
        try:
            function(subject)
        except Exception:  # noqa: BLE001 - one FIFO's failure must not end the others
            self.repeat(act)
            with contextlib.suppress(Exception):
                for fd in subject.pause():
                    if fd in self.watched:
                        self.watch(fd, 0)

    def repeat(self, act: Act) -> None:
        """Run an act again, RETRY seconds after the first of those that wait."""
        if not self._again:
            self._again_at = time.monotonic() + RETRY
        self._again[act] = None

    def repeat_now(self, act: Act) -> None:
        """Run an act, and those that wait, at the next turn."""
        self._again[act] = None
        self._again_at = 0.0

    def until_repeat(self, now: float) -> float | None:
        """Return the seconds until acts are repeated; None if there are none."""
        return max(0.0, self._again_at - now) if self._again else None

    def take_due(self) -> list[Act]:
        """Return the acts to repeat now; they count as no longer waiting."""
        if not self._again or time.monotonic() < self._again_at:
            return []
        again, self._again = self._again, {}
        return list(again)

    def watch(self, fd: int, events: int) -> None:
        """Watch a descriptor for these events in place of earlier ones. Raises OSError."""
        before = self.watched.get(fd)
        if before is None:
            self._epoll.register(fd, events)
        elif before != events:
            self._epoll.modify(fd, events)
        self.watched[fd] = events

    def watch_edges(self, fd: int) -> None:
        """Watch a descriptor for the arrival of input, for good. Raises OSError."""
        self._epoll.register(fd, select.EPOLLIN | select.EPOLLET)

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor before it is closed."""
        if self.watched.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def wake(self) -> None:
        """Make `poll` return. A signal handler needs this too: epoll waits again after a signal."""
        while True:
            try:
                os.eventfd_write(self.wake_fd, 1)
            except OSError:
                time.sleep(RETRY)
            else:
                return

    def clear_wake(self) -> None:
        """Let `poll` wait again after `wake`. Raises OSError."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)
