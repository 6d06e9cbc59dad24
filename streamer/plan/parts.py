"""Segments, byte ranges of object versions, and parts: segments and literals that are fetched together.

    rows of a walk ─── cut ──▶ Part(epoch, offset, items)   items: ranges of objects, and literals, in order
    Part ─────────── window ─▶ Stage                        its bytes are reserved
    Part, first byte ─ source ▶ Body                        one GET a range; literals in their place
    Body ─────────── stage ──▶ pipe, buffer, or the FIFO    every byte of the part, in order, once
    Body has failed ─────────▶ a further body of the part begins at the first missing byte

A part of one range may be large: its body is streamed. Small ranges share a part, and so a stage, a task and
a pipe. The code is the same for both. A part has its offset in the epoch's stream, so that delivery can check
the order. A range never crosses an object's border, because a request is for one object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from streamer.formats.recordio import MAX_PAYLOAD, header, padding
from streamer.units import KIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """One object version, as listed. References from two listings of unchanged data are equal."""

    bucket: str
    key: str
    size: int
    """Bytes."""
    etag: str
    """ETag without quotes and `W/`, since only some servers quote it in listings; or a time
    (`streamer.plan.validators`)."""
    version: str | None = None
    """Version id that a manifest names; None: read the current version, which must have the same ETag."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes `start` (inclusive) to `end` (exclusive) of one object version."""

    object: ObjectRef
    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end <= self.object.size:
            raise ValueError(f"no such range: {self}")

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def whole(self) -> bool:
        """Whether these are all bytes of the object."""
        return self.end - self.start == self.object.size


class ObjectStart(NamedTuple):
    """Offset in a plan's stream from which on its bytes are of one object."""

    offset: int
    number: int
    """Number in the object of the first record that begins there."""
    key: str
    """Empty for literals that are of no object."""
    bucket: str


LONGEST_RECORD = MAX_PAYLOAD
"""Bytes that one RecordIO record of a single part can hold (contract §5.1)."""


def frame(size: int) -> tuple[bytes, bytes]:
    """Return header and padding of a RecordIO record of `size` bytes. Raises ValueError if it is too long."""
    return header(size), padding(size)


MAX_LITERALS = 64 * KIB
"""Maximum bytes of literals in one part; literals are in memory with every transport."""
RANGE_COST = 4 * KIB
"""Memory of the objects that represent a part, or one of its small ranges, while it waits: measured at 2 to
3 KiB."""
NO_OBJECT = ObjectRef("", "", 0, "")
"""Object of a part without a range."""


@dataclass(frozen=True, slots=True)
class Part:
    """Ranges of objects and literals that follow each other in the stream of one epoch. Made by `of`."""

    epoch: int
    offset: int
    """Offset of the part's first byte in the epoch's stream."""
    items: tuple[Segment | bytes, ...]
    """None is empty, and no literal follows a literal."""
    size: int
    """Bytes of the part in the stream; never 0."""
    body: int
    """Bytes to request; 0 if the part has only literals."""
    requests: int
    """Number of ranges: requests that may fetch the part at once."""

    @classmethod
    def of(cls, epoch: int, offset: int, items: Iterable[Segment | bytes]) -> Part:
        """Return the part of these items."""
        items = tuple(items)
        literals = body = requests = 0
        for item in items:
            if isinstance(item, bytes):
                literals += len(item)
            else:
                body += item.end - item.start
                requests += 1
        return cls(epoch, offset, items, literals + body, body, requests)

    @property
    def object(self) -> ObjectRef:
        """Object of the first range."""
        return next((item.object for item in self.items if not isinstance(item, bytes)), NO_OBJECT)

    def ends(self) -> Iterator[tuple[int, int]]:
        """Yield, for each object that ends in the part, the bytes of the part up to its end, and its size."""
        at = 0
        for item in self.items:
            if isinstance(item, bytes):
                at += len(item)
                continue
            at += item.end - item.start
            if item.end == item.object.size:
                yield at, item.object.size

    def item_at(self, at: int) -> tuple[Segment | bytes, int]:
        """Return the item that has byte `at` of the part, and the offset of the byte in the item.

        The byte after the last one counts as one of the last item.
        """
        for item in self.items:
            size = len(item)
            if at < size:
                return item, at
            at -= size
        return item, at + size

    def at(self, first: int) -> tuple[ObjectRef, int]:
        """Return the object of byte `first` of the part, and the offset of the byte in that object.

        For a byte of a literal: the end of the range before it, or the start of the first range.
        """
        ref, offset = NO_OBJECT, 0
        for item in self.items:
            if isinstance(item, bytes):
                if first < len(item) and ref is not NO_OBJECT:
                    break
                first -= min(first, len(item))
            elif first < (size := item.end - item.start):
                return item.object, item.start + first
            else:
                ref, offset, first = item.object, item.end, first - size
        return ref, offset

    def rest(self, first: int) -> list[Segment | bytes]:
        """Return the items without the first `first` bytes."""
        return list(rest(self.items, first) if first else self.items)


MOST_RANGES = 256
"""Maximum ranges in a part, so that its description is short."""
FEW = 8
"""Most ranges of a part that has more bytes than others: of many ranges each should be small."""


def rest(items: Iterable[Segment | bytes], skip: int) -> Iterator[Segment | bytes]:
    """Yield the items without the first `skip` bytes of their stream."""
    for item in items:
        size = len(item)
        if skip >= size:
            skip -= size
            continue
        if not skip:
            yield item
        elif isinstance(item, bytes):
            yield item[skip:]
        else:
            yield Segment(item.object, item.start + skip, item.end)
        skip = 0


def cut(
    segments: Iterable[Segment | bytes],
    *,
    part_size: Callable[[], int],
    epoch: int,
    skip: int = 0,
    base: int = 0,
    together: Callable[[], tuple[int, int]] = lambda: (0, 0),
) -> Iterator[Part]:
    """Yield the parts of one epoch in stream order, without the first `skip` bytes of `segments`.

    `base`: offset in the epoch's stream of the first segment. The other two are called for each part.
    `part_size` returns the maximum bytes of a range; `together` those of a part of 2 to `FEW` ranges, and of
    a part of more, where each range counts for `RANGE_COST` more than it has. By default each range has a
    part of its own. A part has at most 64 KiB of literals.
    """
    offset = base + skip
    items: list[Segment | bytes] = []
    limit = few = many = cost = ranges = literals = 0
    for segment in rest(segments, skip) if skip else segments:
        if isinstance(segment, bytes):
            data = segment
            while data:
                if literals == MAX_LITERALS:
                    yield (part := Part.of(epoch, offset, items))
                    offset += part.size
                    items, ranges, literals = [], 0, 0
                step = data[: MAX_LITERALS - literals]
                if items and isinstance(before := items[-1], bytes):
                    items[-1] = before + step
                else:
                    items.append(step)
                data = data[len(step) :]
                literals += len(step)
            continue
        first, end = segment.start, segment.end
        while first < end:
            if not ranges:
                limit, (few, many), cost = part_size(), together(), literals
            count = min(end - first, limit)
            most = few if ranges < FEW else many
            if ranges and (cost + count + RANGE_COST > most or ranges == MOST_RANGES):
                yield (part := Part.of(epoch, offset, items))
                offset += part.size
                items, ranges, literals = [], 0, 0
                continue
            whole = first == segment.start and first + count == end
            items.append(segment if whole else Segment(segment.object, first, first + count))
            first += count
            cost += count + RANGE_COST
            ranges += 1
    if items:
        yield Part.of(epoch, offset, items)
