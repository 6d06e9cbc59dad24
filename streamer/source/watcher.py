"""Readiness of many sockets, by one epoll object of our own that the event loop watches.

    socket, socket, socket ─→ epoll ─→ event loop ─→ AT_ONCE of them a turn ─→ whoever watches each

An event loop calls everybody whose socket is ready before it turns to anything else. With hundreds of small
answers at once delivery would stand in line behind all of them: the FIFO runs dry meanwhile, and what has
come piles up. Here a few are called, then the loop has its turn, and the rest are still ready
(level-triggered, and epoll lets them take turns, epoll(7)).

A socket in error is readable here on every loop; libuv stops watching one, and uvloop tells nobody.

Whoever is called may close any socket, and have its number taken by another that is told in its place: to be
called must never mean more than to look.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

AT_ONCE = 8
"""Sockets told in one turn of the loop. What 8 objects of 100 KB bring is what a FIFO takes in one."""


class Watcher:
    """Calls back for sockets that are readable, at their end or in error."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._on_readable: dict[int, Callable[[], None]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._epoll.fileno(), self._tell)

    def add(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Call this whenever there is something to read, until `remove`. A closed watcher calls nobody."""
        if not self._epoll.closed:
            self._epoll.register(fd, select.EPOLLIN)
            self._on_readable[fd] = on_readable

    def remove(self, fd: int) -> None:
        """Call nobody for this any more; the descriptor must still be open."""
        if self._on_readable.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _tell(self) -> None:
        for fd, _ in self._epoll.poll(0, AT_ONCE):
            # One that was called before may have removed it.
            if (on_readable := self._on_readable.get(fd)) is not None:
                on_readable()

    def close(self) -> None:
        """Watch nothing any more."""
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._on_readable.clear()
