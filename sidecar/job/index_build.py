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
from itertools import islice
from typing import TYPE_CHECKING

from sidecar.job.index_objects import read_plan
from sidecar.process.logs import log
from streamer.aio import in_thread
from streamer.errors import CorruptObject, ErrorContext
from streamer.formats.borders import BadRecord, FixedScanner
from streamer.formats.record_index import IndexedObject
from streamer.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sidecar.config.job import Job
    from sidecar.job.index_file import IndexFile
    from sidecar.job.index_object import IndexUpload
    from sidecar.job.index_objects import ChannelObjects, IndexedRef
    from streamer.formats.borders import BorderScanner
    from streamer.formats.record_format import RecordFormat
    from streamer.plan import Part
    from streamer.relay.statistics import ChannelCounters
    from streamer.s3.client.session import Clients

APPEND_EVERY = 1.0
"""Seconds between two appends of rows to the file."""
MOST_PENDING = 4096
"""Rows after which they are appended at once."""
MOST_LOGGED = 20
"""Most corrupt objects of a channel that are logged; the error at the end has their number."""


class ObjectScans:
    """Scans objects one after the other, from the bytes of all; a row or a finding for each."""

    def __init__(
        self,
        record_format: RecordFormat,
        stride: int,
        objects: Iterable[IndexedRef],
        *,
        on_row: Callable[[IndexedRef, IndexedObject], None],
        on_bad: Callable[[CorruptObject], None],
    ) -> None:
        """`objects`: those that `feed` gets the bytes of, in this order; none is empty."""
        self._format = record_format
        self._stride = stride
        self._objects = iter(objects)
        self._on_row = on_row
        self._on_bad = on_bad
        self._current: IndexedRef | None = None
        self._scanner: BorderScanner | None = None
        """Scanner of the current object; None if that is not of the format."""
        self._fed = 0
        """Bytes of the current object so far."""

    def feed(self, part: Part, data: memoryview) -> None:
        """Scan the next bytes, which belong to `part`."""
        if self._current is None:
            self._current, self._scanner, self._fed = next(self._objects), self._new(), 0
        current = self._current
        if part.object != current.ref:
            raise RuntimeError(f"bytes of {part.object} instead of {current.ref}")
        self._fed += len(data)
        if self._scanner is not None:
            try:
                self._scanner.feed(data)
            except BadRecord as error:
                self._refuse(current, error)
        if self._fed == current.ref.size:
            self._end(current)
            self._current = None

    def measure(self, objects: Iterable[IndexedRef]) -> None:
        """Make the rows of objects of which no byte is needed: of empty ones, or of records of one size."""
        for each in objects:
            self._scanner = scanner = self._new()
            if isinstance(scanner, FixedScanner):
                scanner.skip(each.ref.size)
            self._end(each)

    def _new(self) -> BorderScanner:
        return self._format.scanner(stride=self._stride)

    def _end(self, current: IndexedRef) -> None:
        scanner, self._scanner = self._scanner, None
        if scanner is None:
            return
        try:
            end = scanner.finish()
        except BadRecord as error:
            self._refuse(current, error)
            return
        row = IndexedObject(
            current.name, current.version, current.ref.size, scanner.records, end, scanner.offsets
        )
        self._on_row(current, row)

    def _refuse(self, current: IndexedRef, error: BadRecord) -> None:
        self._scanner = None
        found = CorruptObject(str(error), ErrorContext(current.ref.bucket, current.ref.key, error.offset))
        found.__cause__ = error
        self._on_bad(found)


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

    def check(self, others: str, advice: str) -> None:
        """Raise the first error, if there is one, with the number of `others` and the advice."""
        if (first := self._first) is not None:
            more = f"; {self._count - 1} {others}" if self._count > 1 else ""
            raise CorruptObject(f"{first.message}{more}; {advice}", first.context)


class IndexBuild:
    """The build of one channel's index: `prepare`, then `run`, once."""

    def __init__(
        self, file: IndexFile, objects: ChannelObjects, findings: Findings, upload: IndexUpload | None
    ) -> None:
        """`findings`: gets each object that is not of the index's format. `upload`: stores the file in S3."""
        self.scanned = 0
        """Number of rows that this build has made."""
        self.bytes_to_read = 0
        self._file = file
        self._objects = objects
        self._to_read, self._others = array("Q"), array("Q")
        """Places in `objects` of those without a row: of which all bytes are needed, and none."""
        self._findings = findings
        self._upload = upload
        self._pending: list[IndexedObject] = []
        self._appended = time.monotonic()

    def prepare(self) -> None:
        """Find the objects without a row of their version; takes seconds a million."""
        index = self._file.index
        fixed = index.format.kind == "fixed"
        for place in self._objects.without_row(index):
            size = self._objects[place].ref.size
            self.bytes_to_read += 0 if fixed else size
            (self._others if fixed or not size else self._to_read).append(place)

    async def run(self, job: Job, clients: Clients, counters: ChannelCounters) -> None:
        """Scan the objects without a row. Raises SourceError, SinkError; CorruptObject after all others.

        What has been scanned is in the file, however this ends.
        """
        index, objects = self._file.index, self._objects
        to_read, others = ((objects[place] for place in each) for each in (self._to_read, self._others))
        scans = ObjectScans(index.format, index.stride, to_read, on_row=self._add, on_bad=self._findings.note)

        def scan(part: Part, data: memoryview) -> None:
            scans.feed(part, data)
            late = bool(self._pending) and time.monotonic() - self._appended >= APPEND_EVERY
            if late or len(self._pending) >= MOST_PENDING:
                self._append()

        try:
            for _ in range(0, len(self._others), MOST_PENDING):
                await in_thread(scans.measure, islice(others, MOST_PENDING))
                if len(self._pending) >= MOST_PENDING:
                    self._append()
            plan = await in_thread(Plan.of, (objects[place].ref for place in self._to_read))
            await read_plan(plan, objects.buckets, scan, job=job, clients=clients, counters=counters)
        finally:
            self._append()
        everything = len(self._to_read) + len(self._others) == len(objects)
        wrong_format = everything and self._findings.at_start == len(self._to_read)
        self._findings.check(
            "more objects are refused",
            f"no object is of the format {index.format}: give --format that of the objects"
            if wrong_format
            else f"the format of the index is {index.format}, and the rows of all other objects are kept: "
            "repair the object, or leave it out by Exclude",
        )
        names = objects.names.tolist()
        if self._upload is not None and (adopted := await self._upload.settle()):
            names = list(dict.fromkeys([*names, *adopted]))
        await in_thread(self._file.tidy, names)

    def _add(self, _: IndexedRef, row: IndexedObject) -> None:
        self._pending.append(row)
        self.scanned += 1

    def _append(self) -> None:
        """Add the pending rows to the file; only in the event loop's thread, for the upload's task."""
        if self._pending:
            rows, self._pending = self._pending, []
            self._file.append(rows)
            if self._upload is not None:
                self._upload.appended(rows)
        self._appended = time.monotonic()
