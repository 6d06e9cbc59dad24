"""`TableIterableDataset`: Parquet and Arrow objects as record batches, for PyTorch.

    PipeIterableDataset -> object (bytes) -> TableDecoder -> RecordBatch -> decode -> DataLoader

The dataset of objects divides them among ranks and workers (`streamer.readers.torch`), so each object is
decoded in one worker. A batch that leaves a worker is copied first: pickle would send the whole object with
each slice of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from streamer.errors import CorruptRecord
from streamer.readers.core.record_keys import KeyedRecord, RecordKey, named
from streamer.readers.table_decoder import BATCH_ROWS, KeyedBatch, TableDecoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa

    from streamer.readers.torch import PipeIterableDataset

__all__ = ["TableIterableDataset"]


class TableIterableDataset(IterableDataset):  # type: ignore[misc] # torch is not followed by the checker
    """The record batches of the objects of a `PipeIterableDataset`. Each pass is the next epoch.

    `objects`: a dataset without `decode`, `batch_size` and `attributes`, of a channel with
    `RecordWrapperType: RecordIO`. `columns`, `batch_rows`: as for `TableDecoder`. `decode`: function that
    makes the element of a batch, such as a tensor; it runs in the workers. If `objects` has `key`, batches
    are `KeyedBatch`es. An epoch has no state.

    Raises what `TableDecoder` raises. Iterating raises what `objects` raises, and CorruptRecord.
    """

    def __init__(
        self,
        objects: PipeIterableDataset,
        *,
        columns: Sequence[str] | None = None,
        batch_rows: int = BATCH_ROWS,
        decode: Callable[[pa.RecordBatch], Any] | None = None,
    ) -> None:
        self._objects = objects
        self._decode = decode
        self._decoder = TableDecoder(columns=columns, batch_rows=batch_rows)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator, because every worker must count a pass, even one that it never reads.
        return self._batches(iter(self._objects))

    def _batches(self, objects: Iterator[Any]) -> Iterator[Any]:
        decode = self._decode or (_copied if get_worker_info() else None)
        channels = ", ".join(self._objects.channels)
        for element in objects:
            payload, *key = element if isinstance(element, KeyedRecord) else (element,)
            if not isinstance(payload, bytes):
                raise TypeError(
                    f"objects yields {type(payload).__name__}, and TableIterableDataset takes whole objects: "
                    "make the PipeIterableDataset without decode, batch_size and attributes"
                )
            row = 0
            try:
                for batch in self._decoder.batches(payload, name=f"an object of {channels}"):
                    keyed = KeyedBatch._make((batch, *key, row)) if key else batch
                    row += batch.num_rows
                    yield keyed if decode is None else decode(keyed)
            except CorruptRecord as error:
                if not key:
                    raise
                raise named(error, RecordKey._make(key)) from error


def _copied(batch: pa.RecordBatch | KeyedBatch) -> pa.RecordBatch | KeyedBatch:
    """Return a batch whose buffers have its own rows only."""
    import pyarrow as pa

    if isinstance(batch, KeyedBatch):
        return batch._replace(batch=_copied(batch.batch))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()
