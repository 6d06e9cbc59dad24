"""Cuts segments into parts: a part is fetched by one request, and memory is reserved for each part.

Small parts are fetched together: `gathered` joins consecutive ones into a `Span`.

A part is a range of one object, the *body*, with the literals before and after it: `leading`, body,
`trailing`. Literals belong to the parts of the objects next to them, so record headers and padding need no
part of their own; a part of literals alone has no body and needs no request. A part has its offset in the
epoch's stream, so that delivery can check the order. A part never crosses an object's border, because a
request is for one object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamer.plan.segments import Literal, ObjectRef, Segment
from streamer.units import KIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

MAX_LITERALS = 64 * KIB
"""Maximum bytes of literals in one part; literals are in memory with every transport."""
NO_OBJECT = ObjectRef("", "", 0, "")
"""Object of a part without a body."""


@dataclass(frozen=True, slots=True)
class Part:
    """A byte range of one object with the literals around it, and its offset in the stream of one epoch."""

    epoch: int
    object: ObjectRef
    start: int
    """First byte in the object, inclusive."""
    end: int
    """Last byte in the object, exclusive."""
    offset: int
    """Offset of the part's first byte in the epoch's stream."""
    leading: bytes = b""
    """Literals before the body."""
    trailing: bytes = b""
    """Literals after the body."""

    @property
    def body(self) -> int:
        """Bytes to request; 0 if the part has only literals."""
        return self.end - self.start

    def __len__(self) -> int:
        """Return the part's bytes in the stream; never 0."""
        return len(self.leading) + self.end - self.start + len(self.trailing)

    @property
    def ends_object(self) -> bool:
        """Whether the object's last byte is in this part."""
        return self.start < self.end == self.object.size

    @property
    def requests(self) -> int:
        """Requests that may fetch the part at once."""
        return 1

    @property
    def pieces(self) -> tuple[Part, ...]:
        """The parts of one object each that are held in memory separately."""
        return (self,)

    def ends(self) -> Iterator[tuple[int, int]]:
        """Yield, for each object that ends in the part, the bytes of the part after it, and its size."""
        if self.ends_object:
            yield len(self.trailing), self.object.size

    def at(self, first: int) -> tuple[ObjectRef, int]:
        """Return the object of byte `first`, and the offset of the byte in that object.

        `first` counts as `start` and `end` do.
        """
        return self.object, first

    def rest(self, first: int) -> list[Part]:
        """Return parts with the bytes of the body from `first` on, each of one object."""
        return [Part(self.epoch, self.object, first, self.end, 0)]


@dataclass(frozen=True, slots=True)
class Span(Part):
    """Consecutive parts of one epoch as one part, for a transport that fetches them together.

    `start` is 0, and `end` is the number of bytes in the stream: the literals of `parts` are in the body.
    """

    parts: tuple[Part, ...] = ()

    @classmethod
    def of(cls, parts: list[Part]) -> Span:
        """Return the span of `parts`."""
        first = parts[0]
        count = parts[-1].offset + len(parts[-1]) - first.offset
        return cls(first.epoch, first.object, 0, count, first.offset, parts=tuple(parts))

    @property
    def ends_object(self) -> bool:
        """Not used: a span may end several objects (`ends`)."""
        return False

    @property
    def requests(self) -> int:
        """Requests that may fetch the part at once."""
        return len(self.parts)

    @property
    def pieces(self) -> tuple[Part, ...]:
        return self.parts

    def ends(self) -> Iterator[tuple[int, int]]:
        end = self.offset + self.end
        for part in self.parts:
            if part.ends_object:
                yield end - part.offset - len(part) + len(part.trailing), part.object.size

    def at(self, first: int) -> tuple[ObjectRef, int]:
        byte = self.offset + first
        part = next((part for part in self.parts if byte < part.offset + len(part)), self.parts[-1])
        place = byte - part.offset - len(part.leading)
        return part.object, part.start + min(max(place, 0), part.body)

    def rest(self, first: int) -> list[Part]:
        found = []
        for part in self.parts:
            skip = self.offset + first - part.offset
            if skip <= 0:
                found.append(part)
            elif skip < len(part):
                found.append(_without(part, skip))
        return found


