"""Segments cut into parts: the unit of one request, and of memory reserved for it.

A part knows its object range *and* its place in the epoch's stream, so whoever delivers it can prove
that it belongs at that place. Parts never cross an object's border: a request is for one object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from streamer.plan.segments import ObjectRef, Segment


@dataclass(frozen=True, slots=True)
class Part:
    """A byte range of one object, with its place in the stream of one epoch."""

    epoch: int
    object: ObjectRef
    start: int
    """First byte in the object, inclusive."""
    end: int
    """Last byte in the object, exclusive; a part is never empty."""
    offset: int
    """Where the part's first byte lies in the epoch's stream."""

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def ends_object(self) -> bool:
        """Whether the object's last byte is in this part."""
        return self.end == self.object.size


def cut(segments: Iterable[Segment], *, part_size: int, epoch: int) -> Iterator[Part]:
    """The parts of one epoch in stream order, each of at most `part_size` bytes."""
    offset = 0
    for segment in segments:
        for start in range(segment.start, segment.end, part_size):
            end = min(start + part_size, segment.end)
            yield Part(epoch, segment.object, start, end, offset)
            offset += end - start
