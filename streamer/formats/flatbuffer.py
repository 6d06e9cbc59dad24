"""Reads FlatBuffers tables, as far as the metadata of Arrow IPC needs it.

A table begins with the distance back to its vtable, which gives the position of each field in the table, or 0
for a field that has its default (FlatBuffers internals). The bytes are untrusted: reading ends with values or
ValueError, in time proportional to their length.
"""

from __future__ import annotations

import struct
from functools import cache

MOST_TABLES = 1 << 16
"""Maximum number of tables read from one buffer; a schema has about two for each column."""


class Buffer:
    """A FlatBuffers buffer; its first four bytes are the offset of the root table."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._tables = 0

    def scalar(self, code: str, at: int) -> int:
        """Return the little-endian integer at `at`. Raises ValueError outside the buffer."""
        if at < 0:
            raise ValueError("metadata that points out of itself")
        try:
            (value,) = _struct(code).unpack_from(self.data, at)
        except struct.error:
            raise ValueError("metadata that points out of itself") from None
        return int(value)

    def follow(self, at: int) -> int:
        """Return the target of the offset at `at`."""
        return at + self.scalar("I", at)

    def table(self, at: int) -> Table:
        """Return the table at `at`."""
        self._tables += 1
        if self._tables > MOST_TABLES:
            raise ValueError(f"metadata of more than {MOST_TABLES} tables")
        return Table(self, at)

    @property
    def root(self) -> Table:
        return self.table(self.follow(0))


class Table:
    """One table of a buffer. Fields are numbered in the order of their declaration."""

    def __init__(self, buffer: Buffer, at: int) -> None:
        self._buffer = buffer
        self._at = at
        self._vtable = at - buffer.scalar("i", at)
        self._size = buffer.scalar("H", self._vtable)

    def _field(self, number: int) -> int | None:
        """Return the position of the field; None if the table lacks it."""
        entry = 4 + 2 * number
        offset = self._buffer.scalar("H", self._vtable + entry) if entry + 2 <= self._size else 0
        return self._at + offset if offset else None

    def integer(self, number: int, code: str, default: int = 0) -> int:
        """Return a number field, or `default` if the table lacks it. `code`: its format in `struct`."""
        at = self._field(number)
        return default if at is None else self._buffer.scalar(code, at)

    def table(self, number: int) -> Table | None:
        at = self._field(number)
        return None if at is None else self._buffer.table(self._buffer.follow(at))

    def text(self, number: int) -> bytes | None:
        """Return a string field as bytes."""
        at = self._field(number)
        if at is None:
            return None
        at = self._buffer.follow(at)
        size = self._buffer.scalar("I", at)
        data = self._buffer.data[at + 4 : at + 4 + size]
        if len(data) < size:
            raise ValueError("metadata that points out of itself")
        return data

    def tables(self, number: int) -> list[Table]:
        """Return the tables of a vector field."""
        return [self._buffer.table(self._buffer.follow(at)) for at in self._elements(number, 4)]

    def integers(self, number: int, code: str) -> list[int]:
        """Return the numbers of a vector field. `code`: their format in `struct`."""
        return [self._buffer.scalar(code, at) for at in self._elements(number, struct.calcsize("<" + code))]

    def _elements(self, number: int, size: int) -> range:
        at = self._field(number)
        if at is None:
            return range(0)
        at = self._buffer.follow(at)
        count = self._buffer.scalar("I", at)
        if at + 4 + count * size > len(self._buffer.data):
            raise ValueError("metadata that points out of itself")
        return range(at + 4, at + 4 + count * size, size)


@cache
def _struct(code: str) -> struct.Struct:
    return struct.Struct("<" + code)
