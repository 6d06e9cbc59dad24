"""Uploads the files of a directory tree, several at once, each whole or not at all.

    files, oldest first ─▶ `FILES_AT_ONCE` tasks ─▶ put_object: parts, at most `PARTS_IN_FLIGHT` of all files
                                  │ changed while it was read: once more, `MOST_READS` times
                                  └ another object has the key, or the file cannot be read: named, and left

The file is looked at when it is opened, and again before the request that makes the object: only a file of
the same size and time of change becomes an object. A file that cannot be uploaded does not stop the others;
an error of storage ends all, because it is that of the next file too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sidecar.process.logs import log
from sidecar.upload.tree import LeftOut, find_files, mark_of, open_file
from streamer.aio import TaskGroup, in_thread
from streamer.errors import ErrorContext, PenstockError
from streamer.plan import S3Uri
from streamer.s3.object_put import ANY, NewObject, put_object

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from sidecar.upload.tree import TreeFile
    from streamer.directory import Directory
    from streamer.errors import SourceError
    from streamer.retry import RetryPolicy
    from streamer.s3.client.session import S3Client

FILES_AT_ONCE = 32
PARTS_IN_FLIGHT = 16
"""Parts of all files that are in memory at once."""
MOST_READS = 3


class FileChanged(PenstockError):
    """A file changed, grew or shrank while it was read."""


class Unreadable(PenstockError):
    """A file cannot be read."""


async def _nothing(_: S3Uri) -> None:
    """Return no ETag: no object may be replaced."""


def _plain() -> Callable[[str, OpenFile], NewObject]:
    """Return what makes objects without headers, whose parts share one limit."""
    requests = asyncio.Semaphore(PARTS_IN_FLIGHT)
    return lambda _, file: NewObject(file.status.st_size, file.read, file.check, requests)


@dataclass(slots=True)
class Uploads:
    """The upload of one tree: its parameters, and how far it is."""

    root: Directory
    uri: S3Uri
    """Bucket, and what precedes the names of the files in their keys."""
    client: S3Client
    policy: RetryPolicy
    on_wait: Callable[[SourceError], None]
    replace: bool
    """Whether objects of other bytes are replaced; else they are left, and named."""
    clash: str = "another object has its key; remove that, or add --replace"
    """Reason why a file is not in S3, if another object is left."""
    own: Callable[[S3Uri], Awaitable[str | None]] = _nothing
    """Returns the ETag of an object that may be replaced in any case; None for another one."""
    new: Callable[[str, OpenFile], NewObject] = field(default_factory=_plain)
    """Returns what is uploaded of a file of this name."""
    objects: int = 0
    """Files that are in S3."""
    bytes: int = 0
    """Their bytes."""
    moved: int = 0
    """Bytes read so far."""
    total: int = 0
    """Bytes of all files when they were found."""
    left_out: list[LeftOut] = field(default_factory=list)

    async def run(self) -> None:
        """Upload all files. Raises SourceError; OSError if a directory cannot be read."""
        files, self.left_out = await in_thread(find_files, self.root, self.uri.key)
        self.total = sum(file.size for file in files)
        for each in self.left_out:
            _report(each)
        left = iter(files)
        async with TaskGroup() as tasks:
            for _ in range(min(FILES_AT_ONCE, len(files))):
                tasks.create_task(self._upload_each(left))

    async def _upload_each(self, files: Iterator[TreeFile]) -> None:
        for file in files:
            if (reason := await self._upload(file)) is not None:
                self.left_out.append(LeftOut(file.name, reason))
                _report(self.left_out[-1])

    async def _upload(self, file: TreeFile) -> str | None:
        """Upload a file; return why it is not in S3, None if it is."""
        for _ in range(MOST_READS):
            try:
                if await self._upload_once(file, ANY if self.replace else None):
                    return None
                etag = await self.own(self._uri(file))
                return self.clash if etag is None or not await self._upload_once(file, etag) else None
            except FileChanged:
                continue
            except Unreadable as error:
                return str(error)
        return f"it changed {MOST_READS} times while it was read"

    def _note_read(self, count: int) -> None:
        self.moved += count

    def _uri(self, file: TreeFile) -> S3Uri:
        return S3Uri(self.uri.bucket, self.uri.key + file.name)

    async def _upload_once(self, file: TreeFile, replaces: str | None) -> bool:
        """Upload a file in place of what `put_object` calls `replaces`; return false if that is not there."""
        with _unreadable():
            fd = await in_thread(open_file, self.root, file)
        try:
            opened = OpenFile(fd, self._note_read)
            size = opened.status.st_size
            etag = await put_object(
                self.client,
                ErrorContext(*self._uri(file)),
                self.new(file.name, opened),
                replaces=replaces,
                policy=self.policy,
                on_wait=self.on_wait,
            )
        finally:
            os.close(fd)
        if etag is not None:
            self.objects += 1
            self.bytes += size
        return etag is not None


class OpenFile:
    """Reads a file from its beginning, as long as it does not change."""

    def __init__(self, fd: int, on_read: Callable[[int], None]) -> None:
        """`fd`: a descriptor of the file, which its owner closes. `on_read`: see `read`."""
        self.status = os.fstat(fd)
        self._fd = fd
        self._on_read = on_read
        self._offset = 0

    async def read(self, count: int) -> bytes:
        """Return the next `count` bytes; fewer at the end. Raises FileChanged, Unreadable.

        Calls `on_read` before with their number, and raises what it raises.
        """
        count = min(count, self.status.st_size - self._offset)
        self._on_read(count)
        with _unreadable():
            data = await in_thread(os.pread, self._fd, count, self._offset)
        if len(data) < count:
            raise FileChanged
        self._offset += count
        return data

    async def check(self) -> None:
        """Raise FileChanged if the file has changed."""
        if mark_of(os.fstat(self._fd)) != mark_of(self.status):
            raise FileChanged


@contextlib.contextmanager
def _unreadable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unreadable(f"it cannot be read ({error.strerror})") from error


def _report(left: LeftOut) -> None:
    log.warning("file not uploaded", file=left.name, reason=left.reason)
