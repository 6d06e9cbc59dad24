"""Decodes Parquet and Arrow objects into record batches of pyarrow.

    object -> first bytes: Parquet | Arrow IPC file (Feather) | Arrow IPC stream -> pyarrow.RecordBatch

All objects of a decoder must have the schema of the first one, by the selected columns; metadata of the
schema may differ. The decoder never returns a part of an object as the whole: it compares the rows of a
Parquet object with its index and requires the end mark of an IPC stream. It compares the checksums of Parquet
pages that have one. It validates Arrow buffers before the trainer gets them, because pyarrow trusts the
offsets in them.

pyarrow is imported when a decoder is made: the extra `tables` of penstock-readers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from streamer.errors import CorruptRecord
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

BATCH_ROWS = 65_536
"""Default maximum of rows in a batch."""
_PARQUET, _IPC_FILE, _IPC_STREAM = b"PAR1", b"ARROW1\0\0", b"\xff\xff\xff\xff"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class KeyedBatch(NamedTuple):
    """A record batch with the key of its object."""

    batch: pa.RecordBatch
    key: str
    number: int
    """Number in the object of the table: 0, unless the objects are RecordIO files themselves."""
    bucket: str
    row: int
    """Number in the table of the first row of the batch."""


class TableDecoder:
    """Decodes whole objects into record batches of one schema.

    `columns`: names of the columns to return, in this order; None for all. Other columns are not decoded.
    `batch_rows`: maximum of rows in a batch. A batch never has rows of two objects.

    Raises ValueError for an invalid argument, ModuleNotFoundError without pyarrow.
    """

    def __init__(self, *, columns: Sequence[str] | None = None, batch_rows: int = BATCH_ROWS) -> None:
        _import_pyarrow()
        if columns is not None and (isinstance(columns, str) or not columns):
            raise ValueError(f"columns is {columns!r}: give a list of one or more names, or None for all")
        self._columns = None if columns is None else list(columns)
        if self._columns is not None and len(set(self._columns)) < len(self._columns):
            raise ValueError(f"columns is {columns!r}: name each column once")
        if batch_rows < 1:
            raise ValueError(f"batch_rows is {batch_rows}: a batch has 1 row or more")
        self._batch_rows = batch_rows
        self.schema: pa.Schema | None = None
        """Schema of the batches; None before the first object."""

    def batches(self, payload: bytes, *, name: str = "the object") -> Iterator[pa.RecordBatch]:
        """Yield the rows of one object as batches of 1 row or more. `name`: the object's, for errors.

        Raises CorruptRecord if the object is no whole table, has not the columns, or has another schema than
        the objects before it. Batches before the damage are yielded.
        """
        import pyarrow as pa

        where = f"{name} ({counted(len(payload), 'byte')})"
        if payload.startswith(_PARQUET):
            form, decoded = "Parquet", self._parquet(payload, where)
        elif payload.startswith(_IPC_FILE):
            form, decoded = "an Arrow IPC file", self._ipc_file(payload, where)
        elif payload.startswith(_IPC_STREAM):
            form, decoded = "an Arrow IPC stream", self._ipc_stream(payload, where)
        else:
            raise CorruptRecord(
                f"{where} is no table: it is neither Parquet nor Arrow IPC, and begins with {payload[:8]!r}"
            )
        try:
            yield from decoded
        except (pa.ArrowException, OSError, ValueError) as error:
            raise CorruptRecord(f"{where} cannot be decoded as {form}: {error}") from error

    def whole(self, payload: bytes, *, name: str = "the object") -> list[pa.RecordBatch]:
        """Return all batches of one object. Errors and arguments are those of `batches`.

        An object that raises does not set the schema of the decoder.
        """
        schema = self.schema
        try:
            return list(self.batches(payload, name=name))
        except CorruptRecord:
            self.schema = schema
            raise

    def _parquet(self, payload: bytes, where: str) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        from pyarrow import parquet

        with parquet.ParquetFile(pa.BufferReader(payload), page_checksum_verification=True) as file:
            self._select(file.schema_arrow, where)
            rows = 0
            for batch in file.iter_batches(self._batch_rows, columns=self._columns):
                rows += batch.num_rows
                if batch.num_rows:
                    yield self._ordered(batch)
            if rows != file.metadata.num_rows:
                raise ValueError(
                    f"it has {counted(rows, 'row')}, and its index counts {file.metadata.num_rows}"
                )

    def _ipc_file(self, payload: bytes, where: str) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        file = pa.ipc.open_file(payload)
        included = self._select(file.schema, where)
        if included is not None:
            file = pa.ipc.open_file(payload, options=pa.ipc.IpcReadOptions(included_fields=included))
        for index in range(file.num_record_batches):
            yield from self._slices(file.get_batch(index))

    def _ipc_stream(self, payload: bytes, where: str) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        included = self._select(pa.ipc.read_schema(pa.py_buffer(payload)), where)
        source = pa.BufferReader(payload)
        options = None if included is None else pa.ipc.IpcReadOptions(included_fields=included)
        with pa.ipc.open_stream(source, options=options) as stream:
            while True:
                offset = source.tell()
                try:
                    batch = stream.read_next_batch()
                except StopIteration:
                    break
                yield from self._slices(batch)
        # pyarrow takes the end of the bytes for the end of the stream, and reads nothing after an end mark.
        if payload[offset:] != _END_OF_STREAM:
            raise ValueError(
                f"{counted(len(payload) - offset, 'byte')} from byte {offset} on, where the end mark of 8 "
                "bytes is due"
            )

    def _select(self, schema: pa.Schema, where: str) -> list[int] | None:
        """Compare an object's schema with that of the first; return the numbers of the selected columns."""
        import pyarrow as pa

        included, names = None, schema.names
        if self._columns is not None:
            for column in self._columns:
                if names.count(column) != 1:
                    raise CorruptRecord(
                        f"{where} has {names.count(column)} columns {column!r}, and columns= needs one of "
                        f"{', '.join(map(repr, names))}"
                    )
            included = [schema.get_field_index(column) for column in self._columns]
            schema = pa.schema([schema.field(index) for index in included])
        if self.schema is None:
            self.schema = schema
        elif not schema.equals(self.schema):
            raise CorruptRecord(
                f"{where} has another schema than the first object: {_difference(self.schema, schema)}; "
                "write all objects with one schema, or select equal columns with columns="
            )
        return None if included is None else sorted(included)

    def _ordered(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch if self._columns is None else batch.select(self._columns)

    def _slices(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        batch.validate(full=True)
        ordered = self._ordered(batch)
        for first in range(0, batch.num_rows, self._batch_rows):
            yield ordered.slice(first, self._batch_rows)


def _difference(first: pa.Schema, other: pa.Schema) -> str:
    """Describe the first difference between two schemas that are not equal."""
    for mine, due in zip(other, first, strict=False):
        if mine != due:
            return f"a column {_described(mine)} where {_described(due)} is due"
    return f"{counted(len(other), 'column')} where {len(first)} are due"


def _described(field: pa.Field) -> str:
    return f"{field.name!r} of {field.type}{'' if field.nullable else ' not null'}"


def _import_pyarrow() -> None:
    try:
        import pyarrow as pa  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise ModuleNotFoundError(
            "tables need pyarrow, which is not installed: install penstock-readers with the extra `tables`",
            name="pyarrow",
        ) from error
