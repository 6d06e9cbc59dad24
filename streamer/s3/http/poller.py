"""Readiness of many sockets, by one epoll object of our own that the event loop watches.

    socket, socket, socket ─→ epoll ─→ event loop ─→ AT_ONCE of them a turn ─→ whoever watches each

An event loop calls everybody whose socket is ready before it turns to anything else. With hundreds of small
answers at once delivery would stand in line behind all of them: the FIFO runs dry meanwhile, and what has
come piles up. Here a few are called, then the loop has its turn, and the rest are still ready
(level-triggered, and epoll lets them take turns, epoll(7)).

A socket in error is told again and again until somebody has heard the error, on every loop; libuv tells it
once and watches no more, so on uvloop an error behind bytes that were still to be read was lost.

Whoever is called may close any socket, and have its number taken by another that is told in its place: to be
called must never mean more than to look. What it raises is told to the loop's exception handler, as that of
any callback is.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

AT_ONCE = 8
"""Sockets told in one turn of the loop. What 8 objects of 100 KB bring is what a FIFO takes in one."""


class FairPoller:
    """Calls back for sockets that are readable, at their end or in error."""

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None
        self._on_readable: dict[int, Callable[[], None]] = {}
        self._loop = asyncio.get_running_loop()

    def open(self) -> None:
        """Make the epoll object, if there is none yet. Raises OSError where no descriptor is left."""
        if self._epoll is None:
            self._epoll = select.epoll()
            self._loop.add_reader(self._epoll.fileno(), self._tell, self._epoll)

    def add(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Call this whenever there is something to read, until `remove`; nobody while we are not open.

        Raises OSError where the kernel has no room for one more.
        """
        if self._epoll is not None:
            self._epoll.register(fd, select.EPOLLIN)
            self._on_readable[fd] = on_readable

    def remove(self, fd: int) -> None:
        """Call nobody for this any more; the descriptor must still be open."""
        if self._on_readable.pop(fd, None) is not None and self._epoll is not None:
            self._epoll.unregister(fd)

    def _tell(self, epoll: select.epoll) -> None:
        for fd, _ in epoll.poll(0, AT_ONCE):
            # One that was called before may have removed it.
            if (on_readable := self._on_readable.get(fd)) is None:
                continue
            try:
                on_readable()
            except Exception as error:  # noqa: BLE001 - of one socket, and others have their turn
                told = {"message": f"{on_readable!r} failed", "exception": error}
                self._loop.call_exception_handler(told)

    def close(self) -> None:
        """Watch nothing any more."""
        if self._epoll is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None
            self._on_readable.clear()
