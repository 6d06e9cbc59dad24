"""Polls many sockets with one epoll object, a few per turn of the event loop.

    socket, socket, socket ─→ epoll ─→ event loop ─→ AT_ONCE sockets a turn ─→ the callback of each

An event loop calls the callbacks of all ready sockets before it runs anything else. With hundreds of small
responses at once, delivery would wait for all of them: the FIFO would run empty while received bytes wait.
This poller calls at most `AT_ONCE` callbacks in a turn of the loop; the other sockets stay ready
(level-triggered; epoll takes them in turn, epoll(7)).

This poller's epoll reports a socket in error until the error has been read. libuv reports it once and stops
watching, so on uvloop an error after unread bytes was lost.

A callback may return another one, which the poller calls next. So the code that reads a response does not
call the stage that takes its body, and that calls the response again.

A callback may close any socket, and a new socket may get the old number and an event of the old socket. So an
event is a hint only: a callback must check its socket. An exception of a callback goes to the loop's
exception handler.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

OnReadable = Callable[[], Callable[[], None] | None]
"""Called when a socket is readable; may return what is to be called next."""
AT_ONCE = 8
"""Most callbacks in one turn of the loop; 8 objects of 100 KB are as much as a FIFO accepts in one turn."""


class FairPoller:
    """Calls the callbacks of sockets that are readable, at their end or in error."""

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None
        self._on_readable: dict[int, OnReadable] = {}
        self._loop = asyncio.get_running_loop()

    def open(self) -> None:
        """Create the epoll object unless it exists. Raises OSError if no descriptor is left."""
        if self._epoll is None:
            self._epoll = select.epoll()
            self._loop.add_reader(self._epoll.fileno(), self._call_ready, self._epoll)

    def add(self, fd: int, on_readable: OnReadable) -> None:
        """Call `on_readable` whenever the socket is readable, until `remove` or another `add`.

        Call `open` before. Raises OSError if the kernel cannot watch another socket.
        """
        if self._epoll is not None:
            if fd not in self._on_readable:
                self._epoll.register(fd, select.EPOLLIN)
            self._on_readable[fd] = on_readable

    def remove(self, fd: int) -> None:
        """Stop watching a descriptor, which must still be open."""
        if self._on_readable.pop(fd, None) is not None and self._epoll is not None:
            self._epoll.unregister(fd)

    def _call_ready(self, epoll: select.epoll) -> None:
        for fd, _ in epoll.poll(0, AT_ONCE):
            # An earlier callback may have removed the socket.
            if (on_readable := self._on_readable.get(fd)) is None:
                continue
            try:
                if (then := on_readable()) is not None:
                    then()
            except Exception as error:  # noqa: BLE001 - one socket's error must not stop the others
                context = {"message": f"{on_readable!r} failed", "exception": error}
                self._loop.call_exception_handler(context)

    def close(self) -> None:
        """Stop watching all sockets."""
        if self._epoll is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None
            self._on_readable.clear()
