"""Finds the records of the objects that one FIFO streams, in the memory that their bytes are delivered from.

    bytes of a part, in stream order ─▶ scanner of the current object ─▶ row, when all its bytes have passed

An object whose bytes do not all pass in order has no row: the epoch was resumed inside it, or its reader left
before its end. The next epoch has it again. An object is refused, and not looked at again, if

    its bytes are not of the format
    its records are so short that to find them would hold up the loop  (`SHORTEST_MEAN`)
    it has so many records that their offsets would take much memory   (`MOST_OFFSETS`)

Pure, and on the event loop: a scanner looks at the headers in up to 128 KiB at a time.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

from streamer.formats.borders import BadRecord
from streamer.formats.record_index import IndexedObject, object_name, object_version
from streamer.plan import is_modified

if TYPE_CHECKING:
    from streamer.formats.borders import BorderScanner
    from streamer.formats.record_format import RecordFormat
    from streamer.formats.record_index import RecordIndex
    from streamer.plan import ObjectRef, Part
    from streamer.trailer import Trailer

SHORTEST_MEAN, SHORTEST_SAMPLE = 256, 4096
"""Least mean bytes of a record, and of a tar sample: a MiB of them takes 2 to 10 ms of the loop."""
JUDGED_AFTER = 256
"""Bytes after which the mean is judged, in records of the least mean: smaller objects are always learnt."""
COUNTED = 8
"""Lines that are searched one by one before an indexed one; the others are counted, at little cost."""
MOST_OFFSETS = 1 << 21
"""Most offsets of one object's row: 16 MiB of memory."""


class Rows(Protocol):
    """The index that gets the rows of a channel's objects, of all its FIFOs."""

    @property
    def index(self) -> RecordIndex:
        """The index, with the rows that are in its file."""

    def lacks(self, name: int, version: int) -> bool:
        """Return whether a row of this version of an object is wanted."""

    def add(self, row: IndexedObject) -> None:
        """Add a row."""

    def refuse(self, ref: ObjectRef, version: int, why: str) -> None:
        """Note that this version of the object gets no row."""


class Learner(Protocol):
    """What learns the index of one channel."""

    def observer(self) -> ObjectLearner:
        """Return the observer of one more FIFO of the channel."""

    def epoch_ended(self, trailer: Trailer) -> None:
        """Note that an epoch of one of the FIFOs has ended with this trailer."""


class ObjectLearner:
    """The `Observer` of one FIFO's bytes (`streamer.relay.staging.observed`)."""

    def __init__(self, rows: Rows) -> None:
        self.outcomes: Counter[str] = Counter()
        """Number of objects that are `learnt` or `refused`."""
        self._rows = rows
        self._format: RecordFormat = rows.index.format
        self._stride = rows.index.stride
        self._shortest = SHORTEST_SAMPLE if self._format.kind == "tar" else SHORTEST_MEAN
        self._part: Part | None = None
        self._scanner: BorderScanner | None = None
        """Scanner of the object of `_part`; None if the object is not looked at."""
        self._hashed: tuple[ObjectRef, int, int] | None = None
        """The last object that was asked for, its name and its version."""

    def wants(self, part: Part) -> bool:
        ref = part.object
        # Without an ETag a row would hold for any version of the object.
        return not is_modified(ref.etag) and self._rows.lacks(*self._hashes(ref))

    def _hashes(self, ref: ObjectRef) -> tuple[int, int]:
        if self._hashed is None or self._hashed[0] is not ref:
            version = object_version(ref.bucket, ref.key, size=ref.size, etag=ref.etag, version=ref.version)
            self._hashed = ref, object_name(ref.bucket, ref.key), version
        return self._hashed[1:]

    def see(self, part: Part, data: memoryview) -> None:
        if part is not self._part:
            self._begin(part)
        if (scanner := self._scanner) is None:
            return
        try:
            scanner.feed(data)
            if scanner.fed == part.object.size:
                self._end(part.object, scanner, scanner.finish())
            elif self._looks(scanner) > scanner.fed // self._shortest > JUDGED_AFTER:
                self._refuse(part.object, f"its records have less than {self._shortest} bytes on average")
            elif len(scanner.offsets) > MOST_OFFSETS:
                self._refuse(part.object, f"its row would have more than {MOST_OFFSETS} offsets")
        except BadRecord as error:
            self._refuse(part.object, f"{error}; at byte {error.offset}")

    def _looks(self, scanner: BorderScanner) -> int:
        """Return how many records the scanner has looked at one by one."""
        if self._format.kind == "lines":
            return min(scanner.records, COUNTED * len(scanner.offsets))
        return scanner.records

    def _begin(self, part: Part) -> None:
        """Go on with the current object, or begin another one."""
        before, self._part = self._part, part
        if part.start == 0:
            wanted = self.wants(part)
            self._scanner = self._format.scanner(stride=self._stride) if wanted else None
        elif self._scanner is not None:
            follows = before is not None and before.object == part.object and self._scanner.fed == part.start
            self._scanner = self._scanner if follows else None

    def _end(self, ref: ObjectRef, scanner: BorderScanner, end: int) -> None:
        self._scanner = None
        name, version = self._hashes(ref)
        if not self._rows.lacks(name, version):
            return  # another FIFO had the object meanwhile
        self._rows.add(IndexedObject(name, version, ref.size, scanner.records, end, scanner.offsets))
        self.outcomes["learnt"] += 1

    def _refuse(self, ref: ObjectRef, why: str) -> None:
        self._scanner = None
        name, version = self._hashes(ref)
        if not self._rows.lacks(name, version):
            return
        self._rows.refuse(ref, version, why)
        self.outcomes["refused"] += 1
