"""`PipeIterableDataset`: Pipe channels as a `torch.utils.data.IterableDataset`, for PyTorch 2.

    channels -> this rank's -> this worker's -> records -> samples -> batches -> decode -> DataLoader

The data is divided once on each of three levels:

    hosts    the sidecar divides objects among hosts (ShardedByS3Key), so a host's channels are its shard
    ranks    each rank of a host has its own channels: rank r of n has channels r, r+n, ...
    workers  of a rank's DataLoader: if there are at least as many channels as workers, each worker has its
             own channels; otherwise the workers of one channel read it in turns, each record in one worker
             (`streamer.readers.torch.workers`)

A worker with several channels reads a block of each in rotation until all have ended. A pass over the dataset
is the next epoch of every channel. A DataLoader with any number of workers returns exactly the records of the
epoch. Their order is always the same if no worker has several channels and no channel several workers: blocks
are what has arrived, so timing decides how the channels of one worker are mixed.

Who may block whom. A worker waits for its FIFO, or until another worker's turn ends; never for a worker from
which its DataLoader requests nothing. Every step runs in the worker's own thread, so `decode` runs in several
workers at once. Reading starts when the first record is requested. A worker whose parent has exited stops
reading.

Every element has an origin (`streamer.readers.torch.progress`), which stays in the worker unless a
`ResumableLoader` (`streamer.readers.loader`) takes both.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

from streamer.errors import ChannelError
from streamer.formats.tar import TarReader, sample
from streamer.readers.core.config import PipeModeDatasetException, check_if_configured, directories
from streamer.readers.core.epochs import TIMEOUT, ChannelEpochs
from streamer.readers.core.plain import check_format, record_reader
from streamer.readers.core.position import StartPosition, reach_start
from streamer.readers.core.rank_steps import RankSteps
from streamer.readers.core.record_keys import NO_BATCH, RecordKeys, with_keys
from streamer.readers.core.skipping import EpochSkips, Replacements, SkipCounts, check_skip, without_skipped
from streamer.readers.samples import check_attributes, cut_sample
from streamer.readers.torch.progress import (
    ElementOrigin,
    NumberedRecords,
    Progress,
    RecordGrouper,
    RecordRange,
    RemainingRecords,
    admitted_blocks,
    parse_state,
    remaining_records,
)
from streamer.readers.torch.workers import (
    PATIENCE_S,
    ParentExited,
    WorkerGroup,
    WorkerGroupReader,
    parent_check,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from streamer.formats.window import RecordReader, Source
    from streamer.readers.core.skipping import SkipPolicy
    from streamer.readers.core.stream import PipeStream

    Blocks = Iterator[tuple[PipeStream, list[NumberedRecords]]]

__all__ = ["WEBDATASET", "PipeIterableDataset", "PipeModeDatasetException"]

WEBDATASET = "WebDataset"
"""The record format of tar streams, whose records are dicts (`streamer.formats.tar`)."""

_passes: Counter[tuple[str, str]] = Counter()
"""Passes that this process has begun over each channel, by state directory and channel."""


class PipeIterableDataset(IterableDataset):  # type: ignore[misc] # torch is not followed by the checker
    """The records of one or several Pipe channels; each pass reads the next epoch of every channel.

    `channel`: one name, or several, which are divided among ranks and workers (see the module).
    `record_format`: 'RecordIO', 'TFRecord', 'TextLine' or 'fixed:BYTES', whose records are `bytes`, or
    'WebDataset', whose records are dicts from field to bytes, and `__key__`. `attributes`: number of records
    of a sample; with 2 or more samples are tuples (augmented manifests). `batch_size`: elements are lists of
    so many samples; an epoch's last batch is shorter, or left out with `drop_remainder`. Set it here, and
    `batch_size=None` in the DataLoader, so that workers spend their cost per element once a batch. Batches do
    not mix channels. `decode`: called with each element in the worker; its result replaces the element.

    `key`: each record is a `KeyedRecord`: the record, the key of its object, its number there, and the
    bucket; errors name them too. The sidecar must keep key lists (`RecordKeys`). `skip`: corrupt records and
    objects that may be left out of each epoch of a channel (`SkipPolicy`); `skipped` counts those of this
    process.

    `share`: (index, number) of this process among the processes of this host that make this dataset with the
    same channels. Default: LOCAL_RANK and LOCAL_WORLD_SIZE, which torchrun sets. `timeout`: seconds to wait
    for a FIFO, and then for its writer. Directories default to those below `$SAGEMAKER_BASE_DIR`.

    `skip` needs one worker for each FIFO; iterating raises ValueError if workers share one.

    Raises ValueError for an unknown format and for arguments that exclude each other,
    PipeModeDatasetException (a ChannelError) for a channel that is not a Pipe channel, or if the number of
    channels is not a multiple of the number of ranks. ChannelError if the quarantine list cannot be written.
    Iterating raises ChannelError, TruncatedStream and
    CorruptRecord; DataLoader raises a worker's error under the same class.
    """

    def __init__(  # noqa: PLR0913 - public; options with defaults
        self,
        channel: str | Sequence[str],
        record_format: str = "RecordIO",
        *,
        decode: Callable[[Any], Any] | None = None,
        batch_size: int | None = None,
        drop_remainder: bool = False,
        attributes: int = 1,
        share: tuple[int, int] | None = None,
        pipe_dir: str | None = None,
        state_dir: str | None = None,
        config_dir: str | None = None,
        timeout: float = TIMEOUT,
        key: bool = False,
        skip: SkipPolicy | None = None,
    ) -> None:
        self._key = key
        self._skip = skip
        self.skipped = SkipCounts()
        """What `skip` has left out in this process so far."""
        if record_format != WEBDATASET:
            check_format(record_format)
        elif attributes != 1:
            raise ValueError("attributes has no meaning for WebDataset, whose records are whole samples")
        check_attributes(attributes)
        if skip is not None and attributes > 1:
            raise ValueError(
                "skip cannot be used with attributes, because the records of a sample are counted, and one "
                "that is left out would mix two samples"
            )
        check_skip(skip, record_format)
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be 1 or more")
        if drop_remainder and batch_size is None:
            raise ValueError("drop_remainder has no meaning without batch_size")
        self.record_format = record_format
        self.channels = _channels_of(channel, *(share or _local_rank()))
        self._paths = directories(pipe_dir, config_dir, state_dir)
        for name in self.channels:
            check_if_configured(name, self._paths.config)
        self._decode = decode
        self._batch_size = batch_size
        self._drop_remainder = drop_remainder
        self._attributes = attributes
        self._timeout = timeout
        self.starts: dict[str, RemainingRecords] = {}
        """By channel, the records of the next pass, if that is not a whole epoch."""
        self._counted: dict[str, ChannelEpochs] = {}
        """By channel, where the length of its epochs is known from."""
        self._progress: Progress | None = None
        """Records that this process has returned of the pass that was begun last."""
        self._shared = False
        """Whether other workers read a channel of this one."""

    def __iter__(self) -> Iterator[Any]:
        # Not a generator, because every worker must count a pass, even one that it never reads.
        channels, starts = self._worker_channels(), self.take_starts()
        self._shared = any(group is not None for _, group in channels)
        self._progress = self.progress(starts, [name for name, _ in channels])
        return self._count(self._progress, self._with_origins(channels, starts))

    def __len__(self) -> int:
        """Return the number of elements of a whole pass, if ranks share the channels by record.

        Waits until the sidecar offers the first epoch. Raises TypeError if a channel has no known length.
        """
        elements = 0
        for name in self.channels:
            whole, rest = divmod(self._counting(name).counts().records, self.unit)
            elements += whole + (rest > 0 and not self._drop_remainder)
        return elements

    def __bool__(self) -> bool:
        """Return True; without this method `bool` would call `len`."""
        return True

    def with_origins(self) -> Iterator[tuple[Any, ElementOrigin]]:
        """Yield each element with its origin, which the caller adds to its progress."""
        return self._with_origins(self._worker_channels(), self.take_starts())

    @property
    def unit(self) -> int:
        """Number of records of an element."""
        return self._attributes * (self._batch_size or 1)

    def progress(
        self, starts: Mapping[str, RemainingRecords], channels: Sequence[str], *, shared: bool = False
    ) -> Progress:
        """Return the progress at the start of a pass. Raises ChannelError as `ChannelEpochs`.

        `shared`: several workers read one channel.
        """
        return Progress(
            [
                starts.get(name) or RemainingRecords(StartPosition(self._epochs(name).position()))
                for name in channels
            ],
            self.unit,
            shared=shared,
        )

    def take_starts(self) -> dict[str, RemainingRecords]:
        """Return `starts` and empty it, because it is for one pass."""
        starts, self.starts = self.starts, {}
        return starts

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the pass in this process, for `load_state_dict` and `penstock run --resume`.

        For a DataLoader without workers, and for loaders that save the states of workers with channels of
        their own. Raises ChannelError elsewhere: only `ResumableLoader` has the whole state.
        """
        if self._shared:
            raise ChannelError(
                "workers share a channel, so the state of one worker is not the whole state; use "
                "ResumableLoader, and save its state_dict()"
            )
        if self._progress is not None:
            return self._progress.state()
        if not self.starts:
            raise ChannelError(
                "this dataset has not been iterated in this process; if workers iterate it, use "
                "ResumableLoader, and save its state_dict()"
            )
        return self.progress(self.starts, list(self.starts)).state()

    def load_state_dict(self, state: Mapping[str, Any], *, anyway: bool = False) -> None:
        """Begin the next pass at the position `state`, with the rest of that epoch.

        Raises ValueError if `state` is no state of this dataset's channels. Iterating raises ChannelError if
        the plan has changed since, unless `anyway`.
        """
        starts = parse_state(state, self.unit, self.channels, anyway=anyway)
        channels = set(self.channels)
        if not (starts.keys() <= channels if get_worker_info() else starts.keys() == channels):
            saved = ", ".join(starts) or "others"
            raise ValueError(f"the state is of channels {saved}, not {', '.join(self.channels)}")
        for name, start in starts.items():
            self._counting(name).seek(start.start.position.epoch)
        self.starts, self._progress = starts, None

    def _epochs(self, channel: str) -> ChannelEpochs:
        return ChannelEpochs(channel, self._paths, timeout=self._timeout, patience=PATIENCE_S)

    def _counting(self, channel: str) -> ChannelEpochs:
        """Return the object that counts the channel's records; the same in every call."""
        return self._counted.setdefault(channel, self._epochs(channel))

    def _worker_channels(self) -> list[tuple[str, WorkerGroup | None]]:
        """Return the channels of this worker, each with the group of workers that share it."""
        info = get_worker_info()
        if info is None or info.num_workers == 1:
            return [(name, None) for name in self.channels]
        count = len(self.channels)
        if count >= info.num_workers:
            return [(name, None) for name in self.channels[info.id :: info.num_workers]]
        name = self.channels[info.id % count]
        size = len(range(info.id % count, info.num_workers, count))
        if size == 1:
            return [(name, None)]
        if self._skip is not None:
            raise ValueError(
                f"{size} workers share {name}, and skip needs one worker for each FIFO: give DataLoader no "
                "more workers than channels, or leave skip out"
            )
        key = (self._paths.state, name)
        _passes[key] += 1
        base_seed = info.seed - info.id
        return [(name, WorkerGroup(f"{base_seed:x}-{_passes[key]}", info.id // count, size))]

    @staticmethod
    def _count(progress: Progress, elements: Iterator[tuple[Any, ElementOrigin]]) -> Iterator[Any]:
        for element, origin in elements:
            progress.add(origin)
            yield element
        progress.end_epochs()

    def _with_origins(
        self, channels: list[tuple[str, WorkerGroup | None]], starts: dict[str, RemainingRecords]
    ) -> Iterator[tuple[Any, ElementOrigin]]:
        turns = [
            (name, self._units(self._records(name, group, starts.get(name)))) for name, group in channels
        ]
        while turns:
            for turn in list(turns):
                name, units = turn
                block = next(units, None)
                if block is None:
                    turns.remove(turn)
                    continue
                stream, elements = block
                digest = stream.trailer.digest if stream.trailer else ""
                rank = RankSteps.of(stream.trailer)
                for records, numbers in elements:
                    element = self._element(records)
                    origin = ElementOrigin(name, stream.epoch, digest, numbers, rank)
                    yield element if self._decode is None else self._decode(element), origin

    def _records(self, channel: str, group: WorkerGroup | None, saved: RemainingRecords | None) -> Blocks:
        if group is not None:
            yield from WorkerGroupReader(
                channel,
                self._paths,
                group,
                self._reader,
                unit=self.unit,
                timeout=self._timeout,
                saved=saved,
                key=self._key,
            )
            return
        check = parent_check() if get_worker_info() else lambda: None
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(ParentExited))
            stream = stack.enter_context(self._epochs(channel).next_stream())
            position = reach_start(stream, channel, saved.start if saved else None, check=check)
            ahead = remaining_records(saved, channel, stream.epoch).ahead
            remaining = RemainingRecords(StartPosition(position), ahead)
            base, number = position.offset, position.records - position.skip
            reader = self._reader(stream)
            skip = self._skip is not None
            keys = RecordKeys.wanted(stream, offset=base, number=position.number, key=self._key, skip=skip)
            if keys is not None:
                stack.enter_context(contextlib.closing(keys))
            skips = None
            if self._skip is not None:
                skips = EpochSkips(self._skip, channel, stream.epoch, self.skipped, keyed=self._key)
            batches = (
                with_keys(reader, keys, base)
                if skips is None
                else skips.lists(reader, keys, base, proven=stream.trailer is not None)
            )
            while True:
                offset = base + reader.offset
                batch, in_object = next(batches, NO_BATCH)
                if batch is None:
                    return
                blocks = list(remaining.select(batch, number, offset, in_object))
                if skips is None or not skips.bad:
                    yield stream, blocks
                else:
                    yield stream, admitted_blocks(blocks, skips)
                    skips.check_refused()
                number += len(batch)
                if not batch:
                    check()

    def _reader(self, source: Source) -> RecordReader:
        if self.record_format == WEBDATASET:
            return TarReader(source)
        return record_reader(source, self.record_format)

    def _units(self, source: Blocks) -> Iterator[tuple[PipeStream, list[tuple[list[Any], RecordRange]]]]:
        """Yield, for each block that arrives, the records of each element that the block completes."""
        units = RecordGrouper(self.unit, short=not self._drop_remainder)
        stream, places = None, None
        for stream, blocks in source:
            skips = self._skip is not None
            if skips and RankSteps.of(stream.trailer) is not None:  # every rank returns all its places
                skips, places = False, places or Replacements(stream.name)
            whole = [unit for block in blocks for unit in units.add(block, skips=skips)]
            if places is not None:
                whole = list(places.units(whole))
            if whole:
                yield stream, whole
        last = units.finish(skips=self._skip is not None and places is None)
        if places is not None and stream is not None:
            rest = list(places.units([] if last is None else [last]))
            places.check_filled()
            last = None
            if rest and len(rest[-1][0]) < self.unit:
                last = rest.pop()
            if rest:
                yield stream, rest
        if stream is None or last is None:
            return
        if cut := len(last[0]) % self._attributes:
            raise cut_sample(cut, self._attributes)
        if not self._drop_remainder:
            yield stream, [last]

    def _element(self, records: list[Any]) -> Any:
        samples: list[Any]
        if self._skip is not None:
            records = without_skipped(records)
        if self.record_format == WEBDATASET:
            samples = [
                each._replace(record=sample(each.record)) if self._key else sample(each) for each in records
            ]
        elif self._attributes == 1:
            samples = list(records)
        else:
            starts = range(0, len(records), self._attributes)
            samples = [tuple(records[at : at + self._attributes]) for at in starts]
        return samples[0] if self._batch_size is None else samples


def _local_rank() -> tuple[int, int]:
    """Return the index of this process among those of this job on this host, and their number."""
    rank, ranks = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    if rank is not None and ranks is not None:
        return int(rank), int(ranks)
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    if together and torch.distributed.get_world_size() > 1:
        raise PipeModeDatasetException(
            "torch.distributed has several processes, but LOCAL_RANK and LOCAL_WORLD_SIZE are not set: start "
            "them with torchrun, or give share=(index, number)"
        )
    return 0, 1


def _channels_of(channel: str | Sequence[str], rank: int, ranks: int) -> list[str]:
    """Return the channels of one process of a host. Raises PipeModeDatasetException if there are too few."""
    channels = [channel] if isinstance(channel, str) else list(channel)
    if not channels or len(set(channels)) != len(channels):
        raise ValueError(f"the channels are {channels}: give one or several, each once")
    if not 0 <= rank < ranks:
        raise ValueError(f"share is ({rank}, {ranks}); the index must be below the number")
    if len(channels) % ranks:
        raise PipeModeDatasetException(
            f"{ranks} processes of this host cannot divide {len(channels)} channels ({', '.join(channels)}): "
            f"name a multiple of {ranks}, or give share=(0, 1) if this process alone reads them"
        )
    return channels[rank::ranks]
