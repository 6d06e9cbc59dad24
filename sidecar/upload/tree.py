"""The files of a directory tree that is uploaded, found and opened by descriptors.

Whoever made the tree, such as a trainer of another user, could plant a link to a file that only the sidecar's
user may read. So every step below the directory is made with O_NOFOLLOW (`streamer.directory`). A link is
uploaded as the file that it names, if that is in the tree and reached without another link.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamer.directory import Directory
from streamer.plan.uris import LONGEST_KEY

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class TreeFile:
    """A regular file of the tree."""

    name: str
    """Path in the tree, which the key ends with."""
    path: str
    """Path in the tree of what is opened: of the file that a link names, else `name`."""
    size: int
    modified: int
    """Time of its last change, in ns since 1970."""


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
    for name, status in _walk(root):
        if (reason := _no_key(prefix + name)) is not None:
            left_out.append(LeftOut(name, reason))
        elif stat.S_ISREG(status.st_mode):
            found.append(TreeFile(name, name, status.st_size, status.st_mtime_ns))
        elif not stat.S_ISLNK(status.st_mode):
            left_out.append(LeftOut(name, "it is neither a file nor a directory"))
        elif (linked := _linked(root, name)) is None:
            left_out.append(LeftOut(name, "it is a link, and names no file of this directory"))
        else:
            found.append(linked)
    return sorted(found, key=lambda each: (each.modified, each.name)), left_out


def _walk(root: Directory) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the path in the tree and the status of everything that is no directory. Raises OSError."""
    folders = [""]
    for folder in folders:
        with _folder(root, folder) as here:
            for each in here.names():
                name = f"{folder}/{each}" if folder else each
                status = here.status(each)
                if status is None:  # removed meanwhile
                    continue
                if stat.S_ISDIR(status.st_mode):
                    folders.append(name)
                else:
                    yield name, status


def _no_key(key: str) -> str | None:
    """Return why this can be no key of S3; None if it can."""
    try:
        return None if len(key.encode()) <= LONGEST_KEY else f"its key has more than {LONGEST_KEY} bytes"
    except UnicodeEncodeError:
        return "its name is not UTF-8, as keys of S3 are"


def _linked(root: Directory, name: str) -> TreeFile | None:
    """Return the file that a link names; None if that is outside the tree, or no regular file."""
    folder, _, last = name.rpartition("/")
    try:
        with _folder(root, folder) as here:
            target = os.readlink(last, dir_fd=here.fd)
        path = os.path.normpath(os.path.join(folder, target))
        if os.path.isabs(path) or path.split("/")[0] == "..":
            return None
        above, _, file = path.rpartition("/")
        with _folder(root, above) as here:
            status = here.status(file)
    except OSError:
        return None
    if status is None or not stat.S_ISREG(status.st_mode):
        return None
    return TreeFile(name, path, status.st_size, status.st_mtime_ns)


def open_file(root: Directory, file: TreeFile) -> int:
    """Open the file for reading; return its descriptor. Raises OSError."""
    above, _, last = file.path.rpartition("/")
    with _folder(root, above) as here:
        return here.open(last, os.O_RDONLY)


def _folder(root: Directory, path: str) -> Directory:
    """Open the directory at a path in the tree; "" is the tree's own. Raises OSError."""
    return root.enter(*filter(None, path.split("/")))
