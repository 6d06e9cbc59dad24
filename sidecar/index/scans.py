"""Finds the records of objects in the memory that their bytes arrived in: rows of a record index.

    bytes of a range, in stream order ▶ scanner of the current object ─▶ row, when all its bytes have passed

A build, `index verify --all`, and each FIFO of a channel that learns its index have one. An object whose
bytes do not all pass in order has no row: the epoch was resumed inside it, or its reader left before its end.
The next epoch has it again. An object is refused if its bytes are not of the format. One that a channel
streams anyway (`limited`) is also refused, and left to a build, if

    its records are so short that to find them would hold up the loop  (`SHORTEST_MEAN`)
    it has so many records that their offsets would take much memory   (`MOST_OFFSETS`)

Pure, and on the event loop: a scanner looks at the headers in up to 128 KiB at a time.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from streamer.formats.borders import BadRecord
from streamer.formats.record_index import IndexedObject, object_name, object_version
from streamer.plan import is_modified
from streamer.relay.staging.taps import Tap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from streamer.formats.borders import BorderScanner
    from streamer.formats.record_format import RecordFormat
    from streamer.plan import ObjectRef, Segment

SHORTEST_MEAN, SHORTEST_SAMPLE = 256, 4096
"""Least mean bytes of a record, and of a tar sample: a MiB of them takes 2 to 10 ms of the loop."""
JUDGED_AFTER = 256
"""Bytes after which the mean is judged, in records of the least mean: smaller objects are always learnt."""
MOST_OFFSETS = 1 << 21
"""Most offsets of one object's row: 16 MiB of memory."""


class ObjectScans(Tap):
    """Makes the rows of the objects of one stream."""

    def __init__(
        self,
        record_format: RecordFormat,
        *,
        on_row: Callable[[ObjectRef, IndexedObject], None],
        on_bad: Callable[[ObjectRef, int, BadRecord], None],
        lacks: Callable[[int, int], bool] = lambda *_: True,
        limited: bool = False,
    ) -> None:
        """`on_bad`: gets object, version and fault. `lacks`: whether the row of a name and version is wanted.

        `limited`: refuse objects whose rows take much time or memory.
        """
        self.outcomes: Counter[str] = Counter()
        """Number of objects that are `learnt` or `refused`."""
        self._format = record_format
        self._on_row = on_row
        self._on_bad = on_bad
        self._lacks = lacks
        self._limited = limited
        self._shortest = SHORTEST_SAMPLE if self._format.kind == "tar" else SHORTEST_MEAN
        self._range: Segment | None = None
        self._scanner: BorderScanner | None = None
        """Scanner of the object of `_range`; None if the object is not looked at."""
        self._hashed: tuple[ObjectRef, int, int] | None = None
        """The last object that was asked for, its name and its version."""

    def wants(self, ref: ObjectRef) -> bool:
        # Without an ETag a row would hold for any version of the object.
        return not is_modified(ref.etag) and self._lacks(*self._hashes(ref))

    def see(self, each: Segment, data: memoryview) -> None:
        if each is not self._range:
            self._begin(each)
        if (scanner := self._scanner) is None:
            return
        try:
            scanner.feed(data)
            if self._limited and scanner.fed < each.object.size:
                self._judge(scanner)
        except BadRecord as error:
            self._refuse(each.object, error)
        else:
            if scanner.fed == each.object.size:
                self._end(each.object, scanner)

    def measure(self, objects: Iterable[ObjectRef]) -> None:
        """Make the rows of empty objects."""
        for ref in filter(self.wants, objects):
            self._end(ref, self._format.scanner())

    def _hashes(self, ref: ObjectRef) -> tuple[int, int]:
        if self._hashed is None or self._hashed[0] is not ref:
            version = object_version(ref.bucket, ref.key, size=ref.size, etag=ref.etag, version=ref.version)
            self._hashed = ref, object_name(ref.bucket, ref.key), version
        return self._hashed[1:]

    def _begin(self, each: Segment) -> None:
        """Go on with the current object, or begin another one."""
        before, self._range = self._range, each
        if each.start == 0:
            wanted = self.wants(each.object)
            self._scanner = self._format.scanner() if wanted else None
        elif self._scanner is not None:
            follows = before is not None and before.object == each.object and self._scanner.fed == each.start
            self._scanner = self._scanner if follows else None

    def _judge(self, scanner: BorderScanner) -> None:
        """Raise BadRecord if the object takes too much time or memory."""
        records = len(scanner.offsets)
        if records > scanner.fed // self._shortest > JUDGED_AFTER:
            raise BadRecord(f"its records have less than {self._shortest} bytes on average", scanner.fed)
        if records > MOST_OFFSETS:
            raise BadRecord(f"it has more than {MOST_OFFSETS} records", scanner.fed)

    def _end(self, ref: ObjectRef, scanner: BorderScanner) -> None:
        self._scanner = None
        try:
            end = scanner.finish()
        except BadRecord as error:
            self._refuse(ref, error)
            return
        name, version = self._hashes(ref)
        if self._lacks(name, version):  # else another FIFO had the object meanwhile
            offsets = scanner.offsets
            self._on_row(ref, IndexedObject(name, version, ref.size, len(offsets), end, offsets))
            self.outcomes["learnt"] += 1

    def _refuse(self, ref: ObjectRef, error: BadRecord) -> None:
        self._scanner = None
        name, version = self._hashes(ref)
        if self._lacks(name, version):
            self._on_bad(ref, version, error)
            self.outcomes["refused"] += 1
