"""Recognises a format by the first bytes of a stream, for readers of another format.

Any bytes are lines, and any bytes are tokens, so a reader of these would return records of whatever comes.
The readers of framed records reject foreign bytes, and this table says what those are. `penstock plan` and
`doctor` compare the first bytes of a channel's first object with `Records.Format`. Pure.
"""

from __future__ import annotations

import codecs
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
    """How the channel is read by Penstock's readers."""
    kind: str = ""
    """`Records.Format` of its records; empty if it has none."""

    def refusal(self, wanted: str) -> str:
        """Return why bytes of this format are not read as `wanted`, and what to do."""
        return f"this is {self.name}, not {wanted}: {self.remedy}"


def _record_format(first: bytes, name: str, kind: str, option: str) -> Signature:
    remedy = f"say record_format={option}, and Records.Format: {kind} if the channel has Records"
    return Signature(first, name, remedy, kind)


_INFLATE = "set CompressionType: Gzip in the channel, which inflates gzip and Zstandard"
_WRAP = "set RecordWrapperType: RecordIO in the channel, and read it with TableReader"
_FILE = "set InputMode: File in the channel, or write the values without a header"
_OTHER = "Penstock does not inflate it: compress with gzip or Zstandard"
_LLM_C = "leave out its header of 1,024 bytes: SkipBytes: 1024 in the Penstock section of the channel"
_IMAGE = "set RecordWrapperType: RecordIO in the channel, which makes a record of each object"
_TFRECORDS = _record_format(b"", "TFRecord", "TFRecord", "'TFRecord'")
_TARS = _record_format(b"", "a tar archive", "tar", "'WebDataset' in PyTorch")
_TEXT = _record_format(b"", "text", "lines", "'TextLine'")
_NOT_TEXT = bytes({*range(32)} - {*b"\t\n\v\f\r\x1b"}) + b"\x7f"
"""Control characters that texts do not have."""
_UTF8 = codecs.getincrementaldecoder("utf-8")
_TFRECORD = struct.Struct("<QI")
_TAR_MAGIC = slice(257, 262)
_SAFETENSORS = struct.Struct("<Q2s")
_LONGEST_HEADER = 100_000_000
"""Most bytes of the header of a safetensors file, by its specification."""

SIGNATURES = (
    _record_format(struct.pack("<I", 0xCED7230A), "RecordIO", "RecordIO", "'RecordIO'"),
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


def recognised(first: bytes) -> Signature | None:
    """Return the format of a stream that begins with these bytes; None if no format is recognised.

    `first`: at best `LOOKED_AT` bytes; a format that needs more of them than are given is not recognised.
    """
    if len(first) >= _TFRECORD.size:
        length, stored = _TFRECORD.unpack_from(first)
        if length < 1 << 40 and mask(crc32c_in_python(first[:8])) == stored:  # 559,903 begins as gzip does
            return _TFRECORDS
    for signature in SIGNATURES:
        if first.startswith(signature.first):
            return signature
    if len(first) >= _SAFETENSORS.size:
        size, begin = _SAFETENSORS.unpack_from(first)
        if size <= _LONGEST_HEADER and begin == b'{"':
            return Signature(b"", "a safetensors file", _FILE)
    if first[_TAR_MAGIC] == b"ustar":
        return _TARS
    return _TEXT if _is_text(first) else None


def foreign(first: bytes, kind: str) -> Signature | None:
    """Return the format of a stream that begins with these bytes, if it is recognised and is not `kind`.

    `kind`: that of `RecordFormat`, or another name of what is read. Records of a fixed size may be text.
    """
    found = recognised(first)
    return None if found is None or found.kind == kind or (found is _TEXT and kind == "fixed") else found


def _is_text(first: bytes) -> bool:
    """Return whether these bytes may begin a text in UTF-8."""
    try:
        _UTF8().decode(first)  # which may end inside a character
    except UnicodeDecodeError:
        return False
    return bool(first) and len(first.translate(None, _NOT_TEXT)) == len(first)
