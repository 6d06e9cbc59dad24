"""Cuts segments into parts: a part is fetched by one request, and memory is reserved for each part.

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
