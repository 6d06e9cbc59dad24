"""`PipeIterableDataset`: Pipe channels as a `torch.utils.data.IterableDataset`, for PyTorch 2.

    channels -> this rank's -> this worker's -> records -> samples -> batches -> decode -> DataLoader

Three levels divide the data, and each does it once:

    hosts    the sidecar does (ShardedByS3Key), so a host's channels are that host's share already
    ranks    of one host have channels of their own: rank r of n has channels r, r+n, ...
    workers  of a rank's DataLoader: with as many channels as workers, or more, each has its own; otherwise
             those who share a channel take turns at it (`streamer.readers.turns`), each record goes to one

Several channels of one worker are read in rotation, a block of each, until all have ended. A pass over the
dataset is the next epoch of every channel. A DataLoader with any number of workers gives exactly the
records of the epoch; in an order that is always the same if no worker shares a channel.

Who may block whom. A worker waits for its FIFO, or for another that is at its turn; never for one that its
DataLoader does not ask. Every step is in the worker's own thread, so `decode` of several workers is side
by side. Nothing is read before the first record is asked for. A worker whose parent died stops reading.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

from streamer.formats.tar import TarReader, sample
from streamer.readers.config import PipeModeDatasetException, check_channel, directories
from streamer.readers.plain import TIMEOUT, check_format, next_stream, record_reader
from streamer.readers.samples import check_attributes, cut_sample
from streamer.readers.turns import PATIENCE_S, Team, TeamReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from streamer.formats.window import RecordReader, Source

__all__ = ["WEBDATASET", "PipeIterableDataset", "PipeModeDatasetException"]

WEBDATASET = "WebDataset"
"""The record format of tar streams, whose records are dicts (`streamer.formats.tar`)."""

_passes: Counter[tuple[str, str]] = Counter()
"""How often this process has begun to read a channel: by state directory and channel."""


class PipeIterableDataset(IterableDataset):  # type: ignore[misc] # torch is not followed by the checker
    """The records of one or several Pipe channels; each pass is the next epoch of all of them.

    `channel`: a name, or several, which are divided among ranks and workers (see the module).
    `record_format`: 'RecordIO', 'TFRecord' or 'TextLine', whose records are `bytes`, or 'WebDataset', whose
    records are dicts from field to bytes, and `__key__`. `attributes`: records of one sample; from 2 on
    samples are tuples (augmented manifests). `batch_size`: elements are lists of so many samples, the last
    one of an epoch shorter, or left out with `drop_remainder`; give it here and not to the DataLoader
    (`batch_size=None` there), and workers do per batch what they would do per record. Batches do not mix
    channels. `decode` gets an element and returns what takes its place; it runs in the workers.

    `share`: (index, number) of this process among those of this host that make this dataset with the same
    channels. By default LOCAL_RANK and LOCAL_WORLD_SIZE, which torchrun sets. `timeout`: seconds to wait for
    a FIFO, and then for its writer. Directories default to those below `$SAGEMAKER_BASE_DIR`.

    Raises ValueError for an unknown format and for arguments that have no meaning, PipeModeDatasetException
    (a ChannelError) for a channel that is not a Pipe channel, and for ranks that cannot be given channels of
    their own. Iterating raises ChannelError, TruncatedStream and CorruptRecord, in a worker by name.
    """

    def __init__(
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
    ) -> None:
        if record_format != WEBDATASET:
            check_format(record_format, 0)
        elif attributes != 1:
            raise ValueError("attributes is for records, and those of WebDataset are whole samples")
        check_attributes(attributes)
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be 1 or more")
        if drop_remainder and batch_size is None:
            raise ValueError("drop_remainder has no meaning without batch_size")
        self.record_format = record_format
        self.channels = _channels_of(channel, *(share or _local_rank()))
        self._where = directories(pipe_dir, config_dir, state_dir)
        if os.path.exists(os.path.join(self._where.config, "inputdataconfig.json")):
            for name in self.channels:
                check_channel(name, self._where.config)
        self._decode = decode
        self._batch_size = batch_size
        self._drop_remainder = drop_remainder
        self._attributes = attributes
        self._timeout = timeout

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: all workers must count a pass that some of them never come to read.
        return self._elements([self._records(name, team) for name, team in self._mine()])

    def _mine(self) -> list[tuple[str, Team | None]]:
        """The channels of this worker, each with those who share it."""
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
        place = (self._where.state, name)
        _passes[place] += 1
        base_seed = info.seed - info.id
        return [(name, Team(f"{base_seed:x}-{_passes[place]}", info.id // count, size))]

    def _elements(self, sources: list[Iterator[list[bytes]]]) -> Iterator[Any]:
        blocks = [self._units(source) for source in sources]
        while blocks:
            for block in list(blocks):
                units = next(block, None)
                if units is None:
                    blocks.remove(block)
                    continue
                for unit in units:
                    element = self._element(unit)
                    yield element if self._decode is None else self._decode(element)

    def _records(self, channel: str, team: Team | None) -> Iterator[list[bytes]]:
        if team is not None:
            unit = self._attributes * (self._batch_size or 1)
            yield from TeamReader(channel, self._where, team, self._reader, unit=unit, timeout=self._timeout)
            return
        parent = os.getppid() if get_worker_info() else None
        with next_stream(channel, self._where, timeout=self._timeout, patience=PATIENCE_S) as stream:
            for records in self._reader(stream).batches():
                if records:
                    yield records
                elif parent not in (None, os.getppid()):
                    return

    def _reader(self, source: Source) -> RecordReader:
        if self.record_format == WEBDATASET:
            return TarReader(source)
        return record_reader(source, self.record_format)

    def _units(self, source: Iterator[list[bytes]]) -> Iterator[list[list[bytes]]]:
        """The records of each element, as many elements at a time as a block has completed."""
        size = self._attributes * (self._batch_size or 1)
        left: list[bytes] = []
        for block in source:
            records = left + block
            whole = len(records) - len(records) % size
            left = records[whole:]
            yield [records[at : at + size] for at in range(0, whole, size)]
        if len(left) % self._attributes:
            raise cut_sample(len(left) % self._attributes, self._attributes)
        if left and not self._drop_remainder:
            yield [left]

    def _element(self, records: list[bytes]) -> Any:
        samples: list[Any]
        if self.record_format == WEBDATASET:
            samples = list(map(sample, records))
        elif self._attributes == 1:
            samples = list(records)
        else:
            starts = range(0, len(records), self._attributes)
            samples = [tuple(records[at : at + self._attributes]) for at in starts]
        return samples[0] if self._batch_size is None else samples


def _local_rank() -> tuple[int, int]:
    """Index and number of the processes of this job on this host."""
    rank, ranks = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    if rank is not None and ranks is not None:
        return int(rank), int(ranks)
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    if together and torch.distributed.get_world_size() > 1:
        raise PipeModeDatasetException(
            "torch.distributed has several processes, but LOCAL_RANK and LOCAL_WORLD_SIZE do not say "
            "how many are on this host: start them with torchrun, or give share=(index, number)"
        )
    return 0, 1


def _channels_of(channel: str | Sequence[str], rank: int, ranks: int) -> list[str]:
    """The channels of one process of a host's. PipeModeDatasetException if they are not a whole number."""
    channels = [channel] if isinstance(channel, str) else list(channel)
    if not channels or len(set(channels)) != len(channels):
        raise ValueError(f"the channels are {channels}: give one or several, each once")
    if not 0 <= rank < ranks:
        raise ValueError(f"share is ({rank}, {ranks}); the index must be below the number")
    if len(channels) % ranks:
        raise PipeModeDatasetException(
            f"{ranks} processes of this host cannot divide {len(channels)} channels ({', '.join(channels)}): "
            "name as many for each process, or give share=(0, 1) if this one alone reads them"
        )
    return channels[rank::ranks]
