"""What of an epoch a trainer has had, where several workers read it for him.

    worker 0   [0 ....... 512)             [1536 .... 2048)
    worker 1             [512 .... 1024)
    worker 2                        (is at [1024, 1536), and has handed over nothing of it)

    had: everything before record 1024, and ahead of that [1536, 2048)

Workers run ahead of the trainer and in no fixed order. So every element carries a mark: which records of
which epoch it was made of, and the place behind them. Who gets the elements notes their marks. Together they
are a beginning without gaps, whose end is a `ReaderPosition`, and some spans ahead of it, no more than
workers hold.

To go on, a reader begins at that place and leaves out the spans. Elements are cut of so many records in a row
(the unit), so the gaps between spans are whole elements, and cutting them anew gives what was missing. Under
another unit it would not, and is refused as long as there are spans ahead.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from streamer.readers.core.position import ReaderPosition

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from streamer.readers.core.stream import PipeStream

FORMAT = 1


class Span(NamedTuple):
    """Records of an epoch in a row, by number."""

    first: int
    end: int
    """Number of the record behind the last one."""
    offset: int
    skip: int
    """The record behind is the `skip`-th of those that begin at byte `offset`."""


class Mark(NamedTuple):
    """What one element was made of."""

    channel: str
    epoch: int
    digest: str
    span: Span


class Block(NamedTuple):
    """Records of an epoch in a row, none of which the trainer has had."""

    records: list[bytes]
    first: int
    """Number in the epoch of the first of them."""
    offset: int
    skip: int
    """The first is the `skip`-th record of those that begin at byte `offset`."""

    def part(self, begin: int, end: int) -> Block:
        return Block(self.records[begin:end], self.first + begin, self.offset, self.skip + begin)


@dataclass(slots=True)
class Start:
    """Where the reading of a channel begins, and what is left out from there."""

    place: ReaderPosition
    ahead: Sequence[Span] = ()
    anyway: bool = False

    def blocks(self, batch: list[bytes], first: int, offset: int) -> Iterator[Block]:
        """What is left to read of a batch that begins with record number `first`, at byte `offset`."""
        whole = Block(batch, first, offset, 0)
        begin, count = max(0, self.place.records - first), len(batch)
        for span in self.ahead:
            stop = min(count, span.first - first)
            if stop > begin:
                yield whole.part(begin, stop)
            begin = max(begin, span.end - first)
        if begin < count:
            yield whole.part(begin, count) if begin else whole


def start_of(stream: PipeStream, channel: str, told: Start | None) -> Start:
    """Where an open stream is to be read from: where `told`, if that is of its epoch."""
    if told is not None and told.place.epoch == stream.epoch:
        return told
    return Start(ReaderPosition(channel, stream.epoch, offset=stream.begun_at))


class RecordGrouper:
    """Cuts blocks, in their order, into units of so many records."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._left: list[bytes] = []
        self._behind = Span(0, 0, 0, 0)
        """From the first record of `left`."""

    def add(self, block: Block) -> Iterator[tuple[list[bytes], Span]]:
        """The units that `block` completes, and what each consists of."""
        size, before = self._size, len(self._left)
        records = self._left + block.records
        first = block.first - before
        whole = len(records) - len(records) % size
        for at in range(0, whole, size):
            end = at + size
            yield records[at:end], Span(first + at, first + end, block.offset, block.skip + end - before)
        self._left = records[whole:]
        count = len(records)
        self._behind = Span(first + whole, first + count, block.offset, block.skip + count - before)

    def finish(self) -> tuple[list[bytes], Span] | None:
        """The records of the unit that the epoch's end leaves unfinished."""
        return (self._left, self._behind) if self._left else None


@dataclass(slots=True)
class _Had:
    """What of one channel the trainer has had: all before the place, and spans ahead of it."""

    place: ReaderPosition
    ahead: list[Span] = field(default_factory=list)

    def note(self, mark: Mark) -> None:
        if mark.epoch != self.place.epoch:
            self.place, self.ahead = ReaderPosition(mark.channel, mark.epoch), []
        self.place.digest = mark.digest
        insort(self.ahead, mark.span)
        while self.ahead and self.ahead[0].first == self.place.records:
            _, self.place.records, self.place.offset, self.place.skip = self.ahead.pop(0)
        if len(self.ahead) > 1:
            self.ahead = _joined(self.ahead)


def _joined(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for span in spans:
        if found and found[-1].end == span.first:
            span = span._replace(first=found.pop().first)  # noqa: PLW2901 - it grows at the front
        found.append(span)
    return found


class Progress:
    """What of its channels a trainer has had; `unit` is how many records an element takes."""

    def __init__(self, starts: Iterable[Start], unit: int) -> None:
        self._unit = unit
        self._had = {
            start.place.channel: _Had(
                ReaderPosition.of(start.place.state(), start.place.channel),
                [Span(*span) for span in start.ahead],
            )
            for start in starts
        }

    def note(self, mark: Mark) -> None:
        """The trainer gets an element."""
        self._had[mark.channel].note(mark)

    def ended(self, channel: str) -> None:
        """The trainer has had the whole epoch."""
        had = self._had[channel]
        had.place, had.ahead = ReaderPosition(channel, had.place.epoch + 1, digest=had.place.digest), []

    def all_ended(self) -> None:
        for channel in self._had:
            self.ended(channel)

    def state(self) -> dict[str, Any]:
        """As JSON and pickle take it."""
        return {
            "format": FORMAT,
            "unit": self._unit,
            "channels": [had.place.state() for had in self._had.values()],
            "ahead": {
                channel: [list(span) for span in had.ahead] for channel, had in self._had.items() if had.ahead
            },
        }


def starts_of(state: Mapping[str, Any], unit: int, *, anyway: bool) -> dict[str, Start]:
    """Where a saved state says that each of its channels begins. Raises ValueError."""
    if state.get("format") != FORMAT or state.keys() != {"format", "unit", "channels", "ahead"}:
        raise ValueError(f"not what state_dict() of a PipeIterableDataset returned: {dict(state)!r}")
    if state["ahead"] and state["unit"] != unit:
        raise ValueError(
            f"the state has gaps of {state['unit']} records, and elements are of {unit} now: load it with "
            "the batch_size and attributes that it was saved with"
        )
    found = {}
    for each in state["channels"]:
        place = ReaderPosition.of(each, each["channel"])
        ahead = [Span(*span) for span in state["ahead"].get(place.channel, ())]
        found[place.channel] = Start(place, ahead, anyway)
    return found
