"""A directory as a tar.gz that is made while it is read, as SageMaker's `model.tar.gz`.

    find the members ─▶ headers and files, 256 KiB at a time ─▶ igzip ─▶ `read`: the next bytes
    └── once more ──── `check`, at the end: has any of them changed? ─────▶ FileChanged: begin again

Everything runs in the thread of `read`, so an archive takes the memory of what is asked for, and no disk. The
names are relative to the directory and sorted, directories among them; the owner is root. The format is
GNU's, which has no limit of names or sizes, and bytes of any name.

A link stays a link, if it leads to a name in the tree. `..` may only be at its begin, no more often than the
link is deep. So whichever links are followed after the archive has been unpacked, none leads out. Sockets,
FIFOs, devices and other links are left out, and named.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from typing import TYPE_CHECKING, NamedTuple

from isal import isal_zlib

from sidecar.upload.tree import LeftOut, linked_path, open_folder
from sidecar.upload.uploads import FileChanged, Unreadable
from streamer.aio import in_thread
from streamer.cancellation import Cancelled, cancelled

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from streamer.directory import Directory

LEVEL = 1
"""Level of igzip: 2 CPU-s/GB, where zlib takes 20 at its level 1, and 30 to 80 at 6, for files as small."""
_READ = 256 * 1024
"""Most bytes of a file that are read at once."""
_CHANGED = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EPERM}
"""Errors of a name that is not what it was when it was found."""


class _Member(NamedTuple):
    """What is in the archive under one name."""

    name: str
    mode: int
    size: int
    """Bytes of a regular file, else 0."""
    modified: int
    """In ns since 1970."""
    changed: int
    """Likewise, of its status too; no program can set this one."""
    link: str
    """What a link names, relative to its directory; else empty."""


class Archive:
    """The bytes of the archive, in order; its owner closes it once."""

    def __init__(self, root: Directory) -> None:
        """Find the members; call it in a thread. `root` stays its owner's. Raises Unreadable, FileChanged."""
        self._root = root
        self._members, self.left_out = _find(root)
        self.files = sum(not stat.S_ISDIR(each.mode) for each in self._members)
        """Files and links."""
        self.most = _most(self._members)
        """Upper bound of its bytes."""
        self._stream = self._compressed()
        self._ahead = bytearray()

    async def read(self, count: int) -> bytes:
        """Return the next bytes: `count` of them, fewer at the end. Raises FileChanged, Unreadable."""
        return await in_thread(self._read, count)

    async def check(self) -> None:
        """Raise FileChanged unless the directory is as it was when the archive was begun."""
        if await in_thread(_find, self._root) != (self._members, self.left_out):
            raise FileChanged("the directory changed while it was read")

    def close(self) -> None:
        """Close the file that is open."""
        self._stream.close()

    def _read(self, count: int) -> bytes:
        ended = cancelled()
        while len(self._ahead) < count and (data := next(self._stream, None)) is not None:
            self._ahead += data
            if ended():
                raise Cancelled
        taken = bytes(self._ahead[:count])
        del self._ahead[:count]
        return taken

    def _compressed(self) -> Generator[bytes]:
        compressor = isal_zlib.compressobj(LEVEL, wbits=31)  # a gzip member
        for data in self._archived():
            yield compressor.compress(data)
        yield compressor.flush()

    def _archived(self) -> Iterator[bytes]:
        for each in self._members:
            yield _header(each)
            if stat.S_ISREG(each.mode):
                yield from self._padded(each)
        yield bytes(tarfile.RECORDSIZE)

    def _padded(self, member: _Member) -> Iterator[bytes]:
        """Yield the bytes of a file, and what fills its last block. Raises FileChanged, Unreadable."""
        try:
            above, _, last = member.name.rpartition("/")
            with open_folder(self._root, above) as here:
                fd = here.open(last, os.O_RDONLY)
            try:
                left = member.size
                while left and (data := os.read(fd, min(left, _READ))):
                    left -= len(data)
                    yield data
                if left or _member(member.name, os.fstat(fd)) != member:
                    raise FileChanged(f"{member.name} changed while it was read")
            finally:
                os.close(fd)
        except OSError as error:
            raise _failed(error, member.name) from error
        yield bytes(-member.size % tarfile.BLOCKSIZE)


def _find(root: Directory) -> tuple[list[_Member], list[LeftOut]]:
    """Return the members of the archive, sorted, and what is left out. Raises Unreadable, FileChanged."""
    members: list[_Member] = []
    left_out: list[LeftOut] = []
    folders = [""]
    try:
        for folder in folders:
            with open_folder(root, folder) as here:
                statuses = [(os.path.join(folder, each), here.status(each)) for each in here.names()]
            for name, status in statuses:
                if status is None:  # removed meanwhile
                    continue
                if stat.S_ISDIR(status.st_mode):
                    folders.append(name)
                if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
                    members.append(_member(name, status))
                elif not stat.S_ISLNK(status.st_mode):
                    left_out.append(LeftOut(name, "it is neither a file nor a directory"))
                elif (path := linked_path(root, name)) is None:
                    left_out.append(LeftOut(name, "it is a link, and leads out of this directory"))
                else:
                    members.append(_member(name, status, os.path.relpath(f"/{path}", f"/{folder}")))
    except OSError as error:
        raise _failed(error, error.filename) from error
    return sorted(members), left_out


def _member(name: str, status: os.stat_result, link: str = "") -> _Member:
    size = status.st_size if stat.S_ISREG(status.st_mode) else 0
    return _Member(name, status.st_mode, size, status.st_mtime_ns, status.st_ctime_ns, link)


def _failed(error: OSError, name: str) -> FileChanged | Unreadable:
    if error.errno in _CHANGED:
        return FileChanged(f"{name} changed while it was read")
    return Unreadable(f"{name} cannot be read ({error.strerror})")


def _header(member: _Member) -> bytes:
    info = tarfile.TarInfo(member.name)
    info.mode = stat.S_IMODE(member.mode)
    info.size, info.mtime, info.linkname = member.size, member.modified // 10**9, member.link
    if not stat.S_ISREG(member.mode):
        info.type = tarfile.SYMTYPE if member.link else tarfile.DIRTYPE
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _most(members: list[_Member]) -> int:
    """Return an upper bound of the compressed bytes: igzip makes no input longer by a part in 256."""
    headers = sum(8 * tarfile.BLOCKSIZE + 4 * len(each.name + each.link) for each in members)
    archived = headers + sum(each.size for each in members) + tarfile.RECORDSIZE
    return archived + archived // 256
