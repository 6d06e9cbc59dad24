"""The plan of ranks that share a channel by record: the byte ranges of their records, in order.

    record order ─ deal ─▶ runs of records ─ RecordTable ─▶ byte ranges ─▶ parts, as of any plan

`RecordTable` has the places of all records. Of tar each run of adjacent samples is an archive, with its end
mark. The plans of one host's ranks share the order, and one walk over it computes the bytes of all of them.
Digests (docs/explanation/record-order.md): `order_digest` is the same on all hosts and at any number of
ranks, `digest` also covers the ranks.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from streamer.errors import ConfigError
from streamer.plan.digest import Digests
from streamer.plan.epoch_cache import EpochCache
from streamer.plan.plan import Plan
from streamer.plan.record_order import Deal, Walk, joined
from streamer.plan.record_table import only_object
from streamer.plan.segments import Literal, Segment
from streamer.plan.shards import Shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamer.plan.entries import Entries
    from streamer.plan.position import Position
    from streamer.plan.record_order import Place, RecordOrder
    from streamer.plan.record_table import RecordTable
    from streamer.plan.segments import ObjectRef

MARKS_EVERY = 1 << 13
"""Runs of the order and slices of ranks between two marks: a resume walks over so many in some ten
milliseconds."""


class _StepMark(NamedTuple):
    """A step at which a walk over the order may begin."""

    step: int
    place: Place
    sums: array[int]
    """Bytes of each rank of this host before the step; without the end mark of a run that goes on in it."""


class _EpochBytes(NamedTuple):
    """The bytes of one epoch."""

    totals: array[int]
    """Bytes of each rank of this host."""
    marks: list[_StepMark]
    """Steps from which a resume may walk."""


class RecordShares:
    """What the plans of one channel's ranks have in common: objects, order, and the totals of every rank."""

    def __init__(
        self,
        entries: Entries,
        table: RecordTable,
        order: RecordOrder,
        deal: Deal,
        *,
        marks_every: int = MARKS_EVERY,
    ) -> None:
        """`deal`: of all ranks of this host. Raises ConfigError if no rank would have a step."""
        self.entries = entries
        self.table = table
        self.order = order
        self.deal = deal
        self._marks_every = marks_every
        self._sums = EpochCache[_EpochBytes]()
        self._digest = ""
        self._lock = threading.Lock()
        """Held by the thread that computes totals or the digest, so that others do not compute them too."""
        if 0 < order.records < deal.global_batch and deal.remainder == "drop":
            raise ConfigError(
                f"the channel has {order.records} records, fewer than one global batch of "
                f"{deal.global_batch}; lower Batch or GlobalBatch, or set Remainder: repeat"
            )

    def sums(self, epoch: int) -> _EpochBytes:
        """Return the bytes that the ranks of this host have in the epoch, and before some steps of it."""
        if self.order.seed is None:
            epoch = 0
        sums = self._sums.get(epoch)
        if sums is None:
            with self._lock:
                sums = self._sums.get(epoch)
                if sums is None:
                    sums = self._sums.put(epoch, self._sum_up(epoch))
        return sums

    def _sum_up(self, epoch: int) -> _EpochBytes:
        deal, border, mark = self.deal, self.table.border, len(self.table.mark)
        totals = array("Q", bytes(8 * (deal.end - deal.first)))
        marks: list[_StepMark] = []
        walk, due, ranks = Walk(self.order, epoch), self._marks_every, deal.end - deal.first
        last: dict[int, tuple[int, int]] = {}
        """By rank, where its last run ends."""
        unseen: set[int] = set()
        """Ranks without a run since the last mark."""
        for step in range(deal.steps(self.order.records)):
            if walk.taken + step * ranks >= due:
                due = walk.taken + step * ranks + self._marks_every
                marks.append(_StepMark(step, walk.place, totals[:]))
                unseen.update(last)
            for rank, (entry, first, end) in deal.step(walk, step):
                totals[rank - deal.first] += border(entry, end) - border(entry, first)
                if mark:
                    if last.get(rank) != (entry, first):
                        totals[rank - deal.first] += mark
                    elif rank in unseen:
                        marks[-1].sums[rank - deal.first] -= mark
                    unseen.discard(rank)
                    last[rank] = entry, end
        return _EpochBytes(totals, marks)

    @property
    def order_digest(self) -> str:
        """SHA-256, in hex, of all inputs that determine the global batches of every epoch."""
        with self._lock:
            if not self._digest:
                self._digest = self._compute_digest()
            return self._digest

    def _compute_digest(self) -> str:
        whole = Shard()
        digests = Digests(self.entries, seed=None, shards=[whole], join=None)
        arranged = {
            "objects": digests.of(whole, len(self.entries)),
            "format": self.table.record_format,
            "global_batch": self.deal.global_batch,
            "remainder": self.deal.remainder,
        }
        if self.order.seed is not None:
            arranged |= {"seed": self.order.seed, "block": self.order.block}
        found = hashlib.sha256(b"penstock records 1\n" + json.dumps(arranged).encode() + b"\n")
        found.update(b"".join(b"%d\n" % records for records in self.table.counts if records))
        return found.hexdigest()


