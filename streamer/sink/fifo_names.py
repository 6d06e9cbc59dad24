"""FIFOs as names in a directory: makes, withdraws and removes them, and finds that one was replaced.

    make       `train_0`, and an O_PATH descriptor of it: it refers to the inode and opens neither end
    withdraw   rename it to a name that only Penstock knows, before its first byte
    replaced   return when the name leads elsewhere and no reader has come
    unlink     remove both names

A FIFO is opened through its descriptor, so the open FIFO is the one created, even if its name has changed
since. Names are made and removed in a directory that is opened for each step (`streamer.directory`): the
trainer may remove the whole directory and make it anew, and must not put a link in its place.

A FIFO has one reader (contract §1.3). If its reader closes it and another program opens it before the kernel
has reported the close, the kernel reports nothing, and the other program would get the rest of the epoch for
a whole one. So a FIFO that has had a byte has no name that a reader looks for. The name that it gets is for
the workers of a reader (`streamer.readers.torch.workers`), and for the next sidecar.

`NameWatch` reports names that may have been removed or replaced, by one inotify(7) watch for all channels,
since the kernel grants a user few. An event is only a hint: who waits for it compares the name with the FIFO.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

from streamer.directory import Directory
from streamer.errors import Shortage
from streamer.linux import changed_names, descriptor_path, open_inotify, watch_for_losses
from streamer.sink.write_ends import WRITE_END
from streamer.trailer import fifo_path, withdrawn_path

if TYPE_CHECKING:
    from collections.abc import Iterator


_SPACE, _FILES = "free space or inodes on that file system", "raise the limit of open files (ulimit -n)"
_REMEDIES = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ELOOP: "remove the link",
    errno.ENOMEM: "see to the machine's memory",
}
"""What to do about a lack of space, descriptors or memory."""


@contextlib.contextmanager
def shortages(path: str) -> Iterator[None]:
    """Raise Shortage for an OSError of the block, with its own path, or with `path` if it has none."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check that the directory exists and is writable")
        own = error.filename if str(error.filename).startswith("/") else path
        raise Shortage(f"{own}: {error.strerror or error}; {remedy}") from error


def check_name(path: str) -> None:
    """Raise Shortage if `path` exists and is not a FIFO of this user."""
    with contextlib.suppress(FileNotFoundError):
        check_fifo(path, os.lstat(path))


def check_fifo(path: str, status: os.stat_result) -> None:
    """Raise Shortage unless the status is that of a FIFO of this user."""
    if not stat.S_ISFIFO(status.st_mode) or status.st_uid != os.geteuid():
        raise Shortage(f"{path} exists and is not a FIFO of ours; remove it or rename the channel")


