"""Builds the record index of a channel, incrementally.

    objects of the plan ─▶ those without a row ─▶ bytes, in order ─▶ ObjectScans ─▶ rows ─▶ IndexFile

One stream reads all objects that have no row of their version, many requests at once, and the scanner of the
current object sees its bytes in order. The row of an object is made when its last byte has been seen. Rows
are appended to the file once a second, so a build that ends early has lost little; the next one goes on.

An object that is not of the format is a finding, not the end: its bytes are skipped, the others get their
rows, and the build raises the first finding at its end.
"""

from __future__ import annotations

import time
from array import array
from typing import TYPE_CHECKING

from sidecar.index.objects import read_plan
from sidecar.index.scans import ObjectScans
from sidecar.index.target import index_target
from sidecar.process.logs import log
from streamer.aio import in_thread
from streamer.errors import CorruptObject, ErrorContext
from streamer.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sidecar.index.file import IndexFile
    from sidecar.index.objects import Access, ChannelObjects
    from sidecar.index.target import IndexUpload
    from streamer.formats.borders import BadRecord
    from streamer.formats.record_format import RecordFormat
    from streamer.formats.record_index import IndexedObject
    from streamer.plan import ObjectRef, Segment

APPEND_EVERY = 1.0
"""Seconds between two appends of rows to the file."""
MOST_PENDING = 4096
"""Rows after which they are appended at once."""
MOST_LOGGED = 20
"""Most corrupt objects of a channel that are logged; the error at the end has their number."""


def in_two(objects: ChannelObjects, numbers: Iterable[int]) -> tuple[array[int], array[int]]:
    """Return the numbers of the objects that have bytes, and of the empty ones."""
    to_read, empty = array("Q"), array("Q")
    for number in numbers:
        (to_read if objects[number].size else empty).append(number)
    return to_read, empty


class Findings:
    """Corrupt objects of one channel: each is logged, up to `MOST_LOGGED`."""

    def __init__(self, channel: str) -> None:
        self._channel = channel
        self._first: CorruptObject | None = None
        self._count = 0
        self.at_start = 0
        """Objects whose first bytes are not of the format."""

    def note(self, error: CorruptObject) -> None:
        """Log the error, and count it."""
        self._first = self._first or error
        self._count += 1
        self.at_start += error.context.offset == 0
        if self._count <= MOST_LOGGED:
            log.warning("corrupt object", channel=self._channel, error=str(error))

    def refuse(self, ref: ObjectRef, _: int, error: BadRecord) -> None:
        """Log an object that is not of the format, and count it."""
        found = CorruptObject(str(error), ErrorContext(ref.bucket, ref.key, error.offset))
        found.__cause__ = error
        self.note(found)

    def check(self, others: str, advice: str) -> None:
        """Raise the first error, if there is one, with the number of `others` and the advice."""
        if (first := self._first) is not None:
            more = f"; {self._count - 1} {others}" if self._count > 1 else ""
            raise CorruptObject(f"{first.message}{more}; {advice}", first.context)


class IndexBuild:
    """The build of one channel's index; call `run` once."""

    def __init__(
        self, file: IndexFile, objects: ChannelObjects, findings: Findings, upload: IndexUpload
    ) -> None:
        """Find the objects without a row of their version; takes seconds a million.

        `findings`: gets each object that is not of the index's format. `upload`: stores the file in S3.
        """
        self.scanned = 0
        """Number of rows that this build has made."""
        self._file = file
        self._objects = objects
        without_row = objects.without_row(file.index)
        self._to_read, self._empty = in_two(objects, without_row)
        self.objects_to_read = len(self._to_read)
        self.bytes_to_read = sum(objects[number].size for number in self._to_read)
        self._findings = findings
        self._upload = upload
        self._pending: list[IndexedObject] = []
        self._appended = time.monotonic()

    async def run(self, access: Access, *, tidy: bool = True) -> None:
        """Scan the objects without a row. Raises SourceError, SinkError; CorruptObject after all others.

        What has been scanned is in the file, however this ends. `tidy`: drop the rows of other objects, which
        the job has no longer; not where another job may stream them.
        """
        index, objects = self._file.index, self._objects
        scans = ObjectScans(index.format, on_row=self._add, on_bad=self._findings.refuse)

        def scan(each: Segment, data: memoryview) -> None:
            scans.see(each, data)
            late = bool(self._pending) and time.monotonic() - self._appended >= APPEND_EVERY
            if late or len(self._pending) >= MOST_PENDING:
                self._append()

        try:
            for start in range(0, len(self._empty), MOST_PENDING):
                some = self._empty[start : start + MOST_PENDING]
                await in_thread(scans.measure, map(objects.__getitem__, some))
                self._append()
            plan = await in_thread(Plan.of, map(objects.__getitem__, self._to_read))
            await read_plan(plan, scan, access)
        finally:
            self._append()
        everything = len(self._to_read) + len(self._empty) == len(objects)
        wrong_format = everything and self._findings.at_start == len(self._to_read)
        self._findings.check(
            "more objects are refused",
            f"no object is of the format {index.format}: correct Records.Format, or --format"
            if wrong_format
            else f"the format of the index is {index.format}, and the rows of all other objects are kept: "
            "repair the object, or leave it out by Exclude",
        )
        names = objects.names.tolist()
        if adopted := await self._upload.settle():
            names = list(dict.fromkeys([*names, *adopted]))
        if tidy:
            await in_thread(self._file.tidy, names)

    def _add(self, _: ObjectRef, row: IndexedObject) -> None:
        self._pending.append(row)
        self.scanned += 1

    def _append(self) -> None:
        """Add the pending rows to the file; only in the event loop's thread, for the upload's task."""
        if self._pending:
            rows, self._pending = self._pending, []
            self._file.append(rows)
            self._upload.appended(rows)
        self._appended = time.monotonic()


async def add_missing(
    place: str, channel: str, record_format: RecordFormat, objects: ChannelObjects, access: Access
) -> None:
    """Build the rows that the index of a channel lacks, and the index itself if there is none.

    `place`: its folder, or prefix of S3. Raises SourceError, SinkError, ConfigError, CorruptObject.
    """
    async with (
        index_target(place, channel, access) as target,
        target.open(record_format) as (file, upload),
    ):
        building = await in_thread(IndexBuild, file, objects, Findings(channel), upload)
        log.info(
            "record index is built",
            channel=channel,
            index=target.name,
            objects=building.objects_to_read,
            bytes=building.bytes_to_read,
        )
        await building.run(access, tidy=False)
