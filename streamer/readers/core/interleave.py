"""Reads several FIFOs as one stream of records: the rank FIFOs of a channel, or several channels.

With `Ranks` in the job file a sidecar deals a channel's objects over several rank FIFOs. Readers treat each
rank FIFO as a channel: `train-0`, `train-1` … Either every process reads one rank FIFO,

    channels = rank_channels("train")
    reader = PipeReader(channels[local_rank], "TFRecord")

or one process reads them all with `InterleavedReader`, in one of two orders:

    in turn          `block` records of each FIFO in rotation, without the FIFOs that have ended. The same
                     order in every run, but as slow as the slowest FIFO.
    as they arrive   whole records of any FIFO that has bytes (poll), so no FIFO waits for another

`InterleavedReader` opens all FIFOs before it returns the first record. A reader that leaves early ends the
epoch of every FIFO. The end of file and errors are those of a single FIFO (`streamer.readers.core.stream`).
While some FIFOs have bytes, the trailers of the others are read once a second.

With `key` each FIFO has its own key list, so a record has the object of its FIFO's bytes in any order.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import TYPE_CHECKING, Any

from streamer.errors import ChannelError
from streamer.readers.core.config import PipeModeDatasetException, directories
from streamer.readers.core.epochs import TIMEOUT
from streamer.readers.core.fifo_source import FifoSource, as_they_arrive
from streamer.readers.core.interleave_state import Turn, saved_states, state_of
from streamer.readers.core.joint_states import load_all
from streamer.readers.core.plain import PipeReader
from streamer.readers.core.rank_channels import rank_channels
from streamer.readers.core.skipping import SkippedRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from streamer.readers.core.skipping import SkipCounts, SkipPolicy
    from streamer.readers.core.stream import PipeStream


class InterleavedReader:
    """The records of several FIFOs as one stream. Each `iter()` or `batches()` reads one epoch of all FIFOs.

    `channels`: one channel's name, for all its rank FIFOs, or the names of several channels. `block`: number
    of records of each FIFO in turn; None for records as they arrive. `key`: records are `KeyedRecord`s, each
    with the object of its own FIFO. Padding (`Remainder: pad`) comes among other records: for an evaluation
    read each rank FIFO by a `PipeReader`. Other arguments: as for `PipeReader`; `skip` is the budget of each
    FIFO, and `shuffle`, which needs a block, is of each for itself.

    Raises ValueError for an unknown format or a block below 1, PipeModeDatasetException as `rank_channels`.
    Iterating raises what `PipeReader` raises, and ChannelError if the rank FIFOs of a channel are at
    different epochs, which together are no epoch of the channel.
    """

    def __init__(  # noqa: PLR0913 - public; options with defaults
        self,
        channels: str | Sequence[str],
        record_format: str = "RecordIO",
        *,
        block: int | None = 1,
        epoch: int | None = None,
        pipe_dir: str | None = None,
        state_dir: str | None = None,
        config_dir: str | None = None,
        timeout: float = TIMEOUT,
        skip: SkipPolicy | None = None,
        key: bool = False,
        shuffle: int | None = None,
        seed: int | None = None,
    ) -> None:
        if block is not None and block < 1:
            raise ValueError(f"block is {block}: it must be 1 or more, or None for records as they arrive")
        if block is None and shuffle is not None:
            raise ValueError("shuffle needs a block, because records that arrive have no order: give block=N")
        self._one_channel = isinstance(channels, str)
        """Whether the FIFOs are the rank FIFOs of one channel."""
        if isinstance(channels, str):
            self.channels = rank_channels(channels, config_dir=directories(config=config_dir).config)
        else:
            self.channels = list(channels)
        if not self.channels:
            raise PipeModeDatasetException("no channel to read: name one")
        if len(set(self.channels)) < len(self.channels):
            raise ValueError(f"the channels are {self.channels}: give one or several, each once")
        self.record_format = record_format
        self._block = block
        kind = PipeReader if block else _ImpatientReader
        self._readers = [
            kind(
                name,
                record_format,
                epoch=epoch,
                pipe_dir=pipe_dir,
                state_dir=state_dir,
                config_dir=config_dir,
                timeout=timeout,
                skip=skip,
                key=key,
                shuffle=shuffle,
                seed=seed,
            )
            for name in self.channels
        ]
        self._turn = Turn()

    def __iter__(self) -> Iterator[Any]:
        # A step for each record, so calls and lists are saved.
        block, turn = self._block, self._turn
        for source in self._sources():
            reader = source.reader
            while block is None or turn.returned < block:
                if not source.left and (block is None or not source.fill()):
                    break
                record = source.list[-source.left]
                reader.left = source.left = source.left - 1
                if type(record) is not SkippedRecord:
                    turn.returned += 1
                    yield record

    def __len__(self) -> int:
        """Return the number of records of an epoch, if ranks share the channels by record.

        Waits until the sidecar offers the first epoch. Raises TypeError if a channel has no known length.
        """
        return sum(map(len, self._readers))

    def __bool__(self) -> bool:
        """Return True; without this method `bool` would call `len`."""
        return True

    @property
    def steps_per_epoch(self) -> int:
        """Number of global batches of an epoch, the same on all ranks. Raises TypeError as `len` does."""
        return self._readers[0].steps_per_epoch

    @property
    def skipped(self) -> dict[str, SkipCounts]:
        """By FIFO, what `skip` has left out so far."""
        return {reader.channel: reader.skipped for reader in self._readers}

    def batches(self) -> Iterator[list[Any]]:
        """Yield the next epoch as lists of records: each list a block of one FIFO, or what arrived on it."""
        block, turn = self._block, self._turn
        for source in self._sources():
            records: list[Any] = []
            while block is None or turn.returned < block:
                if not source.left and (block is None or not source.fill()):
                    break
                taken = source.take(source.left if block is None else block - turn.returned)
                turn.returned += len(taken)
                records = records + taken if records else taken
            if records:
                yield records

    def _sources(self) -> Iterator[FifoSource]:
        """Open the next epoch; yield the source of each turn, or those on which a list has arrived."""
        with contextlib.ExitStack() as stack:
            readers = self._of_epoch()
            streams = [stack.enter_context(reader.next_stream()) for reader in readers]
            if self._one_channel:
                _check_same_epoch(streams)
            # Open missing FIFOs first: if one never appears, no other FIFO has used up its epoch.
            for stream in sorted(streams, key=lambda stream: os.path.exists(stream.name)):
                stream.open()
            sources = [
                stack.enter_context(contextlib.closing(FifoSource(reader, stream)))
                for reader, stream in zip(readers, streams, strict=True)
            ]
            if self._block:
                yield from self._in_turn(sources, self._block)
            else:
                yield from as_they_arrive({s.fileno(): b for s, b in zip(streams, sources, strict=True)})
        self._turn.move(0)

    def _of_epoch(self) -> list[PipeReader]:
        """Return the readers of the FIFOs that have records of the next pass, and forget the turn of another.

        A FIFO may have ended before the state that was loaded.
        """
        if not all(reader.resumes for reader in self._readers):
            self._turn.move(0)
            return self._readers
        first = min(reader.reached.epoch for reader in self._readers)
        return [reader for reader in self._readers if reader.reached.epoch == first]

    def _in_turn(self, sources: list[FifoSource], block: int) -> Iterator[FifoSource]:
        """Yield the sources in rotation, from the turn of the state on, without those that have ended."""
        by_fifo = {self.channels.index(source.reader.channel): source for source in sources}
        turn = self._turn
        turns = deque(sorted(by_fifo, key=lambda fifo: (fifo < turn.fifo, fifo)))
        if turn.fifo not in by_fifo:
            turn.move(turns[0])
        while True:
            yield by_fifo[turn.fifo]
            if turn.returned == block:
                turns.append(turn.fifo)
            turns.popleft()
            if not turns:
                return
            turn.fifo, turn.returned = turns[0], 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last record, or list of records, that was returned.

        It has the position of every FIFO and, with a block, whose turn it is. If the FIFOs are those of ranks
        that share a channel by record, it is the state of the job, after the last global batch whose records
        were all returned. `penstock run --resume` takes both. Raises ChannelError if records of a global
        batch do not come together: with a block that does not divide a rank's batch, or as they arrive.
        """
        return state_of([reader.reached for reader in self._readers], self._turn, self._block)

    def load_state_dict(self, state: Mapping[str, Any], *, anyway: bool = False) -> None:
        """Begin the next iteration after the record of `state`.

        Raises ValueError if `state` is no state of these FIFOs and block. Iterating raises ChannelError if a
        plan has changed since, unless `anyway`.
        """
        saved, turn = saved_states(state, self.channels, self._block)
        load_all(self._readers, saved, anyway=anyway)
        self._turn.move(turn.fifo, turn.returned)


class _ImpatientReader(PipeReader):
    """A reader whose lists may be empty, because it never waits for bytes."""

    patience = 0.0


def _check_same_epoch(streams: list[PipeStream]) -> None:
    """Raise ChannelError unless all streams are of the same epoch."""
    if len({stream.name.rpartition("_")[2] for stream in streams}) > 1:
        names = ", ".join(stream.name.rpartition("/")[2] for stream in streams)
        raise ChannelError(
            f"the rank FIFOs are not at the same epoch (next are {names}), because one was read alone or "
            "could not be opened; read those at the earlier epoch, or restart trainer and sidecar"
        )
