"""The keeper's channels and their FIFOs: opened for a reader, adopted from a sidecar, ended.

A FIFO's pipe and the thread that opens it exist before its reader can open it. When an opening is cancelled,
its thread still waits in open(2), until `PendingOpen.release` opens the read end. The keeper opens that FIFO
again only after the thread has returned; otherwise the new opening would take the release for a reader.

The pump moves the bytes of a channel whose FIFO has a reader from the pipe that the sidecar writes. It waits
for bytes in the pipe or for room in the FIFO, never for both. splice(2) counts what it moves, and that number
is the channel's position. A reader that leaves ends its FIFO and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import stat
from collections import deque
from collections.abc import Callable
from typing import Any

from streamer.helpers.keeper.channel import HeldChannel, PendingOpen, close_all
from streamer.helpers.keeper.loop import EventLoop
from streamer.helpers.keeper.protocol import LONGEST_MARK, parse_mark, parse_position
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


class HeldFifos:
    """The channels by name. Requests about them raise KeyError or ValueError if they break the protocol."""

    def __init__(self, loop: EventLoop, *, reply: Callable[..., None]) -> None:
        """`reply`: as `SidecarConnection.reply`."""
        self.channels: dict[str, HeldChannel] = {}
        self.pump = Pump(loop, settled=lambda channel: reply("settled", channel))
        self.arrived: deque[PendingOpen] = deque()
        self.released: set[tuple[int, int]] = set()
        """Inodes of FIFOs whose opening was cancelled, while the thread has not returned from open(2)."""
        self._loop = loop
        self._reply = reply

    # Requests

    def open(self, name: str, message: dict[str, Any], fds: list[int]) -> None:
        """Handle `open` and `expect`; remove from `fds` what is kept. Raises OSError."""
        epoch, digest, skipped = parse_position(message)
        if fds[0] >= 0 and not stat.S_ISFIFO(os.fstat(fds[0]).st_mode):
            raise ValueError(name)
        channel = self.channels.get(name)
        if channel is None or (channel.state == "idle" and channel.epoch != epoch):
            if channel is not None:
                self._end(channel, "gone")
            channel = self.channels[name] = HeldChannel(name, epoch, digest, skipped)
        if channel.epoch != epoch:
            raise ValueError(epoch)
        channel.digest = digest
        if channel.state == "idle":
            channel.skipped = skipped
            self._await_reader(channel, fds)
        if message["do"] == "expect":
            self._reply("expected", channel)
        elif channel.state == "idle":
            channel.wanted = True
        else:
            self._reply("opened", channel)

    def adopt(self, name: str, message: dict[str, Any], fds: list[int]) -> None:
        """Handle `adopt`; remove from `fds` what is kept. Raises OSError."""
        epoch, digest, skipped = parse_position(message)
        moved, mark = int(message["moved"]), parse_mark(message["mark"])
        previous = self.channels.get(name)
        if previous is not None and previous.state != "idle":
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        fifo = _first(fds)
        if not stat.S_ISFIFO(os.fstat(fifo).st_mode):
            raise ValueError(name)
        if fcntl.fcntl(fifo, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
            raise ValueError(name)
        channel = HeldChannel(name, epoch, digest, skipped)
        channel.moved, channel.mark = moved, mark
        channel.create_pipe()
        del fds[0]
        if previous is not None:
            self._end(previous, "gone")
        self.channels[name] = channel
        self.pump.begin(channel, fifo)
        self._reply("adopted", channel)

    def mark(self, name: str, message: dict[str, Any]) -> None:
        """Handle `mark`."""
        mark = parse_mark(message["mark"])
        if len(mark) > LONGEST_MARK:
            raise ValueError(mark)
        self.channels[name].mark = mark

    def settle(self, name: str) -> None:
        """Handle `settle`."""
        channel = self.channels[name]
        channel.settling = True
        self._loop.perform((self.pump.move, channel))  # a failure must not repeat the message

    def close(self, name: str) -> None:
        """Handle `close`."""
        channel = self.channels[name]
        self._end(channel, "idle")
        channel.begin_next_epoch()

    def forget(self, name: str) -> None:
        """Handle `forget`; a channel that is not there has been forgotten."""
        if (gone := self.channels.pop(name, None)) is not None:
            self._end(gone, "gone")
            gone.settling = gone.wanted = False

    def fail(self, do: str, name: str, error: Exception) -> None:
        """Reply that a request lacked resources; the client repeats it."""
        number = getattr(error, "errno", None) or errno.ENOMEM
        self._reply("failed", do=do, channel=name, errno=number)

    # Ends

    def forget_sidecar(self) -> None:
        """Send no reply to requests of a sidecar that has disconnected."""
        for channel in self.channels.values():
            channel.settling = channel.wanted = False

    def end_all(self) -> None:
        """Close every FIFO."""
        for channel in self.channels.values():
            self._end(channel, "gone")

    def _end(self, channel: HeldChannel, state: str) -> None:
        """Close every descriptor of the channel, and let go of the thread that waits for its reader."""
        opening, channel.opening = channel.opening, None
        if opening is not None:
            self.released.add(opening.inode)
            self._loop.perform((PendingOpen.release, opening))
        self.pump.end(channel, state)

    # Readers

    def _await_reader(self, channel: HeldChannel, fds: list[int]) -> None:
        """Create the FIFO's pipe and the thread that waits for its reader. Raises OSError."""
        status = os.fstat(_first(fds))
        inode = status.st_dev, status.st_ino
        if channel.opening is not None and channel.opening.inode == inode:
            return
        self._end(channel, "idle")
        if inode in self.released:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        channel.create_pipe()
        try:
            channel.opening = PendingOpen(channel, fds[0], inode, self._note)
        except RuntimeError as error:
            self._end(channel, "idle")
            raise BlockingIOError(errno.EAGAIN, str(error)) from error
        del fds[0]

    def _note(self, opening: PendingOpen) -> None:
        """Queue a finished opening for `collect`. Called in the opening's thread."""
        self.arrived.append(opening)
        self._loop.wake()

    def collect(self) -> None:
        """Handle the openings that have finished. Raises OSError."""
        self._loop.clear_wake()
        while self.arrived:
            self._loop.perform((self._opened, self.arrived.popleft()))

    def _opened(self, opening: PendingOpen) -> None:
        """Handle the result of an opening."""
        opening.finish()
        channel = opening.channel
        if channel.opening is not opening:
            self.released.discard(opening.inode)
            close_all(opening.fd)
            return
        channel.opening = None
        wanted, channel.wanted = channel.wanted, False
        if opening.error is not None:
            self._end(channel, "idle")
            if wanted:
                self.fail("open", channel.name, opening.error)
            return
        self.pump.begin(channel, opening.fd)
        if wanted:
            self._reply("opened", channel)

    def pause(self) -> tuple[int, ...]:
        """Return no descriptor: a failed `collect` is repeated; as `Subject`."""
        return ()


def _first(fds: list[int]) -> int:
    """Return the message's first descriptor. Raises OSError if the kernel dropped it."""
    if fds[0] < 0:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return fds[0]
