"""`TableReader`: the Parquet and Arrow objects of a channel as record batches of pyarrow.

    S3 object -> RecordIO record -> TableDecoder -> pyarrow.RecordBatch

A Parquet object ends with its index, so it can only be decoded when all of it has arrived. With
`RecordWrapperType: RecordIO` the sidecar makes every object one record, of at most 512 MiB:

    for batch in TableReader("train", columns=["text", "label"]):
        ...

`streamer.readers.table_decoder` decodes an object, and `skip` leaves out those that
are damaged; `streamer.readers.table_dataset` is the dataset for PyTorch.

A state has the position of the object, which is that of `PipeReader`, and the rows of the object that were
returned. So a resumed reader decodes that object again and returns the rest of its rows.

`table_batches` returns the record batches of one object after the other, for all readers of tables. With
`skip` an object is decoded wholly before its first batch is returned, so a damaged object gives no row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamer.errors import ChannelError, CorruptRecord
from streamer.formats.recordio import MAX_PAYLOAD
from streamer.readers.core.channel_reader import ChannelReader, paths_of, with_defaults
from streamer.readers.core.record_names import named, record_name
from streamer.readers.core.record_spec import RecordSpec, format_of
from streamer.readers.core.skipping import SkippedRecord
from streamer.readers.table_decoder import BATCH_ROWS, KeyedBatch, TableDecoder
from streamer.step_state import is_step_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa
    from typing_extensions import Unpack

    from streamer.readers.core.channel_reader import ReadOptions
    from streamer.readers.core.epoch_skips import EpochSkips
    from streamer.readers.core.position import ReaderPosition
    from streamer.readers.core.read_loop import ReadLoop
    from streamer.readers.core.skipping import PlacedRecord, SkipPolicy
    from streamer.readers.core.stream import PipeStream


@dataclass(frozen=True, slots=True)
class SkippedTable(SkippedRecord):
    """An object that cannot be decoded. `reason` names it; the next one begins at its end."""

    def __str__(self) -> str:
        if self.key is None:
            return f"{self.reason}; it is the table at offset {self.offset}"
        return f"{self.reason}; it is {record_name(self.key, self.number, self.bucket)}"


def check_table_skip(skip: SkipPolicy | None) -> None:
    """Raise ValueError for a budget of records, which tables have not."""
    if skip is not None and skip.records:
        raise ValueError(
            f"skip has records {skip.records}, and a reader of tables leaves out whole objects: give objects "
            "only"
        )


def table_batches(
    decoder: TableDecoder,
    entry: Any,
    name: str,
    *,
    key: bool,
    skips: EpochSkips | None = None,
    rows: int = 0,
) -> Iterator[tuple[Any, int]]:
    """Yield the batches of an object, each with the number of its rows so far; 0 with the last batch.

    `entry`: the object, as a `KeyedRecord` with `key`, and as an entry of `EpochSkips` with `skips`. `name`:
    the object's, for errors. `key`: batches are `KeyedBatch`es. `rows`: number of rows that were returned
    before. A corrupt object has no batch, within the budget of `skips`. Raises CorruptRecord, ChannelError.
    """
    if isinstance(entry, SkippedRecord):
        return
    if skips is None:
        batches = _plain(decoder, entry, name, key=key)
    elif (whole := _decoded(decoder, entry, name, skips)) is not None:
        batches = iter(whole)
    else:
        return
    batches = _without(batches, rows, name)
    batch = next(batches, None)
    while batch is not None:
        failure, following = None, None
        try:
            following = next(batches, None)
        except CorruptRecord as error:
            failure = error
        element = KeyedBatch(batch, entry.key, entry.number, entry.bucket, rows) if key else batch
        rows += batch.num_rows
        yield element, 0 if following is None and failure is None else rows
        if failure is not None:
            raise failure
        batch = following


def _plain(decoder: TableDecoder, entry: Any, name: str, *, key: bool) -> Iterator[pa.RecordBatch]:
    """Yield the batches of an object, without skips. Raises CorruptRecord, which names the object."""
    if not key:
        yield from decoder.batches(entry, name=name)
        return
    try:
        yield from decoder.batches(entry.record, name=name)
    except CorruptRecord as error:
        raise named(error, record_name(*entry[1:])) from error


def _decoded(
    decoder: TableDecoder, entry: PlacedRecord, name: str, skips: EpochSkips
) -> list[pa.RecordBatch] | None:
    """Return the batches of an object; None if it is left out. Raises CorruptRecord over the budget."""
    try:
        return decoder.whole(entry.record, name=name)
    except CorruptRecord as error:
        place = (entry.key, entry.number, entry.bucket)
        if not skips.admit([SkippedTable(entry.offset, str(error), "object", *place)]):
            raise skips.refusal() from error
    return None


def _without(batches: Iterator[pa.RecordBatch], skip: int, name: str) -> Iterator[pa.RecordBatch]:
    """Yield batches without the first `skip` rows. Raises ChannelError if there are less."""
    for batch in batches:
        if skip < batch.num_rows:
            yield batch.slice(skip) if skip else batch
            skip = 0
        else:
            skip -= batch.num_rows
    if skip:
        raise ChannelError(
            f"the state is {skip} rows after the end of {name}: restore it, or begin without the state"
        )


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
