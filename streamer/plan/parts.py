"""Segments cut into parts: the unit of one request, and of memory reserved for it.

A part is a range of one object, the *body*, with the literals before and after it: `leading`, body,
`trailing`. Literals belong to the parts of the objects beside them, so record headers and padding need no
part of their own; a part of literals alone has no body and needs no request. A part has its offset in the
epoch's stream, so delivery can check that it comes next. A part never crosses an object's border, because a
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
"""Bytes of literals in one part at most; literals are in memory with every transport."""
NO_OBJECT = ObjectRef("", "", 0, "")
"""The object of a part without a body."""


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
    """Where the part's first byte lies in the epoch's stream."""
    leading: bytes = b""
    """Literals before the body."""
    trailing: bytes = b""
    """Literals after it."""

    @property
    def body(self) -> int:
        """Bytes to request; 0 if the part has only literals."""
        return self.end - self.start

    def __len__(self) -> int:
        """Bytes in the stream; never 0."""
        return len(self.leading) + self.end - self.start + len(self.trailing)

    @property
    def ends_object(self) -> bool:
        """Whether the object's last byte is in this part."""
        return self.start < self.end == self.object.size


def rest(segments: Iterable[Segment | Literal], behind: int) -> Iterator[Segment | Literal]:
    """The segments without the first `behind` bytes of what they stream."""
    for segment in segments:
        size = len(segment)
        if behind >= size:
            behind -= size
        elif not behind:
            yield segment
        else:
            if isinstance(segment, Literal):
                yield Literal(segment.data[behind:])
            else:
                yield Segment(segment.object, segment.start + behind, segment.end)
            behind = 0


def cut(
    segments: Iterable[Segment | Literal], *, part_size: Callable[[], int], epoch: int, behind: int = 0
) -> Iterator[Part]:
    """The parts of one epoch in stream order, without the stream's first `behind` bytes.

    A body has at most as many bytes as `part_size` says when it is cut, and the literals of a part 64 KiB.
    """
    most = MAX_LITERALS
    offset = behind
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

    for segment in rest(segments, behind) if behind else segments:
        if isinstance(segment, Literal):
            left = memoryview(segment.data)
            while left:
                room = most - len(leading) - len(trailing)
                if not room:
                    yield close()
                    continue
                (trailing if start < end else leading).extend(left[:room])
                left = left[room:]
            continue
        first = segment.start
        while first < segment.end:
            if start < end:
                yield close()
            ref, start, end = segment.object, first, min(first + part_size(), segment.end)
            first = end
    if leading or start < end:
        yield close()
