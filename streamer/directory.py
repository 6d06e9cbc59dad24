"""A directory by its descriptor, so that no step below it follows a link.

    at        open a directory by its path, from / on        open, create   files in it
    enter     open a directory below it                      move, remove, remove_tree
    add, make the same, and make what is missing             size, names

Whoever may write on the volume of the FIFOs, such as the trainer's user, can replace any name on it by a link
at any time, between two calls too. A path that is joined and then opened follows that link, and the sidecar
would write where its own user may write and the other user may not. So the sidecar opens a directory step by
step with O_NOFOLLOW, and makes, renames and removes names by its descriptor (the `dir_fd` of Python's `os`;
openat(2)). openat2(2) with RESOLVE_NO_SYMLINKS would be one call, and Python lacks it.

A file of an earlier process is written to only if it is this user's and has no other name: a hard link may be
a name of a file elsewhere. Errors are OSError, with the path as `filename`.

Temporary files are in TMPDIR, or else /tmp, /var/tmp, the working directory. A container with a read-only
root file system may have none.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from itertools import count
from typing import TYPE_CHECKING

from streamer.errors import SinkError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self


_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""O_PATH needs permission to search the directories above, and none to read this one."""


class Directory:
    """An open directory; its owner closes it once."""

    __slots__ = ("fd", "path")

    def __init__(self, path: str, fd: int) -> None:
        """Take ownership of `fd`, a descriptor of the directory. `path` is for errors."""
        self.path = path
        self.fd = fd

    @classmethod
    def at(cls, path: str) -> Directory:
        """Open the directory at an absolute path; ENOTDIR if a step is a link or not a directory."""
        with cls("/", os.open("/", _STEP)) as root:
            return root.enter(*filter(None, path.split("/")))

    def renew(self) -> None:
        """Go on with the directory that has the absolute path now, if another one has; raises as `at`."""
        with contextlib.suppress(FileNotFoundError), Directory.at(self.path) as now:
            if not os.path.samestat(os.fstat(now.fd), os.fstat(self.fd)):
                os.dup2(now.fd, self.fd, inheritable=False)

    def __repr__(self) -> str:
        return f"<Directory {self.path}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.fd)

    def enter(self, *names: str) -> Directory:
        """Open the directory below this one that is reached by `names`, each in the one before."""
        return self._walk(names, make=False, replace=False)

    def add(self, *names: str) -> Directory:
        """Make the directory that `enter` would open; ENOTDIR if a step is a link or not a directory."""
        return self._walk(names, make=True, replace=False)

    def make(self, *names: str) -> Directory:
        """Make the directory that `enter` would open; replace what is not a directory on the way."""
        return self._walk(names, make=True, replace=True)

    def _walk(self, names: tuple[str, ...], *, make: bool, replace: bool) -> Directory:
        here = Directory(self.path, os.dup(self.fd))
        try:
            for name in names:
                here._step(name, make=make, replace=replace)
        except BaseException:
            here.close()
            raise
        return here

    def _step(self, name: str, *, make: bool, replace: bool) -> None:
        with self.errors(name):
            if make:
                self.mkdir(name)
            try:
                fd = os.open(name, _STEP, dir_fd=self.fd)
            except NotADirectoryError:
                if not replace:
                    raise
                os.unlink(name, dir_fd=self.fd)
                os.mkdir(name, dir_fd=self.fd)
                fd = os.open(name, _STEP, dir_fd=self.fd)
        os.close(self.fd)
        self.path, self.fd = os.path.join(self.path, name), fd

    def mkdir(self, name: str) -> None:
        """Make a directory, unless the name exists, whatever it is of."""
        with self.errors(name), contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=self.fd)

    @contextlib.contextmanager
    def errors(self, name: str) -> Iterator[None]:
        """Name the path in an OSError of the block: the system calls have the name alone."""
        try:
            yield
        except OSError as error:
            error.filename, error.filename2 = os.path.join(self.path, name), None
            raise

    def names(self) -> list[str]:
        """Return the names in the directory."""
        with self.errors("."):
            fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
            try:
                return os.listdir(fd)
            finally:
                os.close(fd)

    def status(self, name: str) -> os.stat_result | None:
        """Return the status of `name` itself, not of what a link leads to; None if there is no such name."""
        with self.errors(name):
            try:
                return os.lstat(name, dir_fd=self.fd)
            except FileNotFoundError:
                return None

    def size(self, name: str) -> int:
        """Return the bytes of a regular file; -1 if there is none of that name."""
        status = self.status(name)
        return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else -1

    def create(self, name: str, mode: int = 0o644) -> int:
        """Make a file and return its descriptor, for writing; `mode` is reduced by the umask."""
        with self.errors(name):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            return os.open(name, flags, mode, dir_fd=self.fd)

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        """Open a regular file; if for writing, only one of this user that has no other name. Else EPERM."""
        with self.errors(name):
            safe = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO would block
            fd = os.open(name, flags | safe, mode, dir_fd=self.fd)
            status = os.fstat(fd)
            own = status.st_uid == os.geteuid() and status.st_nlink == 1
            if stat.S_ISREG(status.st_mode) and (own or not flags & (os.O_WRONLY | os.O_RDWR)):
                return fd
            os.close(fd)
            raise PermissionError(errno.EPERM, "not a regular file, or not of this user alone")

    def move(self, name: str, into: Directory, new: str) -> None:
        """Rename `name` to `new` in the directory `into`, in place of what is there, a directory too."""
        with self.errors(name):
            try:
                os.rename(name, new, src_dir_fd=self.fd, dst_dir_fd=into.fd)
            except (IsADirectoryError, NotADirectoryError, FileExistsError):
                into.remove_tree(new)
                os.rename(name, new, src_dir_fd=self.fd, dst_dir_fd=into.fd)

    def remove(self, name: str) -> None:
        """Remove a name that is not a directory, if it exists."""
        with self.errors(name), contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def remove_tree(self, name: str) -> None:
        """Remove `name`, and everything below it if it is a directory.

        Directories below it are moved up before they are emptied. So a tree of any depth needs two
        descriptors and no recursion, and no step leads out of it.
        """
        with contextlib.suppress(IsADirectoryError):
            self.remove(name)
            return
        names = map(str, count())
        with self.enter(name) as top:
            left = top.empty_into(top, names)
            for folder in left:
                with top.enter(folder) as here:
                    left += here.empty_into(top, names)
                top.rmdir(folder)
        self.rmdir(name)

    def empty_into(self, top: Directory, names: Iterator[str]) -> list[str]:
        """Remove the files of this directory, move its directories to `top`, and return their names there.

        `names`: candidates for these names.
        """
        moved = []
        for name in self.names():
            try:
                self.remove(name)
            except IsADirectoryError:
                moved.append(next(each for each in names if top.status(each) is None))
                self.move(name, top, moved[-1])
        return moved

    def rmdir(self, name: str) -> None:
        """Remove an empty directory."""
        with self.errors(name):
            os.rmdir(name, dir_fd=self.fd)


def scratch_directory(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """Return a new folder, which its context manager removes. Raises SinkError."""
    try:
        return tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise SinkError(
            f"cannot make a temporary directory: {error.strerror}; let TMPDIR name a directory that this "
            "user may write, with free space"
        ) from error


def scratch_folder() -> str:
    """Return the folder of temporary files, for an error's text; `TMPDIR` if there is none."""
    try:
        return tempfile.gettempdir()
    except OSError:
        return "TMPDIR"
