"""The plan of ranks that share a channel by record: the byte ranges of their records, in order.

    record order ─ deal ─▶ runs of records ─ RecordTable ─▶ byte ranges ─▶ parts, as of any plan

`RecordTable` has the offsets of all records. Of tar each run of adjacent samples is an archive in the stream
of a rank, with its end mark; with `Join` a whole epoch is one. A stream of several ranks has records alone,
so that its requests are large; `streamer.plan.dealing` adds the end marks. The plans of one host's ranks
share the order (`streamer.plan.host_ranks`). Digests (docs/explanation/record-order.md): `order_digest` is
the same on all hosts and at any number of ranks, `digest` also covers the ranks and `Join`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from streamer.plan.epoch_cache import EpochCache
from streamer.plan.plan import Plan
from streamer.plan.record_order import START, Deal, Walk, joined
from streamer.plan.record_table import EndMarks, misplaced, only_object
from streamer.plan.segments import Segment

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator

    from streamer.plan.host_ranks import HostRanks
    from streamer.plan.position import Position
    from streamer.plan.record_order import WalkPosition
    from streamer.plan.segments import ObjectRef


class RecordPlan(Plan):
    """Streams the records of some ranks: those of one rank FIFO, or of all of this host."""

    def __init__(self, host_ranks: HostRanks, deal: Deal | None = None) -> None:
        """`deal`: of some of this host's ranks; default: all of them."""
        super().__init__(host_ranks.entries)
        self.host_ranks = host_ranks
        self.deal = deal or host_ranks.deal
        self._bytes = EpochCache[int]()
        """Bytes of the stream. `host_ranks` may not cache them: another rank may be many epochs ahead."""

    def __repr__(self) -> str:
        return f"<RecordPlan {self.entries}, {self.deal}>"

    def ranks(self, count: int) -> tuple[RecordPlan, ...]:
        """Return the plans of this host's ranks. Raises ValueError unless there are `count`."""
        deal = self.deal
        if deal.end - deal.first != count:
            raise ValueError(f"the plan has {deal.end - deal.first} ranks, not {count}")
        ranks = range(deal.first, deal.end)
        return tuple(
            RecordPlan(self.host_ranks, Deal(deal.global_batch, deal.ranks, rank, rank + 1, deal.remainder))
            for rank in ranks
        )

    @property
    def end_marks(self) -> EndMarks:
        """End marks in this stream; it has none if it is of several ranks."""
        return EndMarks() if self.deal.end - self.deal.first > 1 else self.host_ranks.table.end_marks

    @property
    def one_archive(self) -> bool:
        return bool(self.host_ranks.table.end_marks.epoch)

    @property
    def varies(self) -> bool:
        """Whether a rank's records differ from epoch to epoch, so that each epoch needs its own totals."""
        return self.host_ranks.order.varies

    @property
    def streams(self) -> bool:
        """Whether there is a record to stream."""
        return self.steps(0) > 0

    def total_bytes(self, epoch: int) -> int:
        """Return the length of the epoch's stream.

        If the plan `varies`, the first call for an epoch takes some microseconds per block and slice.
        """
        key = self.host_ranks.order.key(epoch)
        total = self._bytes.get(key)
        if total is None:
            total = self._bytes.put(key, self.own(self.host_ranks.sums(epoch).totals))
        return total

    def own(self, sums: array[int]) -> int:
        """Return the bytes of this stream. `sums`: of each rank of this host, and of all of them."""
        one = self.deal.end - self.deal.first == 1
        return sums[self.deal.first - self.host_ranks.deal.first if one else -1]

    def objects(self, epoch: int) -> int:  # noqa: ARG002 - every epoch has all
        """Return the number of objects of the order, those of other ranks too."""
        return len(self.entries)

    @property
    def counts_records(self) -> bool:
        """Whether `records` and `steps` return numbers."""
        return True

    def records(self, epoch: int) -> int:  # noqa: ARG002 - every epoch has as many
        """Return the number of records of these ranks in the epoch, repeated ones included."""
        return self.deal.records(self.host_ranks.order.records)

    def steps(self, epoch: int) -> int:  # noqa: ARG002 - likewise
        """Return the number of global batches of the epoch."""
        return self.deal.steps(self.host_ranks.order.records)

    def padding(self, epoch: int) -> int:  # noqa: ARG002 - likewise
        """Return how many records of each epoch of these ranks are padding."""
        return self.deal.padding(self.host_ranks.order.records)

    def segments(self, epoch: int, first: int = 0, end: int | None = None) -> Iterator[Segment | bytes]:
        """Yield the epoch's byte ranges, in stream order. Raises ValueError for a part of the entries."""
        if first or end not in (None, self.known):
            raise ValueError("an order of records has no order of entries")
        return self._segments(epoch, START, 0)

    def segments_near(self, epoch: int, offset: int) -> tuple[int, Iterator[Segment | bytes]]:
        """See `Plan.segments_near`. Takes some ten milliseconds, once the plan knows the epoch's length."""
        positions = self.host_ranks.sums(epoch).positions
        after = bisect_right(positions, offset, key=lambda position: self.own(position.sums))
        if not after:
            return 0, self.segments(epoch)
        step, start, sums = positions[after - 1]
        return self.own(sums), self._segments(epoch, start, step)

    @property
    def record_order(self) -> dict[str, Any]:
        """See `HostRanks.described_order`."""
        return self.host_ranks.described_order

    def _segments(self, epoch: int, begin: WalkPosition, step: int) -> Iterator[Segment | bytes]:
        """Yield the byte ranges of these ranks from a step on. `begin`: of the walk, not after that step."""
        walk = Walk(self.host_ranks.order, epoch, begin)
        border, (run_mark, epoch_mark) = self.host_ranks.table.border, self.end_marks
        current: tuple[int, ObjectRef] | None = None
        for entry, start, stop in joined(self.deal.together(walk, step)):
            if current is None or current[0] != entry:
                current = entry, only_object(self.entries, entry)
            first, end = border(entry, start), border(entry, stop)
            if end <= first:
                raise misplaced(self.entries, entry)
            yield Segment(current[1], first, end)
            if run_mark:
                yield run_mark
        if epoch_mark and current is not None:
            yield epoch_mark

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of all inputs that determine the streams of these ranks."""
        deal = self.deal
        join = " tar" if self.one_archive else ""
        ranks = f"{self.host_ranks.order_digest} {deal.first} {deal.end} {deal.ranks}{join}"
        return hashlib.sha256(f"penstock ranks 1\n{ranks}\n".encode()).hexdigest()

    def covers(self, digest: str, position: Position) -> bool:  # noqa: ARG002 - an index is of whole plans
        return digest == self.digest
