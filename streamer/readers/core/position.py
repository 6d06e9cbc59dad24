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
records came in the FIFO's order, but the byte is that of the window's first record, or an earlier one.

A reader that names the object of each record (`streamer.readers.core.record_keys`) adds `number`, the number
in its object of the record at `offset`.

`streamer.readers.core.start` brings a stream to a position, and `streamer.readers.core.read_loop` moves it.

`RankSteps` are the steps of one FIFO of a channel that is shared by record. The FIFOs of a rank take turns
(`Ranks.Workers`): that of worker i of w has the steps i, i + w, …, in which the workers of a DataLoader
return their batches. With one worker a FIFO has all steps.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from streamer.errors import ChannelError
from streamer.step_state import StepState, is_step_state
from streamer.trailer import channel_of_rank
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from streamer.readers.core.shuffle import NumberedRecords, Shuffle
    from streamer.trailer import Trailer


@dataclass(frozen=True, slots=True)
class RankSteps:
    """Steps of one FIFO of a channel that is shared by record, by the trailer of an epoch."""

    channel: str
    """The channel that the ranks share."""
    steps: int
    """Global batches of an epoch, those of other workers too."""
    records: int
    """Records of this rank in a global batch."""
    first: int
    """Number of the FIFO's first record in the epoch; not 0 if the sidecar resumed."""
    order: Mapping[str, Any]
    padding: int = 0
    """Records at the end of the epoch that are padding."""
    workers: int = 1
    """FIFOs of the rank."""
    worker: int = 0
    """Number of this one."""

    @classmethod
    def of(cls, trailer: Trailer | None) -> RankSteps | None:
        """Return the steps in a trailer; None if ranks do not share the channel by record."""
        if trailer is None or trailer.order is None or not trailer.steps or trailer.records is None:
            return None
        channel, first, padding = channel_of_rank(trailer.channel), trailer.records_skipped, trailer.padding
        own = len(range(trailer.worker, trailer.steps, trailer.workers))
        records = max(1, trailer.records // max(1, own))  # without a step of its own any number will do
        turn = trailer.workers, trailer.worker
        return cls(channel, trailer.steps, records, first, trailer.order, padding, *turn)

    def before(self, step: int) -> int:
        """Return how many records of the epoch this FIFO has before a step."""
        return len(range(self.worker, step, self.workers)) * self.records

    def padding_of(self, first: int, end: int) -> int:
        """Return how many of the records `first` up to `end` of the epoch are padding; they are the last."""
        return max(0, min(end - first, end + self.padding - self.before(self.steps)))

    def state(
        self, epoch: int, records: int, shuffle: Shuffle | None = None, window: int | None = None
    ) -> StepState:
        """Return the state after `records` records of this FIFO. A step counts when it is whole.

        `window`: number of the first record of the present window, if `shuffle` permutes the records, which
        a worker's never does.
        """
        last = self.worker + (records // self.records - 1) * self.workers
        reached, step = self.following(epoch, max(-1, last))
        inside = None
        if shuffle is not None and window is not None and reached == epoch:
            inside = shuffle.inside(step, first=window // self.records, batch=self.records)
        return StepState(self.channel, reached, step, self.order, inside)

    def next_step(self, epoch: int, records: int) -> tuple[int, int]:
        """Return epoch and number of this FIFO's step after `records` of its records."""
        step = self.worker + records // self.records * self.workers
        return (epoch, step) if step < self.steps else (epoch + 1, self.worker)

    def following(self, epoch: int, step: int) -> tuple[int, int]:
        """Return epoch and number of the step after this one."""
        return (epoch, step + 1) if step + 1 < self.steps else (epoch + 1, 0)


def step_records(rank: RankSteps | None) -> int:
    """Return the records of a rank in a step; 1 if ranks do not share the channel by record."""
    return 1 if rank is None else rank.records


FORMAT = 1
_KEYS = ("channel", "epoch", "offset", "skip", "records", "digest")
_NUMBER = "number"
_SHUFFLE = "shuffle"
_SHUFFLE_KEYS = {"records", "seed", "returned"}


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
    anyway: bool = field(default=False, compare=False, repr=False)
    """Whether a reader may begin here under another plan too."""

    def state(self) -> dict[str, Any]:
        """Return the position as a dict for JSON or pickle.

        Raises ChannelError if steps cannot be counted, because corrupt records were left out.
        """
        if self.start is not None or self.rank is None:
            return self.bytes_state()
        if self.skipped:
            raise ChannelError(
                f"{self.channel} has no state, because "
                f"{counted(self.skipped, 'corrupt record was', 'corrupt records were')} left out and its "
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

    def next_step(self) -> tuple[int, int]:
        """Return epoch and number of the FIFO's next step, of which records may have been returned."""
        if self.rank is None:
            return self.epoch, 0 if self.start is None else self.start.step
        return self.rank.next_step(self.epoch, self._returned(self.rank))

    def is_after(self, epoch: int, step: int) -> bool:
        """Return whether records of the FIFO after a step were returned."""
        if self.rank is None:
            return False
        before = (self.epoch - epoch) * self.rank.before(self.rank.steps)
        return before + self._returned(self.rank) > self.rank.before(step + 1)

    def _returned(self, rank: RankSteps) -> int:
        return self.records if self.start is None else rank.before(self.start.step)

    @classmethod
    def of(
        cls, state: Mapping[str, Any], channel: str, shuffle: Shuffle | None = None, *, anyway: bool = False
    ) -> ReaderPosition:
        """Parse a saved `state`. `shuffle`: that of the reader. `anyway`: use it under another plan too.

        Raises ValueError if it is no position in `channel`, or inside a window of another shuffle.
        """
        if is_step_state(state):
            start = StepState.of(state)
            if channel_of_rank(channel) != start.channel:
                raise ValueError(f"the state is of channel {start.channel}, and this reader is of {channel}")
            _check_shuffle(start.shuffle, shuffle)
            return cls(channel, start.epoch, start=start, shuffle=shuffle, anyway=anyway)
        if state.get("format") != FORMAT or state.keys() - {"format", _NUMBER, _SHUFFLE} != set(_KEYS):
            raise ValueError(f"the state is not what PipeReader.state_dict() returns: {dict(state)!r}")
        saved: dict[str, Any] = {name: state[name] for name in _KEYS}
        position = cls(**saved, number=state.get(_NUMBER), shuffle=shuffle, anyway=anyway)
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

    def reach(self, block: NumberedRecords) -> None:
        """Move to the end of a block."""
        self.offset, self.number, self.window = block.offset, block.number, block.window
        self.skip, self.records, self.last = block.skip + len(block.records), block.end, block.last

    def end_epoch(self, digest: str) -> None:
        """Move to the first record of the next epoch. `digest`: that of this epoch."""
        self.last, self.digest, self.skipped = False, digest, 0
        self.epoch, self.offset, self.skip, self.records = self.epoch + 1, 0, 0, 0
        self.number = self.window = None

    def before(self, left: int) -> ReaderPosition:
        """Return the position before the last `left` records of the batch."""
        if self.last and not left and self.rank is None:
            following = replace(self, epoch=self.epoch + 1, offset=0, skip=0, records=0)
            following.number = following.window = None
            return following
        return replace(self, skip=self.skip - left, records=self.records - left)

    def texts(self, lefts: Iterable[int]) -> list[bytes]:
        """Return, for each of `lefts`, the state of `before` as JSON; of bytes cheaper than one by one."""
        if self.rank is not None or self.shuffle is not None:
            return [json.dumps(self.before(left).state()).encode() for left in lefts]
        template = json.dumps(self.state() | {"skip": None, "records": None})
        template = template.replace('"skip": null, "records": null', '"skip": %d, "records": %d')
        return [
            json.dumps(self.before(0).state()).encode()
            if self.last and not left
            else (template % (self.skip - left, self.records - left)).encode()
            for left in lefts
        ]


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
