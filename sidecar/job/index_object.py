"""The record index of a channel as an object of S3: `s3://BUCKET/PREFIX/CHANNEL.index`.

    run, plan, verify, show   HEAD ─▶ ranged GETs of this ETag ─▶ unnamed file in TMPDIR ─▶ StoredIndex
    build                     likewise, into a folder of copies ─▶ open_index, IndexBuild
                                 rows appended, at their end ─▶ IndexUpload ─▶ PUT, If-Match ─▶ ETag
                                 another build has written ─▶ its rows are added to the file ─▶ PUT again

A PUT replaces the whole object or nothing, so readers find a whole index, that of before or that of after.
The index of a job is copied once, at its start: what happens to the object later changes nothing.

A build stores its file while it scans, so that a build on any host goes on where this one was killed. The
first rows are stored at once, which shows whether the credentials may write.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from array import array
from functools import partial
from typing import TYPE_CHECKING

from sidecar.config.index_place import index_path, index_uri
from sidecar.job.index_objects import check_etag, read_plan
from sidecar.job.listings import job_inspector
from sidecar.job.stored_index import StoredIndex, check_kind, open_stored
from sidecar.process.logs import log
from streamer.aio import in_thread
from streamer.errors import ConfigError, ErrorContext, ObjectMissing, PenstockError, SinkError, SourceChanged
from streamer.plan import Plan
from streamer.retry import RetryPolicy, retry_while_unavailable
from streamer.s3.client.object_put import NewObject, put_object
from streamer.scratch import scratch_folder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from sidecar.job.index_file import IndexFile
    from sidecar.job.index_objects import Access
    from streamer.formats.record_index import IndexedObject
    from streamer.plan import ObjectRef, Part, S3Uri

UPLOAD_EVERY = 60.0
"""Least seconds between two uploads of a build's file."""
UPLOAD_SHARE = 20
"""An upload that takes a second is followed by none for so many."""
MOST_CONFLICTS = 10
"""Times that a request is repeated because another build has replaced the object."""
ROWS_AT_ONCE = 4096
"""Rows of another build that are added without a turn for other tasks."""


async def open_channel_index(
    place: str,
    channel: str,
    access: Access,
    *,
    named_by: str = "--from",
    build: str = "penstock index build",
) -> StoredIndex:
    """Open a channel's index in a folder or in S3, of which it makes a copy in an unnamed file.

    `named_by`: the option or key that names the place. `build`: the command that makes the index. Raises
    ConfigError if there is none, SinkError, SourceError.
    """
    uri = index_uri(place, channel)
    name = index_path(place, channel) if uri is None else str(uri)
    stored = await in_thread(open_stored, name) if uri is None else (await _open_copy(uri, access))[0]
    if stored is None:
        raise ConfigError(f"there is no record index {name}: make it by `{build}`, or correct {named_by}")
    return stored


async def _open_copy(uri: S3Uri, access: Access) -> tuple[StoredIndex, str] | tuple[None, None]:
    """Return the index in an unnamed file, and its ETag; None if there is none."""
    with _copying(uri):
        file = tempfile.TemporaryFile(prefix="penstock-index-", buffering=0)  # noqa: SIM115 - closed below
    with file:
        etag = await fetch_index(uri, access, file.fileno())
        return (None, None) if etag is None else (StoredIndex(str(uri), os.dup(file.fileno())), etag)


async def fetch_index(uri: S3Uri, access: Access, fd: int) -> str | None:
    """Copy an index in S3 into an empty file; return its ETag, or None if there is none.

    Raises SourceError, SinkError.
    """
    for left in reversed(range(MOST_CONFLICTS)):
        async with job_inspector(access.job, access.clients) as inspector:
            try:
                ref = await inspector.stat(*uri)
            except ObjectMissing:
                return None
        check_etag(ref)
        try:
            await _copy(ref, fd, uri, access)
        except SourceChanged:
            if not left:
                raise
        else:
            return ref.etag
    raise AssertionError


async def _copy(ref: ObjectRef, fd: int, uri: S3Uri, access: Access) -> None:
    with _copying(uri):
        os.ftruncate(fd, 0)
        if ref.size:
            await in_thread(os.posix_fallocate, fd, 0, ref.size)  # fails now if the disk is too small
    at = 0

    def write(_: Part, data: memoryview) -> None:
        nonlocal at
        with _copying(uri):
            while data:
                count = os.pwrite(fd, data, at)
                at, data = at + count, data[count:]

    await read_plan(Plan.of([ref]), {ref.bucket}, write, access)


