"""The elements of one pass over channels: samples and batches, made of the records that arrive.

    channel -> FIFO -> records -> (skip) -> (shuffle) -> units, one of each element -> batch -> decode

`ElementSpec` has the options, which never change. `ElementSource` reads.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from streamer.formats.tar import TarReader, sample
from streamer.readers.core.epochs import ChannelEpochs
from streamer.readers.core.keys_and_skips import KeysAndSkips, placed_lists
from streamer.readers.core.memory import keep_memory
from streamer.readers.core.plain import check_format, record_reader
from streamer.readers.core.position import StartPosition
from streamer.readers.core.rank_channels import check_one_host
from streamer.readers.core.rank_steps import RankSteps, step_records
from streamer.readers.core.record_count import RecordCount
from streamer.readers.core.record_keys import NO_BATCH
from streamer.readers.core.shuffle import NumberedRecords, Windows
from streamer.readers.core.skipping import Replacements, without_skipped
from streamer.readers.core.start import reach_start
from streamer.readers.samples import check_attributes, cut_sample
from streamer.readers.torch.progress import ElementOrigin
from streamer.readers.torch.record_ranges import (
    RecordGrouper,
    RecordRange,
    RemainingRecords,
    Unit,
    admitted_blocks,
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
    from streamer.readers.core.config import Directories
    from streamer.readers.core.epoch_skips import EpochSkips
    from streamer.readers.core.shuffle import Shuffle
    from streamer.readers.core.skipping import SkipPolicy
    from streamer.readers.core.stream import PipeStream

    Blocks = Iterator[tuple[PipeStream, list[NumberedRecords]]]

WEBDATASET = "WebDataset"
"""The record format of tar streams, whose records are dicts (`streamer.formats.tar`)."""


@dataclass(frozen=True)
class ElementSpec:
    """What an element is; the options are those of `PipeIterableDataset`. Raises ValueError."""

    record_format: str
    attributes: int = 1
    batch_size: int | None = None
    drop_remainder: bool = False
    decode: Callable[[Any], Any] | None = None
    key: bool = False
    skip: SkipPolicy | None = None
    padding: bool = False
    shuffle: Shuffle | None = None

    def __post_init__(self) -> None:
        if self.record_format != WEBDATASET:
            check_format(self.record_format)
        elif self.attributes != 1:
            raise ValueError("attributes has no meaning for WebDataset, whose records are whole samples")
        check_attributes(self.attributes)
        if self.skip is not None and self.attributes > 1:
            raise ValueError(
                "skip cannot be used with attributes, because the records of a sample are counted, and one "
                "that is left out would mix two samples"
            )
        if self.shuffle is not None and self.attributes > 1:
            raise ValueError("shuffle cannot be used with attributes, because it would mix samples")
        if self.shuffle is not None and self.padding:
            raise ValueError("shuffle moves padding among other records: read an evaluation without shuffle")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be 1 or more")
        if self.drop_remainder and self.batch_size is None:
            raise ValueError("drop_remainder has no meaning without batch_size")

    @property
    def unit(self) -> int:
        """Number of records of an element."""
        return self.attributes * (self.batch_size or 1)

    def reader(self, source: Source) -> RecordReader:
        """Return a reader of the records of one stream."""
        if self.record_format == WEBDATASET:
            keep_memory()
            return TarReader(source)
        return record_reader(source, self.record_format)

    def element(self, records: list[Any]) -> Any:
        """Return the element of the records of one unit, without `decode`; it may be this list."""
        if self.skip is None and self.attributes == 1 and self.record_format != WEBDATASET:
            return records[0] if self.batch_size is None else records
        samples: list[Any]
        if self.skip is not None:
            records = without_skipped(records)
        if self.record_format == WEBDATASET:
            samples = [
                each._replace(record=sample(each.record)) if self.key else sample(each) for each in records
            ]
        elif self.attributes == 1:
            samples = list(records)
        else:
            starts = range(0, len(records), self.attributes)
            samples = [tuple(records[at : at + self.attributes]) for at in starts]
        return samples[0] if self.batch_size is None else samples


class ElementSource:
    """Reads the elements of channels in this process."""

    placed = False
    """As for `KeysAndSkips`."""

    def __init__(self, spec: ElementSpec, paths: Directories, *, timeout: float) -> None:
        """`timeout`: seconds to wait for a FIFO, and then for its writer."""
        self.spec = spec
        self._keys_and_skips = KeysAndSkips(
            spec.record_format, key=spec.key, skip=spec.skip, placed=self.placed
        )
        self.skips: dict[str, EpochSkips] = {}
        """By channel, what is left out of the present epoch, if there is a policy."""
        self.skipped = self._keys_and_skips.skipped
        """What `skip` has left out in this process so far."""
        self.paths = paths
        self.channels: Sequence[str] = ()
        """Channels of this process."""
        self._timeout = timeout

    def epochs(self, channel: str) -> ChannelEpochs:
        """Return the epochs of a channel, from the next one that this process reads."""
        return ChannelEpochs(channel, self.paths, timeout=self._timeout, patience=PATIENCE_S)

    def elements(
        self, channels: list[tuple[str, WorkerGroup | None]], starts: dict[str, RemainingRecords]
    ) -> Iterator[tuple[Any, ElementOrigin]]:
        """Yield each element of the next pass with its origin, a block of each channel in rotation."""
        decode = self.spec.decode
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
                stream, whole = block
                epoch, digest, rank = stream.epoch, stream.digest, RankSteps.of(stream.trailer)
                saved = remaining_records(starts.get(name), name, epoch)
                for element, received, rows in self._elements(name, epoch, whole, saved.rows):
                    if decode is not None:
                        element = decode(element)  # noqa: PLW2901 - the same element
                    if self.spec.padding:
                        padding = rank.padding_of(received.first, received.end) if rank else 0
                        element = element, padding  # noqa: PLW2901
                    yield element, ElementOrigin(name, epoch, digest, received, rank, rows)

    def _elements(
        self,
        channel: str,  # noqa: ARG002 - for a source of tables
        epoch: int,  # noqa: ARG002
        units: list[Unit],
        rows: Mapping[int, int],  # noqa: ARG002
    ) -> Iterator[tuple[Any, RecordRange, int]]:
        """Yield the elements of units, without `decode`, with the fields of their origins.

        `rows`: as in `RemainingRecords`.
        """
        element = self.spec.element
        for records, numbers in units:
            yield element(records), numbers, 0

    def _records(self, channel: str, group: WorkerGroup | None, saved: RemainingRecords | None) -> Blocks:
        if group is None:
            return self._own_records(channel, saved)
        return iter(
            WorkerGroupReader(
                channel,
                self.paths,
                group,
                self.spec.reader,
                unit=self.spec.unit,
                timeout=self._timeout,
                saved=saved,
                key=self.spec.key,
            )
        )

    def _own_records(self, channel: str, saved: RemainingRecords | None) -> Blocks:
        """Yield the records of a FIFO that this worker reads alone."""
        spec = self.spec
        check = parent_check() if get_worker_info() else lambda: None
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(ParentExited))
            stream = stack.enter_context(self.epochs(channel).next_stream())
            position = reach_start(stream, channel, saved.start if saved else None, check=check)
            info = get_worker_info()
            if info is not None and info.num_workers > 1:
                check_one_host(RankSteps.of(stream.trailer), self.channels, self.paths.config)
            base, number = position.offset, position.records - position.skip
            keys, skips = stack.enter_context(
                self._keys_and_skips.epoch(stream, channel, offset=base, number=position.number)
            )
            if skips is not None:
                self.skips[channel] = skips
            windows = None
            if spec.shuffle is not None:
                returned = 0 if position.window is None else position.records - position.window
                windows = Windows(spec.shuffle, stream.epoch, returned=returned)
                position.records -= returned  # the window is read again
            ahead = remaining_records(saved, channel, stream.epoch).ahead
            remaining = RemainingRecords(StartPosition(position), ahead)
            reader = spec.reader(stream)
            lists = placed_lists(reader, stream, keys, skips, base)
            batches = RecordCount(stream, number).checked(lists, reader)
            while True:
                offset = base + reader.offset
                batch, in_object = next(batches, NO_BATCH)
                if batch is None:
                    break
                blocks = list(remaining.select(batch, number, offset, in_object))
                bad = skips if skips is not None and skips.bad else None
                if bad is not None:
                    blocks = admitted_blocks(blocks, bad)
                for ready in _shuffled(blocks, windows, stream):
                    yield stream, ready
                if bad is not None:
                    bad.check_refused()
                number += len(batch)
                if not batch:
                    check()
            for piece in windows.finish() if windows is not None else ():
                yield stream, [piece]

    def _units(self, source: Blocks) -> Iterator[tuple[PipeStream, list[Unit]]]:
        """Yield, for each block that arrives, the records of each element that the block completes."""
        spec = self.spec
        units = RecordGrouper(spec.unit, short=not spec.drop_remainder)
        stream, places = None, None
        for stream, blocks in source:
            skips = spec.skip is not None
            if skips and RankSteps.of(stream.trailer) is not None:  # every rank returns all its places
                skips, places = False, places or Replacements(stream.name)
            whole = [unit for block in blocks for unit in units.add(block, skips=skips)]
            if places is not None:
                whole = list(places.units(whole))
            if whole:
                yield stream, whole
        last = units.finish(skips=spec.skip is not None and places is None)
        if places is not None and stream is not None:
            rest = list(places.units([] if last is None else [last]))
            places.check_filled()
            last = None
            if rest and len(rest[-1][0]) < spec.unit:
                last = rest.pop()
            if rest:
                yield stream, rest
        if stream is None or last is None:
            return
        if cut := len(last[0]) % spec.attributes:
            raise cut_sample(cut, spec.attributes)
        if not spec.drop_remainder:
            yield stream, [last]


def _shuffled(
    blocks: list[NumberedRecords], windows: Windows | None, stream: PipeStream
) -> Iterator[list[NumberedRecords]]:
    """Yield the blocks, or the pieces of the windows that they complete."""
    if windows is None:
        yield blocks
        return
    step = step_records(RankSteps.of(stream.trailer))
    for block in blocks:
        for piece in windows.add(block, step):
            yield [piece]
