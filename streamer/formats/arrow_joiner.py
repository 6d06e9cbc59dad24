"""Joins Arrow IPC streams: one schema message, all dictionaries and record batches, one end mark.

A stream is a sequence of messages: 0xFFFFFFFF, the length of the metadata, the metadata, a body; the length 0
is the end mark (Arrow columnar format, "IPC Streaming Format"). Messages are passed on unchanged, except that
only the first object's schema is passed on: every object has a schema, but a stream may have only one.

Dictionaries need no change: a batch that is not a delta replaces the dictionary of its id (same page,
"Dictionary Messages"), and each object has its own dictionaries before the batches that use them. A delta
without such a dictionary in its object is refused, because it would add to another object's dictionary.
"""

from __future__ import annotations

from streamer.formats.arrow import DICTIONARY, SCHEMA, Schema, difference, read_message
from streamer.formats.join import NotJoinable, UnitJoiner

CONTINUATION = b"\xff\xff\xff\xff"
END_MARK = CONTINUATION + bytes(4)
FILE_MAGIC = b"ARROW1"
LONGEST_METADATA = 64 << 20
"""Maximum bytes of metadata; a batch of a hundred thousand columns has about five million."""

_ADVICE = "; Join: arrow takes whole Arrow IPC streams, as pyarrow.ipc.new_stream writes them"


class ArrowJoiner(UnitJoiner):
    """Joins the messages of Arrow IPC streams of one schema."""

    _UNIT = 8

    def __init__(self, *, resumed: bool) -> None:
        """`resumed`: the reader already has the schema, which is that of the first object fed here too."""
        super().__init__()
        self._sent = resumed
        """Whether the joined stream has its schema message."""
        self._schema: Schema | None = None
        """Schema of the joined stream."""
        self._metadata = b""
        """Metadata of the last schema message; equal metadata are not decoded again, to save time."""
        self._begun = False
        """Whether the schema message of the current object has arrived."""
        self._anchored = False
        self._dictionaries: set[int] = set()
        """Ids of the dictionaries in the current object so far."""

    @property
    def anchored(self) -> bool:
        """Whether the object's schema has been compared with the stream's."""
        return self._anchored

    def begin(self) -> None:
        super().begin()
        self._begun = self._anchored = False
        self._dictionaries.clear()

    def _unit(self, unit: bytes) -> bool:
        if unit[:4] != CONTINUATION:
            raise self._fault(_no_message(unit, first=self._offset == 0) + _ADVICE)
        size = int.from_bytes(unit[4:8], "little", signed=True)
        if size == 0:
            if not self._begun:
                raise self._fault("an end mark where a schema is due" + _ADVICE)
            self._ended, self._begun = True, False
            return False
        if not 0 < size <= LONGEST_METADATA:
            raise self._fault(f"a message with {size} bytes of metadata" + _ADVICE)
        self._wanted = self._UNIT + size
        if len(unit) < self._wanted:
            return True
        self._wanted, self._ended = self._UNIT, False
        try:
            return self._message(unit[8:])
        except ValueError as error:
            raise self._fault(f"{error}{_ADVICE}") from None

    def _message(self, metadata: bytes) -> bool:
        if self._schema is not None and metadata == self._metadata and not self._begun:
            self._passing = 0
            return self._opened(self._schema)
        message = read_message(metadata)
        self._passing = message.body
        if message.kind == SCHEMA:
            if self._begun or message.body or message.schema is None:
                raise ValueError("a schema message where none may be")
            self._metadata = metadata
            return self._opened(message.schema)
        if not self._begun:
            raise ValueError("a message of data before the schema")
        if message.kind == DICTIONARY and message.dictionary is not None:
            if message.delta and message.dictionary not in self._dictionaries:
                raise ValueError(f"a delta for dictionary {message.dictionary}, which the stream has not")
            self._dictionaries.add(message.dictionary)
        return True

    def _opened(self, schema: Schema) -> bool:
        """Start an object with this schema; return whether its message is passed on."""
        self._begun = True
        self._dictionaries.clear()
        if self._schema is None:
            self._schema = schema
        elif schema != self._schema:
            raise ValueError(
                f"another schema than that of the objects before it ({difference(self._schema, schema)}); "
                "a stream has one"
            )
        self._anchored = True
        first, self._sent = not self._sent, True
        return first

    def end(self) -> bytes:
        if self._passing or self._held:
            raise self._fault("the object ends in the middle of a message: it was cut off")
        if not self._ended and self._offset:
            raise self._fault("the object has no end mark: it may have been cut off between two messages")
        return b""

    def finish(self) -> bytes:
        return END_MARK if self._sent else b""

    def _fault(self, message: str) -> NotJoinable:
        return NotJoinable(message, self._offset)


def _no_message(unit: bytes, *, first: bool) -> str:
    if first and unit.startswith(FILE_MAGIC):
        return "an Arrow IPC file (Feather): it ends with an index, and cannot be streamed"
    if first:
        return "not an Arrow IPC stream, or one of a release before 0.15, without continuation markers"
    return "no Arrow IPC message"
