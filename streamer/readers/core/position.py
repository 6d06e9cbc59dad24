"""Position of a reader in its channel, which `PipeReader.state_dict()` returns as a plain dict.

    {"format": 1, "channel": "train", "epoch": 2, "offset": 73400320, "skip": 17, "records": 90017,
     "digest": "33d8b0af…"}

The reader has returned `records` records of `epoch`. A record begins at byte `offset` of the epoch's stream;
the next record is the `skip`-th after that one. `digest` is the plan's. Under the same digest an epoch has
the same bytes, so the position names the same record. A reader refuses a position with another digest unless
`anyway` is given.

While the sidecar lists objects, the digest is partial, `N:HEX`, over the plan's first N entries, which have
all bytes before the position. Only a sidecar with that state (`--resume`) can compare it with its plan; its
trailer then names the partial digest (`resumed`).

After the last record of an epoch the position is the first record of the next epoch. The reader recognises
the last record by the trailer's byte count, or else by the end of the stream. If the byte count is not known
before the end (objects that are inflated), a position taken before the end may have no record after it.

If ranks share the channel by record, the state is that of the whole job instead (`streamer.step_state`): the
epoch, and the number of its global batches whose records this rank has returned. Any rank may save it, and
any number of ranks may load it.

A reader that shuffles records in windows (`streamer.readers.core.shuffle`) adds `shuffle` inside a window:
its size in `records`, its `seed`, and how many of its records were `returned`. The other keys are as if the
records came in the FIFO's order, but the byte is at or before the window's first record.

A reader that names the object of each record (`streamer.readers.core.record_keys`) adds `number`, the number
in its object of the record at `offset`.

A FIFO begins at its epoch's first byte or, under `penstock run --resume`, at a later one, which its trailer
states (`bytes_skipped`). The reader drops the bytes from there to the position. Without `--resume` a new
sidecar offers epoch 0, so only a position in epoch 0 can be resumed without it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from streamer.errors import ChannelError
from streamer.readers.core.rank_steps import RankSteps, step_records
from streamer.readers.core.record_keys import NO_BATCH, with_keys
from streamer.readers.core.shuffle import NumberedRecords, Windows
from streamer.step_state import StepState, is_step_state, order_difference
from streamer.trailer import channel_of_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping

    from streamer.formats.window import RecordReader
    from streamer.readers.core.epoch_skips import EpochSkips
    from streamer.readers.core.record_keys import RecordKeys
    from streamer.readers.core.shuffle import Shuffle
    from streamer.readers.core.stream import PipeStream

FORMAT = 1
_KEYS = ("channel", "epoch", "offset", "skip", "records", "digest")
_NUMBER = "number"
_SHUFFLE = "shuffle"
_SHUFFLE_KEYS = {"records", "seed", "returned"}
_BLOCK = 1 << 20


@dataclass(slots=True)
class ReaderPosition:
    """Position of a channel's next record. It moves as records are returned."""

    channel: str
    epoch: int
    offset: int = 0
    skip: int = 0
    records: int = 0
    digest: str = ""
    """Empty before the first FIFO is open, and for a FIFO without a trailer, which no other one can go on."""
    number: int | None = None
    """Number in its object of the record at `offset`, if records are read with their keys; else None."""
    last: bool = field(default=False, compare=False)
    """Whether the epoch is known to have no further record."""
    rank: RankSteps | None = field(default=None, compare=False)
    """Steps of the epoch, once a trailer has them; None if ranks do not share the channel by record."""
    start: StepState | None = None
    """State at which a reader begins. Records and offset are unknown until the FIFO is open."""
    skipped: int = field(default=0, compare=False)
    """Corrupt records of the pass that were left out. The number of steps is then unknown."""
    shuffle: Shuffle | None = field(default=None, compare=False)
    """How records are shuffled; None if they are not."""
    window: int | None = None
    """Number in the epoch of the first record of the present window, if records are shuffled; else None."""

    def state(self) -> dict[str, Any]:
        """Return the position as a dict for JSON or pickle.

        Raises ChannelError if steps cannot be counted, because corrupt records were left out.
        """
        if self.start is not None or self.rank is None:
            return self.bytes_state()
        if self.skipped:
            raise ChannelError(
                f"{self.channel} has no state, because {self.skipped} corrupt records were left out and its "
                "steps cannot be counted; mend or leave out the objects, or do not skip corrupt records"
            )
        return self.rank.state(self.epoch, self.records, self.shuffle, self.window).document()

    def bytes_state(self) -> dict[str, Any]:
        """Return the position in this FIFO's bytes, for the same ranks only."""
        if self.start is not None:
            return self.start.document()
        state: dict[str, Any] = {"format": FORMAT} | {name: getattr(self, name) for name in _KEYS}
        if self.number is not None:
            state[_NUMBER] = self.number
        if self.shuffle is not None and self.window is not None:
            returned = self.records - self.window
            if 0 < returned < self.shuffle.window(step_records(self.rank)):
                state[_SHUFFLE] = {
                    "records": self.shuffle.records,
                    "seed": self.shuffle.seed,
                    "returned": returned,
                }
        return state

    def next_step(self, *, begun: bool = False) -> tuple[int, int]:
        """Return epoch and number of the next step. `begun`: count a step of which records were returned."""
        if self.start is not None:
            return self.start.epoch, self.start.step
        if self.rank is None:
            return self.epoch, 0
        state = self.rank.state(self.epoch, self.records + (self.rank.records - 1 if begun else 0))
        return state.epoch, state.step

    @classmethod
    def of(cls, state: Mapping[str, Any], channel: str, shuffle: Shuffle | None = None) -> ReaderPosition:
        """Parse a saved `state`. `shuffle`: that of the reader.

        Raises ValueError if it is no position in `channel`, or inside a window of another shuffle.
        """
        if is_step_state(state):
            start = StepState.of(state)
            if channel_of_rank(channel) != start.channel:
                raise ValueError(f"the state is of channel {start.channel}, and this reader is of {channel}")
            _check_shuffle(start.shuffle, shuffle)
            return cls(channel, start.epoch, start=start, shuffle=shuffle)
        if state.get("format") != FORMAT or state.keys() - {"format", _NUMBER, _SHUFFLE} != set(_KEYS):
            raise ValueError(f"the state is not what PipeReader.state_dict() returns: {dict(state)!r}")
        position = cls(**{name: state[name] for name in _KEYS}, number=state.get(_NUMBER), shuffle=shuffle)
        if position.channel != channel:
            raise ValueError(f"the state is of channel {position.channel}, and this reader is of {channel}")
        numbers: tuple[object, ...] = position.epoch, position.offset, position.skip, position.records
        if position.number is not None:
            numbers = *numbers, position.number
        if (window := state.get(_SHUFFLE)) is not None:
            if not isinstance(window, dict) or window.keys() != _SHUFFLE_KEYS:
                raise ValueError(f"the position is invalid: {dict(state)!r}")
            _check_shuffle(window, shuffle)
            numbers = *numbers, window["returned"]
        if not all(type(number) is int and number >= 0 for number in numbers) or not isinstance(
            position.digest, str
        ):
            raise ValueError(f"the position is invalid: {position}")
        if window is not None:
            position.window = position.records - window["returned"]
            if window["returned"] > position.skip:
                raise ValueError(f"the position is invalid: {position}")
        return position

    def follow(
        self,
        reader: RecordReader,
        stream: PipeStream,
        keys: RecordKeys | None = None,
        skips: EpochSkips | None = None,
        *,
        batches: Iterator[tuple[list[Any], int | None]] | None = None,
        shuffle: Shuffle | None = None,
    ) -> Iterator[list[Any]]:
        """Yield the batches of `reader`, which reads `stream` from `offset`, without `skip` records.

        `shuffle`: permute them in windows; a corrupt record of `skips` keeps a place in these. If the stream
        has a patience, the batches are empty while a window is read. Other arguments, and errors, are those
        of `in_order`.
        """
        if shuffle is None:
            yield from self.in_order(reader, stream, keys, skips, batches)
            return
        self.shuffle = shuffle
        returned = 0 if self.window is None else self.records - self.window
        inner = replace(self, skip=self.skip - returned, records=self.records - returned, window=None)
        windows = Windows(shuffle, self.epoch, returned=returned)
        for batch in inner.in_order(reader, stream, keys, skips, batches):
            self.rank = inner.rank
            count = len(batch)
            first, skip = inner.records - count, inner.skip - count
            block = NumberedRecords(batch, first, inner.offset, skip, inner.number)
            none = True
            for piece in windows.add(block, step_records(inner.rank)):
                self.skipped, self.digest = inner.skipped, inner.digest
                self._reach(piece, last=inner.last and piece.end == inner.records)
                yield piece.records
                none = False
            if none and (not batch or stream.patience is not None):
                yield []
        rest = list(windows.finish())
        self.digest = inner.digest
        while rest:
            piece = rest.pop(0)
            self._reach(piece, last=not rest)
            yield piece.records
        self._end_epoch(stream)

    def _reach(self, piece: NumberedRecords, *, last: bool) -> None:
        """Move to the end of a piece of a window. `last`: no record of the epoch follows."""
        count = len(piece.records)
        self.offset, self.skip, self.number = piece.offset, piece.skip + count, piece.number
        self.records, self.window, self.last = piece.end, piece.window, last

    def _end_epoch(self, stream: PipeStream) -> None:
        """Move to the first record of the next epoch."""
        self.last, self.digest, self.skipped = False, _digest(stream), 0
        self.epoch, self.offset, self.skip, self.records = self.epoch + 1, 0, 0, 0
        self.number = self.window = None

    def in_order(
        self,
        reader: RecordReader,
        stream: PipeStream,
        keys: RecordKeys | None,
        skips: EpochSkips | None,
        batches: Iterator[tuple[list[Any], int | None]] | None,
    ) -> Iterator[list[Any]]:
        """Yield the batches of `reader` in their order.

        While the caller has a batch, the position is after it; `returned` gives positions inside it. Digest
        and length of the epoch are those of the trailer as last read, because a plan may grow. With `keys`
        the records are `KeyedRecord`s, unless `skips` has its own word. With `skips` a corrupt record is in
        its place as a `SkippedRecord`, unless ranks share the channel by record. Raises CorruptRecord for one
        that is over the budget, after the records before it. `batches`: the lists of `reader` in a form
        of the caller's, each with the number before it, instead of those with keys or skips.
        """
        base, dropped, skipped_before = self.offset, self.skip, reader.skipped_records
        if batches is None:
            batches = (
                with_keys(reader, keys, base)
                if skips is None
                else skips.lists(reader, keys, base, proven=stream.trailer is not None)
            )
        trailer = stream.trailer
        self.rank = RankSteps.of(trailer)
        while True:
            offset = base + reader.offset
            batch, number = next(batches, NO_BATCH)
            if batch is None:
                break
            count, self.skipped = len(batch), reader.skipped_records - skipped_before
            if dropped and self.skipped and self.rank is not None:
                raise ChannelError(
                    f"{stream.name} has corrupt records before or near the step of the state, so the reader "
                    "cannot count to that step; start the sidecar with --resume and this state"
                )
            first = min(dropped, count)
            dropped -= first
            if first and skips is not None and self.rank is not None:
                skips.replacements.pass_over(batch[:first])
            if count and first == count:
                continue
            stop = count if skips is None or not skips.bad else skips.admit(batch, first)
            if stream.trailer is not trailer:  # the weights of a mix may have changed
                trailer = stream.trailer
                self.rank = RankSteps.of(trailer)
            if count:  # an empty batch: no bytes for now
                self.offset, self.skip, self.number = offset, stop, number
                rest = batch[first:stop] if stop - first < count else batch
                if skips is not None and self.rank is not None:
                    rest = skips.replacements.filled(rest)
                self.records += len(rest)
                self.last = stop == count and base + reader.offset == stream.bytes_total
                self.digest = _digest(stream)
                yield rest
            else:
                yield batch
            if stop < count and skips is not None:
                skips.check_refused()
        if skips is not None:
            skips.replacements.check_filled()
        self._end_epoch(stream)

    def returned(self, left: int) -> dict[str, Any]:
        """Return the state if the last `left` records of the batch have not been returned yet."""
        return self.before(left).state()

    def before(self, left: int) -> ReaderPosition:
        """Return the position before the last `left` records of the batch."""
        if self.last and not left and self.rank is None:
            following = replace(self, epoch=self.epoch + 1, offset=0, skip=0, records=0)
            following.number = following.window = None
            return following
        return replace(self, skip=self.skip - left, records=self.records - left)

    def texts(self, lefts: Iterable[int]) -> list[bytes]:
        """Return, for each of `lefts`, `returned` as JSON; of bytes cheaper than one call for each."""
        if self.rank is not None or self.shuffle is not None:
            return [json.dumps(self.returned(left)).encode() for left in lefts]
        template = json.dumps(self.state() | {"skip": None, "records": None})
        template = template.replace('"skip": null, "records": null', '"skip": %d, "records": %d')
        return [
            json.dumps(self.returned(0)).encode()
            if self.last and not left
            else (template % (self.skip - left, self.records - left)).encode()
            for left in lefts
        ]