class RecordPlan(Plan):
    """Streams the records of some ranks: those of one rank FIFO, or of all of this host."""

    def __init__(self, shares: RecordShares, deal: Deal | None = None) -> None:
        """`deal`: of some of this host's ranks; default: all of them."""
        super().__init__(shares.entries)
        self.shares = shares
        self.deal = deal or shares.deal
        self._bytes = EpochCache[int]()
        """Bytes of the stream; another rank may be many epochs ahead, so `shares` may have forgotten them."""

    def __repr__(self) -> str:
        return f"<RecordPlan {self.entries}, {self.deal}>"

    def ranks(self, count: int) -> tuple[Plan, ...]:
        """Return the plans of this host's ranks. Raises ValueError unless there are `count`."""
        deal = self.deal
        if deal.end - deal.first != count:
            raise ValueError(f"the plan has {deal.end - deal.first} ranks, not {count}")
        ranks = range(deal.first, deal.end)
        return tuple(
            RecordPlan(self.shares, Deal(deal.global_batch, deal.ranks, rank, rank + 1, deal.remainder))
            for rank in ranks
        )

    @property
    def varies(self) -> bool:
        """Whether a rank's records differ from epoch to epoch, so that each epoch needs its own totals."""
        return self.shares.order.seed is not None

    @property
    def streams(self) -> bool:
        """Whether there is a record to stream."""
        return self.steps(0) > 0

    def total_bytes(self, epoch: int) -> int:
        """Return the length of the epoch's stream.

        If the plan `varies`, the first call for an epoch takes some microseconds per block and slice.
        """
        if not self.varies:
            epoch = 0
        total = self._bytes.get(epoch)
        if total is None:
            total = self._bytes.put(epoch, self._own(self.shares.sums(epoch).totals))
        return total

    def _own(self, by_rank: array[int]) -> int:
        """Return the sum of these ranks' numbers. `by_rank`: of all ranks of this host."""
        first = self.deal.first - self.shares.deal.first
        return sum(by_rank[first : first + self.deal.end - self.deal.first])

    def objects(self, epoch: int) -> int:  # noqa: ARG002 - every epoch has all
        """Return the number of objects of the order, those of other ranks too."""
        return len(self.entries)

    @property
    def counts_records(self) -> bool:
        """Whether `records` and `steps` return numbers."""
        return True

    def records(self, epoch: int) -> int:  # noqa: ARG002 - every epoch has as many
        """Return the number of records of these ranks in the epoch, repeated ones included."""
        return self.deal.records(self.shares.order.records)

    def steps(self, epoch: int) -> int:  # noqa: ARG002 - likewise
        """Return the number of global batches of the epoch."""
        return self.deal.steps(self.shares.order.records)

    def segments(self, epoch: int, first: int = 0, end: int | None = None) -> Iterator[Segment | Literal]:
        """Yield the epoch's byte ranges, in stream order. Raises ValueError for a part of the entries."""
        if first or end not in (None, self.known):
            raise ValueError("an order of records has no order of entries")
        return self._segments(Walk(self.shares.order, epoch), 0)

    def segments_near(self, epoch: int, offset: int) -> tuple[int, Iterator[Segment | Literal]]:
        """See `Plan.segments_near`. Takes some ten milliseconds, once the plan knows the epoch's length."""
        marks = self.shares.sums(epoch).marks
        after = bisect_right(marks, offset, key=lambda mark: self._own(mark.sums))
        if not after:
            return 0, self.segments(epoch)
        step, place, sums = marks[after - 1]
        return self._own(sums), self._segments(Walk(self.shares.order, epoch, place), step)

    def _segments(self, walk: Walk, step: int) -> Iterator[Segment | Literal]:
        """Yield the byte ranges of these ranks from a step on."""
        border, mark = self.shares.table.border, self.shares.table.mark
        runs = (run for _, run in self.deal.deal(walk, step))
        held: tuple[int, ObjectRef] | None = None
        for entry, start, stop in joined(runs):
            if held is None or held[0] != entry:
                held = entry, only_object(self.entries, entry)
            yield Segment(held[1], border(entry, start), border(entry, stop))
            if mark:
                yield Literal(mark)

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of all inputs that determine the streams of these ranks."""
        deal = self.deal
        text = f"penstock ranks 1\n{self.shares.order_digest} {deal.first} {deal.end} {deal.ranks}\n"
        return hashlib.sha256(text.encode()).hexdigest()

    def covers(self, digest: str, position: Position) -> bool:  # noqa: ARG002 - no digest is partial
        """Return whether a plan with `digest` is this one."""
        return digest == self.digest
