"""Moves the bytes of channels whose FIFO has a reader: from the pipe that the sidecar writes into the FIFO.

The pump waits for bytes in the pipe or for room in the FIFO, never for both. splice(2) counts what it moves,
and that number is the channel's position. A reader that leaves ends its FIFO and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable

from streamer.helpers.keeper.channel import HeldChannel, close_all
from streamer.helpers.keeper.loop import EventLoop
from streamer.linux import PIPE_SIZE, SPLICE_FLAGS, bytes_unread, is_ready, set_pipe_size


class Pump:
    """The FIFOs that have a reader."""

    def __init__(self, loop: EventLoop, *, settled: Callable[[HeldChannel], None]) -> None:
        """`settled` is called once for each `settling` channel whose FIFO has accepted everything."""
        self.owners: dict[int, HeldChannel] = {}
        """Channels by their FIFO's and pipe's descriptors."""
        self._loop = loop
        self._settled = settled

    def begin(self, channel: HeldChannel, fifo: int) -> None:
        """Start to move bytes: a reader has opened the FIFO."""
        channel.fifo, channel.state = fifo, "open"
        self.owners |= {fifo: channel, channel.read_fd: channel}
        for fd in (fifo, channel.write_fd):
            with contextlib.suppress(OSError):
                set_pipe_size(fd)
        self._loop.perform((self.move, channel))

    def move(self, channel: HeldChannel) -> None:
        """Move the pipe's bytes to the FIFO, as far as that has room. Raises OSError."""
        if channel.fifo < 0:
            self._settle(channel)
            return
        if channel.full is None:
            self._await(channel, full=False)
        try:
            channel.moved += os.splice(channel.read_fd, channel.fifo, PIPE_SIZE, flags=SPLICE_FLAGS)
        except BlockingIOError:
            self._await(channel, full=bytes_unread(channel.read_fd) > 0)
        except BrokenPipeError:
            self._end_left(channel)
        self._settle(channel)

    def look(self, channel: HeldChannel) -> None:
        """End the FIFO if poll(2) confirms that its reader has left: the event may be a stale one."""
        if channel.fifo < 0:
            return
        if is_ready(channel.fifo, 0):
            self._end_left(channel)
            self._settle(channel)
        else:
            self.move(channel)

    def end(self, channel: HeldChannel, state: str) -> None:
        """Close FIFO and pipe; the sidecar's next write raises BrokenPipeError."""
        channel.state = state
        for fd in (channel.fifo, channel.read_fd):
            self.owners.pop(fd, None)
            self._loop.unwatch(fd)
        close_all(channel.fifo, channel.read_fd, channel.write_fd, channel.untouched)
        channel.fifo = channel.read_fd = channel.write_fd = channel.untouched = -1
        channel.full = None

    def _end_left(self, channel: HeldChannel) -> None:
        """End a FIFO whose reader has left."""
        kept = -1 if channel.moved else os.dup(channel.fifo)
        self.end(channel, "gone")
        channel.untouched = kept

    def act_on(self, channel: HeldChannel, fd: int, event: int) -> Callable[[HeldChannel], None]:
        """Return what an event on one of the channel's descriptors leads to."""
        gone = fd == channel.fifo and event & (select.EPOLLERR | select.EPOLLHUP)
        return self.look if gone else self.move

    def _await(self, channel: HeldChannel, *, full: bool) -> None:
        """Wait for room in the FIFO if it is full, else for bytes in the pipe."""
        if channel.full is not full:
            channel.full = None
            self._loop.watch(channel.fifo, select.EPOLLOUT if full else 0)
            self._loop.watch(channel.read_fd, 0 if full else select.EPOLLIN)
            channel.full = full

    def _settle(self, channel: HeldChannel) -> None:
        if channel.settling and (channel.state != "open" or not bytes_unread(channel.read_fd)):
            channel.settling = False
            self._settled(channel)
