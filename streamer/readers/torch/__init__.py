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

`streamer.readers.torch.elements` reads the elements. Each has an origin (`streamer.readers.torch.progress`),
which stays in the worker unless a `ResumableLoader` (`streamer.readers.loader`) takes both.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch.distributed
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from streamer.errors import ChannelError
from streamer.launchers import local_share
from streamer.readers.core.channel_reader import ShuffledReadOptions, paths_of, with_defaults
from streamer.readers.core.config import PipeModeDatasetException
from streamer.readers.core.record_spec import WEBDATASET, format_of
from streamer.readers.core.shuffle import Shuffle
from streamer.readers.core.wrappers import check_wrappers, divided, wrapper
from streamer.readers.torch.elements import ElementSource, ElementSpec
from streamer.readers.torch.progress import ChannelProgress, ElementOrigin, Progress, parse_state
from streamer.readers.torch.workers import WorkerGroup
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

    from typing_extensions import Unpack

BATCHED_TWICE = (
    "the data set makes batches of {} records, and the DataLoader would make batches of these, by default of "
    "one: give DataLoader batch_size=None, or leave batch_size out of the data set"
)

_FETCH = "torch.utils.data._utils.fetch"
"""Module of what DataLoader makes batches with."""

__all__ = ["WEBDATASET", "PipeIterableDataset", "PipeModeDatasetException"]

_passes: Counter[tuple[str, str]] = Counter()
"""Passes that this process has begun over each channel, by state directory and channel."""