class FifoNames:
    """Names and O_PATH descriptors of one channel's FIFOs, one per epoch."""

    def __init__(self, directory: str, channel: str, *, mode: int, watch: NameWatch | None) -> None:
        """`watch` watches `directory`; None: `replaced` never returns."""
        self._directory = directory
        self._channel = channel
        self._mode = mode
        self._watch = watch
        self._fds: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<FifoNames {self._channel} epochs {sorted(self._fds)}>"

    def path(self, epoch: int) -> str:
        """Return the path at which a reader finds the epoch's FIFO."""
        return fifo_path(self._directory, self._channel, epoch)

    def _name(self, epoch: int) -> str:
        return fifo_path("", self._channel, epoch)

    def _withdrawn(self, epoch: int) -> str:
        return withdrawn_path("", self._channel, epoch)

    def fd(self, epoch: int) -> int:
        """Return the descriptor of the epoch's FIFO; -1 if there is none."""
        return self._fds.get(epoch, -1)

    def kept(self, epoch: int) -> bool:
        """Return whether the epoch's FIFO has been made and is found by its name; else forget it."""
        if self._watch is not None:
            self._watch.renew()
        if epoch in self._fds and self._named(epoch):
            return True
        self.let_go(epoch)
        return False

    def make(self, epoch: int, here: Directory) -> None:
        """Create the epoch's FIFO in `here`, unless its name exists. Raises OSError, Shortage."""
        with contextlib.suppress(FileExistsError):
            os.mkfifo(self._name(epoch), self._mode, dir_fd=here.fd)
        self._hold(epoch, here, self._name(epoch))

    def is_withdrawn(self, epoch: int, here: Directory) -> bool:
        """Return whether an earlier sidecar has withdrawn the epoch's FIFO."""
        return here.status(self._withdrawn(epoch)) is not None

    def hold_withdrawn(self, epoch: int, here: Directory) -> None:
        """Take over a FIFO that is withdrawn. Raises OSError, Shortage."""
        self._hold(epoch, here, self._withdrawn(epoch))

    def _hold(self, epoch: int, here: Directory, name: str) -> None:
        """Keep an O_PATH descriptor of the epoch's FIFO and set its mode. Raises OSError, Shortage."""
        path_fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here.fd)
        try:
            check_fifo(os.path.join(self._directory, name), os.fstat(path_fd))
            # mkfifo(3) applies the umask; the mode is for the trainer's user or group.
            os.chmod(descriptor_path(path_fd), self._mode)
        except (OSError, Shortage):
            os.close(path_fd)
            raise
        self._fds[epoch] = path_fd

    def _named(self, epoch: int) -> bool:
        """Return whether the epoch's FIFO still has its name, or the one that `withdraw` gives it."""
        names = self._name(epoch), self._withdrawn(epoch)
        try:
            with Directory.at(self._directory) as here:
                return any(self._is_name(name, epoch, here) for name in names)
        except OSError:
            return False  # the directory cannot be searched; `make` raises the error

    def _is_name(self, name: str, epoch: int, here: Directory) -> bool:
        """Return whether `name` in `here` is a name of the epoch's FIFO."""
        named, own = here.status(name), os.fstat(self._fds[epoch])
        return named is not None and (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino)

    async def replaced(self, epoch: int) -> None:
        """Return once the name of the epoch's FIFO no longer leads to it, and no reader has opened it."""
        if self._watch is None:
            await asyncio.Event().wait()
            return
        name = os.path.basename(self.path(epoch))
        with self._watch.changes(name) as changed:
            while epoch not in self._fds or self._named(epoch) or not await self._has_no_reader(epoch):
                await changed.wait()
                changed.clear()

    async def _has_no_reader(self, epoch: int) -> bool:
        """Return whether nobody reads the epoch's FIFO. If somebody does, wait to be cancelled."""
        try:
            write_end = self.write_end(epoch)
        except OSError:
            return False
        if write_end is None:
            return True
        try:
            await asyncio.Event().wait()  # the write end is about to be opened
        finally:
            os.close(write_end)  # not before: as long as it is the only one, the reader would see an end
        return False

    def write_end(self, epoch: int) -> int | None:
        """Open the write end of the epoch's FIFO; return None if nobody reads it. Raises OSError."""
        try:
            return os.open(descriptor_path(self._fds[epoch]), WRITE_END | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ENXIO:  # fifo(7)
                return None
            raise

    def withdraw(self, epoch: int, here: Directory) -> None:
        """Take the name of an open FIFO away, so that no further reader opens it. Raises OSError."""
        if self._is_name(self._name(epoch), epoch, here):
            here.move(self._name(epoch), here, self._withdrawn(epoch))

    def unlink(self, epoch: int, here: Directory) -> None:
        """Remove the names of the epoch's FIFO. Raises OSError."""
        here.remove(self._name(epoch))
        here.remove(self._withdrawn(epoch))

    def let_go(self, epoch: int) -> None:
        """Close the descriptor of the epoch's FIFO; its name stays."""
        if (path_fd := self._fds.pop(epoch, None)) is not None:
            os.close(path_fd)

    def let_all_go(self) -> None:
        """Close all descriptors; the names stay."""
        for epoch in list(self._fds):
            self.let_go(epoch)

    def remove_all(self) -> None:
        """Close all descriptors and remove the names, as far as that is possible."""
        for epoch in list(self._fds):
            self.let_go(epoch)
            with contextlib.suppress(OSError), Directory.at(self._directory) as here:
                self.unlink(epoch, here)


class NameWatch:
    """Watches the names of one directory, for the running event loop, until `close`."""

    def __init__(self, directory: str) -> None:
        """Raises OSError where the kernel, a sandbox or a limit forbids inotify."""
        self._directory = directory
        self._waiting: dict[bytes, asyncio.Event] = {}
        self._fd = open_inotify()
        try:
            watch_for_losses(self._fd, directory)
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._fd, self._on_events)
        except BaseException:
            os.close(self._fd)
            raise

    def __repr__(self) -> str:
        return f"<NameWatch {self._directory}, {len(self._waiting)} names>"

    def renew(self) -> None:
        """Watch the directory that has the path now, which may be another one than before."""
        with contextlib.suppress(OSError):  # it does not exist, which its user notices
            watch_for_losses(self._fd, self._directory)

    @contextlib.contextmanager
    def changes(self, name: str) -> Iterator[asyncio.Event]:
        """Return an event that is set whenever `name` may have been removed or replaced. One user a name."""
        changed = self._waiting[os.fsencode(name)] = asyncio.Event()
        try:
            yield changed
        finally:
            del self._waiting[os.fsencode(name)]

    def _on_events(self) -> None:
        names = changed_names(self._fd)
        for name in self._waiting if b"" in names else names & self._waiting.keys():
            self._waiting[name].set()

    def close(self) -> None:
        """End the watch."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
