"""Divides the stream of several FIFOs, in which each byte comes once, over the FIFOs. Pure.

    epoch's stream of two ranks       ── step 0 ─────────┬── step 1 ─────────┬─…
    turns, of one worker each         FIFO 0 │ FIFO 1    │ FIFO 0 │ FIFO 1   │ …
    turns, of two workers             FIFO 0 │ FIFO 1    │ FIFO 2 │ FIFO 3   │ …
    shares of tar samples             FIFO 0, mark │ FIFO 1, mark, more, mark │ …

The turns are the FIFO of each run of bytes and its length, in stream order. The end mark of a run of tar
samples is a turn that is not in the stream: it follows the run at once, so that its last sample is whole
before the stream goes on with another FIFO. Joined samples (`Join`) have no stream of several FIFOs: a
sample would be whole when the FIFO's next one begins, after the other FIFOs' slices. Turns are computed
while the stream is delivered (`streamer.plan.pieces`); for end marks the pieces of `Workers` steps are held.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from itertools import chain
from operator import gt
from typing import TYPE_CHECKING, NamedTuple

from streamer.plan.pieces import START
from streamer.plan.record_plan import RecordPlan

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from streamer.plan.pieces import Piece
    from streamer.plan.plan import Plan


class Turn(NamedTuple):
    """Consecutive bytes of a stream that one rank gets, or the end mark after them."""

    rank: int
    """Number of the rank among those of the stream."""
    size: int
    mark: bool = False
    """Whether this is an end mark: zeros that the stream has not."""


@dataclass(frozen=True, slots=True)
class DealtEpoch:
    """The turns of one epoch from some point of its stream on."""

    offset: int
    """Offset of that point in the stream."""
    before: list[int]
    """Bytes of each rank before that point, end marks included."""
    turns: Iterator[Turn]


def deal_stream(plan: Plan, epoch: int, offsets: Sequence[int]) -> DealtEpoch:
    """Return the turns of the epoch from the first byte that any rank lacks.

    `offsets`: bytes that each rank has already; with one of them, the whole stream is of one rank. Takes some
    ten milliseconds for offsets after 0, once the plan knows the epoch's length. Raises ValueError for other
    ranks than those of the plan.
    """
    if len(offsets) == 1:
        left = plan.total_bytes(epoch) - offsets[0]
        return DealtEpoch(offsets[0], [offsets[0]], iter([Turn(0, left)] if left else []))
    if not isinstance(plan, RecordPlan) or len(offsets) != plan.deal.fifos:
        raise ValueError(f"no stream of {len(offsets)} ranks: {plan!r}")
    *before, offset = [0] * (len(offsets) + 1)
    at = START
    if any(offsets):
        checkpoints = plan.sums(epoch).checkpoints
        at = checkpoints[bisect_left(checkpoints, 1, key=lambda at: any(map(gt, at.sums, offsets))) - 1]
        *before, offset = at.sums
    pieces, mark = plan.pieces(epoch, at), len(plan.table.end_marks.run)
    return _after(offset, before, _marked(pieces, mark) if mark else _unmarked(pieces), offsets)


def _after(offset: int, before: list[int], turns: Iterator[Turn], offsets: Sequence[int]) -> DealtEpoch:
    """Return the turns from the first byte that any rank lacks.

    `offset`, `before`: bytes of the stream, and of each rank, before `turns`.
    """
    for turn in turns:
        if before[turn.rank] + turn.size > offsets[turn.rank]:
            return DealtEpoch(offset, before, chain([turn], turns))
        before[turn.rank] += turn.size
        offset += 0 if turn.mark else turn.size
    return DealtEpoch(offset, before, iter(()))


def _unmarked(pieces: Iterable[Piece]) -> Iterator[Turn]:
    """Yield the turns of the pieces: one for each slice, or for those of one FIFO in a row."""
    last, size = 0, 0
    for rank, _, _, _, start, stop in pieces:
        if rank != last:
            yield Turn(last, size)
            last, size = rank, 0
        size += stop - start
    if size:
        yield Turn(last, size)


def _marked(pieces: Iterable[Piece], mark: int) -> Iterator[Turn]:
    """Yield a turn for each piece, and one for the end mark, of `mark` bytes, after each run.

    A run that goes on in the rank's next slice has no end mark yet, so a turn waits until the rank's next
    piece is known.
    """
    waiting, ends = deque[Turn](), dict[int, bool]()
    """The turns from number `first` on; and by number whether a run ends, once that is known."""
    last: dict[int, tuple[int, int, int]] = {}
    """Number of the last piece of each rank, its object, and the byte after it."""
    first = 0
    for number, (rank, entry, _, _, start, stop) in enumerate(pieces):
        if rank in last:
            before, *after = last[rank]
            ends[before] = after != [entry, start]
        last[rank] = number, entry, stop
        waiting.append(Turn(rank, stop - start))
        while first in ends:
            yield (turn := waiting.popleft())
            if ends.pop(first):
                yield Turn(turn.rank, mark, mark=True)
            first += 1
    for number, turn in enumerate(waiting, first):
        yield turn
        if ends.get(number, True):
            yield Turn(turn.rank, mark, mark=True)
