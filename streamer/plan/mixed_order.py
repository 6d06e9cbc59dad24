"""The order of the records of several sources that are mixed by weights. Pure.

    source 0: RecordOrder ─ pass after pass ─┐
    source 1: RecordOrder ─ pass after pass ─┴─ next_source, or Picks ─▶ runs of one order ─▶ deal

Each source has a shuffled order of its own, and goes through it in passes: with `Until: all` the smaller ones
several times in an epoch, each time in another order. The number of records of a source in an epoch depends
on the weights and on the numbers of records alone, so every epoch is equally long.

The weights may change at steps (`Mix.then`). The order before such a step is as without the change, and so is
the length of the epoch: a source of which more is taken than before begins again.

The order is walked from its start, at two to four microseconds a run. States of the walk are kept every
`_STATES_EVERY` runs, so that a resume walks over few. docs/explanation/record-order.md has an example.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from streamer.errors import ConfigError
from streamer.plan.epoch_cache import EpochCache
from streamer.plan.mix import Picks, next_source
from streamer.plan.record_order import BLOCK, RecordOrder, Run
from streamer.plan.record_selection import RecordSelection, select_records
from streamer.plan.record_table import only_object
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from streamer.plan.entries import Entries
    from streamer.plan.mix import Mix
    from streamer.plan.split import Split
    from streamer.plan.uris import S3Uri

_STATES_EVERY = 1 << 12
MOST_REPEATED = 100
"""Most records of an epoch, in multiples of those that the sources have. More are a mistake in the weights,
and the bytes of such an epoch are summed up for hours."""


@dataclass(frozen=True, slots=True)
class MixedSource:
    """One source of a mixed order."""

    order: RecordOrder
    """Its own order; entries count from `first`."""
    first: int
    """Number of its first object in the plan."""
    records: int
    """Records that it has in an epoch, repeated ones included."""

    @property
    def passes(self) -> int:
        """Passes through the source's order that an epoch begins with the first weights."""
        return -(-self.records // self.order.records)

    def runs(self, epoch: int, turn: int, first: int = 0) -> Iterator[Run]:
        """Return the runs of pass `turn` of the epoch, from number `first` on."""
        further = turn - self.passes
        number = epoch * self.passes + turn if further < 0 else (further + 1 << 32) + epoch
        return self.order.runs(number, first)


class _CursorState(NamedTuple):
    """Position of a source's cursor."""

    taken: int = 0
    """Records taken in this epoch."""
    run: int = 0
    """Runs ended in this pass."""
    record: int = 0
    """Records taken of the present run."""


class _Cursor:
    """One walk through the passes of a source in one epoch."""

    def __init__(self, source: MixedSource, epoch: int, state: _CursorState) -> None:
        self._source = source
        self._epoch = epoch
        self.taken, self._number, self._record = state
        self.limit = self.taken
        """Records that may be taken in this epoch."""
        self._runs = source.runs(epoch, self.taken // source.order.records, self._number)
        self._run = next(self._runs)

    @property
    def state(self) -> _CursorState:
        return _CursorState(self.taken, self._number, self._record)

    @property
    def left(self) -> int:
        """Records left of the present run, of those that may be taken."""
        _, first, end = self._run
        return min(end - first - self._record, self.limit - self.taken)

    def take(self, most: int) -> Run:
        """Return the next records, at most so many; none is left at the end alone."""
        entry, start, last = self._run
        first = start + self._record
        end = first + min(most, self.left)
        self.taken += end - first
        self._record = end - start
        if end == last:
            self._number += 1
            self._record = 0
            passed, rest = divmod(self.taken, self._source.order.records)
            if not rest:  # another pass begins
                self._number, self._runs = 0, self._source.runs(self._epoch, passed)
            self._run = next(self._runs)
        return Run(self._source.first + entry, first, end)


class _WalkState(NamedTuple):
    """A state of the walk over one epoch."""

    runs: int
    """Runs before it."""
    cursors: tuple[_CursorState, ...]
    phase: int
    """Changes of the weights that the walk has passed in this epoch."""
    begun: tuple[int, ...]
    """Records of each source that were taken before the last of these."""

    @property
    def position(self) -> int:
        """Records before it."""
        return sum(cursor.taken for cursor in self.cursors)


Phases = tuple[tuple[int, tuple[int, ...]], ...]
"""The weights of an epoch, each with the position of its first record."""


class MixedOrder:
    """The order of the records of several sources: it has what a `RecordOrder` has."""

    def __init__(
        self,
        entries: Entries,
        counts: Sequence[int],
        uris: Sequence[S3Uri],
        mix: Mix,
        *,
        seed: int | None = None,
        block: int = BLOCK,
        split: Split | None = None,
        batch: int = 0,
    ) -> None:
        """`uris`: prefixes of the sources, in plan order. `split`: of the blocks of every source.

        `batch`: records of a step, which changes of the weights name. Raises ConfigError for a source without
        a record, and for a change at a step that no epoch has.
        """
        self.seed = seed
        self.mix = mix
        self._block = block
        self._batch = batch
        used = {mix.weights, *(change.weights for change in mix.then)}
        self._picks = {weights: Picks(weights) for weights in used}
        self._counts = counts
        self._states = EpochCache[list[_WalkState]]()
        self._lock = threading.Lock()
        """Held while a state is added."""
        orders: list[RecordOrder] = []
        firsts: list[int] = []
        first = 0
        for uri in uris:
            end = first + bisect_left(range(first, len(entries)), 1, key=partial(_outside, entries, uri))
            part, sizes, selected = counts[first:end], entries.sizes[first:end], None
            if split is not None:
                selection = RecordSelection(split)
                selected = select_records(entries, part, sizes, selection, block=block, first=first)
            order = RecordOrder(part, sizes, seed=seed, block=block, selected=selected, in_blocks=True)
            if not order.records:
                raise ConfigError(
                    f"Mix has no record to take from {uri}; remove this prefix and its weight, or select "
                    "some of its objects by Include, Exclude, Split and Limit"
                )
            orders.append(order)
            firsts.append(first)
            first = end
        have = [order.records for order in orders]
        records = self._picks[mix.weights].epoch(have, mix.until)
        if sum(records) > MOST_REPEATED * sum(have):
            slowest = max(range(len(have)), key=lambda source: have[source] / mix.weights[source])
            raise ConfigError(
                f"Mix with Until: all makes an epoch of {sum(records)} records of {sum(have)}, because "
                f"{uris[slowest]} is read last; raise its weight, or use Until: first"
            )
        self.sources = tuple(map(MixedSource, orders, firsts, records))
        self.records = sum(records)
        """Number of records of an epoch."""
        for change in mix.then:
            if change.step * batch >= self.records:
                raise ConfigError(
                    f"Mix has a change at step {change.step} of epoch {change.epoch}, and an epoch has "
                    f"{counted(-(-self.records // batch), 'step')}; write a step of the epoch, or Step: 0 of "
                    "the next one"
                )

    @property
    def arranged(self) -> dict[str, Any]:
        lines = [sum(1 for _ in source.order.lines()) for source in self.sources]
        mix = self.mix
        mixed: dict[str, Any] = {
            "objects": lines,
            "weights": list(mix.weights),
            "until": mix.until,
            "by": mix.by,
        }
        if mix.then:
            mixed["then"] = [[change.epoch, change.step, list(change.weights)] for change in mix.then]
        seeded = {} if self.seed is None else {"seed": self.seed}
        return seeded | {"block": self._block} | self.sources[0].order.arranged | {"mix": mixed}

    def lines(self) -> Iterable[bytes]:
        for source in self.sources:
            yield from source.order.lines()

    def _phases(self, epoch: int) -> Phases:
        then = self.mix.then
        before = [change.weights for change in then if (change.epoch, change.step) <= (epoch, 0)]
        inside = (change for change in then if change.epoch == epoch and change.step)
        later = ((change.step * self._batch, change.weights) for change in inside)
        return (0, before[-1] if before else self.mix.weights), *later

    @property
    def varies(self) -> bool:
        return self.seed is not None or bool(self.mix.then)

    def key(self, epoch: int) -> Hashable:
        return None if self.seed is None else epoch, self._phases(epoch)

    def runs(self, epoch: int, first: int = 0) -> Iterator[Run]:
        states = self._states.of(self.key(epoch), list)
        after = bisect_right(states, first, key=lambda state: state.runs)
        every = len(self.sources)
        start = _WalkState(0, (_CursorState(),) * every, 0, (0,) * every)
        if after:
            start = states[after - 1]
        return islice(self._walk(epoch, start), first - start.runs, None)

    def _walk(self, epoch: int, start: _WalkState) -> Iterator[Run]:
        both = zip(self.sources, start.cursors, strict=True)
        cursors = [_Cursor(source, epoch, state) for source, state in both]
        decide = _by_block if self.mix.by == "block" else _by_record
        phases, begun = self._phases(epoch), start.begun
        position, passed, keep_at = start.position, start.runs, start.runs + _STATES_EVERY
        for phase in range(start.phase, len(phases)):
            first, weights = phases[phase]
            end = phases[phase + 1][0] if phase + 1 < len(phases) else self.records
            picks = self._picks[weights]
            for number, (cursor, before) in enumerate(zip(cursors, begun, strict=True)):
                cursor.limit = before + picks.before(number, self.records - first)
            for source, records in decide(cursors, begun, picks):
                if passed >= keep_at:
                    states = tuple(cursor.state for cursor in cursors)
                    self._keep(epoch, _WalkState(passed, states, phase, begun))
                    keep_at = passed + _STATES_EVERY
                left, take = min(records, end - position), cursors[source].take
                position += left
                while left:
                    run = take(left)
                    left -= run.end - run.first
                    passed += 1
                    yield run
                if position == end:
                    break
            begun = tuple(cursor.taken for cursor in cursors)

    def _keep(self, epoch: int, state: _WalkState) -> None:
        """Keep a state of the walk, unless a later one is kept."""
        with self._lock:
            states = self._states.of(self.key(epoch), list)
            if not states or states[-1].runs < state.runs:
                states.append(state)


def _by_block(cursors: Sequence[_Cursor], begun: Sequence[int], picks: Picks) -> Iterator[tuple[int, int]]:
    """Yield the source of each block, and the records of the block. The caller takes them, or ends.

    `begun`: records of each source that were taken before these weights.
    """
    taken = [cursor.taken - before for cursor, before in zip(cursors, begun, strict=True)]
    blocks = [cursor.left for cursor in cursors]
    while any(blocks):
        source = next_source(taken, blocks, picks.weights, picks.period)
        yield source, blocks[source]
        taken[source] += blocks[source]
        blocks[source] = cursors[source].left


def _by_record(cursors: Sequence[_Cursor], begun: Sequence[int], picks: Picks) -> Iterator[tuple[int, int]]:
    """Yield sources, each with the number of records that come from it in turn. See `_by_block`."""
    position = sum(cursor.taken for cursor in cursors) - sum(begun)
    while True:
        first, rest = position - position % picks.period, position % picks.period
        group = bisect_right(picks.starts, rest) - 1
        for number in range(group, len(picks.starts)):
            end = picks.starts[number + 1] if number + 1 < len(picks.starts) else picks.period
            yield picks.sources[number], first + end - position
            position = first + end


def _outside(entries: Entries, uri: S3Uri, entry: int) -> bool:
    """Return whether the object of an entry is not below the prefix."""
    ref = only_object(entries, entry)
    return ref.bucket != uri.bucket or not ref.key.startswith(uri.key)


Order = RecordOrder | MixedOrder
"""The order of all records of a channel, for every epoch."""
