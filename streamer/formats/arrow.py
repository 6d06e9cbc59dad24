"""Decodes the metadata of Arrow IPC messages: the kind of a message, and the fields of a schema.

The source is Arrow's Message.fbs and Schema.fbs (columnar format, versions V4 and V5). Two schemas are equal
if readers decode a record batch in the same way under either: equal fields (names, types, dictionaries, and
metadata, which hold extension types), byte order and features. Metadata of the whole schema are ignored:
pandas stores the number of rows there, which differs between objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from streamer.formats.flatbuffer import Buffer

if TYPE_CHECKING:
    from streamer.formats.flatbuffer import Table

SCHEMA, DICTIONARY, RECORDS = 1, 2, 3

DEEPEST = 64
"""Maximum levels of nested fields."""

_TYPES: dict[int, tuple[str, tuple[tuple[str, int], ...]]] = {
    1: ("null", ()),
    2: ("int", (("i", 0), ("B", 0))),
    3: ("float", (("h", 0),)),
    4: ("binary", ()),
    5: ("utf8", ()),
    6: ("bool", ()),
    7: ("decimal", (("i", 0), ("i", 0), ("i", 128))),
    8: ("date", (("h", 1),)),
    9: ("time", (("h", 1), ("i", 32))),
    10: ("timestamp", (("h", 0),)),
    11: ("interval", (("h", 0),)),
    12: ("list", ()),
    13: ("struct", ()),
    14: ("union", (("h", 0),)),
    15: ("fixed size binary", (("i", 0),)),
    16: ("fixed size list", (("i", 0),)),
    17: ("map", (("B", 0),)),
    18: ("duration", (("h", 1),)),
    19: ("large binary", ()),
    20: ("large utf8", ()),
    21: ("large list", ()),
    22: ("run end encoded", ()),
    23: ("binary view", ()),
    24: ("utf8 view", ()),
    25: ("list view", ()),
    26: ("large list view", ()),
}
"""By number in the union `Type`: the type's name, and format and default of its table's scalar fields."""
_TIMESTAMP, _UNION = 10, 14


class Field(NamedTuple):
    """A column, or a field within a nested column."""

    name: bytes
    nullable: bool
    type: tuple[object, ...]
    dictionary: tuple[int, ...] | None
    """Id, width and signedness of the indices, whether the dictionary is ordered, kind."""
    children: tuple[Field, ...]
    metadata: tuple[tuple[bytes, bytes], ...]


class Schema(NamedTuple):
    """Content of a schema message, without the metadata of the whole schema."""

    version: int
    endianness: int
    features: tuple[int, ...]
    fields: tuple[Field, ...]


class Message(NamedTuple):
    """Metadata of one message."""

    kind: int
    body: int
    """Bytes of the message's body, padding included."""
    schema: Schema | None = None
    dictionary: int | None = None
    """Id of the dictionary that the message contains."""
    delta: bool = False
    """Whether the message adds to that dictionary instead of replacing it."""


def read_message(metadata: bytes) -> Message:
    """Decode the FlatBuffers table `Message`. Raises ValueError if `metadata` is not one."""
    root = Buffer(metadata).root
    version, kind = root.integer(0, "h"), root.integer(1, "B")
    header, body = root.table(2), root.integer(3, "q")
    if header is None or body < 0:
        raise ValueError("a message without a header")
    match kind:
        case 1:
            return Message(kind, body, schema=_schema(header, version))
        case 2:
            return Message(kind, body, dictionary=header.integer(0, "q"), delta=bool(header.integer(2, "B")))
        case 3:
            return Message(kind, body)
    raise ValueError(f"a message of kind {kind}, which a stream of record batches does not have")


def _schema(table: Table, version: int) -> Schema:
    return Schema(
        version,
        table.integer(0, "h"),
        tuple(table.integers(3, "q")),
        tuple(_field(field, DEEPEST) for field in table.tables(1)),
    )


def _field(table: Table, depth: int) -> Field:
    if not depth:
        raise ValueError(f"fields nested in more than {DEEPEST} levels")
    kind, about = table.integer(2, "B"), table.table(3)
    if kind not in _TYPES or about is None:
        raise ValueError(f"a field of the type {kind}, which this release of Penstock does not know")
    name, scalars = _TYPES[kind]
    type_: tuple[object, ...] = (name, *(about.integer(i, *scalar) for i, scalar in enumerate(scalars)))
    if kind == _TIMESTAMP:
        type_ += (about.text(1),)
    elif kind == _UNION:
        type_ += tuple(about.integers(1, "i"))
    return Field(
        table.text(0) or b"",
        bool(table.integer(1, "B")),
        type_,
        _dictionary(table.table(4)),
        tuple(_field(child, depth - 1) for child in table.tables(5)),
        tuple(sorted((pair.text(0) or b"", pair.text(1) or b"") for pair in table.tables(6))),
    )


def _dictionary(table: Table | None) -> tuple[int, ...] | None:
    if table is None:
        return None
    index = table.table(1)
    # The default type of the indices is a signed 32-bit integer (Schema.fbs).
    width, signed = (32, 1) if index is None else (index.integer(0, "i"), index.integer(1, "B"))
    return table.integer(0, "q"), width, signed, table.integer(2, "B"), table.integer(3, "h")


def difference(first: Schema, second: Schema) -> str:
    """Describe the first difference between two schemas that are not equal."""
    for mine, other in zip(first.fields, second.fields, strict=False):
        if mine.name != other.name:
            return f"a field {_name(other)} where {_name(mine)} is due"
        if mine != other:
            what = next(name for name in Field._fields if getattr(mine, name) != getattr(other, name))
            return f"the {what} of field {_name(mine)}"
    if len(first.fields) != len(second.fields):
        return f"{len(second.fields)} fields, and {len(first.fields)} are due"
    what = next(name for name in Schema._fields if getattr(first, name) != getattr(second, name))
    return f"the {'version of the metadata' if what == 'version' else what}"


def _name(field: Field) -> str:
    return repr(field.name.decode(errors="replace"))
