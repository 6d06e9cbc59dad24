"""The plan of ranks that share a channel by record: the byte ranges of their records, in order.

    order, deal, RecordTable ─▶ pieces ─ joined ─▶ byte ranges ─▶ parts, as of any plan
                                  └─ one walk ─▶ bytes of every rank of this host, checkpoints on the way

`RecordTable` has the offsets of all records. If objects are the records, a byte range is a whole entry with
its frames. Of tar each run of adjacent samples is an archive in the stream
of a rank, with its end mark; with `Join` a whole epoch is one. A stream of several ranks has records alone,
so that its requests are large; `streamer.plan.dealing` adds the end marks.

The plans of one host's ranks share the sums of its epochs: the walk takes seconds for millions of records, so
the last few are cached. Digests (docs/explanation/record-order.md): `order_digest` is the same on all hosts
and at any number of ranks, `digest` also covers the ranks and `Join`.
"""

from __future__ import annotations

import hashlib
import json
import threading
from bisect import bisect_right
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from streamer.errors import ConfigError
from streamer.plan.digest import Digests
from streamer.plan.epoch_cache import EpochCache
from streamer.plan.order_columns import sum_columns
from streamer.plan.parts import Segment
from streamer.plan.pieces import START, OrderSums, Walk, joined, sum_order
from streamer.plan.plan import Plan
from streamer.plan.record_table import EndMarks, only_object
from streamer.plan.shuffle import Shard
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from streamer.plan.entries import Entries
    from streamer.plan.mixed_order import Order
    from streamer.plan.parts import ObjectRef
    from streamer.plan.pieces import Checkpoint, Piece
    from streamer.plan.position import Position
    from streamer.plan.record_order import Deal
    from streamer.plan.record_table import RecordTable

CHECKPOINT_EVERY = 1 << 13
"""Runs of the order and slices of ranks between two checkpoints: a resume walks over so many in some ten
milliseconds."""

MOST_FILLED = 100_000
"""Records that may always fill up an epoch; more are at most as many as the epoch has. So sums and walks over
the order take at most twice as long as without, or a second or two."""


