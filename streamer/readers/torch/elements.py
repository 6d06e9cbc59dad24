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
from streamer.readers.core.config import check_turn
from streamer.readers.core.epochs import ChannelEpochs
from streamer.readers.core.memory import keep_memory
from streamer.readers.core.position import RankSteps
from streamer.readers.core.read_loop import ReadLoop
from streamer.readers.core.record_spec import WEBDATASET, RecordSpec, check_format
from streamer.readers.core.skipping import without_skipped
from streamer.readers.core.start import reach_start
from streamer.readers.samples import check_attributes, cut_sample
from streamer.readers.torch.progress import (
    ChannelProgress,
    ElementOrigin,
    RecordGrouper,
    RecordRange,
    Unit,
    progress_in,
)
from streamer.readers.torch.workers import (
    PATIENCE_S,
    ParentExited,
    WorkerGroup,
    WorkerGroupReader,
    parent_check,
)
from streamer.trailer import channel_of_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from streamer.formats.window import RecordReader, Source
    from streamer.readers.core.config import Directories
    from streamer.readers.core.shuffle import NumberedRecords
    from streamer.readers.core.stream import PipeStream

    Blocks = Iterator[tuple[ReadLoop, list[NumberedRecords]]]


@dataclass(frozen=True)
class ElementSpec(RecordSpec):
    """What an element is; the options are those of `PipeIterableDataset`. Raises ValueError, ChannelError."""

    attributes: int = 1
    batch_size: int | None = None
    drop_remainder: bool = False
    decode: Callable[[Any], Any] | None = None
    padding: bool = False

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
        super().__post_init__()

    @property
    def unit(self) -> int:
        """Number of records of an element."""
        return self.attributes * (self.batch_size or 1)

    def reader(self, source: Source) -> RecordReader:
        """Return a reader of the records of one stream."""
        if self.record_format == WEBDATASET:
            keep_memory()
            return TarReader(source)
        return super().reader(source)

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

    def __init__(self, spec: ElementSpec, paths: Directories, *, timeout: float) -> None:
        """`timeout`: seconds to wait for a FIFO, and then for its writer."""
        self.spec = spec
        self.paths = paths
        self.channels: Sequence[str] = ()
        """Channels of this process."""
        self.turn: int | None = 0
        """Number of the FIFO of a rank that the first worker reads in this pass; None if it is unknown."""
        self._timeout = timeout
        self._epochs: dict[str, ChannelEpochs] = {}

    def epochs(self, channel: str) -> ChannelEpochs:
        """Return the epochs of a channel; the same object in every call."""
        if channel not in self._epochs:
            options: dict[str, Any] = {"timeout": self._timeout, "patience": PATIENCE_S}
            self._epochs[channel] = ChannelEpochs(channel, self.paths, **options)
        return self._epochs[channel]

    def elements(
        self, channels: list[tuple[str, WorkerGroup | None]], starts: dict[str, ChannelProgress]
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
                loop, whole = block
                epoch, digest, rank = loop.stream.epoch, loop.stream.digest, loop.rank
                saved = progress_in(starts.get(name), name, epoch)
                self._check_turn(loop.stream)
                for element, received, rows in self._elements(loop, whole, saved.rows):
                    if decode is not None:
                        element = decode(element)  # noqa: PLW2901 - the same element
                    if self.spec.padding:
                        padding = rank.padding_of(received.first, received.end) if rank else 0
                        element = element, padding  # noqa: PLW2901
                    yield element, ElementOrigin(name, epoch, digest, received, rank, rows)

    def _check_turn(self, stream: PipeStream) -> None:
        """Raise ChannelError unless this is the FIFO that this worker reads for the order of batches."""
        rank = RankSteps.of(stream.trailer)
        if rank is None:
            return
        info, spec = get_worker_info(), self.spec
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        fifos = sum(channel_of_rank(name) == rank.channel for name in self.channels)
        records = None if spec.batch_size is None and not spec.placed else spec.unit
        unknown = self.turn is None and rank.first > 0
        worker = None if unknown else (number + (self.turn or 0)) % rank.workers
        check_turn(rank, fifos, worker=worker, workers=workers, records=records)

    def _elements(
        self,
        loop: ReadLoop,  # noqa: ARG002 - for a source of tables
        units: list[Unit],
        rows: Mapping[int, int],  # noqa: ARG002
    ) -> Iterator[tuple[Any, RecordRange, int]]:
        """Yield the elements of units, without `decode`, with the fields of their origins.

        `rows`: as in `ChannelProgress`.
        """
        element = self.spec.element
        for records, numbers in units:
            yield element(records), numbers, 0

    def _records(self, channel: str, group: WorkerGroup | None, saved: ChannelProgress | None) -> Blocks:
        if group is None:
            return self._own_records(channel, saved)
        return iter(
            WorkerGroupReader(
                channel,
                self.paths,
                group,
                self.spec,
                unit=self.spec.unit,
                timeout=self._timeout,
                saved=saved,
            )
        )

    def _own_records(self, channel: str, saved: ChannelProgress | None) -> Blocks:
        """Yield the records of a FIFO that this worker reads alone."""
        parent = parent_check() if get_worker_info() else lambda: None
        with contextlib.suppress(ParentExited), self.epochs(channel).next_stream() as stream:

            def check() -> None:
                parent()
                # The first byte may wait for a FIFO that this process would open after this one.
                self._check_turn(stream)

            position = reach_start(stream, channel, saved.position if saved else None, check=check)
            ahead = progress_in(saved, channel, stream.epoch).ahead
            loop = ReadLoop(stream, self.spec.reader(stream), self.spec, position, gaps=ahead)
            for block in loop:
                if block.records:
                    yield loop, [block]
                else:
                    parent()

    def _units(self, source: Blocks) -> Iterator[tuple[ReadLoop, list[Unit]]]:
        """Yield, for each block that arrives, the records of each element that the block completes."""
        spec, loop, skips = self.spec, None, False
        units = RecordGrouper(spec.unit, short=not spec.drop_remainder)
        for loop, blocks in source:
            skips = spec.skip is not None and loop.rank is None  # a rank has good records in all places
            if whole := [unit for block in blocks for unit in units.add(block, skips=skips)]:
                yield loop, whole
        last = units.finish(skips=skips)
        if loop is None or last is None:
            return
        if cut := len(last[0]) % spec.attributes:
            raise cut_sample(cut, spec.attributes)
        if not spec.drop_remainder:
            yield loop, [last]