@dataclass(frozen=True, slots=True)
class StartPosition:
    """A saved position at which a reader resumes."""

    position: ReaderPosition
    anyway: bool = False
    """Whether to use the position under another plan too."""


def start_in(stream: PipeStream, channel: str, start: StartPosition) -> StartPosition:
    """Return a start with its record, by the trailer of an open stream of its epoch. Raises ChannelError."""
    if start.position.start is None:
        return start
    return StartPosition(_at_step(stream, channel, start.position.start, anyway=start.anyway), start.anyway)


def _digest(stream: PipeStream) -> str:
    return stream.trailer.digest if stream.trailer else ""


def approach_start(
    stream: PipeStream, channel: str, start: StartPosition | None
) -> Generator[list[bytes], None, ReaderPosition]:
    """Open `stream`, drop the bytes before the start, and return the start as a new position.

    The start is `start` if that is of the stream's epoch, else the FIFO's first byte. Yields an empty list
    after each wait; no wait is longer than the stream's patience.

    Raises ChannelError if the plan has changed and `start.anyway` is false, or if the FIFO begins after the
    start; otherwise as `PipeStream.begin` and `PipeStream.readinto`.
    """
    while not stream.begin(stream.patience):
        yield []
    offset = stream.start_offset
    if start is None or start.position.epoch != stream.epoch:
        first = stream.trailer.records_skipped if stream.trailer else 0
        return ReaderPosition(channel, stream.epoch, offset=offset, records=first, digest=_digest(stream))
    position = start.position
    if position.start is not None:
        return _at_step(stream, channel, position.start, anyway=start.anyway)
    begun = bool(position.digest or position.offset or position.records)
    while begun and not start.anyway and not stream.wait_for_plan(stream.patience):
        yield []
    digest = _digest(stream)
    resumed = stream.trailer.resumed if stream.trailer else ""
    if ":" in position.digest and position.digest != resumed and not start.anyway:
        raise ChannelError(
            f"the state of {channel} was saved while the sidecar was listing, and only the sidecar "
            "can compare those with its plan: start it with --resume and this state, begin without the "
            "state, or call load_state_dict with anyway=True"
        )
    if begun and position.digest not in (digest, resumed or digest) and not start.anyway:
        raise ChannelError(
            f"the state of {channel} was saved under plan {position.digest[:16] or 'unknown'}, and "
            f"{stream.name} is of plan {digest[:16] or 'unknown'}: the objects or their order have "
            "changed; restore them, begin without the state, or call load_state_dict with anyway=True"
        )
    if offset > position.offset:
        raise ChannelError(
            f"{stream.name} begins at byte {offset}, and the reader is at byte {position.offset}: "
            "give this reader's own state to load_state_dict, or start the sidecar with it (--resume)"
        )
    yield from drop_bytes(stream, position.offset - offset)
    return replace(position, digest=digest)


