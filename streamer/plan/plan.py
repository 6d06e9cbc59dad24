"""A channel's plan: its entries, their arrangement, and the resulting streams.

    entries, in plan order ─ shuffle (per epoch) ─ shard (this host's, or one FIFO's) ─ wrap ─ segments

If delivery inflates or joins objects (`rewrites`), the stream's length is known only after delivery.

Keys, sizes and ETags are fixed once per job, so every epoch streams the same bytes or fails with an error
(contract §8-2). All hosts shuffle all entries in the same way, and then take their shards (contract §3.2).
An epoch's order is computed while it streams, and is never held in memory.

A plan in the listing's order may be *open*: it streams while its listing goes on (`streamer.plan.growth`).
Its length, its digest and the end of its epochs are unknown until the listing has ended.

Two plans with the same digest stream the same bytes in every epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from streamer.formats.recordio import header, padding
from streamer.plan.digest import Digests, parse_partial, partial_digest
from streamer.plan.entries import Entries
from streamer.plan.epoch_cache import EpochCache
from streamer.plan.parts import ObjectRef, Segment
from streamer.plan.shuffle import Permutation, Shard, lightest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from streamer.plan.growth import Growth
    from streamer.plan.position import Position
    from streamer.plan.strays import Strays
    from streamer.plan.uris import S3Uri


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A channel's settings for the order and form of its data."""

    wrap: bool = False
    """One RecordIO record per object or attribute (RecordWrapperType)."""
    seed: int | None = None
    """Shuffle every epoch, the first one too (ShuffleConfig.Seed); None keeps plan order."""
    shard: Shard = field(default_factory=Shard)
    inflate: bool = False
    """Objects are compressed, and delivery inflates them (CompressionType)."""
    join: str | None = None
    """How delivery joins the objects (`streamer.formats.transform`); None: they are not joined."""
    rows: Shard = field(default_factory=Shard)
    """Rows of a manifest that become entries, by count; the others cost no request. `shard` divides these."""

    @property
    def may_grow(self) -> bool:
        """Whether a plan of this arrangement can stream before all its entries are known."""
        return self.seed is None and (self.shard.count == 1 or self.shard.by == "count")

    def entries(self, *, objects_each: int = 1) -> Entries:
        """Return empty entries for a plan of this arrangement, with `objects_each` objects in each."""
        return Entries(wrap=self.wrap, inflate=self.inflate, objects_each=objects_each)


class _EpochTotals(NamedTuple):
    """Entries and bytes that this host streams in one epoch."""

    entries: int
    bytes: int