class PipeIterableDataset(IterableDataset):  # type: ignore[misc] # torch is not followed by the checker
    """The records of one or several Pipe channels; each pass reads the next epoch of every channel.

    `channel`: one name, or several, which are divided among ranks and workers (see the module).
    `record_format`: 'RecordIO', 'MXRecordIO', 'TFRecord', 'TextLine' or 'fixed:BYTES', whose records are
    `bytes`, or 'WebDataset', whose records are dicts from field to bytes, and `__key__`; None for the
    channels' `Records.Format`. `attributes`: number of records of a sample; with 2 or more samples are tuples
    (augmented manifests). `batch_size`: elements are lists of `batch_size` samples; an epoch's last batch is
    shorter, or left out with `drop_remainder`. Set it here, and `batch_size=None` in the DataLoader, so that
    workers spend their cost per element once a batch. Batches do not mix channels. `decode`: called with each
    element in the worker; its result replaces the element.

    `padding`: elements are pairs of the element and how many of its records are padding, the last ones
    (`Remainder: pad`). `share`: (index, number) of this process among the processes of this host that make
    this dataset with the same channels. Default: by the launcher's variables (`streamer.launchers`). Other
    arguments: `ShuffledReadOptions`. With `key` records are `KeyedRecord`s.

    `skip` and `shuffle` need one worker for each FIFO; iterating raises ValueError if workers share one.

    Raises ValueError for an unknown format and for arguments that exclude each other,
    PipeModeDatasetException (a ChannelError) for a channel that is not a Pipe channel, or that has another
    format or none, or if the number of channels is not a multiple of the number of ranks. ChannelError if the
    quarantine list cannot be written. Iterating raises ChannelError, TruncatedStream and CorruptRecord;
    DataLoader raises a worker's error under the same class.
    """

    def __init__(
        self,
        channel: str | Sequence[str],
        record_format: str | None = None,
        *,
        decode: Callable[[Any], Any] | None = None,
        batch_size: int | None = None,
        drop_remainder: bool = False,
        attributes: int = 1,
        share: tuple[int, int] | None = None,
        padding: bool = False,
        **options: Unpack[ShuffledReadOptions],
    ) -> None:
        chosen = with_defaults(options, ShuffledReadOptions)
        paths = paths_of(chosen)
        self._divide(channel, share)
        spec = ElementSpec(
            format_of(self.channels, paths.config, record_format),
            attributes=attributes,
            batch_size=batch_size,
            drop_remainder=drop_remainder,
            decode=decode,
            key=chosen["key"],
            skip=chosen["skip"],
            padding=padding,
            shuffle=Shuffle.of(chosen["shuffle"], chosen["seed"]),
        )
        self._read(ElementSource(spec, paths, timeout=chosen["timeout"]))

    def _divide(self, channel: str | Sequence[str], share: tuple[int, int] | None) -> None:
        """Choose the channels of this process. Raises as the constructor."""
        self._finds_share = share is None
        rank, self._ranks = share or _local_rank()
        self.channels = _channels_of(channel, rank, self._ranks)
        self._of_host = [channel] if isinstance(channel, str) else list(channel)
        """Channels of all processes of this host."""

    def _read(self, source: ElementSource) -> None:
        """Begin to read this process's channels by `source`."""
        self._source = source
        source.channels = self.channels
        self._spec = source.spec
        self._paths = source.paths
        self.record_format = self._spec.record_format
        self.batch_size = self._spec.batch_size
        self.skipped = source.spec.skipped
        """What `skip` has left out in this process so far."""
        self.starts: dict[str, ChannelProgress] = {}
        """By channel, what was received of the next pass, if that is not a whole epoch."""
        self._of_worker = False
        """Whether `starts` are those of one worker, and not of the whole process."""
        self._progress: Progress | None = None
        """Records that this process has returned of the pass that was begun last."""
        self._shared = False
        """Whether other workers read a channel of this one."""

    def __iter__(self) -> Iterator[Any]:
        # Not a generator, because every worker must count a pass, even one that it never reads.
        _check_batches(self._spec, inspect.currentframe())
        if not (names := self._channels_to_read()):
            return iter(())
        channels, starts = self._worker_channels(names), self.take_starts()
        self._shared = any(group is not None for _, group in channels)
        self._progress = self.progress(starts, [name for name, _ in channels])
        return self._count(self._progress, self._source.elements(channels, starts))

    def __len__(self) -> int:
        """Return the number of elements of a whole pass, if ranks share the channels by record.

        Waits until the sidecar offers the first epoch. Raises TypeError if a channel has no known length.
        """
        elements = 0
        for name in self.channels:
            whole, rest = divmod(self._source.epochs(name).counts().records, self.unit)
            elements += whole + (rest > 0 and not self._spec.drop_remainder)
        return elements

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, such as a worker that is spawned. Raises ChannelError."""
        return self.__dict__ | {"channels": self._channels_to_read()}

    def __bool__(self) -> bool:
        """Return True; without this method `bool` would call `len`."""
        return True

    def with_origins(self) -> Iterator[tuple[Any, ElementOrigin]]:
        """Yield each element with its origin, which the caller adds to its progress."""
        check_wrappers(self.channels, self._paths.config, shared=self._ranks > 1)
        return self._source.elements(self._worker_channels(self.channels), self.take_starts())

    def _channels_to_read(self) -> list[str]:
        """Return the channels that this process reads in a pass: its own, unless process 0 reads for all.

        Raises ChannelError as `check_wrappers`.
        """
        if self._finds_share and (_share_in_environment() or (0, 1))[1] != self._ranks:
            raise ChannelError(
                f"this dataset was made when its process was one of {counted(self._ranks, 'rank')}, and the "
                "launcher has set others since: give share=(index, number)"
            )
        found = wrapper()
        if found is None or found.process is None or not self.channels:
            check_wrappers(self.channels, self._paths.config, shared=self._ranks > 1)
            return self.channels
        apart = [name for name in self.channels if divided(name, self._paths.config)]
        if (self._ranks == 1 and apart) or self._ranks not in {1, found.processes}:
            raise found.refusal(self.channels[0])
        if self._ranks > 1 and any(self._shares_records(name) for name in self.channels):
            raise found.refusal(self.channels[0])
        return [] if found.process else self._of_host

    def _shares_records(self, channel: str) -> bool:
        """Return whether ranks share a channel by record, whose batches another order would change."""
        try:
            self._source.epochs(channel).counts()
        except TypeError:
            return False
        return True

    @property
    def unit(self) -> int:
        """Number of records of an element."""
        return self._spec.unit

    def progress(
        self, starts: Mapping[str, ChannelProgress], channels: Sequence[str], *, shared: bool = False
    ) -> Progress:
        """Return the progress at the start of a pass. Raises ChannelError as `ChannelEpochs`.

        `shared`: several workers read one channel.
        """
        return Progress(
            [starts.get(name) or ChannelProgress(self._source.epochs(name).position()) for name in channels],
            self.unit,
            shared=shared,
            shuffle=self._spec.shuffle,
        )

    def take_starts(self) -> dict[str, ChannelProgress]:
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
        starts = parse_state(state, self.unit, self.channels, anyway=anyway, shuffle=self._spec.shuffle)
        channels = set(self.channels)
        if not (starts.keys() <= channels if get_worker_info() else starts.keys() == channels):
            saved = ", ".join(starts) or "others"
            raise ValueError(f"the state is of channels {saved}, not {', '.join(self.channels)}")
        if not self._spec.placed and any(start.rows for start in starts.values()):
            raise ValueError("the state is inside a table; load it into a TableIterableDataset")
        self._of_worker = get_worker_info() is not None
        if not self._of_worker:
            self.channels = list(starts)  # the next worker's channel first
        for name, start in starts.items():
            self._source.epochs(name).seek(start.position.epoch)
        self.starts, self._progress = starts, None

    def _worker_channels(self, names: list[str]) -> list[tuple[str, WorkerGroup | None]]:
        """Return which of the channels this worker reads, each with the group of workers that share it."""
        info = get_worker_info()
        if info is None or info.num_workers == 1:
            return [(name, None) for name in names]
        count = len(names)
        if count >= info.num_workers:
            in_turn = count == info.num_workers and not self._of_worker
            self._source.turn = self._turn(names, info.id) if in_turn else 0
            first = (info.id + (self._source.turn or 0)) % info.num_workers
            return [(name, None) for name in names[first :: info.num_workers]]
        name = names[info.id % count]
        size = len(range(info.id % count, info.num_workers, count))
        if size == 1:
            return [(name, None)]
        for option in ("skip", "shuffle"):
            if getattr(self._spec, option) is not None:
                raise ValueError(
                    f"{size} workers share {name}, and {option} needs one worker for each FIFO: give the "
                    f"channel Ranks: {info.num_workers} and the dataset rank_channels(...), give DataLoader "
                    f"no more workers than channels, or leave {option} out"
                )
        key = (self._paths.state, name)
        _passes[key] += 1
        base_seed = info.seed - info.id
        return [(name, WorkerGroup(f"{base_seed:x}-{_passes[key]}", info.id // count, size))]

    def _turn(self, names: list[str], worker: int) -> int | None:
        """Return the number of the FIFO that worker 0 reads: it has the step at which the pass begins.

        A DataLoader takes the first batch of every pass from worker 0. `worker`: this one. None: there are no
        trailers yet.
        """
        channels, workers = [self._source.epochs(name) for name in names], len(names)
        start = next((each.position.start for each in self.starts.values() if each.position.start), None)
        if start is not None:
            turn = start.step % workers
            # In a later pass the state is an old one.
            if channels[(worker + turn) % workers].peek() == start.epoch:
                return turn
        epoch = min(each.peek() for each in channels)  # some workers may have taken it, but this one not
        steps = [rank.next_step(epoch, rank.first) for each in channels if (rank := each.rank(epoch))]
        return min(steps)[1] % workers if len(steps) == workers else None

    @staticmethod
    def _count(progress: Progress, elements: Iterator[tuple[Any, ElementOrigin]]) -> Iterator[Any]:
        for element, origin in elements:
            progress.add(origin)
            yield element
        progress.end_epochs()


def _check_batches(spec: ElementSpec, frame: FrameType | None) -> None:
    """Raise ValueError if the DataLoader that begins a pass makes batches of batches.

    `frame`: that of the pass, since a data set is not given its loader.
    """
    caller = frame and frame.f_back
    if caller is None or caller.f_globals.get("__name__") != _FETCH:  # `f_locals` keeps a copy in the frame
        return
    fetcher = caller.f_locals.get("self")
    again = getattr(fetcher, "auto_collation", False) and getattr(fetcher, "collate_fn", None)
    if spec.batch_size is not None and again is default_collate:
        raise ValueError(BATCHED_TWICE.format(spec.batch_size))


def _local_rank() -> tuple[int, int]:
    """Return the index of this process among those of this job on this host, and their number."""
    if (found := _share_in_environment()) is not None:
        return found
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    if together and torch.distributed.get_world_size() > 1:
        raise PipeModeDatasetException(
            "torch.distributed has several processes, but LOCAL_RANK and LOCAL_WORLD_SIZE are not set: start "
            "them with torchrun, or give share=(index, number)"
        )
    return 0, 1


def _share_in_environment() -> tuple[int, int] | None:
    """Return as `local_share`. Raises ChannelError."""
    try:
        return local_share(os.environ)
    except ValueError as error:
        raise ChannelError(
            f"which channels this process reads is unknown, because {error}: start the processes with "
            "torchrun, or give share=(index, number)"
        ) from error


def _channels_of(channel: str | Sequence[str], rank: int, ranks: int) -> list[str]:
    """Return the channels of one process of a host. Raises PipeModeDatasetException if there are too few."""
    channels = [channel] if isinstance(channel, str) else list(channel)
    if not channels or len(set(channels)) != len(channels):
        raise ValueError(f"the channels are {channels}: give one or several, each once")
    if not 0 <= rank < ranks:
        raise ValueError(f"share is ({rank}, {ranks}); the index must be below the number")
    if len(channels) % ranks:
        raise PipeModeDatasetException(
            f"{ranks} processes of this host cannot divide {counted(len(channels), 'channel')} "
            f"({', '.join(channels)}): name a multiple of {ranks}, or give share=(0, 1) if this "
            "process alone reads them"
        )
    return channels[rank::ranks]
