"""Compressed objects inflated as they arrive: bytes in, cut anywhere; content out, in bounded pieces. Pure.

An object is one or more members, one after the other: gzip members (RFC 1952 §2.2) or Zstandard frames
(RFC 8878 §3), each told by its magic. Its last byte must be the last byte of a member: what ends earlier is
truncated, what follows a member and is none is refused, zeros too. So an object's content is whole and its
checksums hold, or the caller's error is raised.

A piece is as long as the caller allows, whatever a few bytes may stand for: output never waits in memory.
Input goes to a member in slices, because the bytes after its end come back as a copy.

A gzip header is collected here and given to ISA-L in one go: cut in two, one with a header checksum, or
with both name and comment, is refused by it as corrupt (isal 1.9).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

from isal import igzip_lib

from streamer.errors import PenstockError
from streamer.units import KIB

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Callable

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPABLE_MAGICS = tuple(bytes((low, 0x2A, 0x4D, 0x18)) for low in range(0x50, 0x60))
"""Frames of user data, which inflate to nothing (RFC 8878 §3.1.2)."""
_MAGICS = (GZIP_MAGIC, ZSTD_MAGIC, *_SKIPPABLE_MAGICS)

_DAMAGED: tuple[type[Exception], ...] = (igzip_lib.IsalError, zstd.ZstdError)  # type: ignore[assignment] # isal's stub has an instance there

SLICE = 32 * KIB
_STEP = 256
"""Bytes by which a header is collected; most are shorter."""
LONGEST_HEADER = 128 * KIB
"""Bytes: twice the longest extra field. Only name and comment of a gzip header have no limit."""
LARGEST_WINDOW = 27
"""log2 of the memory that a Zstandard frame may want: 128 MiB, as the zstd program allows by itself."""


class _Member(Protocol):
    """What inflates one member; the interface of `bz2.BZ2Decompressor`."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes | memoryview, max_length: int = -1) -> bytes: ...


class Inflater:
    """Inflates one object: `feed` its bytes in order, take `pieces` until there are none, `finish`."""

    def __init__(self, damaged: Callable[[str, int], PenstockError]) -> None:
        """`damaged` makes the error to raise: of a text, and of the offset in the object where it applies."""
        self.produced = 0
        """Bytes of content so far."""
        self._damaged = damaged
        self._member: _Member | None = None
        self._members = 0
        self._damage: PenstockError | None = None
        """What is to be raised next."""
        self._header = b""
        """The beginning of a member, while it is not whole."""
        self._data = memoryview(b"")
        self._used = 0
        """Bytes of `_data` that are with a member, or in `_header`."""
        self._base = 0
        """Where `_data` lies in the object."""

    def __repr__(self) -> str:
        return f"<Inflater {self._base + self._used} bytes in, {self.produced} out>"

    def feed(self, data: bytes) -> None:
        """The object's next bytes; what was fed before must have been used up."""
        if self._used < len(self._data) or (self._member is not None and not self._member.needs_input):
            raise ValueError("take all pieces before feeding more")
        self._base += len(self._data)
        self._data, self._used = memoryview(data), 0

    def pieces(self, most: int) -> list[bytes]:
        """Content, at most `most` bytes in all; none when more input is needed.

        Raises the error of `damaged`, once the content before the damage has been taken.
        """
        if self._damage is not None:
            raise self._damage
        pieces: list[bytes] = []
        left = most
        try:
            while left:
                if self._member is None and not self._begin():
                    break
                out = self._inflate(left)
                if out is None:
                    break
                if out:
                    pieces.append(out)
                    left -= len(out)
        except PenstockError as error:
            if not pieces:
                raise
            self._damage = error
        self.produced += most - left
        return pieces

    def finish(self) -> None:
        """All of the object has been fed and taken. Raises the error of `damaged` if that was not its end."""
        if self._member is not None or self._header:
            raise self._corrupt(f"ends in the middle of member {self._members}: it was cut off")

    def _inflate(self, most: int) -> bytes | None:
        """More of the member's content, perhaps none yet; None if it needs input that is not there."""
        member, fed = self._member, self._used
        assert member is not None  # noqa: S101 - `_begin` has made it
        data = self._data[fed : fed + SLICE] if member.needs_input else b""
        if member.needs_input and not data:
            return None
        try:
            out = member.decompress(data, most)
        except _DAMAGED as error:
            raise self._corrupt(f"is damaged in member {self._members} ({error})") from error
        self._used = fed + len(data)
        if member.eof:
            self._used -= len(member.unused_data)
            self._member = None
        return out

    def _begin(self) -> bool:
        """Begin the next member once its header is whole; False while it is not, or at the object's end."""
        while self._used < len(self._data):
            step = bytes(self._data[self._used : self._used + _STEP])
            before = len(self._header)
            header = self._header + step
            if not any(magic.startswith(header[:4]) or header.startswith(magic) for magic in _MAGICS):
                raise self._foreign()
            end = _header_end(header)
            if end is None:
                self._header = header
                self._used += len(step)
                self._members += before == 0
                if len(header) > LONGEST_HEADER:
                    raise self._corrupt(f"has a header without end in member {self._members}")
                continue
            self._used += end - before
            self._members += before == 0
            self._header = b""
            member = self._member = _open(header)
            try:
                member.decompress(header[:end])
            except _DAMAGED as error:
                raise self._corrupt(f"has a wrong header in member {self._members} ({error})") from error
            return True
        return False

    def _foreign(self) -> PenstockError:
        if not self._members:
            return self._corrupt(
                "is neither gzip nor zstd, and CompressionType is Gzip; compress it, take it out of the "
                "channel, or give uncompressed objects a channel with CompressionType: None"
            )
        return self._corrupt(f"has bytes after member {self._members} that are no further member")

    def _corrupt(self, what: str) -> PenstockError:
        return self._damaged(what, self._base + self._used)


def _open(header: bytes) -> _Member:
    if header.startswith(GZIP_MAGIC):
        return igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: LARGEST_WINDOW})


def _header_end(data: bytes) -> int | None:
    """Where the header that `data` begins with ends; None if `data` ends before.

    Of gzip all that RFC 1952 §2.3 puts before the deflated data, of Zstandard the magic alone.
    """
    if len(data) < 4:
        return None
    if not data.startswith(GZIP_MAGIC):
        return 4
    flags, end = data[3], 10
    if flags & 4:  # FEXTRA
        if len(data) < end + 2:
            return None
        end += 2 + int.from_bytes(data[end : end + 2], "little")
    for flag in (8, 16):  # FNAME, FCOMMENT: ended by a zero
        if flags & flag:
            zero = data.find(0, end)
            if zero < 0:
                return None
            end = zero + 1
    if flags & 2:  # FHCRC
        end += 2
    return end if len(data) >= end else None
