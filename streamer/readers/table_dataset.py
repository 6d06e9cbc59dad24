"""`TableIterableDataset`: Parquet and Arrow objects as record batches, for PyTorch.

    PipeIterableDataset -> object (bytes) -> batches of its rows -> decode -> DataLoader

An object is one record of its channel, so each object is decoded in one worker, and the state is that of
`PipeIterableDataset`, with the rows of objects that were returned in part. A batch that leaves a worker is
copied first: pickle would send the whole object with each slice of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from streamer.formats.recordio import MAX_PAYLOAD
from streamer.readers.core.channel_reader import paths_of, with_defaults
from streamer.readers.core.record_spec import format_of
from streamer.readers.table_decoder import BATCH_ROWS, KeyedBatch, TableDecoder
from streamer.readers.tables import check_table_skip, table_batches
from streamer.readers.torch import PipeIterableDataset
from streamer.readers.torch.elements import ElementSource, ElementSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pyarrow as pa
    from typing_extensions import Unpack

    from streamer.readers.core.channel_reader import ReadOptions
    from streamer.readers.core.config import Directories
    from streamer.readers.core.read_loop import ReadLoop
    from streamer.readers.torch.progress import RecordRange, Unit

__all__ = ["TableIterableDataset"]


class TableIterableDataset(PipeIterableDataset):
    """The record batches of the objects of one or several channels. Each pass is the next epoch of each.

    The channels have `RecordWrapperType: RecordIO`. `columns`, `batch_rows`: as for `TableDecoder`.
    `max_object_bytes`, `skip`, `key`: as for `TableReader`; `skip` needs one worker for each FIFO.
    `decode`: function that makes the element of a batch, or of a `KeyedBatch`, such as a tensor; it runs in
    the workers. Other arguments, states and errors are those of `PipeIterableDataset`; `len` is unknown.
    """

    def __init__(
        self,
        channel: str | Sequence[str],
        *,
        columns: Sequence[str] | None = None,
        batch_rows: int = BATCH_ROWS,
        max_object_bytes: int = MAX_PAYLOAD,
        decode: Callable[[Any], Any] | None = None,
        share: tuple[int, int] | None = None,
        **options: Unpack[ReadOptions],
    ) -> None:
        chosen = with_defaults(options)
        if max_object_bytes < 1:
            raise ValueError(f"max_object_bytes is {max_object_bytes}: it must be 1 or more")
        check_table_skip(chosen["skip"])
        paths = paths_of(chosen)
        self._divide(channel, share)
        spec = ElementSpec(
            format_of(self.channels, paths.config, "RecordIO"),
            decode=decode or _copied_in_worker,
            key=chosen["key"],
            skip=chosen["skip"],
            placed=True,
            max_object_bytes=max_object_bytes,
        )
        decoder = TableDecoder(columns=columns, batch_rows=batch_rows)
        self._read(_TableSource(spec, paths, decoder, timeout=chosen["timeout"]))

    def __len__(self) -> int:
        """Raise TypeError, because the rows of the objects are unknown."""
        raise TypeError("the number of batches of tables is unknown, because their rows are")


class _TableSource(ElementSource):
    """Reads the batches of the objects of channels."""

    def __init__(
        self, spec: ElementSpec, paths: Directories, decoder: TableDecoder, *, timeout: float
    ) -> None:
        super().__init__(spec, paths, timeout=timeout)
        self._decoder = decoder
        self._empty: dict[str, tuple[int, RecordRange]] = {}
        """By channel, the last objects without a batch, and their epoch; received with the next object."""

    def _elements(
        self, loop: ReadLoop, units: list[Unit], rows: Mapping[int, int]
    ) -> Iterator[tuple[Any, RecordRange, int]]:
        """Yield the batches of objects; corrupt ones before an object are received with it."""
        for records, numbers in units:
            yield from self._of_object(loop, records, numbers, rows)

    def _of_object(
        self, loop: ReadLoop, records: list[Any], numbers: RecordRange, rows: Mapping[int, int]
    ) -> Iterator[tuple[Any, RecordRange, int]]:
        channel, epoch = loop.position.channel, loop.stream.epoch
        entry, number = records[-1], numbers.end - 1
        before = self._empty.pop(channel, None)
        if before is not None and before[0] == epoch and before[1].end == numbers.first:
            numbers = numbers._replace(first=before[1].first)
        batches = table_batches(
            self._decoder,
            entry,
            f"object {number} of epoch {epoch} of channel {channel}",
            key=self.spec.key,
            skips=loop.skips,
            rows=rows.get(number, 0),
        )
        empty = True
        for batch, after in batches:
            empty = False
            yield batch, numbers, after
        if empty:
            self._empty[channel] = epoch, numbers


def _copied_in_worker(batch: pa.RecordBatch | KeyedBatch) -> pa.RecordBatch | KeyedBatch:
    return batch if get_worker_info() is None else _copied(batch)


def _copied(batch: pa.RecordBatch | KeyedBatch) -> pa.RecordBatch | KeyedBatch:
    """Return a batch whose buffers have its own rows only."""
    import pyarrow as pa

    if isinstance(batch, KeyedBatch):
        return batch._replace(batch=_copied(batch.batch))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()
