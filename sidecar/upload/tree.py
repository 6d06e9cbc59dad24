"""The files of a directory tree that is uploaded, found and opened by descriptors.

Whoever made the tree, such as a trainer of another user, could plant a link to a file that only the sidecar's
user may read. So every step below the directory is made with O_NOFOLLOW (`streamer.directory`). A link is
uploaded as the file that it names, if that is in the tree and reached without another link.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from itertools import dropwhile
from typing import TYPE_CHECKING

from streamer.directory import Directory
from streamer.plan.uris import LONGEST_KEY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


Mark = tuple[int, int, int]
"""Inode, size and time of change (ns) of a file. Another one has, or had meanwhile, other bytes."""


def mark_of(status: os.stat_result) -> Mark:
    """Return the mark of a file's present bytes."""
    return status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True, slots=True)
class TreeFile:
    """A regular file of the tree."""

    name: str
    """Path in the tree, which the key ends with."""
    path: str
    """Path in the tree of what is opened: of the file that a link names, else `name`."""
    status: os.stat_result

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.status.st_size


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A name in the tree that cannot be uploaded, and why."""

    name: str
    reason: str


def find_files(root: Directory, prefix: str) -> tuple[list[TreeFile], list[LeftOut]]:
    """Return the files, those changed first in front, and what is left out. Raises OSError.

    `prefix`: what precedes the names in their keys.
    """
    found: list[TreeFile] = []
    left_out: list[LeftOut] = []
    for each in walk(root, prefix):
        if isinstance(each, TreeFile):
            found.append(each)
        else:
            left_out.append(each)
    return sorted(found, key=lambda each: (each.status.st_mtime_ns, each.name)), left_out


def walk(
    root: Directory,
    prefix: str,
    below: str = "",
    on_folder: Callable[[str, Directory], None] = lambda _, __: None,
) -> Iterator[TreeFile | LeftOut]:
    """Yield the files, and what is left out. Raises OSError if the tree itself cannot be read.

    `prefix`: see `find_files`. `below`: path in the tree of the directory to search. `on_folder`: called with
    each directory before its names are read.
    """
    folders = [below]
    for folder in folders:
        try:
            with open_folder(root, folder) as here:
                on_folder(folder, here)
                statuses = [(each, here.status(each)) for each in here.names()]
        except OSError as error:
            if not folder:
                raise
            if not isinstance(
                error, (FileNotFoundError, NotADirectoryError)
            ):  # removed or replaced meanwhile
                yield LeftOut(folder, _unreadable(error))
            continue
        for each, status in statuses:
            name = f"{folder}/{each}" if folder else each
            if status is not None and stat.S_ISDIR(status.st_mode):
                folders.append(name)
            elif status is not None:  # else it was removed meanwhile
                yield _examined(root, prefix, name, status)


def find_file(root: Directory, prefix: str, name: str) -> TreeFile | LeftOut | None:
    """Return the file of this name, or why it is left out; None if it was removed, or is a directory."""
    above, _, last = name.rpartition("/")
    try:
        with open_folder(root, above) as here:
            status = here.status(last)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return LeftOut(name, _unreadable(error))
    if status is None or stat.S_ISDIR(status.st_mode):
        return None
    return _examined(root, prefix, name, status)


def _examined(root: Directory, prefix: str, name: str, status: os.stat_result) -> TreeFile | LeftOut:
    if (reason := _no_key(prefix + name)) is not None:
        return LeftOut(name, reason)
    if stat.S_ISREG(status.st_mode):
        return TreeFile(name, name, status)
    if not stat.S_ISLNK(status.st_mode):
        return LeftOut(name, "it is neither a file nor a directory")
    return _linked(root, name) or LeftOut(name, "it is a link, and names no file of this directory")


def _unreadable(error: OSError) -> str:
    return f"it cannot be read ({error.strerror})"


def _no_key(key: str) -> str | None:
    """Return why this can be no key of S3; None if it can."""
    try:
        return None if len(key.encode()) <= LONGEST_KEY else f"its key has more than {LONGEST_KEY} bytes"
    except UnicodeEncodeError:
        return "its name is not UTF-8, as keys of S3 are"


def linked_path(root: Directory, name: str) -> str | None:
    """Return the path in the tree that a link names; None if that is outside the tree. Raises OSError.

    It is None too if `..` follows a name in the link: what that names depends on other links.
    """
    folder, _, last = name.rpartition("/")
    with open_folder(root, folder) as here, here.errors(last):
        target = os.readlink(last, dir_fd=here.fd)
    if target.startswith(f"{root.path}/"):
        target = os.path.relpath(target, os.path.join(root.path, folder))
    if ".." in dropwhile(lambda each: each in {"", ".", ".."}, target.split("/")):
        return None
    path = os.path.normpath(os.path.join(folder, target))
    return None if os.path.isabs(path) or path.split("/")[0] == ".." else path


def _linked(root: Directory, name: str) -> TreeFile | None:
    """Return the file that a link names; None if that is outside the tree, or no regular file."""
    try:
        if (path := linked_path(root, name)) is None:
            return None
        above, _, file = path.rpartition("/")
        with open_folder(root, above) as here:
            status = here.status(file)
    except OSError:
        return None
    if status is None or not stat.S_ISREG(status.st_mode):
        return None
    return TreeFile(name, path, status)


def open_file(root: Directory, file: TreeFile) -> int:
    """Open the file for reading; return its descriptor. Raises OSError."""
    above, _, last = file.path.rpartition("/")
    with open_folder(root, above) as here:
        return here.open(last, os.O_RDONLY)


def open_folder(root: Directory, path: str) -> Directory:
    """Open the directory at a path in the tree; "" is the tree's own. Raises OSError."""
    return root.enter(*filter(None, path.split("/")))
