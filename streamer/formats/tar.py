"""WebDataset streams: tar archives whose neighbouring members of one name form a sample.

    photo/0001.jpg  photo/0001.cls  photo/0002.jpg  photo/0002.cls  ...
    sample {"__key__": "photo/0001", "jpg": b"...", "cls": b"7"}, sample {"__key__": "photo/0002", ...

The rules are those of the `webdataset` package: a member's key is its path up to the first dot of its last
step, what follows is the field, in lower case; neighbours of one key are one sample. Members that are no
regular files, have no dot, or are called `__like_this__` are passed over. An archive's end (blocks of zeros)
ends a sample, so archives may follow each other in one stream, as the objects of a channel do.

A record is all blocks of one sample, as they arrived; `sample` makes a dict of it. In this way tar is a
format like the others: the border is found here, and the members are copied where the sample is used. A
sample is whole when the next header has arrived, so it is handed over one header late.

Read are ustar, pax (long names, sizes above 8 GiB) and GNU long names, with checksums of all headers; sparse
members are refused. (`tarfile` in its stream mode reads the same at a fifth of the speed.)
"""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING, NamedTuple

from streamer.errors import CorruptRecord, TruncatedStream
from streamer.formats.window import BLOCK_BYTES, RecordReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamer.formats.window import Source

BLOCK = 512
"""Bytes of a header; data are padded to a multiple of it (POSIX pax, "ustar Interchange Format")."""
KEY = "__key__"

_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
_HIDDEN = re.compile(r"__[^/]*__($|/)")
_REGULAR = frozenset(b"0\x007")
EMPTY = frozenset(b"123456")
"""Links, devices, directories and FIFOs: whatever size their header tells, no data follow."""
EXTENSIONS = frozenset(b"xgXLK")
"""Headers about the next member: pax, Solaris' pax, GNU's long names."""
SPARSE = ord("S")
_ZEROS = bytes(BLOCK)
_OCTAL = b"01234567"
_HALF = BLOCK // 2


class Header(NamedTuple):
    """What one header says."""

    kind: int
    name: str
    size: int
    """Bytes of data after the header, without padding."""

    @property
    def length(self) -> int:
        """Bytes from the beginning of this header to that of the next."""
        return BLOCK + padded(self.size)


