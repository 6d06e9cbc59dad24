"""Inflates compressed objects as their bytes arrive, into pieces of bounded size. Pure.

An object is one or more members: gzip members (RFC 1952 §2.2) or Zstandard frames (RFC 8878 §3), recognised
by their magic. Its last byte must be the last byte of a member: a member that ends early is an error, and so
are other bytes after a member, even zeros: a file that was not written whole ends in them, too. So either an
object's content is whole and its checksums are right, or the caller's error is raised.

A piece has at most the bytes that the caller allows, however well they are compressed, so output does not
accumulate in memory. Input is passed in slices, because a decompressor copies the bytes after a member's end.
The slices of a long member grow: two threads that inflate wait for the interpreter's lock after each slice.

`Inflater` collects a whole gzip header before it passes it to ISA-L: isal 1.9 refuses a header in two pieces
as corrupt if it has a checksum, or both name and comment.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from isal import igzip_lib

from streamer.errors import PenstockError
from streamer.units import KIB, MIB

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Callable

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_RESERVED_FLAGS = 0xE0
"""Bits of a gzip header that must be zero (RFC 1952 §2.3.1.2): they may stand for further fields, whose bytes
would be inflated as data. ISA-L ignores them."""
_SKIPPABLE_MAGICS = tuple(bytes((low, 0x2A, 0x4D, 0x18)) for low in range(0x50, 0x60))
"""Magics of skippable frames, which hold user data and no content (RFC 8878 §3.1.2)."""
_MAGICS = (GZIP_MAGIC, ZSTD_MAGIC, *_SKIPPABLE_MAGICS)

_DAMAGED: tuple[type[Exception], ...] = (igzip_lib.IsalError, zstd.ZstdError)  # type: ignore[assignment] # isal's stub has an instance there

SLICE, LONGEST_SLICE = 32 * KIB, 512 * KIB
OUTPUT = 1 * MIB
"""Maximum bytes that a decompressor returns at once, into a buffer that it doubles up to them."""
_STEP = 256
"""Bytes in which a header is begun to be collected; most headers are shorter."""
LONGEST_HEADER = 128 * KIB
"""Maximum bytes of a header: twice the longest extra field; the format does not limit name and comment."""
LARGEST_WINDOW = 27
"""log2 of a Zstandard frame's maximum window: 128 MiB, the default limit of the zstd program."""


_Member = igzip_lib.IgzipDecompressor | zstd.ZstdDecompressor
"""Decompressor of one member, with the interface of `bz2.BZ2Decompressor`."""


class Inflater:
    """Inflates one object: `feed` its bytes in order, take `pieces` until there are none, `finish`."""

    def __init__(
        self,
        damaged: Callable[[str, int], PenstockError],
        *,
        largest_window: int = LARGEST_WINDOW,
    ) -> None:
        """`damaged` returns the error to raise, from a text and the offset of the damage in the object.

        `largest_window`: as `LARGEST_WINDOW`, for this inflater.
        """
        self._largest_window = largest_window
        self.produced = 0
        """Bytes of content returned so far."""
        self._damaged = damaged
        self._member: _Member | None = None
        self._members = 0
        self._damage: PenstockError | None = None
        """Error that the next call of `pieces` raises."""
        self._header = b""
        """Start of a member's header that is not whole."""
        self._data = memoryview(b"")
        self._slice = SLICE
        """Bytes to pass to the member at once: as many as the last member had, or more for a longer one."""
        self._began = 0
        """Offset of the member in the object."""
        self._used = 0
        """Bytes of `_data` passed to a member, or copied to `_header`."""
        self._base = 0
        """Offset of `_data` in the object."""

    def __repr__(self) -> str:
        return f"<Inflater {self._base + self._used} bytes in, {self.produced} out>"

    @property
    def drained(self) -> bool:
        """Whether `pieces` would return an empty list before more bytes are fed."""
        used = self._damage is None and self._used == len(self._data)
        return used and (self._member is None or self._member.needs_input)

    @property
    def is_damaged(self) -> bool:
        """Whether the next call of `pieces` raises an error."""
        return self._damage is not None

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add the object's next bytes. Raises ValueError unless all pieces of earlier bytes were taken."""
        if not self.drained:
            raise ValueError("take all pieces before feeding more")
        self._base += len(self._data)
        self._data, self._used = memoryview(data), 0

    def pieces(self, most: int) -> list[bytes]:
        """Return content in pieces, at most `most` bytes together; none if more input is needed.

        Raises the error of `damaged` after the content before the damage has been returned.
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
        """Check that the object is complete, after all pieces were taken. Raises the error of `damaged`."""
        if self._member is not None or self._header:
            raise self._corrupt(f"ends in the middle of member {self._members}: it was cut off")

    def _inflate(self, most: int) -> bytes | None:
        """Return more of the member's content, perhaps none; None if more input must be fed first."""
        member, fed = self._member, self._used
        assert member is not None  # noqa: S101 - `_begin` has made it
        data = self._data[fed : fed + self._slice] if member.needs_input else b""
        if member.needs_input and not data:
            return None
        try:
            out = member.decompress(data, min(most, OUTPUT))
        except _DAMAGED as error:
            raise self._corrupt(f"is corrupt in member {self._members} ({error})") from error
        self._used = fed + len(data)
        if member.eof:
            self._used -= len(member.unused_data)
            self._member = None
            self._slice = min(max(SLICE, self._base + self._used - self._began), LONGEST_SLICE)
        elif len(data) == self._slice < LONGEST_SLICE:
            self._slice *= 2
        return out

    def _begin(self) -> bool:
        """Begin the next member; return False if its header is not whole, or no byte is left."""
        while self._used < len(self._data):
            step = bytes(self._data[self._used : self._used + max(_STEP, len(self._header))])
            before = len(self._header)
            header = self._header + step
            if header.startswith(GZIP_MAGIC) and len(header) > 3 and header[3] & _RESERVED_FLAGS:
                number = self._members + (before == 0)
                raise self._corrupt(
                    f"has a wrong header in member {number}: reserved flags (0x{header[3]:02x}) are set"
                )
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
            self._began = self._base + self._used
            member = self._member = _open(header, self._largest_window)
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
        if not self._header and self._data[self._used] == 0:
            return self._corrupt(
                f"has zero bytes after member {self._members}, the padding of an archiver or of a tape, or "
                "what was never written; check its content, and compress it again without them"
            )
        return self._corrupt(f"has bytes after member {self._members} that are no further member")

    def _corrupt(self, what: str) -> PenstockError:
        return self._damaged(what, self._base + self._used)


def _open(header: bytes, largest_window: int) -> _Member:
    if header.startswith(GZIP_MAGIC):
        return igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: largest_window})


def _header_end(data: bytes) -> int | None:
    """Return the end of the header at the start of `data`; None if the header is longer than `data`.

    A gzip header is everything before the deflated data (RFC 1952 §2.3), a Zstandard header only the magic.
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
    for flag in (8, 16):  # FNAME, FCOMMENT: each ends with a zero byte
        if flags & flag:
            zero = data.find(0, end)
            if zero < 0:
                return None
            end = zero + 1
    if flags & 2:  # FHCRC
        end += 2
    return end if len(data) >= end else None
