"""Shuffles the records of a channel in windows, with a state.

    records, in the order of the FIFO ─▶ window of so many bytes, or steps ─▶ permutation ─▶ records

The permutation of a window depends on the seed, the epoch, and the number of the window's first record. So
the state is the position of the window's first record and how many records of it were returned: a resumed
reader reads the window again, permutes it in the same way, and leaves these out. Nothing of the window is
saved.

A window ends where its records have `window` bytes, so another epoch, or another order of the sidecar, has
other windows. Ranks that share a channel by record take the same steps, and their state is that of the job.
Their windows are therefore so many steps, the same on all ranks, and `window` is a limit.

A window is read before its first record is returned, and the next one after its last.
"""

from __future__ import annotations

import hashlib
from random import Random
from typing import TYPE_CHECKING, Any

from streamer.errors import ChannelError
from streamer.readers.core.plain import PipeReader
from streamer.readers.core.record_keys import KeyedRecord
from streamer.readers.core.skipping import SkippedRecord
from streamer.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from streamer.readers.core.position import ReaderPosition
    from streamer.readers.core.rank_steps import RankSteps

FORMAT = 1
WINDOW = 64 * MIB
"""Default bytes of a window."""
RECORD_COST = 64
"""Bytes that a record counts for besides its own: what Python takes for an object."""
_SHUFFLE = "shuffle"


