"""The plan of ranks that share a channel by record: the byte ranges of their records, in order.

    record order ─ deal ─▶ runs of records ─ RecordTable ─▶ byte ranges ─▶ parts, as of any plan

`RecordTable` has the offsets of all records. Of tar each run of adjacent samples is an archive, with its end
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
from typing import TYPE_CHECKING, Any, NamedTuple

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
    from streamer.plan.record_order import Order, WalkPosition
    from streamer.plan.record_table import RecordTable
    from streamer.plan.segments import ObjectRef

POSITIONS_EVERY = 1 << 13
"""Runs of the order and slices of ranks between two stored positions: a resume walks over so many in some ten
milliseconds."""


class StepPosition(NamedTuple):
    """Start of a step, at which a walk over the order may start."""

    step: int
    walk: WalkPosition
    sums: array[int]
    """Bytes of each rank of this host before the step; without the end mark of a run that goes on in it."""


class _EpochBytes(NamedTuple):
    """The bytes of one epoch."""

    totals: array[int]
    """Bytes of each rank of this host."""
    positions: list[StepPosition]
    """Steps at which the walk of a resume may start."""


class HostRanks:
    """The ranks of one channel on this host: objects, order, deal, and the totals of every rank."""

    def __init__(
        self,
        entries: Entries,
        table: RecordTable,
        order: Order,
        deal: Deal,
        *,
        positions_every: int = POSITIONS_EVERY,
    ) -> None:
        """`deal`: of all ranks of this host. Raises ConfigError if no rank would have a step."""
        self.entries = entries
        self.table = table
        self.order = order
        self.deal = deal
        self._positions_every = positions_every
        self._sums = EpochCache[_EpochBytes]()
        self._described: dict[str, Any] | None = None
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
        deal, border, end_mark_bytes = self.deal, self.table.border, len(self.table.end_mark)
        totals = array("Q", bytes(8 * (deal.end - deal.first)))
        positions: list[StepPosition] = []
        walk, due, ranks = Walk(self.order, epoch), self._positions_every, deal.end - deal.first
        last: dict[int, tuple[int, int]] = {}
        """Entry and end of the last run of each rank."""
        unseen: set[int] = set()
        """Ranks without a run since the last stored position."""
        for step in range(deal.steps(self.order.records)):
            if walk.taken + step * ranks >= due:
                due = walk.taken + step * ranks + self._positions_every
                positions.append(StepPosition(step, walk.position, totals[:]))
                unseen.update(last)
            for rank, (entry, first, end) in deal.step(walk, step):
                totals[rank - deal.first] += border(entry, end) - border(entry, first)
                if end_mark_bytes:
                    if last.get(rank) != (entry, first):
                        totals[rank - deal.first] += end_mark_bytes
                    elif rank in unseen:
                        positions[-1].sums[rank - deal.first] -= end_mark_bytes
                    unseen.discard(rank)
                    last[rank] = entry, end
        return _EpochBytes(totals, positions)

    @property
    def order_digest(self) -> str:
        """SHA-256, in hex, of all inputs that determine the global batches of every epoch."""
        return str(self.described_order["digest"])

    @property
    def described_order(self) -> dict[str, Any]:
        """The digest of the order, and its inputs but the records of each object."""
        with self._lock:
            if self._described is None:
                self._described = self._describe()
            return self._described

    def _describe(self) -> dict[str, Any]:
        whole = Shard()
        digests = Digests(self.entries, seed=None, shards=[whole], join=None)
        arranged: dict[str, Any] = {
            "objects": digests.of(whole, len(self.entries)),
            "format": self.table.record_format,
            "global_batch": self.deal.global_batch,
            "remainder": self.deal.remainder,
        } | self.order.arranged
        digest = hashlib.sha256(b"penstock records 1\n" + json.dumps(arranged).encode() + b"\n")
        digest.update(b"".join(self.order.lines()))
        return {"digest": digest.hexdigest()} | arranged


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
    def varies(self) -> bool:
        """Whether a rank's records differ from epoch to epoch, so that each epoch needs its own totals."""
        return self.host_ranks.order.seed is not None

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
            total = self._bytes.put(epoch, self.own(self.host_ranks.sums(epoch).totals))
        return total

    def own(self, by_rank: array[int]) -> int:
        """Return the sum of these ranks' numbers. `by_rank`: of all ranks of this host."""
        first = self.deal.first - self.host_ranks.deal.first
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
        return self.deal.records(self.host_ranks.order.records)

    def steps(self, epoch: int) -> int:  # noqa: ARG002 - likewise
        """Return the number of global batches of the epoch."""
        return self.deal.steps(self.host_ranks.order.records)

    def segments(self, epoch: int, first: int = 0, end: int | None = None) -> Iterator[Segment | Literal]:
        """Yield the epoch's byte ranges, in stream order. Raises ValueError for a part of the entries."""
        if first or end not in (None, self.known):
            raise ValueError("an order of records has no order of entries")
        return self._segments(Walk(self.host_ranks.order, epoch), 0)

    def segments_near(self, epoch: int, offset: int) -> tuple[int, Iterator[Segment | Literal]]:
        """See `Plan.segments_near`. Takes some ten milliseconds, once the plan knows the epoch's length."""
        positions = self.host_ranks.sums(epoch).positions
        after = bisect_right(positions, offset, key=lambda position: self.own(position.sums))
        if not after:
            return 0, self.segments(epoch)
        step, start, sums = positions[after - 1]
        return self.own(sums), self._segments(Walk(self.host_ranks.order, epoch, start), step)

    @property
    def record_order(self) -> dict[str, Any]:
        """See `HostRanks.described_order`."""
        return self.host_ranks.described_order

    def _segments(self, walk: Walk, step: int) -> Iterator[Segment | Literal]:
        """Yield the byte ranges of these ranks from a step on."""
        border, end_mark = self.host_ranks.table.border, self.host_ranks.table.end_mark
        runs = (run for _, run in self.deal.deal(walk, step))
        current: tuple[int, ObjectRef] | None = None
        for entry, start, stop in joined(runs):
            if current is None or current[0] != entry:
                current = entry, only_object(self.entries, entry)
            yield Segment(current[1], border(entry, start), border(entry, stop))
            if end_mark:
                yield Literal(end_mark)

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of all inputs that determine the streams of these ranks."""
        deal = self.deal
        text = f"penstock ranks 1\n{self.host_ranks.order_digest} {deal.first} {deal.end} {deal.ranks}\n"
        return hashlib.sha256(text.encode()).hexdigest()

    def covers(self, digest: str, position: Position) -> bool:  # noqa: ARG002 - no digest is partial
        """Return whether a plan with `digest` is this one."""
        return digest == self.digest
