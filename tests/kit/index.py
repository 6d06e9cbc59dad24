"""Record indexes in memory."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

from streamer.formats.record_format import RecordFormat
from streamer.formats.record_index import IndexedObject, RecordIndex, block, header


class IndexBytes:
    """The bytes of an index's file, which may change."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size = len(data)

    def read(self, position: int, count: int) -> bytes:
        return self.data[position : position + count]

    def changed(self) -> Exception:
        return RuntimeError("changed")


def index_of(kind: str, rows: Iterable[IndexedObject] = ()) -> RecordIndex:
    """An index of one block."""
    return RecordIndex(IndexBytes(header(RecordFormat.parse(kind)) + block(rows)))


def with_stride(data: bytes, stride: int) -> bytes:
    """The file of an index whose header states a stride, as before every index had every record."""
    begin = data[:12] + struct.pack("<I", stride) + data[16:32]
    return begin + struct.pack("<I", crc32(begin)) + data[36:]


def read_index(path: str) -> RecordIndex:
    """The index of a whole file, which may be overwritten afterwards."""
    data = Path(path).read_bytes()
    index = RecordIndex(IndexBytes(data))
    assert index.end == len(data)
    return index