class ShuffledReader(PipeReader):
    """The records of a channel, shuffled in windows. Each `iter()` reads the next epoch.

    `seed`: the same seed makes the same order. `window`: bytes of a window, with 64 for each record.
    `steps`: global batches of a window, for a channel that ranks share by record, and only for that; `window`
    is then the most that a window may have. `options`: arguments of `PipeReader`.

    Raises ValueError for a window or steps below 1, and what `PipeReader` raises. Iterating raises what
    `PipeReader` raises, and ChannelError if `steps` does not fit the channel, or a window is larger than
    `window`.
    """

    def __init__(
        self,
        channel: str,
        record_format: str = "RecordIO",
        *,
        seed: int,
        window: int = WINDOW,
        steps: int | None = None,
        **options: Any,
    ) -> None:
        if window < 1 or (steps is not None and steps < 1):
            raise ValueError(f"window is {window} and steps {steps}; they must be 1 or more")
        super().__init__(channel, record_format, **options)
        self._seed = seed
        self._window = window
        self._steps = steps
        self._begin: dict[str, Any] | ChannelError | None = None
        """State at the present window's first record, or why there is none; None between two windows."""
        self._returned = 0
        """Records of the present window that were returned."""
        self._in_step = 0
        """Records of this rank in a step, when the window began; 0 if ranks do not share the channel."""
        self._resumed: tuple[int, int] | None = None
        """Records to leave out of the first window, and records of a step when the state was saved; None
        once that window begins.
        """

    def __iter__(self) -> Iterator[Any]:
        records: list[Any] = []
        first = held = 0
        epoch = None
        for batch in self._lists():
            position = self._reached
            for index, record in enumerate(batch):
                if type(record) is SkippedRecord:
                    continue
                if not records:
                    epoch, first, held = position.epoch, position.records - len(batch) + index, 0
                    self._left = len(batch) - index
                    self._begin_window(position)
                records.append(record)
                held += RECORD_COST + len(record.record if isinstance(record, KeyedRecord) else record)
                self._left = len(batch) - 1 - index
                if self._is_full(position.rank, first + len(records), held):
                    yield from self._shuffled(records, epoch, first)
        if records:
            yield from self._shuffled(records, epoch, first)

    def batches(self) -> Iterator[list[Any]]:
        """Raise TypeError: records are shuffled one by one."""
        raise TypeError("a ShuffledReader returns records one by one; iterate it, or use a PipeReader")

    @property
    def padding(self) -> int:
        """0. Raises TypeError as `len` does, and if there is padding, which comes among other records."""
        if super().padding:
            raise TypeError(
                "a ShuffledReader returns the padding of Remainder: pad among other records; read an "
                "evaluation by a PipeReader"
            )
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last record that was returned, for JSON and checkpoints.

        `penstock run --resume` takes it. Raises ChannelError as `PipeReader.state_dict`.
        """
        begin = self._begin
        if isinstance(begin, ChannelError):
            raise begin
        if begin is None:
            returned, in_step = self._resumed or (0, 0)
            begin = super().state_dict()
        else:
            returned, in_step = self._returned, self._in_step
        return {
            "format": FORMAT,
            "channels": [begin],
            "ahead": {},
            _SHUFFLE: self._arguments() | {"returned": returned, "in_step": in_step},
        }

    def load_state_dict(self, state: Mapping[str, Any], *, anyway: bool = False) -> None:
        """Begin the next iteration after the record of `state`, which may also be that of a `PipeReader`.

        Raises ValueError if `state` is no state of this channel, or has another seed, window or steps.
        Iterating raises ChannelError if the plan has changed since, unless `anyway`, or if the state is
        inside a window and the number of ranks is another one.
        """
        inner, resumed = state, (0, 0)
        if _SHUFFLE in state:
            shuffle, channels = state[_SHUFFLE], state.get("channels")
            if (
                not isinstance(shuffle, dict)
                or not isinstance(channels, list)
                or len(channels) != 1
                or not isinstance(channels[0], dict)
                or shuffle.keys() != self._arguments().keys() | {"returned", "in_step"}
                or not all(
                    type(shuffle[name]) is int and shuffle[name] >= 0 for name in ("returned", "in_step")
                )
            ):
                raise ValueError(
                    f"the state is not what ShuffledReader.state_dict() returns: {dict(state)!r}"
                )
            for name, value in self._arguments().items():
                if shuffle[name] != value:
                    raise ValueError(f"the state has {name} {shuffle[name]}, and this reader has {value}")
            inner, resumed = channels[0], (shuffle["returned"], shuffle["in_step"])
        super().load_state_dict(inner, anyway=anyway)
        self._begin, self._resumed = None, resumed

    def _begin_epoch(self, position: ReaderPosition) -> None:
        if not self._resumes(position):  # an epoch before it was left inside a window
            self._begin = self._resumed = None
        super()._begin_epoch(position)

    def _arguments(self) -> dict[str, int | None]:
        return {"seed": self._seed, "window": self._window, "steps": self._steps}

    @property
    def _reached(self) -> ReaderPosition:
        if self._position is None:
            raise RuntimeError("no epoch was begun")
        return self._position

    def _begin_window(self, position: ReaderPosition) -> None:
        """Save the state before the record that comes next. Raises ChannelError if `steps`, or the state that
        was loaded, does not fit.
        """
        rank = position.rank
        if (rank is None) != (self._steps is None):
            raise ChannelError(
                f"ranks share {self.channel} by record, so windows must be the same on all ranks: give steps"
                if rank is not None
                else f"{self.channel} has no steps, because ranks do not share it by record; leave steps out"
            )
        in_step = 0 if rank is None else rank.records
        returned, saved_in_step = self._resumed or (0, 0)
        if returned and in_step != saved_in_step:
            raise ChannelError(
                f"the state of {self.channel} is inside a window, and only the same number of ranks can go "
                f"on there: it had {saved_in_step} records of a step, and this rank has {in_step}; load a "
                "state that was saved at the end of a window"
            )
        try:
            begin: dict[str, Any] | ChannelError = super().state_dict()
        except ChannelError as error:  # for whoever asks for a state
            begin = error
        self._begin, self._returned, self._in_step, self._resumed = begin, returned, in_step, None

    def _is_full(self, rank: RankSteps | None, end: int, held: int) -> bool:
        """Return whether a window is full that ends before record number `end` and holds so many bytes."""
        if rank is None or self._steps is None:
            return held >= self._window
        if held > self._window + RECORD_COST:
            raise ChannelError(
                f"a window of {self._steps} steps of {self.channel} has more than {self._window} bytes; "
                "lower steps, or raise window"
            )
        return end % (self._steps * rank.records) == 0

    def _shuffled(self, records: list[Any], epoch: int | None, first: int) -> Iterator[Any]:
        """Yield a window's records in the order of its permutation, and empty the list."""
        if self._returned > len(records):
            raise ChannelError(
                f"the state of {self.channel} has {self._returned} records of a window that has "
                f"{len(records)}: the objects have changed; begin without the state"
            )
        permute(records, self._seed, 0 if epoch is None else epoch, first)
        del records[len(records) - self._returned :]
        while records:
            record = records.pop()
            self._returned += 1
            if not records:
                self._begin = None
            yield record


def permute(records: list[Any], seed: int, epoch: int, first: int) -> None:
    """Permute a window whose first record has the number `first` in the epoch."""
    digest = hashlib.sha256(f"penstock window 1\n{seed} {epoch} {first}\n".encode()).digest()
    # The same numbers in every version of Python; they are no secret.
    draw = Random(int.from_bytes(digest[:8], "big")).random  # noqa: S311
    for last in range(len(records) - 1, 0, -1):
        other = int(draw() * (last + 1))
        records[last], records[other] = records[other], records[last]
