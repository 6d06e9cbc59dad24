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
import select
import time
from collections import deque
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from streamer.errors import ChannelError
from streamer.readers.core.config import PipeModeDatasetException, channels_in, check_channel, directories
from streamer.readers.core.epochs import TIMEOUT, ChannelEpochs
from streamer.readers.core.keys_and_skips import KeysAndSkips
from streamer.readers.core.plain import check_format, record_reader
from streamer.readers.core.position import approach_start
from streamer.readers.core.skipping import without_skipped
from streamer.trailer import rank_channel_name

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from streamer.readers.core.skipping import SkipPolicy
    from streamer.readers.core.stream import PipeStream

_CHECK_S = 1.0
"""Seconds between two reads of the trailer of a FIFO without bytes."""


def rank_channel(channel: str, index: int) -> str:
    """Return the channel name of rank FIFO `index`, from 0 on. Raises ValueError for an index below 0."""
    if index < 0:
        raise ValueError(f"rank {index}: ranks are counted from 0")
    return rank_channel_name(channel, index)


def rank_channels(channel: str, *, config_dir: str | None = None) -> list[str]:
    """Return the names of all rank FIFOs of a channel, in order; the channel itself if it has none.

    The names are in inputdataconfig.json, in `config_dir` or else `input/config` below `$SAGEMAKER_BASE_DIR`
    (default /opt/ml). Raises PipeModeDatasetException if there is no such channel, or if it is not a Pipe
    channel.
    """
    config_dir = directories(config=config_dir).config
    channels = channels_in(config_dir)
    ranks: list[str] = []
    if channel not in channels:
        while (name := rank_channel(channel, len(ranks))) in channels:
            ranks.append(name)
    for name in ranks or [channel]:
        check_channel(name, config_dir)
    return ranks or [channel]


class InterleavedReader:
    """The records of several FIFOs as one stream. Each `iter()` or `batches()` reads one epoch of all FIFOs.

    `channels`: one channel's name, for all its rank FIFOs, or the names of several channels. `block`: number
    of records of each FIFO in turn; None for records as they arrive. `key`: records are `KeyedRecord`s, each
    with the object of its own FIFO. Padding (`Remainder: pad`) comes among other records: for an evaluation
    read each rank FIFO by a `PipeReader`. Other arguments: as for `PipeReader`; `skip` is the budget of each
    FIFO.

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
    ) -> None:
        check_format(record_format)
        self._records = KeysAndSkips(record_format, key=key, skip=skip)
        self.skipped = self._records.skipped
        """What `skip` has left out of all FIFOs so far."""
        if block is not None and block < 1:
            raise ValueError(f"block is {block}: it must be 1 or more, or None for records as they arrive")
        paths = directories(pipe_dir, config_dir, state_dir)
        self._one_channel = isinstance(channels, str)
        """Whether the FIFOs are the rank FIFOs of one channel."""
        if isinstance(channels, str):
            self.channels = rank_channels(channels, config_dir=paths.config)
        else:
            self.channels = list(channels)
            for name in self.channels:
                check_channel(name, paths.config)
        if not self.channels:
            raise PipeModeDatasetException("no channel to read: name one")
        self.record_format = record_format
        self._block = block
        patience = None if block else 0.0
        self._epochs = [
            ChannelEpochs(name, paths, epoch=epoch, timeout=timeout, patience=patience)
            for name in self.channels
        ]

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[list[Any]]:
        """Yield the next epoch as lists of records: each list a block of one FIFO, or what arrived on it."""
        with contextlib.ExitStack() as stack:
            streams = [stack.enter_context(epochs.next_stream()) for epochs in self._epochs]
            if self._one_channel:
                _check_same_epoch(streams)
            # Open missing FIFOs first: if one never appears, no other FIFO has used up its epoch.
            for stream in sorted(streams, key=lambda stream: os.path.exists(stream.name)):
                stream.open()
            sources = [
                stack.enter_context(contextlib.closing(self._lists(name, stream)))
                for name, stream in zip(self.channels, streams, strict=True)
            ]
            if self._block:
                yield from _in_turn(sources, self._block)
            else:
                yield from _as_they_arrive({s.fileno(): b for s, b in zip(streams, sources, strict=True)})

    def _lists(self, channel: str, stream: PipeStream) -> Generator[list[Any], None, None]:
        """Yield the lists of one FIFO's records; empty lists while no bytes come."""
        reader = record_reader(stream, self.record_format)
        if self._records.skip is None and not self._records.key:
            yield from reader.batches()
            return
        position = yield from approach_start(stream, channel, None)
        with self._records.epoch(stream, channel, offset=position.offset) as (keys, skips):
            for batch in position.follow(reader, stream, keys, skips):
                yield without_skipped(batch) if skips else batch


def _check_same_epoch(streams: list[PipeStream]) -> None:
    """Raise ChannelError unless all streams are of the same epoch."""
    if len({stream.name.rpartition("_")[2] for stream in streams}) > 1:
        names = ", ".join(stream.name.rpartition("/")[2] for stream in streams)
        raise ChannelError(
            f"the rank FIFOs are not at the same epoch (next are {names}), because one was read alone or "
            "could not be opened; read those at the earlier epoch, or restart trainer and sidecar"
        )


def _in_turn(sources: Sequence[Iterator[list[Any]]], block: int) -> Iterator[list[Any]]:
    waiting = deque(chain.from_iterable(source) for source in sources)
    while waiting:
        records = waiting.popleft()
        batch = list(islice(records, block))
        if batch:
            yield batch
        if len(batch) == block:
            waiting.append(records)


def _as_they_arrive(sources: dict[int, Generator[list[Any], None, None]]) -> Iterator[list[Any]]:
    """Yield batches of the sources that have bytes. `sources`: by descriptor; each yields [] for no bytes."""
    poller = select.poll()
    for fd in sources:
        poller.register(fd, select.POLLIN)
    next_check = time.monotonic() + _CHECK_S
    while sources:
        ready = [fd for fd, _ in poller.poll(max(0.0, next_check - time.monotonic()) * 1000)]
        if time.monotonic() >= next_check:
            ready = list(sources)
            next_check = time.monotonic() + _CHECK_S
        for fd in ready:
            batch = next(sources[fd], None)
            if batch is None:
                poller.unregister(fd)
                del sources[fd]
            elif batch:
                yield batch
