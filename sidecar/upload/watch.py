"""Which files are uploaded while the trainer writes, and in which order: that in which they were closed.

    inotify(7) ─ events ─▶ Watch.follow ─┐
    walks of the tree ───▶ Watch.scan ───┴─ files ─▶ Order ─ next ─▶ upload ─ is_first ─▶ visible in S3

An event is a hint: those of a directory that has no watch yet, or of a full queue, are lost, and a sandbox
such as gVisor may send none. A scan finds the same files by inode, size and time of change. It is made at the
start, of a new directory once its watch is there, after an overflow, and when the trainer has ended; every
`SCAN_EVERY` seconds one finds the files that have not changed for as long. A scan of the whole tree opens it
by its path, since trainers empty a directory by making it anew. The order of a scan is that of the
inodes' changes (ctime), which a rename sets too, and a copy of the times does not. Events keep their order;
the files of a renamed directory are in that of their times of change, those that name the others last.

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
    descriptor_path,
    open_inotify,
    watch_for_files,
)
from streamer.step_state import FILE_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from streamer.directory import Directory

SCAN_EVERY = 60.0
CLOSED_REST, FOUND_REST, TEMPORARY_REST = 2.0, 10.0, 300.0
"""Seconds; see above."""
OURS = ".penstock"
"""Alone, or before a dot, begins the names of markers, the journal, and what is being restored."""
_TEMPORARY = re.compile(r"(^|[._~-])(tmp|temp(?![a-z]))", re.IGNORECASE)
"""Matches the name of a file or directory that will be renamed."""
_LAST = re.compile(
    r"checkpoint|latest|\.metadata|_CHECKPOINT_METADATA|trainer_state\.json|training_metadata\.json"
    rf"|{re.escape(FILE_NAME)}"
)
"""Matches the name of a file that names the others of its directory."""


def is_own(name: str) -> bool:
    """Return whether a name in the root is Penstock's, and no checkpoint's."""
    return name == OURS or name.startswith(f"{OURS}.")


class ClosedFile(NamedTuple):
    """A file that is closed, or may be."""

    file: TreeFile
    event: bool = False
    """Whether an event has just said so, and its place is the end of the order."""
    whole: bool = False
    """Whether it came with its step, which was renamed."""

    @property
    def change(self) -> tuple[int, bool]:
        """The key of a scan's order."""
        return self.file.status.st_ctime_ns, self.is_last

    @property
    def is_last(self) -> bool:
        """Whether it names the others of its directory."""
        return _LAST.fullmatch(os.path.basename(self.file.name)) is not None


class Watch:
    """The watched tree. `scan` and `follow` run in threads, one at a time, between `open` and `close`."""

    def __init__(self, root: Directory, prefix: str, is_new: Callable[[str, os.stat_result], bool]) -> None:
        """`prefix`: of the keys. `is_new`: whether a file is not in S3 as it is."""
        self.fd = -1
        self.left_out: dict[str, str] = {}
        """Why files cannot be uploaded, by name."""
        self._root = root
        self._prefix = prefix
        self._is_new = is_new
        self._folders: dict[int, str] = {}
        """Paths in the tree, by the number of their watch."""
        self._reported = False

    def open(self) -> None:
        """Begin to watch, if the kernel allows it."""
        try:
            self.fd = open_inotify()
        except OSError as error:
            self._report(error)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def scan(self, below: str = "", *, rested: float = 0.0, ended: bool = False) -> list[ClosedFile]:
        """Watch all directories below one; return their new files.

        `rested`: seconds for which they have not changed. `ended`: whether the trainer has ended.
        """
        found: list[ClosedFile] = []
        try:
            if not below:
                self._root.renew()
            for each in walk(self._root, self._prefix, below, self._watch):
                if isinstance(each, LeftOut):
                    self.leave_out(each)
                elif self._is_due(each, rested, ended=ended):
                    found.append(ClosedFile(each))
        except OSError as error:
            self.leave_out(LeftOut(".", f"it cannot be read ({error.strerror})"))
        return sorted(found, key=lambda each: each.change)

    def follow(self, events: Iterable[tuple[int, int, bytes]]) -> list[ClosedFile]:
        """Return the files of the events, in order."""
        found: list[tuple[int, ClosedFile]] = []
        latest = 0
        for watch, kind, raw in events:
            folder = "" if kind & LOST else self._folders.get(watch)
            if kind & IGNORED or folder is None:
                self._folders.pop(watch, None)
                continue
            name = os.path.join(folder, os.fsdecode(raw))
            if kind & (LOST | IS_DIRECTORY):
                files = self.scan(name)
            else:
                files = self._closed(name, made=bool(kind & CREATED))
            if kind & LOST or kind & (IS_DIRECTORY | CREATED) == IS_DIRECTORY | CREATED:
                found += [(each.change[0], each) for each in files]
                continue
            whole = bool(kind & IS_DIRECTORY) and not folder
            for each in sorted(files, key=lambda each: (each.is_last, each.file.status.st_mtime_ns)):
                latest = max(latest, each.change[0])
                found.append((latest, ClosedFile(each.file, event=True, whole=whole)))
        return [each for _, each in sorted(found, key=lambda each: each[0])]

    def _closed(self, name: str, *, made: bool) -> list[ClosedFile]:
        """Return the file of an event. `made`: its name is new, as of a link, or of what is written."""
        each = find_file(self._root, self._prefix, name)
        if isinstance(each, LeftOut):
            self.leave_out(each)
        elif (
            each is not None and self._is_due(each) and not (made and each.path == name and self._open(each))
        ):
            return [ClosedFile(each)]
        return []

    def _is_due(self, file: TreeFile, rested: float = 0.0, *, ended: bool = False) -> bool:
        names = file.name.split("/")
        age = abs(time.time() - file.status.st_ctime)  # clocks of a network file system differ
        temporary = not ended and age < TEMPORARY_REST and any(map(_TEMPORARY.search, names))
        return (
            not temporary and not is_own(names[0]) and age >= rested and self._is_new(file.name, file.status)
        )

    def _open(self, file: TreeFile) -> bool:
        """Return whether a file may be open for writing."""
        try:
            fd = open_file(self._root, file)
        except OSError:
            return True
        try:
            return is_written(fd) is not False
        finally:
            os.close(fd)

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


def is_written(fd: int) -> bool | None:
    """Return whether any process has a file open for writing; None if the kernel does not say.

    One that opens it meanwhile waits for the end of this, some microseconds. It also has the kernel send a
    signal to this process: SIGURG, which is ignored, in place of SIGIO, which is not.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return True
    except OSError:
        return None
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
