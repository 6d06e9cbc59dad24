"""Data of records that are read into memory of their own, which becomes the record without a copy.

    readv(2) -> rest of the data | what is between | data | what is between | ...

A record reader reads so a large record, and the next records where all have one length.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamer.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterable

LARGE = 2
"""Part of a block from which data is read into memory of its own, whatever the records around it are."""
REPEATED = 16
"""That part for records of one length: copying smaller ones costs less than memory for each, measured."""
LARGEST = GIB
"""Bytes above which memory is taken as the data arrives."""
_PYBUF_WRITE = 0x200
"""From <cpython/pybuffer.h>."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The frame of a record: header, data, and the bytes after it."""

    header: int
    length: int
    after: int
    repeated: bool
    """Whether the record before has data of the same length."""

    @property
    def between(self) -> int:
        """Bytes between the data of two records."""
        return self.after + self.header


class DataAhead:
    """The data of one record that arrives.

    `bytes(size)` would be zeroed, which costs a third of a copy. So this takes the memory of a `bytes` as
    extensions do (PyBytes_FromStringAndSize), and writes to it until it is whole; nobody else has it before.
    """

    __slots__ = ("_record", "arrived", "rest", "size")

    def __init__(self, size: int) -> None:
        """`size`: bytes of the data, at least 1. Raises MemoryError."""
        new_bytes, address_of, view_of = _python()
        self._record: bytes = new_bytes(None, size)
        self.rest: memoryview = view_of(address_of(self._record), size, _PYBUF_WRITE)
        """The part that has not arrived, to be read into."""
        self.size = size
        self.arrived = 0
        """Bytes that have arrived."""

    @property
    def whole(self) -> bool:
        """Whether all bytes have arrived."""
        return self.arrived == self.size

    def put(self, begin: memoryview) -> None:
        """Take the first bytes."""
        self.rest[: len(begin)] = begin
        self.move(len(begin))

    def move(self, count: int) -> None:
        """Note that `count` more bytes have arrived."""
        self.arrived += count
        self.rest = self.rest[count:]

    def record(self) -> bytes:
        """Return the data, which is whole, without a copy."""
        return self._record

    def so_far(self) -> bytes:
        """Return what has arrived."""
        return self._record[: self.arrived]


@functools.cache
def _python() -> tuple[Any, Any, Any]:
    """Return functions of Python's C interface: new bytes, their address, a view of memory."""
    import ctypes  # takes 2 ms, and small records do not need it

    api, address, size = ctypes.pythonapi, ctypes.c_void_p, ctypes.c_ssize_t
    # Prototypes of our own: those of `ctypes.pythonapi` are the process's.
    new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, address, size)(("PyBytes_FromStringAndSize", api))
    address_of = ctypes.PYFUNCTYPE(address, ctypes.py_object)(("PyBytes_AsString", api))
    view_of = ctypes.PYFUNCTYPE(ctypes.py_object, address, size, ctypes.c_int)(
        ("PyMemoryView_FromMemory", api)
    )
    return new_bytes, address_of, view_of


def joined(between: memoryview, header: int, step: int, ahead: Iterable[DataAhead]) -> bytes:
    """Return the stream's bytes: a `header`, then data and `step` bytes of `between` in turn."""
    pieces: list[bytes | memoryview] = []
    at, stop = 0, header
    for data in ahead:
        pieces += between[at:stop], data.so_far()
        at, stop = stop, stop + step
    return b"".join([*pieces, between[at:]])