def drop_bytes(stream: PipeStream, left: int) -> Iterator[list[bytes]]:
    """Drop so many bytes of an open stream; yield an empty list after each read. Raises ChannelError."""
    buffer = memoryview(bytearray(min(left, _BLOCK)))
    while left:
        count = stream.readinto(buffer[: min(left, _BLOCK)])
        if count == 0:
            raise ChannelError(f"{stream.name} ended {left} bytes before the position of the state")
        left -= count or 0
        yield []


def _at_step(stream: PipeStream, channel: str, start: StepState, *, anyway: bool) -> ReaderPosition:
    """Return the position of a step in `stream`. Raises ChannelError."""
    rank = RankSteps.of(stream.trailer)
    if rank is None:
        raise ChannelError(
            f"the state of {channel} has steps, and {stream.name} has none; load it into a reader of a "
            "channel whose Ranks have Batch or GlobalBatch"
        )
    difference = order_difference(start, rank.order)
    if difference is not None and not anyway:
        raise ChannelError(
            f"the state of {channel} was saved under another order of records: {difference}; restore what "
            "has changed, begin without the state, or call load_state_dict with anyway=True"
        )
    records, begin = (step * rank.records for step in (start.step, start.begin))
    if start.shuffle is not None and start.shuffle["batch"] != rank.records:
        raise ChannelError(
            f"the state of {channel} is inside a window of shuffled records, and only the same number of "
            f"ranks can go on there: a rank had {start.shuffle['batch']} records of a step, and this one has "
            f"{rank.records}; load a state that was saved at the end of a window"
        )
    if start.step >= rank.steps:
        raise ChannelError(
            f"the state of {channel} is at step {start.step}, and epoch {start.epoch} has {rank.steps} steps"
        )
    if begin < rank.first:
        raise ChannelError(
            f"{stream.name} begins after step {start.begin}, the step of the state of {channel}: save "
            "the checkpoint first and the file of --resume after it, or give the sidecar this state"
        )
    return ReaderPosition(
        channel,
        start.epoch,
        offset=stream.start_offset,
        skip=records - rank.first,
        records=records,
        digest=_digest(stream),
        rank=rank,
        window=None if start.shuffle is None else begin,
    )


def _check_shuffle(saved: Mapping[str, Any] | None, shuffle: Shuffle | None) -> None:
    """Raise ValueError if a state is inside a window of another shuffle than the reader's."""
    if saved is None:
        return
    if shuffle is None:
        raise ValueError(
            "the state is inside a window of shuffled records, and this reader does not shuffle: make it "
            f"with shuffle={saved['records']} and seed={saved['seed']}"
        )
    shuffle.check(saved)


def reach_start(
    stream: PipeStream,
    channel: str,
    start: StartPosition | None = None,
    *,
    check: Callable[[], None] = lambda: None,
) -> ReaderPosition:
    """Do as `approach_start`, in one call. `check` is called after each wait and may raise to give up."""
    waits = approach_start(stream, channel, start)
    while True:
        try:
            next(waits)
        except StopIteration as end:
            position: ReaderPosition = end.value
            return position
        check()
