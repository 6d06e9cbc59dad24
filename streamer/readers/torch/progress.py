"""The records of an epoch that the trainer has received from several workers.

    worker 0   [0 ....... 512)             [1536 .... 2048)
    worker 1             [512 .... 1024)
    worker 2                        (reads [1024, 1536), and has returned nothing of it)

    received: all records before 1024, and the range [1536, 2048) after it

Workers read ahead of the trainer, in no fixed order. So every element carries its origin: the records of the
epoch that it was made of, and the position after them. The process that gets the elements adds up their
origins. The sum is a `ReaderPosition`, before which every record was received, and the ranges after it that
were received too: no more than the workers' read-ahead.

To resume, a reader begins at that position and leaves out the ranges. An element is made of a fixed number of
consecutive records (the unit), so the gaps between ranges are whole elements, and cutting the gaps again
makes exactly the missing elements. With another unit it would not, so a state with ranges is then refused.

If records are shuffled in windows (`streamer.readers.core.shuffle`), no channel has several workers. Origins
then count records in the order in which they are returned, and the position is one inside a window.

If ranks share the channels by record, and no channel has several workers, the state is that of the whole job
(`streamer.step_state`), at the least step of the rank FIFOs of this process.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from streamer.readers.core.position import ReaderPosition
from streamer.readers.core.skipping import SkippedRecord
from streamer.readers.core.state_file import joint_states
from streamer.step_state import is_step_state
from streamer.trailer import channel_of_rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from streamer.readers.core.position import RankSteps
    from streamer.readers.core.shuffle import NumberedRecords, Shuffle


class RecordRange(NamedTuple):
    """Consecutive records of an epoch, by number."""

    first: int
    end: int
    """Number of the record after the last one."""
    offset: int
    skip: int
    """Number of records between byte `offset` and record `end`."""
    number: int | None = None
    """Number in its object of the record at `offset`, if records are read with their keys; else None."""
    window: int | None = None
    """Number in the epoch of the first record of the window of the last one, if records are shuffled."""


Unit = tuple[list[Any], RecordRange]
"""The records of one element, and their range."""


class RecordGrouper:
    """Groups numbered records, in their order, into units of a fixed number of records.

    A record that was skipped belongs to the unit of the next good record and does not count in it, unless
    ranks share records. So a unit ends with a good record, wherever lists of records and turns end.
    """

    def __init__(self, size: int, *, short: bool = True) -> None:
        """`short`: whether the last unit before a gap may be short.

        It is short if the state with the gap was saved without `skip`, and a record in the gap is skipped.
        """
        self._size = size
        self._short = short
        self._left: list[Any] = []
        self._left_range = RecordRange(0, 0, 0, 0)

    def add(self, block: NumberedRecords, *, skips: bool = False) -> Iterator[Unit]:
        """Yield the units that `block` completes, each with its range.

        `skips`: records that were skipped do not count.
        """
        if self._left and self._left_range.end != block.first:
            if self._short and (last := self.finish(skips=skips)) is not None:
                yield last
            self._left = []
        size, before = self._size, len(self._left)
        records = self._left + block.records if before else block.records
        first, offset, skip = block.first - before, block.offset, block.skip - before
        number, window = block.number, block.window
        ends: Sequence[int] = range(size, len(records) + 1, size)
        if skips and (good := good_places(records)) is not None:
            ends = [place + 1 for place in good[size - 1 :: size]]
        whole = 0
        for end in ends:
            at, whole = whole, end
            yield records[at:end], RecordRange(first + at, first + end, offset, skip + end, number, window)
        self._left, count = records[whole:], len(records)
        self._left_range = RecordRange(first + whole, first + count, offset, skip + count, number, window)

    def finish(self, *, skips: bool = False) -> Unit | None:
        """Return the incomplete unit at the end of the epoch; None if there is none. `skips`: as in `add`."""
        if not self._left or (skips and good_places(self._left) == []):
            return None
        return self._left, self._left_range


def good_places(records: Sequence[Any]) -> list[int] | None:
    """Return the indices of the records that were not skipped; None if no record was skipped."""
    good = [index for index, record in enumerate(records) if type(record) is not SkippedRecord]
    return None if len(good) == len(records) else good


FORMAT = 1
_ROWS = "rows"


class ElementOrigin(NamedTuple):
    """The records that one element was made of."""

    channel: str
    epoch: int
    digest: str
    records: RecordRange
    rank: RankSteps | None = None
    """Steps of the epoch, if ranks share the channel by record."""
    rows: int = 0
    """Rows of the last record, a table, that were returned with this element, if more follow; else 0."""


@dataclass(slots=True)
class ChannelProgress:
    """The records of one channel that the trainer has received: all before the position, and some ranges."""

    position: ReaderPosition
    ahead: list[RecordRange] = field(default_factory=list)
    rows: dict[int, int] = field(default_factory=dict)
    """Rows returned of each table that was returned in part, by record number."""

    def add(self, origin: ElementOrigin) -> None:
        if origin.epoch != self.position.epoch:
            self.position = ReaderPosition(origin.channel, origin.epoch, shuffle=self.position.shuffle)
            self.ahead, self.rows = [], {}
        position = self.position
        position.digest = origin.digest
        if (rank := origin.rank) is not None:
            if position.start is not None:
                position.records, position.start = rank.before(position.start.step), None
            position.records, position.rank = max(position.records, rank.first), rank
        if self.rows:
            self.rows.pop(origin.records.end - 1, None)
        if origin.rows:
            self.rows[origin.records.end - 1] = origin.rows
            return
        if self.ahead or origin.records.first != position.records:
            insort(self.ahead, origin.records)
            while self.ahead and self.ahead[0].first == position.records:
                self._move(self.ahead.pop(0))
            if len(self.ahead) > 1:
                self.ahead = _joined(self.ahead)
        else:
            self._move(origin.records)

    def _move(self, received: RecordRange) -> None:
        """Move the position over a range that begins there."""
        at = self.position
        _, at.records, at.offset, at.skip, at.number, at.window = received


def _joined(ranges: Iterable[RecordRange]) -> list[RecordRange]:
    joined: list[RecordRange] = []
    for records in ranges:
        if joined and joined[-1].end == records.first:
            joined.append(records._replace(first=joined.pop().first))
        else:
            joined.append(records)
    return joined


class Progress:
    """The records that the trainer has received of its channels. `unit`: number of records of an element."""

    def __init__(
        self,
        starts: Iterable[ChannelProgress],
        unit: int,
        *,
        shared: bool = False,
        shuffle: Shuffle | None = None,
    ) -> None:
        """`shared`: several workers read one channel."""
        self._unit = unit
        self._shared = shared
        self._channels: dict[str, ChannelProgress] = {}
        self._last: str | None = None
        """Channel of the element that was received last, in this epoch."""
        for start in starts:
            position = replace(start.position, shuffle=shuffle)
            self._channels[position.channel] = ChannelProgress(position, [*start.ahead], dict(start.rows))

    def add(self, origin: ElementOrigin) -> None:
        """Add an element that the trainer has received."""
        self._last = origin.channel
        self._channels[origin.channel].add(origin)

    def end_epochs(self) -> None:
        """Move every channel to its next epoch, after the trainer has received all of this one."""
        self._last = None
        for name, channel in self._channels.items():
            position = channel.position
            rank = position.rank and replace(position.rank, first=0)
            channel.position = ReaderPosition(
                name, position.epoch + 1, digest=position.digest, rank=rank, shuffle=position.shuffle
            )
            channel.ahead, channel.rows = [], {}

    def state(self) -> dict[str, Any]:
        """Return the progress as a dict for JSON or pickle; only the state of the steps, if that is all.

        Its first channel is the one whose turn is next, if each worker has one. Raises ChannelError if the
        rank FIFOs of a channel have reached different steps.
        """
        names = list(self._channels)
        first = 0 if self._last is None else names.index(self._last) + 1
        positions = [self._channels[name].position for name in names[first:] + names[:first]]
        if self._shared:
            channels = [position.bytes_state() for position in positions]
        else:
            channels = joint_states(positions)
            if len(channels) == 1 and is_step_state(channels[0]):
                return channels[0]
        rows = {
            name: [list(item) for item in sorted(channel.rows.items())]
            for name, channel in self._channels.items()
            if channel.rows
        }
        state = {
            "format": FORMAT,
            "unit": self._unit,
            "channels": channels,
            "ahead": {
                name: [list(records[: 4 if records.number is None else 5]) for records in channel.ahead]
                for name, channel in self._channels.items()
                if channel.ahead
            },
        }
        return state | {_ROWS: rows} if rows else state


def parse_state(
    state: Mapping[str, Any],
    unit: int,
    channels: Iterable[str],
    *,
    anyway: bool,
    shuffle: Shuffle | None = None,
) -> dict[str, ChannelProgress]:
    """Return the progress of each channel by a saved state. Raises ValueError.

    `channels`, `shuffle`: those of the reader. A state of steps is of all rank FIFOs of its channel.
    """
    if is_step_state(state):
        state = {"format": FORMAT, "unit": unit, "channels": [state], "ahead": {}}
    rows = state.get(_ROWS, {})
    if (
        state.get("format") != FORMAT
        or state.keys() - {_ROWS} != {"format", "unit", "channels", "ahead"}
        or not isinstance(rows, dict)
    ):
        raise ValueError(f"the state is not what PipeIterableDataset.state_dict() returns: {dict(state)!r}")
    if state["ahead"] and state["unit"] != unit:
        raise ValueError(
            f"the state has gaps of {state['unit']} records, and an element has {unit} now; load the state "
            "with the batch_size and attributes that it was saved with"
        )
    if state["ahead"] and shuffle is not None:
        raise ValueError(
            "the state has gaps, because workers shared a channel, and a shuffle cannot begin there: go on "
            "without shuffle, or load a state that was saved between two epochs"
        )
    starts = {}
    for saved in state["channels"]:
        if is_step_state(saved):
            for name in channels:
                if channel_of_rank(name) == saved["channel"]:
                    starts[name] = ChannelProgress(ReaderPosition.of(saved, name, shuffle, anyway=anyway))
            continue
        position = ReaderPosition.of(saved, saved["channel"], shuffle, anyway=anyway)
        ahead = [RecordRange(*records) for records in state["ahead"].get(position.channel, ())]
        of_tables = dict(rows.get(position.channel, ()))
        starts[position.channel] = ChannelProgress(position, ahead, of_tables)
    return starts


def progress_in(saved: ChannelProgress | None, channel: str, epoch: int) -> ChannelProgress:
    """Return `saved` if it is of this epoch, else that of an epoch of which nothing was received."""
    if saved is not None and saved.position.epoch == epoch:
        return saved
    return ChannelProgress(ReaderPosition(channel, epoch))
