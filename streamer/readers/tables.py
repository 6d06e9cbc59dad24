"""`TableReader`: the Parquet and Arrow objects of a channel as record batches of pyarrow.

    S3 object -> RecordIO record -> TableDecoder -> pyarrow.RecordBatch

A Parquet object ends with its index, so it can only be decoded when all of it has arrived. With
`RecordWrapperType: RecordIO` the sidecar makes every object one record, of at most 512 MiB:

    for batch in TableReader("train", columns=["text", "label"]):
        ...

With `skip` an object is decoded wholly before its first batch is returned, so a damaged object gives no row:

    object -> all its batches, or CorruptRecord -> budget, quarantine (`streamer.readers.core.skipping`)

`streamer.readers.table_decoder` decodes an object; `streamer.readers.table_dataset` is the dataset for
PyTorch.

A state has the position of the object, which is that of `PipeReader`, and the rows of the object that were
returned. So a resumed reader decodes that object again and returns the rest of its rows.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamer.errors import ChannelError, CorruptRecord
from streamer.formats.recordio import MAX_PAYLOAD, RecordIOReader
from streamer.readers.core.channel_reader import ChannelReader
from streamer.readers.core.config import directories
from streamer.readers.core.epoch_skips import EpochSkips
from streamer.readers.core.epochs import TIMEOUT
from streamer.readers.core.keys_and_skips import KeysAndSkips
from streamer.readers.core.position import reach_start
from streamer.readers.core.record_keys import named, record_name
from streamer.readers.core.skipping import SkippedRecord
from streamer.readers.table_decoder import BATCH_ROWS, KeyedBatch, TableDecoder
from streamer.step_state import is_step_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa

    from streamer.readers.core.skipping import PlacedRecord, SkipPolicy

FORMAT = 1
_KEYS = {"format", "channels", "ahead", "rows"}


@dataclass(frozen=True, slots=True)
class SkippedTable(SkippedRecord):
    """An object that cannot be decoded. `reason` names it; the next one begins at its end."""

    def __str__(self) -> str:
        if self.key is None:
            return f"{self.reason}; it is the table at offset {self.offset}"
        return f"{self.reason}; it is {record_name(self.key, self.number, self.bucket)}"


class TableReader(ChannelReader):
    """The objects of a channel as record batches of pyarrow. Each `iter()` reads the next epoch.

    The channel has `RecordWrapperType: RecordIO`. `columns`, `batch_rows`: as for `TableDecoder`.
    `max_object_bytes`: objects that are larger raise RecordTooLarge, before they take memory. `skip`: number
    of corrupt objects that may be left out (`SkipPolicy.objects`); `skipped` counts them. `key`: batches are
    `KeyedBatch`es, with the key of their object and the number of their first row; errors name the object
    too. The sidecar must keep key lists (`RecordKeys`). Other arguments: as for `PipeReader`.

    Raises ValueError for an invalid argument, ModuleNotFoundError without pyarrow, PipeModeDatasetException
    for a channel that is not a Pipe channel, ChannelError if the quarantine list cannot be written. Iterating
    raises ChannelError, TruncatedStream, CorruptRecord and RecordTooLarge.
    """

    def __init__(  # noqa: PLR0913 - public; options with defaults
        self,
        channel: str,
        *,
        columns: Sequence[str] | None = None,
        batch_rows: int = BATCH_ROWS,
        max_object_bytes: int = MAX_PAYLOAD,
        epoch: int | None = None,
        pipe_dir: str | None = None,
        state_dir: str | None = None,
        config_dir: str | None = None,
        timeout: float = TIMEOUT,
        skip: SkipPolicy | None = None,
        key: bool = False,
    ) -> None:
        if max_object_bytes < 1:
            raise ValueError(f"max_object_bytes is {max_object_bytes}: it must be 1 or more")
        if skip is not None and skip.records:
            raise ValueError(
                f"skip has records {skip.records}, and TableReader leaves out whole objects: "
                "give objects only"
            )
        self._objects = KeysAndSkips("RecordIO", key=key, skip=skip, placed=True)
        self.skipped = self._objects.skipped
        """What `skip` has left out so far."""
        self._decoder = TableDecoder(columns=columns, batch_rows=batch_rows)
        self._max_object_bytes = max_object_bytes
        super().__init__(channel, directories(pipe_dir, config_dir, state_dir), epoch=epoch, timeout=timeout)
        self._rows = 0
        """Rows that have been returned of the object at the position, which is not returned whole."""

    @property
    def schema(self) -> pa.Schema | None:
        """Schema of the batches; None before the first object."""
        return self._decoder.schema

    def __iter__(self) -> Iterator[Any]:
        with contextlib.ExitStack() as stack:
            stream = stack.enter_context(self._next_stream())
            position = reach_start(stream, self.channel, self._start)
            self._rows = rows = self._rows if self._resumes(position) else 0
            keys, skips = stack.enter_context(
                self._objects.epoch(stream, self.channel, offset=position.offset, number=position.number)
            )
            self._begin_epoch(position)
            objects = RecordIOReader(stream, max_payload=self._max_object_bytes)
            for block in position.follow(objects, stream, keys, skips):
                for left, entry in zip(range(len(block), 0, -1), block, strict=True):
                    number = position.records - left
                    name = f"object {number} of epoch {stream.epoch} of channel {self.channel}"
                    self._left, self._rows = left, rows
                    batches = self._plain(entry, name) if skips is None else self._decoded(entry, name, skips)
                    if batches is not None:
                        yield from self._returned(_without(batches, rows, name), entry)
                    rows = 0

    def _plain(self, entry: Any, name: str) -> Iterator[pa.RecordBatch]:
        """Yield the batches of an object, without skips. Raises CorruptRecord, which names the object."""
        if not self._objects.key:
            yield from self._decoder.batches(entry, name=name)
            return
        try:
            yield from self._decoder.batches(entry.record, name=name)
        except CorruptRecord as error:
            raise named(error, record_name(*entry[1:])) from error

    def _decoded(
        self, entry: PlacedRecord | SkippedRecord, name: str, skips: EpochSkips
    ) -> Iterator[pa.RecordBatch] | None:
        """Return the batches of an object; None if it is left out. Raises CorruptRecord over the budget."""
        if isinstance(entry, SkippedRecord):
            return None
        try:
            return iter(self._decoder.whole(entry.record, name=name))
        except CorruptRecord as error:
            place = (entry.key, entry.number, entry.bucket)
            if not skips.admit([SkippedTable(entry.offset, str(error), "object", *place)]):
                raise skips.refusal() from error
        return None

    def _returned(self, batches: Iterator[pa.RecordBatch], entry: Any) -> Iterator[Any]:
        """Yield the batches of an object. The object counts as returned with its last batch."""
        batch = next(batches, None)
        while batch is not None:
            failure, following = None, None
            try:
                following = next(batches, None)
            except CorruptRecord as error:
                failure = error
            if following is None and failure is None:
                break
            element = self._element(batch, entry)
            self._rows += batch.num_rows
            yield element
            if failure is not None:
                raise failure
            batch = following
        last = None if batch is None else self._element(batch, entry)
        self._left, self._rows = self._left - 1, 0
        if last is not None:
            yield last

    def _element(self, batch: pa.RecordBatch, entry: Any) -> Any:
        """Return the next batch of an object, with its key; `_rows` of the object were returned before."""
        if not self._objects.key:
            return batch
        return KeyedBatch(batch, entry.key, entry.number, entry.bucket, self._rows)

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
