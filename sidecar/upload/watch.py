"""Which files are uploaded while the trainer writes, and in which order: that in which they were closed.

    inotify(7) ─ events ─▶ Watch.follow ─┐
    walks of the tree ───▶ Watch.scan ───┴─ files ─▶ Order ─ next ─▶ upload ─ is_first ─▶ visible in S3

An event is a hint: those of a directory that has no watch yet, or of a full queue, are lost, and a sandbox
such as gVisor may send none. A scan finds the same files by inode, size and time of change. It is made at the
start, of a new directory once its watch is there, after an overflow, and when the trainer has ended; every
`SCAN_EVERY` seconds one finds the files that have not changed for as long. The order of a scan is that of the
inodes' changes (ctime), which a rename sets too, and a copy of the times does not. Events keep their order.

**When is a file closed?** A file that an event or a scan names may be open again, or still. The kernel grants
no read lease (F_SETLEASE, fcntl(2)) on a file that is open for writing; but only its owner, or a process with
CAP_LEASE, may have one, and not on each file system. Where the kernel does not say, a file counts as closed
when it has not changed for `CLOSED_REST` seconds after an event, or `FOUND_REST` after a scan, and at any
time after the trainer's end. One that changes later is closed later: it leaves its place in the order.

A name that is marked as temporary waits for its rename, at most `TEMPORARY_REST` seconds.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

from sidecar.process.logs import log
from sidecar.upload.tree import LeftOut, TreeFile, find_file, open_file, walk
from streamer.linux import (
    CREATED,
    IGNORED,
    IS_DIRECTORY,
    LOST,
    MOVED_IN,
    descriptor_path,
    open_inotify,
    watch_for_files,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from streamer.directory import Directory

SCAN_EVERY = 60.0
CLOSED_REST, FOUND_REST, TEMPORARY_REST = 2.0, 10.0, 300.0
"""Seconds; see above."""
OURS = ".penstock"
"""Name in the root of what is no file of the trainer: markers, the journal and what is being restored."""
_TEMPORARY = re.compile(r"(^|[._~-])(tmp|temp(?![a-z]))", re.IGNORECASE)
"""Matches the name of a file or directory that will be renamed."""
_LAST = {
    "checkpoint",
    ".metadata",
    "trainer_state.json",
    "training_metadata.json",
    "latest",
    "_CHECKPOINT_METADATA",
}
"""Names of files that name the others of their directory."""


class Found(NamedTuple):
    """A file that may be closed."""

    file: TreeFile
    rest: float
    """Seconds without a change after which it is taken for closed, if the kernel does not say."""
    event: bool = False
    """Whether its place is the end of the order, since an event has just said that it was closed."""
    whole: bool = False
    """Whether it came with its step, which was renamed."""


class Watch:
    """The watched tree. `scan` and `follow` run in threads, one at a time, between `open` and `close`."""

    def __init__(self, root: Directory, prefix: str, is_new: Callable[[str, os.stat_result], bool]) -> None:
        """`prefix`: of the keys. `is_new`: whether a file is not in S3 as it is."""
        self.left_out: dict[str, str] = {}
        """Why files cannot be uploaded, by name."""
        self._root = root
        self._prefix = prefix
        self._is_new = is_new
        self._reported = False
        self._folders: dict[int, str] = {}
        """Paths in the tree, by the number of their watch."""
        self.fd = -1

    def open(self) -> None:
        """Begin to watch, if the kernel allows it."""
        try:
            self.fd = open_inotify()
        except OSError as error:
            self._report(error)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def scan(self, below: str = "", *, rest: float = FOUND_REST, rested: float = 0.0) -> list[Found]:
        """Watch all directories below one; return their new files. `rested`: those unchanged for so long."""
        now = time.time()
        found: list[Found] = []
        try:
            for each in walk(self._root, self._prefix, below, self._watch):
                if isinstance(each, LeftOut):
                    self.leave_out(each)
                elif now - each.status.st_ctime >= rested:
                    found += self._new(each, rest=rest)
        except OSError as error:
            self.leave_out(LeftOut(".", f"it cannot be read ({error.strerror})"))
        return sorted(found, key=_change)

    def follow(self, events: Iterable[tuple[int, int, bytes]]) -> list[Found]:
        """Return the files of the events, in order."""
        found: list[tuple[int, Found]] = []
        latest = 0
        for watch, kind, raw in events:
            if kind & LOST:
                found += [(_change(each)[0], each) for each in self.scan()]
            if kind & IGNORED:
                self._folders.pop(watch, None)
            if kind & (LOST | IGNORED) or watch not in self._folders:
                continue
            name = os.path.join(self._folders[watch], os.fsdecode(raw))
            moved = bool(kind & MOVED_IN)
            if not kind & IS_DIRECTORY:
                closed = [*self._closed(name, made=bool(kind & CREATED))]
            elif moved:
                closed = [
                    each._replace(event=True, whole="/" not in name)
                    for each in self.scan(name, rest=CLOSED_REST)
                ]
                closed.sort(key=lambda each: os.path.basename(each.file.name) in _LAST)
            else:
                found += [(_change(each)[0], each) for each in self.scan(name)]
                continue
            for each in closed:
                latest = max(latest, _change(each)[0])
                found.append((latest, each))
        return [each for _, each in sorted(found, key=lambda each: each[0])]

    def _closed(self, name: str, *, made: bool) -> Iterator[Found]:
        """Yield the file of an event. `made`: its name is new, as of a link, or of what is written."""
        each = find_file(self._root, self._prefix, name)
        if isinstance(each, LeftOut):
            self.leave_out(each)
        elif each is not None and not (made and each.path == name and self._is_open(each)):
            yield from self._new(each, rest=CLOSED_REST, event=True)

    def _is_open(self, file: TreeFile) -> bool:
        """Return whether a file may be open for writing."""
        try:
            fd = open_file(self._root, file)
        except OSError:
            return True
        try:
            return is_written(fd) is not False
        finally:
            os.close(fd)

    def _new(self, file: TreeFile, *, rest: float, event: bool = False) -> Iterator[Found]:
        top = file.name.split("/", 1)[0]
        if top == OURS or top.startswith(f"{OURS}.") or not self._is_new(file.name, file.status):
            return
        age = time.time() - file.status.st_ctime
        if age >= TEMPORARY_REST or rest == 0 or not any(map(_TEMPORARY.search, file.name.split("/"))):
            yield Found(file, rest, event)

    def _watch(self, folder: str, directory: Directory) -> None:
        if self.fd >= 0:
            try:
                self._folders[watch_for_files(self.fd, descriptor_path(directory.fd))] = folder
            except OSError as error:
                self._report(error)

    def _report(self, error: OSError) -> None:
        if not self._reported:
            self._reported = True
            log.warning(
                "checkpoints are found by scans alone",
                error=f"inotify: {error.strerror}",
                do="raise fs.inotify.max_user_watches or max_user_instances, for uploads at once",
            )

    def leave_out(self, each: LeftOut) -> None:
        """Name a file that cannot be uploaded."""
        if self.left_out.get(each.name) != each.reason:
            self.left_out[each.name] = each.reason
            log.warning("file not uploaded", file=each.name, reason=each.reason)


def _change(found: Found) -> tuple[int, bool]:
    """Return the key of a scan's order."""
    return found.file.status.st_ctime_ns, os.path.basename(found.file.name) in _LAST


def is_written(fd: int) -> bool | None:
    """Return whether a file is open for writing by any process; None if the kernel does not say.

    A process that opens it for writing in the middle of this waits until its end, some microseconds.
    """
    try:
        fcntl.fcntl(
            fd, fcntl.F_SETSIG, signal.SIGURG
        )  # that process has a signal sent to this; SIGIO would end it
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return True
    except OSError:
        return None
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
