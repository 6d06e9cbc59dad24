"""A plan of ranges of objects: some bytes of each, in the order given, in one epoch.

    segments ─▶ RangePlan ─▶ parts, as of any plan

The record index looks at record headers by it (`sidecar.index.check`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamer.plan.entries import Entries
from streamer.plan.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from streamer.plan.segments import Segment


class RangePlan(Plan):
    """Streams `ranges` in the order given; none may be empty."""

    def __init__(self, ranges: Sequence[Segment]) -> None:
        super().__init__(Entries())
        self._ranges = ranges
        self._bytes = sum(map(len, ranges))

    @property
    def known(self) -> int:
        """Number of ranges."""
        return len(self._ranges)

    @property
    def streams(self) -> bool:
        """Whether there is a range."""
        return self._bytes > 0

    def total_bytes(self, epoch: int) -> int:  # noqa: ARG002 - every epoch is the same
        """Return the bytes of all ranges."""
        return self._bytes

    def buckets(self) -> set[str]:
        """Return the buckets of the ranges' objects."""
        return {each.object.bucket for each in self._ranges}

    def segments(self, epoch: int, first: int = 0, end: int | None = None) -> Iterator[Segment | bytes]:  # noqa: ARG002 - likewise
        """Yield the ranges from number `first` up to `end`."""
        yield from self._ranges[first:end]
