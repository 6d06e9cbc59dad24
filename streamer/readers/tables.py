"""`TableReader`: the Parquet and Arrow objects of a channel as record batches of pyarrow.

    S3 object -> RecordIO record -> TableDecoder -> pyarrow.RecordBatch

A Parquet object ends with its index, so it can only be decoded when all of it has arrived. With
`RecordWrapperType: RecordIO` the sidecar makes every object one record, of at most 512 MiB:

    for batch in TableReader("train", columns=["text", "label"]):
        ...

`streamer.readers.table_decoder` decodes an object, and `streamer.readers.table_objects` leaves out those that
are damaged; `streamer.readers.table_dataset` is the dataset for PyTorch.

A state has the position of the object, which is that of `PipeReader`, and the rows of the object that were
returned. So a resumed reader decodes that object again and returns the rest of its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamer.formats.recordio import MAX_PAYLOAD
from streamer.readers.core.channel_reader import ChannelReader
from streamer.readers.core.options import paths_of, with_defaults
from streamer.readers.core.record_spec import RecordSpec, format_of
from streamer.readers.table_decoder import BATCH_ROWS, TableDecoder
from streamer.readers.table_objects import check_table_skip, table_batches
from streamer.step_state import is_step_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa
    from typing_extensions import Unpack

    from streamer.readers.core.options import ReadOptions
    from streamer.readers.core.position import ReaderPosition
    from streamer.readers.core.read_loop import ReadLoop
    from streamer.readers.core.stream import PipeStream

FORMAT = 1
_KEYS = {"format", "channels", "ahead", "rows"}


class TableReader(ChannelReader):
    """The objects of a channel as record batches of pyarrow. Each `iter()` reads the next epoch.

    The channel has `RecordWrapperType: RecordIO`. `columns`, `batch_rows`: as for `TableDecoder`.
    `max_object_bytes`: objects that are larger raise RecordTooLarge, before they take memory. `epoch`: as for
    `PipeReader`. Other arguments: `ReadOptions`. `skip` has a number of objects only. With `key` batches are
    `KeyedBatch`es, with the key of their object and the number of their first row.

    Raises ValueError for an invalid argument, ModuleNotFoundError without pyarrow, PipeModeDatasetException
    for a channel that is not a Pipe channel, ChannelError if the quarantine list cannot be written. Iterating
    raises ChannelError, TruncatedStream, CorruptRecord and RecordTooLarge.
    """

    def __init__(
        self,
        channel: str,
        *,
        columns: Sequence[str] | None = None,
        batch_rows: int = BATCH_ROWS,
        max_object_bytes: int = MAX_PAYLOAD,
        epoch: int | None = None,
        **options: Unpack[ReadOptions],
    ) -> None:
        chosen = with_defaults(options)
        if max_object_bytes < 1:
            raise ValueError(f"max_object_bytes is {max_object_bytes}: it must be 1 or more")
        check_table_skip(chosen["skip"])
        spec = RecordSpec(
            format_of([channel], paths_of(chosen).config, "RecordIO"),
            chosen["key"],
            chosen["skip"],
            placed=True,
            max_object_bytes=max_object_bytes,
        )
        self._decoder = TableDecoder(columns=columns, batch_rows=batch_rows)
        super().__init__(channel, spec, chosen, epoch=epoch)
        self._rows = 0
        """Rows that have been returned of the object at the position, which is not returned whole."""

    @property
    def schema(self) -> pa.Schema | None:
        """Schema of the batches; None before the first object."""
        return self._decoder.schema

    def __iter__(self) -> Iterator[Any]:
        with self._next_epoch() as loop:
            rows = self._rows
            for block in loop.lists():
                for left, entry in zip(range(len(block), 0, -1), block, strict=True):
                    number = loop.position.records - left
                    name = f"object {number} of epoch {loop.stream.epoch} of channel {self.channel}"
                    self.left, self._rows = left, rows
                    for batch, after in table_batches(
                        self._decoder, entry, name, key=self._spec.key, skips=loop.skips, rows=rows
                    ):
                        self.left, self._rows = (left, after) if after else (left - 1, 0)
                        yield batch
                    self.left, self._rows, rows = left - 1, 0, 0

    def _loop(self, stream: PipeStream, position: ReaderPosition) -> ReadLoop:
        if self._start is None or self._start.epoch != stream.epoch:  # another reader may have taken that
            self._rows = 0
        return super()._loop(stream, position)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was returned, for JSON and checkpoints.

        If ranks share the channel by record, it is the state of the whole job after the last global batch
        whose objects were all returned (`streamer.step_state`).
        """
        state = super().state_dict()
        if is_step_state(state):
            return state
        return {"format": FORMAT, "channels": [state], "ahead": {}, "rows": self._rows}

    def load_state_dict(self, state: Mapping[str, Any], *, anyway: bool = False) -> None:
        """Begin the next iteration at the position `state`, with the rest of that epoch.

        The batches of the object that `state` is in may have other borders; their rows are the same. Raises
        ValueError if `state` is no state of this channel. Iterating raises ChannelError if the plan has
        changed since, unless `anyway`.
        """
        rows: Any = 0
        if not is_step_state(state):
            inner, rows = state.get("channels"), state.get("rows")
            if (
                state.keys() != _KEYS
                or state["format"] != FORMAT
                or not isinstance(inner, list)
                or len(inner) != 1
                or not isinstance(inner[0], dict)
                or type(rows) is not int
                or rows < 0
            ):
                raise ValueError(f"the state is not what TableReader.state_dict() returns: {dict(state)!r}")
            state = inner[0]
        super().load_state_dict(state, anyway=anyway)
        self._rows = rows
