"""Several FIFOs as one stream of records: the rank FIFOs of a channel, or any channels.

A sidecar may deal a channel's objects over several FIFOs, its rank FIFOs (`Ranks` of the job file), each of
which is to readers a channel of its own: `train-0`, `train-1` … Either every process takes a rank FIFO,

    channels = rank_channels("train")
    reader = PipeReader(channels[local_rank], "TFRecord")

or one process reads them all, with `InterleavedReader`, in one of two orders:

    in turn          `block` records of the first FIFO, as many of the second, and so on round; a FIFO that
                     has ended is passed over. The same in every run, but the slowest sets the pace.
    as they arrive   whole records of whichever FIFO has bytes (poll), so none waits for another

All FIFOs are opened before the first record is returned. A reader that leaves early ends the epoch of all
of them. The end of file and errors are those of a single FIFO (`streamer.readers.core.stream`). While some
FIFOs have bytes, the trailers of the others are read once a second.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from itertools import chain, islice
from typing import TYPE_CHECKING

from streamer.errors import ChannelError
from streamer.readers.core.config import PipeModeDatasetException, channels_in, check_channel, directories
from streamer.readers.core.epochs import TIMEOUT, ChannelEpochs
from streamer.readers.core.plain import check_format, record_reader
from streamer.trailer import rank_channel_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from streamer.readers.core.stream import PipeStream

_CHECK_S = 1.0
"""Seconds after which the trailer of a FIFO without bytes is read."""


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
    """The records of several FIFOs as one stream. Each `iter()` or `batches()` is one epoch of all of them.

    `channels`: the name of a channel, for all its rank FIFOs, or the names of several channels. `block`: so
    many records of each in turn; None takes them as they arrive. The other arguments are those of
    `PipeReader`.

    Raises ValueError for an unknown format or a block below 1, PipeModeDatasetException as `rank_channels`.
    Iterating raises what `PipeReader` does, and ChannelError if the rank FIFOs of a channel are not at the
    same epoch: together they would be none.
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
        max_corrupted_records_to_skip: int = 0,
    ) -> None:
        check_format(record_format, max_corrupted_records_to_skip)
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
        self._skip = max_corrupted_records_to_skip

    def __iter__(self) -> Iterator[bytes]:
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[list[bytes]]:
        """The next epoch as lists of records, each list of one FIFO: a block of it, or what arrived."""
        with contextlib.ExitStack() as stack:
            streams = [stack.enter_context(epochs.next_stream()) for epochs in self._epochs]
            if self._one_channel:
                _check_same_epoch(streams)
            # FIFOs that do not exist yet come first: if one never appears, no other has used up its epoch.
            for stream in sorted(streams, key=lambda stream: os.path.exists(stream.name)):
                stream.open()
            sources = [
                record_reader(stream, self.record_format, skip=self._skip).batches() for stream in streams
            ]
            if self._block:
                yield from _in_turn(sources, self._block)
            else:
                yield from _as_they_arrive({s.fileno(): b for s, b in zip(streams, sources, strict=True)})


def _check_same_epoch(streams: list[PipeStream]) -> None:
    """Raise ChannelError unless all are of the same epoch."""
    if len({stream.name.rpartition("_")[2] for stream in streams}) > 1:
        names = ", ".join(stream.name.rpartition("/")[2] for stream in streams)
        raise ChannelError(
            f"the rank FIFOs are not at the same epoch, next are {names}: one was read alone, or could not "
            "be opened; read those at the earlier epoch, or restart trainer and sidecar"
        )


def _in_turn(sources: list[Iterator[list[bytes]]], block: int) -> Iterator[list[bytes]]:
    waiting = deque(chain.from_iterable(source) for source in sources)
    while waiting:
        records = waiting.popleft()
        batch = list(islice(records, block))
        if batch:
            yield batch
        if len(batch) == block:
            waiting.append(records)


def _as_they_arrive(sources: dict[int, Iterator[list[bytes]]]) -> Iterator[list[bytes]]:
    """`sources`, by the descriptors that they read, give an empty list where they would have to wait."""
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
