"""Recognises a format by the first bytes of a stream, for readers of another format.

Any bytes are lines, and any bytes are tokens, so a reader of these would return records of whatever comes.
The readers of framed records reject foreign bytes, and this table says what those are. Pure.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from streamer.formats.crc import crc32c_in_python, mask

LOOKED_AT = 512
"""First bytes of a stream that are enough for every format here."""


class Signature(NamedTuple):
    """First bytes of a format."""

    first: bytes
    name: str
    remedy: str


_INFLATE = "set CompressionType: Gzip in the channel, which inflates gzip and Zstandard"
_WRAP = "set RecordWrapperType: RecordIO in the channel, and read it with TableReader"
_FILE = "set InputMode: File in the channel, or write the values without a header"
_OTHER = "Penstock does not inflate it: compress with gzip or Zstandard"
_LLM_C = "leave out its header of 1,024 bytes: SkipBytes: 1024 in the Penstock section of the channel"
_IMAGE = "set RecordWrapperType: RecordIO in the channel, which makes a record of each object"
_RECORDIO = struct.pack("<I", 0xCED7230A)
_TFRECORD = struct.Struct("<QI")
_TAR_MAGIC = slice(257, 262)
_SAFETENSORS = struct.Struct("<Q2s")
_LONGEST_HEADER = 100_000_000
"""Most bytes of the header of a safetensors file, by its specification."""

SIGNATURES = (
    Signature(_RECORDIO, "RecordIO", "read it with record_format='RecordIO'"),
    Signature(b"\x1f\x8b\x08", "gzip", _INFLATE),
    Signature(b"\x28\xb5\x2f\xfd", "Zstandard", _INFLATE),
    Signature(b"BZh91AY&SY", "bzip2", _OTHER),
    Signature(b"\xfd7zXZ\0", "xz", _OTHER),
    Signature(b"\x04\x22\x4d\x18", "LZ4", _OTHER),
    Signature(b"PAR1\x15", "a Parquet file", _WRAP),
    Signature(b"ARROW1\0\0", "an Arrow IPC file (Feather)", _WRAP),
    Signature(b"\x93NUMPY", "a NumPy array file (.npy)", _FILE),
    Signature(b"PK\x03\x04", "a zip archive (.npz and PyTorch's .pt are some)", _FILE),
    Signature(b"\x89HDF\r\n\x1a\n", "an HDF5 file", _FILE),
    Signature(b"MMIDIDX\0\0", "the index of a Megatron data set", "add Exclude: ['*.idx'] to the channel"),
    Signature(struct.pack("<i", 20240520), "a token file of llm.c with a header", _LLM_C),
    Signature(struct.pack("<i", 20240801), "a token file of llm.c with a header", _LLM_C),
    Signature(b"\x89PNG\r\n\x1a\n", "a PNG image", _IMAGE),
    Signature(b"\xff\xd8\xff", "a JPEG image", _IMAGE),
)


def recognised(first: bytes) -> str | None:
    """Return what a stream that begins with these bytes is, and what to do; None if no format is recognised.

    `first`: at best `LOOKED_AT` bytes; a format that needs more of them than are given is not recognised.
    """
    if len(first) >= _TFRECORD.size:
        length, stored = _TFRECORD.unpack_from(first)
        if length < 1 << 40 and mask(crc32c_in_python(first[:8])) == stored:  # 559,903 begins as gzip does
            return "the bytes are TFRecords: read them with record_format='TFRecord'"
    for signature in SIGNATURES:
        if first.startswith(signature.first):
            return f"the bytes are {signature.name}: {signature.remedy}"
    if len(first) >= _SAFETENSORS.size:
        size, begin = _SAFETENSORS.unpack_from(first)
        if size <= _LONGEST_HEADER and begin == b'{"':
            return f"the bytes are a safetensors file: {_FILE}"
    if first[_TAR_MAGIC] == b"ustar":
        return "the bytes are a tar archive: read it with record_format='WebDataset' in PyTorch"
    return None