class RecordPlan(Plan):
    """Streams the records of some ranks: those of one rank FIFO, or of all of this host."""

    def __init__(
        self,
        entries: Entries,
        table: RecordTable,
        order: Order,
        deal: Deal,
        *,
        every: int = CHECKPOINT_EVERY,
        host: RecordPlan | None = None,
    ) -> None:
        """`host`: the plan of all ranks of this host; None: this one. `every`: as for `sum_order`.

        Raises ConfigError if no rank would have a step, or if a step would repeat the order very often.
        """
        super().__init__(entries)
        self.table = table
        self.global_order = order
        self.deal = deal
        self._host = host
        dealt, worker = self.host.deal, (deal.worker or 0) - (self.host.deal.worker or 0)
        rank = deal.first - dealt.first
        self.number = -1 if deal.fifos > 1 else worker * (dealt.end - dealt.first) + rank
        """Number of this FIFO among those of this host; -1 for the stream of several."""
        self._every = every
        self._sums = EpochCache[OrderSums]()
        self._bytes = EpochCache[int]()
        """Bytes of the stream. Not those of `host`: another rank may be many epochs ahead."""
        self._described: dict[str, Any] | None = None
        self._lock = threading.Lock()
        """Held by the thread that computes the digest, so that others do not compute it too."""
        if 0 < order.records < deal.global_batch and deal.remainder == "drop":
            raise ConfigError(
                f"the channel has {counted(order.records, 'record')}, fewer than one global batch of "
                f"{deal.global_batch}; lower GlobalBatch, or set Remainder: repeat"
            )
        self.records_each = len(entries.items(0)) if entries.wrap and len(entries) else 1
        """Records in the stream for each one of the order: the attributes of a manifest's line, else 1."""
        self.steps: int = deal.steps(order.records)
        self.padding = deal.padding(order.records) * self.records_each
        self.workers, self.worker = deal.stride, deal.worker or 0
        filled = self.steps * deal.global_batch - order.records
        if filled > (most := max(order.records, MOST_FILLED)):
            raise ConfigError(
                f"the channel has {counted(order.records, 'record')}, and Remainder: {deal.remainder} would "
                f"fill a global batch of {deal.global_batch} with {filled} more; lower GlobalBatch, "
                f"to a global batch of at most {order.records + most}"
            )

    @property
    def host(self) -> RecordPlan:
        """The plan of all ranks of this host."""
        return self._host or self

    def __repr__(self) -> str:
        return f"<RecordPlan {self.entries}, {self.deal}>"

    def ranks(self, count: int) -> tuple[RecordPlan, ...]:
        """Return the plans of this host's FIFOs. Raises ValueError unless there are `count`."""
        deal = self.deal
        if deal.fifos != count:
            raise ValueError(f"the plan has {deal.fifos} FIFOs, not {count}")
        deals = [
            replace(deal, first=rank, end=rank + 1, worker=worker)
            for worker in range(deal.workers)
            for rank in range(deal.first, deal.end)
        ]
        return tuple(
            RecordPlan(self.entries, self.table, self.global_order, each, host=self.host) for each in deals
        )

    @property
    def end_marks(self) -> EndMarks:
        """End marks in this stream; it has none if it is of several FIFOs."""
        return EndMarks() if self.deal.fifos > 1 else self.table.end_marks

    @property
    def one_archive(self) -> bool:
        return bool(self.table.end_marks.epoch)

    @property
    def varies(self) -> bool:
        """Whether a rank's records differ from epoch to epoch, so that each epoch needs its own totals."""
        return self.global_order.varies

    @property
    def streams(self) -> bool:
        """Whether there is a record to stream: a worker may have no step."""
        return self.records(0) > 0

    def sums(self, epoch: int) -> OrderSums:
        """Return the bytes that the ranks of this host have in the epoch, and before some steps of it."""
        if self._host is not None:
            return self._host.sums(epoch)
        return self._sums.of(self.global_order.key(epoch), partial(self._sum_up, epoch))

    def _sum_up(self, epoch: int) -> OrderSums:
        order, table, deal, every = self.global_order, self.table, self.deal, self._every
        return sum_columns(order, epoch, table=table, deal=deal, every=every) or sum_order(
            order, epoch, entries=self.entries, table=table, deal=deal, every=every
        )

    def own(self, sums: Sequence[int]) -> int:
        """Return the bytes of this stream. `sums`: of each FIFO of this host, and of all of them."""
        return sums[self.number]

    def checkpoint(self, epoch: int, offset: int) -> Checkpoint:
        """Return the last checkpoint of the epoch that is not after this offset of the stream."""
        found = self.sums(epoch).checkpoints
        return found[bisect_right(found, offset, key=lambda each: self.own(each.sums)) - 1]

    def total_bytes(self, epoch: int) -> int:
        """Return the length of the epoch's stream.

        If the plan `varies`, the first call for an epoch takes some microseconds per block and slice.
        """
        return self._bytes.of(self.global_order.key(epoch), lambda: self.own(self.sums(epoch).totals))

    def objects(self, epoch: int) -> int:  # noqa: ARG002 - every epoch has all
        """Return the number of objects of the order, those of other ranks too."""
        return len(self.entries)

    def records(self, epoch: int) -> int:  # noqa: ARG002 - every epoch has as many
        """Return the number of records in the epoch's streams of these ranks, repeated ones included."""
        return self.deal.records(self.global_order.records) * self.records_each

    def pieces(self, epoch: int, at: Checkpoint = START) -> Iterator[Piece]:
        """Yield the pieces of the epoch from a checkpoint on, each with its rank among those of this plan."""
        return iter(self._walk(epoch, at, together=False))

    def ranges(self, epoch: int, at: Checkpoint = START) -> Iterator[Piece]:
        """Yield the same as byte ranges of the one stream: of rank 0, as long as they can be."""
        return joined(self._walk(epoch, at, together=True))

    def _walk(self, epoch: int, at: Checkpoint, *, together: bool) -> Walk:
        order, table, deal = self.global_order, self.table, self.deal
        return Walk(order, epoch, entries=self.entries, table=table, deal=deal, at=at, together=together)

    def segments(self, epoch: int, first: int = 0, end: int | None = None) -> Iterator[Segment | bytes]:
        """Yield the epoch's byte ranges, in stream order. Raises ValueError for a part of the entries."""
        if first or end not in (None, self.known):
            raise ValueError("an order of records has no order of entries")
        return self._segments(epoch, START)

    def segments_near(self, epoch: int, offset: int) -> tuple[int, Iterator[Segment | bytes]]:
        """See `Plan.segments_near`. Takes some ten milliseconds, once the plan knows the epoch's length."""
        at = self.checkpoint(epoch, offset)
        return self.own(at.sums), self._segments(epoch, at)

    def _segments(self, epoch: int, at: Checkpoint) -> Iterator[Segment | bytes]:
        run_mark, epoch_mark = self.end_marks
        current: tuple[int, ObjectRef] | None = None
        for _, entry, _, _, start, stop in self.ranges(epoch, at):
            if self.entries.wrap:
                yield from self._segments_of(entry)
                continue
            if current is None or current[0] != entry:
                current = entry, only_object(self.entries, entry)
            yield Segment(current[1], start, stop)
            if run_mark:
                yield run_mark
        if epoch_mark and (current is not None or (at.sums and self.own(at.sums))):
            yield epoch_mark

    @property
    def order_digest(self) -> str:
        """SHA-256, in hex, of all inputs that determine the global batches of every epoch."""
        return str(self.record_order["digest"])

    @property
    def record_order(self) -> dict[str, Any]:
        """The digest of the order, and its inputs but the records of each object."""
        if self._host is not None:
            return self._host.record_order
        if self._described is None:
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
        } | self.global_order.arranged
        digest = hashlib.sha256(b"penstock records 1\n" + json.dumps(arranged).encode() + b"\n")
        digest.update(b"".join(self.global_order.lines()))
        return {"digest": digest.hexdigest()} | arranged

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of all inputs that determine the streams of these ranks."""
        deal = self.deal
        join = " tar" if self.one_archive else ""
        worker = "" if deal.stride == 1 else f" {deal.workers} {deal.worker}"
        ranks = f"{self.order_digest} {deal.first} {deal.end} {deal.ranks}{worker}{join}"
        return hashlib.sha256(f"penstock ranks 1\n{ranks}\n".encode()).hexdigest()

    def covers(self, digest: str, position: Position) -> bool:  # noqa: ARG002 - an index is of whole plans
        return digest == self.digest