class IndexUpload:
    """Stores the file of one build in S3 while rows are appended to it, and at its end.

    The rows that other builds have stored meanwhile are added to the file.
    """

    def __init__(self, uri: S3Uri, etag: str | None, file: IndexFile, access: Access) -> None:
        """`etag`: of the object that `file` is a copy of; None if there was none."""
        self._failure: PenstockError | None = None
        """Error of the last upload that failed."""
        self._uri = uri
        self._etag = etag
        self._file = file
        self._access = access
        self._scanned = array("Q")
        """Names of the objects whose rows were appended."""
        self._adopted = array("Q")
        """Names of the objects whose rows other builds have stored while this one ran."""
        self._stored = 0
        """`IndexFile.writes` of the file that is in S3."""
        self._running: asyncio.Task[None] | None = None
        self._next = 0.0
        """Time of the next upload, at the earliest."""

    def appended(self, rows: Sequence[IndexedObject]) -> None:
        """Store the file soon. Raises the error of the last upload."""
        self._scanned.extend(row.name for row in rows)
        if self._running is not None:
            if not self._running.done():
                return
            ended, self._running = self._running, None
            ended.result()
        if time.monotonic() >= self._next:
            self._running = asyncio.create_task(self._store(), name="upload of the record index")

    async def settle(self) -> array[int]:
        """Wait for the end of an upload; return the names whose rows are other builds'. Raises its error."""
        if self._running is not None:
            try:
                await self._running
            finally:
                self._running = None
        return self._adopted

    async def finish(self) -> None:
        """Store what is not yet in S3, also after an upload that failed. Raises SourceError, SinkError."""
        if self._running is not None and self._running.done():
            self._running.exception()  # it is out of date: what was not stored is stored now
            self._running = None
        await self.settle()
        if self._file.writes != self._stored:
            await self._store()

    @contextlib.asynccontextmanager
    async def at_end(self) -> AsyncIterator[None]:
        """Finish at the end of the block, also if it raises an error."""
        try:
            try:
                yield
            except PenstockError as ended:
                if ended is not self._failure:  # that upload had all its time
                    try:
                        await self.finish()
                    except PenstockError as error:
                        log.warning("record index not stored", error=str(error))
                raise
            await self.finish()
        finally:
            await self.cancel()

    async def cancel(self) -> None:
        """End the upload that goes on."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _store(self) -> None:
        began = time.monotonic()
        try:
            self._stored = await self._replace()
        except PenstockError as error:
            self._failure = error
            raise
        finally:
            now = time.monotonic()
            self._next = now + max(UPLOAD_EVERY, UPLOAD_SHARE * (now - began))

    async def _replace(self) -> int:
        """Replace the object by the file, with the rows of other builds; return the file's `writes` in it."""
        policy = RetryPolicy(give_up_after=self._access.job.penstock.give_up_after)
        for _ in range(MOST_CONFLICTS):
            copy, writes = self._file.snapshot()
            etag = await retry_while_unavailable(partial(self._put, copy), policy, what="an upload")
            if etag is not None:
                self._etag = etag
                return writes
            await self._add_rows()
        raise SourceChanged(
            f"other builds have replaced the record index {MOST_CONFLICTS} times while this one wrote it; "
            "run `penstock index build` again when they have ended",
            ErrorContext(*self._uri),
        )

    async def _put(self, copy: StoredIndex, progressed: Callable[[], None]) -> str | None:
        def read(position: int, count: int) -> Awaitable[bytes]:
            progressed()
            return in_thread(copy.read, position, count)

        control, new = self._access.clients.control, NewObject(copy.size, read)
        return await put_object(control, ErrorContext(*self._uri), new, replaces=self._etag)

    async def _add_rows(self) -> None:
        """Add the rows of the object, but those of objects that this build has scanned, to the file."""
        file, scanned = self._file, set(self._scanned)
        stored, self._etag = await _open_copy(self._uri, self._access)
        if stored is None:
            return
        index = await in_thread(stored.index)
        check_kind(str(self._uri), index, file.index.format, file.index.stride)
        rows: list[IndexedObject] = []
        for number, row in enumerate(index):
            if row.name not in scanned and not file.index.has(row.name, row.version):
                rows.append(row)
            if number % ROWS_AT_ONCE == ROWS_AT_ONCE - 1:
                await asyncio.sleep(0)  # other tasks' turn
        for start in range(0, len(rows), ROWS_AT_ONCE):
            file.append(rows[start : start + ROWS_AT_ONCE])
        self._adopted.extend(row.name for row in rows)


@contextlib.contextmanager
def _copying(uri: S3Uri) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SinkError(
            f"cannot copy the record index {uri} into {scratch_folder()}: {error.strerror}; free space "
            "there, or set TMPDIR"
        ) from error
