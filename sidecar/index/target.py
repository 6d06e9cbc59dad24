"""Where a build or a learner writes the index of a channel: a local file, or a copy that is stored in S3.

    rows appended, at their end ─▶ IndexUpload ─▶ PUT, If-Match ─▶ ETag
    another build has written   ─▶ its rows are added to the file ─▶ PUT again

A PUT replaces the whole object or nothing, so readers find a whole index, that of before or that of after.

A build stores its file while it scans, so that a build on any host goes on where this one was killed. The
first rows are stored at once, which shows whether the credentials may write.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sidecar.config.index_place import index_path, index_uri
from sidecar.config.transport import retry_policy
from sidecar.index.file import open_index
from sidecar.index.object import fetch_index, open_copy
from sidecar.index.stored import check_format, open_stored
from sidecar.process.logs import log
from streamer.aio import in_thread
from streamer.directory import scratch_directory
from streamer.errors import ErrorContext, PenstockError, SourceChanged
from streamer.s3.object_put import NewObject, put_object

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from sidecar.index.file import IndexFile
    from sidecar.index.objects import Access
    from sidecar.index.stored import StoredIndex
    from streamer.formats.record_format import RecordFormat
    from streamer.formats.record_index import IndexedObject
    from streamer.plan import S3Uri

UPLOAD_EVERY = 60.0
"""Least seconds between two uploads of a build's file."""
UPLOAD_SHARE = 20
"""Least pause after an upload, in multiples of the upload's own time."""
MOST_CONFLICTS = 10
"""Times that an upload is repeated because another build has replaced the object."""
ROWS_AT_ONCE = 4096
"""Rows of another build that are added without a turn for other tasks."""


@dataclass(frozen=True, slots=True)
class IndexTarget:
    """The index of a channel that is written; made by `index_target`."""

    path: str
    uri: S3Uri | None
    """The index in S3, of which `path` is a copy; None if it is a local file."""
    etag: str | None
    """ETag of the object that was copied; None if there was none."""
    access: Access

    @property
    def name(self) -> str:
        """Path or URI, for texts."""
        return self.path if self.uri is None else str(self.uri)

    def format(self) -> RecordFormat | None:
        """Return the record format of the index there is; None if there is none. Raises SinkError."""
        stored = open_stored(self.path, name=self.name)
        return None if stored is None or not stored.size else stored.format()

    @contextlib.asynccontextmanager
    async def open(self, record_format: RecordFormat) -> AsyncIterator[tuple[IndexFile, IndexUpload]]:
        """Open the file for writing, and what stores it in S3 if it is a copy.

        Raises what `open_index` and, at the end of the block, `IndexUpload.finish` raise.
        """
        with open_index(self.path, record_format, name=self.name) as file:
            upload = IndexUpload(self, file)
            async with upload.at_end():
                yield file, upload


class IndexUpload:
    """Stores the file of one build in S3 while rows are appended to it, and at its end.

    The rows that other builds have stored meanwhile are added to the file. A local file is not stored.
    """

    def __init__(self, target: IndexTarget, file: IndexFile) -> None:
        self._failure: PenstockError | None = None
        """Error of the last upload that failed."""
        self._uri = target.uri
        self._etag = target.etag
        self._file = file
        self._access = target.access
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
        if self._uri is None:
            return
        self._scanned.extend(row.name for row in rows)
        if self._running is not None:
            if not self._running.done():
                return
            ended, self._running = self._running, None
            ended.result()
        if time.monotonic() >= self._next:
            self._running = asyncio.create_task(self._store(self._uri), name="upload of the record index")

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
        if self._uri is not None and self._file.writes != self._stored:
            await self._store(self._uri)

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

    async def _store(self, uri: S3Uri) -> None:
        began = time.monotonic()
        try:
            self._stored = await self._replace(uri)
        except PenstockError as error:
            self._failure = error
            raise
        finally:
            now = time.monotonic()
            self._next = now + max(UPLOAD_EVERY, UPLOAD_SHARE * (now - began))

    async def _replace(self, uri: S3Uri) -> int:
        """Replace the object by the file, with the rows of other builds; return the file's `writes` in it."""
        for _ in range(MOST_CONFLICTS):
            copy, writes = self._file.snapshot()
            etag = await self._put(uri, copy)
            if etag is not None:
                self._etag = etag
                return writes
            await self._add_rows(uri)
        raise SourceChanged(
            f"other builds have replaced the record index {MOST_CONFLICTS} times while this one wrote it; "
            "run `penstock index build` again when they have ended",
            ErrorContext(*uri),
        )

    async def _put(self, uri: S3Uri, copy: StoredIndex) -> str | None:
        position = 0

        async def read(count: int) -> bytes:
            nonlocal position
            data = await in_thread(copy.read, position, min(count, copy.size - position))
            position += len(data)
            return data

        return await put_object(
            self._access.clients.control,
            ErrorContext(*uri),
            NewObject(copy.size, read),
            replaces=self._etag,
            policy=retry_policy(self._access.job),
        )

    async def _add_rows(self, uri: S3Uri) -> None:
        """Add the rows of the object, but those of objects that this build has scanned, to the file."""
        file, scanned = self._file, set(self._scanned)
        stored, self._etag = await open_copy(uri, self._access)
        if stored is None:
            return
        index = await in_thread(stored.index)
        check_format(stored.path, index, file.index.format)
        rows: list[IndexedObject] = []
        for number, row in enumerate(index):
            if row.name not in scanned and not file.index.has(row.name, row.version):
                rows.append(row)
            if number % ROWS_AT_ONCE == ROWS_AT_ONCE - 1:
                await asyncio.sleep(0)  # other tasks' turn
        for start in range(0, len(rows), ROWS_AT_ONCE):
            file.append(rows[start : start + ROWS_AT_ONCE])
        self._adopted.extend(row.name for row in rows)


@contextlib.asynccontextmanager
async def index_target(place: str, channel: str, access: Access) -> AsyncIterator[IndexTarget]:
    """Yield where the index of a channel is written.

    `place`: folder, or prefix of S3, from which an index is copied now. Raises SourceError, SinkError,
    ConfigError.
    """
    if (uri := index_uri(place, channel)) is None:
        yield IndexTarget(index_path(place, channel), None, None, access)
        return
    with scratch_directory("penstock-index-") as copies:
        path = index_path(copies, channel)
        with await in_thread(partial(open, path, "xb", buffering=0)) as file:
            etag = await fetch_index(uri, access, file.fileno())
        yield IndexTarget(path, uri, etag, access)