class Plan:
    """Decides which bytes one channel streams on one host."""

    steps: int | None = None
    """Global batches of an epoch; None if ranks do not share the plan by record."""
    padding = 0
    """Records at the end of an epoch that are padding."""
    workers, worker = 1, 0
    """Number of FIFOs of a rank, and the number of this one among them (`Ranks.Workers`)."""

    def __init__(
        self,
        entries: Entries,
        arrangement: Arrangement | None = None,
        *,
        digests: Digests | None = None,
        growth: Growth | None = None,
    ) -> None:
        """`entries`: made with the arrangement's `wrap` and `inflate`. `arrangement`: None keeps plan order.

        `digests`: digests of several plans, this one included. With `growth`, which extends `entries` in the
        order of the plan, it is open; the arrangement must allow that (`may_grow`). Without it the entries
        must not change any more.
        """
        arrangement = arrangement or Arrangement(wrap=entries.wrap, inflate=entries.inflate)
        if growth is not None and not arrangement.may_grow:
            raise ValueError("the order of this arrangement needs all entries")
        if (entries.wrap, entries.inflate) != (arrangement.wrap, arrangement.inflate):
            raise ValueError("the entries were made for another arrangement")
        self._arrangement = arrangement
        self.entries = entries
        self.growth = growth
        self.seed, self.shard = arrangement.seed, arrangement.shard
        self.join = arrangement.join
        """How delivery joins the objects; None: they are not joined."""
        self.base: S3Uri | None = None
        """Prefix that the channel's definition gives for all objects; None: it gives none."""
        self.strays: Strays | None = None
        """Objects of a listing that are probably no data; None: nothing looked for them."""
        self.epochs: int | None = None
        """Number of epochs that are streamed; None: as many as readers open."""
        self._totals = EpochCache[_EpochTotals]()
        if digests is None:
            digests = Digests(entries, seed=self.seed, shards=[self.shard], join=self.join)
            if growth is not None:
                growth.extend_digests(digests)
        self._digests = digests

    @classmethod
    def of(cls, objects: Iterable[ObjectRef], arrangement: Arrangement | None = None) -> Plan:
        """Plan one entry per object, in the order given."""
        arrangement = arrangement or Arrangement()
        entries = arrangement.entries()
        for ref in objects:
            entries.add(ref)
        return cls(entries, arrangement)

    def __repr__(self) -> str:
        return f"<Plan {self.entries}, seed {self.seed}, {self.shard}>"

    def ranks(self, count: int) -> tuple[Plan, ...]:
        """Divide this plan over `count` rank FIFOs (`Shard.rank`); return their plans.

        The plans share the entries, so they need no listing and almost no memory. Raises ValueError if the
        plan may grow and the rank FIFOs are balanced by bytes.
        """
        if self.growth is not None and self.shard.by == "bytes" and count > 1:
            raise ValueError("a balance by bytes needs all entries")
        shards = [self.shard.rank(index, count) for index in range(count)]
        digests = Digests(self.entries, seed=self.seed, shards=shards, join=self.join)
        if self.growth is not None:
            self.growth.extend_digests(digests)
        return tuple(
            Plan(self.entries, replace(self._arrangement, shard=shard), digests=digests, growth=self.growth)
            for shard in shards
        )

    def has_epoch(self, epoch: int) -> bool:
        """Return whether `epoch` is streamed: it is not past the last one."""
        return self.epochs is None or epoch < self.epochs

    @property
    def open(self) -> bool:
        """Whether the listing goes on, or has failed: further entries may exist."""
        return self.growth is not None and not self.growth.complete

    @property
    def known(self) -> int:
        """Number of entries, of all hosts, that may be streamed; all of them unless the plan is `open`."""
        return len(self.entries) if self.growth is None else self.growth.known

    @property
    def varies(self) -> bool:
        """Whether this host's entries differ from epoch to epoch, so that each epoch needs its own totals."""
        return self.seed is not None and self.shard.count > 1

    @property
    def inflate(self) -> bool:
        """Whether objects are inflated on delivery."""
        return self.entries.inflate

    @property
    def rewrites(self) -> bool:
        """Whether delivery changes the objects' bytes: the stream's length is unknown before its end."""
        return self.inflate or self.join is not None

    @property
    def one_archive(self) -> bool:
        """Whether an epoch is one archive or stream, with one end mark."""
        return self.join is not None

    @property
    def streams(self) -> bool:
        """Whether any epoch has bytes for this host. Raises ValueError if the plan is open."""
        if self.varies:
            return self.entries.total > 0 and self.shard.index < len(self.entries)
        return self.total_bytes(0) > 0

    def order(self, epoch: int, first: int = 0, end: int | None = None) -> Iterator[int]:
        """Return the indices of this host's entries in `epoch`, in stream order.

        `first`, `end`: only those among the entries from `first` up to `end`, for a plan that `may_grow`.
        Default: all that are known.
        """
        shard, count = self.shard, self.known if end is None else end
        positions = self._positions(first, count)
        shuffled: Iterable[int] = positions
        if self.seed is not None:
            shuffled = Permutation(count, seed=self.seed, epoch=epoch).over(positions)
        if shard.by == "bytes" and shard.count > 1:
            return lightest(shuffled, self.entries.sizes, shard)
        return iter(shuffled)

    def _positions(self, first: int, end: int) -> range:
        """Return this host's positions of the order from `first` up to `end`; by bytes, all of them."""
        if self.shard.by == "bytes":
            return range(first, end)
        index, step = self.shard.index, self.shard.count
        return range(first + (index - first) % step, end, step)

    def _epoch_totals(self, epoch: int) -> _EpochTotals:
        if self.open:
            raise ValueError("the totals of an open plan are unknown")
        return self._totals.of(epoch if self.varies else 0, partial(self._total_up, epoch))

    def _total_up(self, epoch: int) -> _EpochTotals:
        entries, sizes = self.entries, self.entries.sizes
        if self.shard.count == 1:
            return _EpochTotals(len(entries), entries.total)
        if self.seed is None and self.shard.by == "count":
            dealt = sizes[self.shard.index :: self.shard.count]
            return _EpochTotals(len(dealt), sum(dealt))
        number = total = 0
        for index in self.order(epoch):
            number += 1
            total += sizes[index]
        return _EpochTotals(number, total)

    def total_bytes(self, epoch: int) -> int:
        """Return the bytes of the epoch's segments; unless the plan `rewrites`, also the stream's length.

        If the plan `varies`, the first call for an epoch takes some microseconds per entry. Raises ValueError
        if the plan is open.
        """
        return self._epoch_totals(epoch).bytes

    def known_bytes(self, epoch: int) -> int | None:
        """Return the same as `total_bytes`; None if the plan is open."""
        return None if self.open else self.total_bytes(epoch)

    def objects(self, epoch: int) -> int:
        """Return the number of objects of the epoch, empty ones included; if open, of those known."""
        entries = len(self._positions(0, self.known)) if self.open else self._epoch_totals(epoch).entries
        return entries * self.entries.objects_each

    @property
    def framed(self) -> bool:
        """Whether each object or attribute becomes one record (RecordWrapperType)."""
        return self.entries.wrap

    def records(self, epoch: int) -> int | None:
        """Return the number of records of the epoch; None if that is unknown."""
        if not self.framed:
            return None
        entries = self._epoch_totals(epoch).entries
        return entries and entries * len(self.entries.items(0))

    @property
    def record_order(self) -> Mapping[str, Any] | None:
        """Digest of the order of records and its inputs; None if ranks do not share the plan by record."""
        return None

    def refs(self, epoch: int) -> Iterator[ObjectRef]:
        """Yield the epoch's objects, in stream order."""
        for index in self.order(epoch):
            for item in self.entries.items(index):
                if isinstance(item, ObjectRef):
                    yield item

    def segments(self, epoch: int, first: int = 0, end: int | None = None) -> Iterator[Segment | bytes]:
        """Yield the epoch's segments, in stream order; none is empty. `first`, `end`: as for `order`."""
        for index in self.order(epoch, first, end):
            yield from self._segments_of(index)

    def _segments_of(self, index: int) -> Iterator[Segment | bytes]:
        """Yield the segments of one entry."""
        for item in self.entries.items(index):
            size = item.size if isinstance(item, ObjectRef) else len(item)
            wrap = self.entries.framed_here(item)
            if wrap:
                yield header(size)
            if size:
                yield Segment(item, 0, size) if isinstance(item, ObjectRef) else item
            if wrap and size % 4:
                yield padding(size)

    def segments_near(self, epoch: int, offset: int) -> tuple[int, Iterator[Segment | bytes]]:  # noqa: ARG002 - see `RecordPlan`
        """Return an offset of the stream, at most `offset`, and the segments from there on.

        Raises ValueError if the plan is open.
        """
        if self.open:
            raise ValueError("an open plan has no last segment")
        return 0, self.segments(epoch)

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of all inputs that determine the streams (`streamer.plan.digest`).

        If the plan is open, the partial digest over the known entries. The first call takes about two
        microseconds per entry, for all rank FIFOs together.
        """
        digest = self._digests.of(self.shard, self.known)
        return partial_digest(self.known, digest) if self.open else digest

    def covers(self, digest: str, position: Position) -> bool:
        """Return whether the bytes before `position` in a plan with `digest` are those of this plan.

        So if the digests are equal, and if `digest` is a partial one of this plan's first entries and the
        position lies in these, in the first epoch. After the first epoch, and if the plan `rewrites`, the
        partial digest must have all entries. Takes about two microseconds per entry for a partial digest.
        """
        partial = parse_partial(digest)
        if partial is None or self.open:
            return digest == self.digest
        count, due = partial
        entries = self.entries
        if count > len(entries):
            return False
        digests = Digests(entries, seed=self.seed, shards=[self.shard], join=self.join)
        if digests.of(self.shard, count) != due:
            return False
        if count == len(entries):
            return True
        if self.rewrites or position.epoch:
            return False
        return position.offset <= sum(entries.sizes[index] for index in self.order(0, 0, count))