def _without(part: Part, skip: int) -> Part:
    """Return the part without its first `skip` bytes."""
    lead = min(skip, len(part.leading))
    body = min(skip - lead, part.body)
    return Part(
        part.epoch,
        part.object,
        part.start + body,
        part.end,
        part.offset + skip,
        part.leading[lead:],
        part.trailing[skip - lead - body :],
    )


MOST_GATHERED = 256
"""Maximum parts in a span, so that its description is short."""
FEW = 8
"""Most parts of a span that has more bytes than others: of many parts each should be small."""


def gathered(
    parts: Iterable[Part | None],
    size: int,
    cost: Callable[[Part], int] = len,
    *,
    of_few: Callable[[], int] = lambda: 0,
) -> Iterator[Part | None]:
    """Yield the parts, with consecutive ones joined into spans of at most `size` bytes.

    A span of up to `FEW` parts may have `of_few()` bytes, if that is more. A span has parts of one epoch.
    None, for an unknown next part, is passed on after the parts before it. `cost` returns the bytes that a
    part counts for.
    """
    held: list[Part] = []
    count = 0

    def joined() -> Part:
        nonlocal held, count
        parts, held, count = held, [], 0
        return Span.of(parts) if len(parts) > 1 else parts[0]

    for part in parts:
        more = 0 if part is None else cost(part)
        most = max(size, of_few()) if len(held) < FEW else size
        if held and (part is None or part.epoch != held[0].epoch or count + more > most):
            yield joined()
        if part is None:
            yield None
            continue
        held.append(part)
        count += more
        if count >= (most if len(held) < FEW else size) or len(held) == MOST_GATHERED:
            yield joined()
    if held:
        yield joined()


def rest(segments: Iterable[Segment | Literal], skip: int) -> Iterator[Segment | Literal]:
    """Yield the segments without the first `skip` bytes of their stream."""
    for segment in segments:
        size = len(segment)
        if skip >= size:
            skip -= size
        elif not skip:
            yield segment
        else:
            if isinstance(segment, Literal):
                yield Literal(segment.data[skip:])
            else:
                yield Segment(segment.object, segment.start + skip, segment.end)
            skip = 0


def cut(
    segments: Iterable[Segment | Literal],
    *,
    part_size: Callable[[], int],
    epoch: int,
    skip: int = 0,
    base: int = 0,
) -> Iterator[Part]:
    """Yield the parts of one epoch in stream order, without the first `skip` bytes of `segments`.

    `base`: offset in the epoch's stream of the first segment. `part_size` is called for each body and returns
    its maximum bytes. A part has at most 64 KiB of literals.
    """
    most = MAX_LITERALS
    offset = base + skip
    leading, trailing = bytearray(), bytearray()
    ref, start, end = NO_OBJECT, 0, 0

    def close() -> Part:
        nonlocal offset, ref, start, end
        part = Part(epoch, ref, start, end, offset, bytes(leading), bytes(trailing))
        offset += len(part)
        leading.clear()
        trailing.clear()
        ref, start, end = NO_OBJECT, 0, 0
        return part

    for segment in rest(segments, skip) if skip else segments:
        if isinstance(segment, Literal):
            left = memoryview(segment.data)
            while left:
                free = most - len(leading) - len(trailing)
                if not free:
                    yield close()
                    continue
                (trailing if start < end else leading).extend(left[:free])
                left = left[free:]
            continue
        first = segment.start
        while first < segment.end:
            if start < end:
                yield close()
            ref, start, end = segment.object, first, min(first + part_size(), segment.end)
            first = end
    if leading or start < end:
        yield close()