def padded(size: int) -> int:
    """Bytes that `size` bytes of data take in an archive."""
    return -(-size // BLOCK) * BLOCK


def verify(raw: bytes) -> None:
    """Raise ValueError unless the block's checksum says that it is a header."""
    checksum = raw[148:156]
    total = _sum(raw[:_HALF]) + _sum(raw[_HALF:]) - sum(checksum) + 8 * ord(" ")
    if checksum.strip(b" \0").strip(_OCTAL) or total != number(checksum):
        raise ValueError("its checksum does not agree, so this is no tar header")


def _sum(half: bytes) -> int:
    """The sum of half a block's bytes: one less than the lower part of Adler-32, which is modulo 65521."""
    return (zlib.adler32(half) & 0xFFFF) - 1


def read_header(raw: bytes) -> Header:
    """Decode one header. Raises ValueError if it is none, or of a kind that is not read."""
    verify(raw)
    return _decode(raw)


def _decode(raw: bytes) -> Header:
    """A header whose checksum agrees."""
    kind = raw[156]
    if kind == SPARSE:
        raise ValueError("sparse members are not read; write the archive without --sparse")
    name = _text(raw[:100])
    if raw[257:263] == b"ustar\0" and raw[345]:
        name = f"{_text(raw[345:500])}/{name}"
    return Header(kind, name, 0 if kind in EMPTY else number(raw[124:136]))


def split_name(name: str) -> tuple[str, str] | None:
    """Key and field of a member's path; None for a member that belongs to no sample."""
    match = _NAME.fullmatch(name)
    if match is None or _HIDDEN.match(name):
        return None
    return match[1], match[2].lower()


def sample(record: bytes) -> dict[str, str | bytes]:
    """The fields of a sample that `TarReader` cut, and its key as `__key__`.

    Raises CorruptRecord if a field comes twice.
    """
    fields: dict[str, str | bytes] = {}
    for name, start, size in _members(record):
        if (parts := split_name(name)) is None:
            continue
        key, field = parts
        fields.setdefault(KEY, key)
        if field in fields:
            raise CorruptRecord(f"sample {key}: the field {field!r} comes twice, so names are not unique")
        fields[field] = record[start : start + size]
    return fields


class TarReader(RecordReader):
    """The samples of a stream of tar archives, each as its blocks; see `sample`.

    Raises CorruptRecord at a header that is none, TruncatedStream if the stream ends inside a member.
    """

    what = "tar member"

    def __init__(self, source: Source, *, block_bytes: int = BLOCK_BYTES) -> None:
        super().__init__(source, block_bytes=block_bytes)
        self._key: str | None = None
        """Key of the sample that begins at `_start`, once one of its members has told it."""
        self._whole = 0
        """Bytes from `_start` that whole members take."""
        self._seen = 0
        """Bytes from `_start` that are looked at: those, and extensions of the member that comes next."""
        self._extended = _Extended()

    def _forget(self) -> None:
        self._key = None
        self._whole = self._seen = 0
        self._extended = _Extended()

    def _cut(self) -> list[bytes]:
        batch: list[bytes] = []
        try:
            while self._step(batch):
                pass
        except ValueError as error:
            self._fault = self._corrupt(self.offset + self._seen, str(error))
        return batch

    def _finish(self) -> list[bytes]:
        left = self._end - self._start
        if left != self._whole:
            raise TruncatedStream(
                f"the stream ends inside a {self.what} at offset {self.offset + self._whole}: "
                f"{self._wanted - self._whole} bytes wanted, {left - self._whole} arrived"
            )
        batch: list[bytes] = []
        self._emit(batch)
        return batch

    def _step(self, batch: list[bytes]) -> bool:
        """Look at one header; whether it and its data were there."""
        here = self._start + self._seen
        self._wanted = self._seen + BLOCK
        if self._end - here < BLOCK:
            return False
        block = bytes(self._view[here : here + BLOCK])
        if block == _ZEROS:
            self._emit(batch)
            self._start += self._seen + BLOCK
            self._forget()
            return True
        header = read_header(block)
        length = header.length
        if header.kind not in EXTENSIONS:
            header = self._extended.apply(header)
            length = header.length
            if header.kind in _REGULAR and (parts := split_name(header.name)) and parts[0] != self._key:
                ahead = self._seen - self._whole
                self._emit(batch)
                self._key, self._seen = parts[0], self._whole + ahead
        self._wanted = self._seen + length
        if self._end - self._start < self._wanted:
            return False
        if header.kind in EXTENSIONS:
            data = self._start + self._seen + BLOCK
            self._extended.add(header, bytes(self._view[data : data + header.size]))
        else:
            self._extended = _Extended()
            self._whole = self._seen + length
        self._seen += length
        return True

    def _emit(self, batch: list[bytes]) -> None:
        """Hand over the sample that the whole members make, if they make one."""
        if self._key is None:
            return
        batch.append(bytes(self._view[self._start : self._start + self._whole]))
        self._start += self._whole
        self._key = None
        self._whole = self._seen = 0


class _Extended:
    """What extension headers say about the member that follows them."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._size: int | None = None

    def add(self, header: Header, data: bytes) -> None:
        """Take in one. Raises ValueError if it cannot be understood."""
        if header.kind == ord("L"):
            self._name = _text(data)
        elif header.kind in b"xX":
            for name, value in pax_records(data):
                if name == b"path":
                    self._name = _text(value)
                elif name == b"size":
                    if not value.isdigit():
                        raise ValueError(f"a pax header with the size {value!r}")
                    self._size = int(value)
                elif name.startswith(b"GNU.sparse."):
                    raise ValueError("sparse members are not read; write the archive without --sparse")

    def apply(self, header: Header) -> Header:
        """The member's header with what was said about it."""
        return Header(
            header.kind,
            header.name if self._name is None else self._name,
            header.size if self._size is None or header.kind in EMPTY else self._size,
        )


def _members(record: bytes) -> Iterator[tuple[str, int, int]]:
    """Path, and place of the data, of every regular member of a record, which `TarReader` has checked."""
    at = 0
    extended = _Extended()
    while at < len(record):
        header = _decode(record[at : at + BLOCK])
        if header.kind in EXTENSIONS:
            extended.add(header, record[at + BLOCK : at + BLOCK + header.size])
        else:
            header = extended.apply(header)
            extended = _Extended()
            if header.kind in _REGULAR:
                yield header.name, at + BLOCK, header.size
        at += header.length


def number(field: bytes) -> int:
    """A number of a header: octal text, or GNU's base 256 where the first bit is set."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    text = field.strip(b" \0")
    if text.strip(_OCTAL):
        raise ValueError(f"{field!r} is no octal number")
    return int(text, 8) if text else 0


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def pax_records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    r"""The records `LENGTH NAME=VALUE\n` of a pax header."""
    while data:
        digits, space, _ = data[:24].partition(b" ")
        if not (space and digits.isdigit() and len(digits) + 1 < int(digits) <= len(data)):
            raise ValueError("a pax header without a length")
        name, _, value = data[len(digits) + 1 : int(digits) - 1].partition(b"=")
        yield name, value
        data = data[int(digits) :]
