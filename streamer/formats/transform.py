r"""Transforms of an epoch's stream: for each object bytes in, bytes out and what follows it; then an end.

Programs that read tar streams stop at the first end mark, so they read only the first of several concatenated
objects and report success. Objects of text may lack the line feed after their last line; JSON Lines allows
that (jsonlines.org), and ``"\n".join`` writes it. A transform joins such objects into one stream:

    object a: members, end mark ─┐
    object b: members, end mark ─┴▶ JoinTar ─▶ members of a, members of b, end mark

Pure. `streamer.relay.deliver.transform_runner` runs them, and `wrap` makes a record of each object.

An archive is a sequence of blocks of 512 bytes: a header, the member's data padded to blocks, the next
header. A block of zeros ends it, usually followed by more zeros, up to the writer's blocking factor (POSIX
pax, "ustar Interchange Format"; tar(5)). An object may hold several archives.

`JoinTar` goes from header to header and never searches for a mark, because data may look like one. It keeps
at most one header, and passes on the data between headers without a copy. An archive must end with its mark,
or BadContent is raised: an archive that is cut off between two members looks whole otherwise. It accepts v7,
ustar, pax and GNU archives, with long names, sparse members of each kind and sizes in base 256. A global pax
header applies to all members after it, also to those of the next archives. So one that sets anything but a
comment, which changes no member, is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from streamer.formats.tar import BLOCK, EMPTY, EXTENSIONS, SPARSE, number, padded, pax_records, verify
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterable


Join = Literal["tar", "lines"]
"""Formats of joined objects. A plan also knows `skip:BYTES` (`SKIP`)."""
SKIP = "skip:"
"""Begin of the name of `SkipHeaders`; the number of bytes follows."""
LINE_FEED = b"\n"


class BadContent(ValueError):
    """The object is incomplete, of another format, or does not match the objects before it."""

    def __init__(self, message: str, offset: int | None = None) -> None:
        super().__init__(message)
        self.offset = offset
        """Offset of the fault in the object's content; None: the fault is of the whole object."""


class Transform:
    """Passes on the bytes of one epoch: for each object `begin`, `feed` in order, `end`; then `finish`.

    Subclasses change them. The owner of a transform closes it once.
    """

    def begin(self) -> None:
        """Start a new object with the next byte."""

    def feed(self, data: bytes | bytearray) -> Iterable[bytes | bytearray | memoryview]:
        """Return what the stream gets for the object's next bytes. Raises BadContent."""
        return [data]

    def end(self) -> Iterable[bytes]:
        """Check that the object is complete after its last byte, and return what the stream has after it.

        Raises BadContent.
        """
        return []

    def finish(self) -> bytes:
        """Return the bytes that end the stream after the last object."""
        return b""

    def close(self) -> None:
        """Drop what is kept of an object."""


class JoinLines(Transform):
    """Ends the last line of each object: else it would be one line with the first of the next object."""

    def __init__(self) -> None:
        self._last = LINE_FEED
        """Last byte of the current object so far; a line feed before its first one."""

    def begin(self) -> None:
        self._last = LINE_FEED

    def feed(self, data: bytes | bytearray) -> Iterable[bytes | bytearray]:
        self._last = bytes(data[-1:]) or self._last
        return [data]

    def end(self) -> Iterable[bytes]:
        return [] if self._last == LINE_FEED else [LINE_FEED]


class SkipHeaders(Transform):
    """Leaves out the first `size` bytes of each object."""

    def __init__(self, size: int) -> None:
        self._size = self._left = size
        """`_left`: bytes of the current object's header that have not arrived."""

    def begin(self) -> None:
        self._left = self._size

    def feed(self, data: bytes | bytearray) -> Iterable[memoryview]:
        skipped = min(self._left, len(data))
        self._left -= skipped
        return [memoryview(data)[skipped:]]

    def end(self) -> Iterable[bytes]:
        if self._left:
            whole = self._size - self._left
            raise BadContent(
                f"the object has {counted(whole, 'byte')}, and SkipBytes leaves out {self._size}", whole
            )
        return []


END_MARK = bytes(2 * BLOCK)
LONGEST_PAX = 8 << 20
"""Maximum bytes of a pax header; its records describe one member, and the holes of a sparse one."""

_ZEROS = bytes(BLOCK)
_PAX = frozenset(b"xgX")
_GLOBAL = ord("g")
_HARMLESS = frozenset({b"comment"})


class JoinTar(Transform):
    """Joins the members of tar archives."""

    def __init__(self) -> None:
        self._held = bytearray()
        """Start of a header that has not arrived completely."""
        self._wanted = BLOCK
        """Bytes of the header, from its start, that `_header` needs next."""
        self._passing = 0
        """Bytes of data left before the next header."""
        self._offset = 0
        """Offset of the current header in the object's content."""
        self._ended = False
        """Whether the last header of the object was its end mark."""
        self._size: int | None = None
        """Size of the next member, if a pax header sets it."""
        self._extends = False
        """Whether the last header was an extension header of the next member."""
        self._after_map: int | None = None
        """Bytes of data after a sparse member's map; None unless the next block belongs to the map."""

    def begin(self) -> None:
        self._held.clear()
        self._wanted, self._passing, self._offset = BLOCK, 0, 0
        self._ended = False
        self._size, self._extends, self._after_map = None, False, None

    def feed(self, data: bytes | bytearray) -> list[bytes | memoryview]:
        view, pieces = memoryview(data), list[bytes | memoryview]()
        first = at = 0  # view[first:at] is to be passed on
        while at < len(view):
            if self._passing:
                step = min(self._passing, len(view) - at)
                self._passing -= step
                self._offset += step
                at += step
                continue
            step = min(self._wanted - len(self._held), len(view) - at)
            if self._held or step < self._wanted:
                pieces.append(view[first:at])
                self._held += view[at : at + step]
                first = at = at + step
                if len(self._held) < self._wanted:
                    break
                header = bytes(self._held)
            else:
                header = bytes(view[at : at + step])
                at += step
            size = len(header)
            self._wanted = BLOCK
            kept = self._header(header)
            if self._wanted > size:  # the header is longer: hold its start and go on
                if not self._held:
                    pieces.append(view[first : at - size])
                    self._held += header
                    first = at
                continue
            if self._held:
                self._held.clear()
                if kept:
                    pieces.append(header)
            elif not kept:
                pieces.append(view[first : at - size])
                first = at
            self._offset += size
        pieces.append(view[first:at])
        return [piece for piece in pieces if piece]

    def _header(self, header: bytes) -> bool:
        """Return whether the header is part of the stream; set `_passing` and `_ended`.

        If the header is longer than the bytes given, set `_wanted`; the method is then called again with all
        bytes.
        """
        if self._after_map is not None:
            self._map_goes_on(header[504])
            return True
        if header == _ZEROS:
            if self._extends:
                raise self._fault("the archive ends after a header about a next member: it is corrupt")
            self._ended = True
            return False
        try:
            verify(header[:BLOCK])
            kind = header[156]
            size = number(header[124:136])
            if kind in _PAX:
                return self._pax(header, size)
        except ValueError as error:
            raise self._fault(f"{error}; Join: tar takes whole, undamaged tar archives") from None
        self._ended = False
        self._extends = kind in EXTENSIONS
        if self._extends:
            self._passing = padded(size)
            return True
        if self._size is not None:
            size, self._size = self._size, None
        if kind in EMPTY:
            size = 0
        if kind == SPARSE and header[482]:
            self._after_map = size
        else:
            self._passing = padded(size)
        return True

    def _map_goes_on(self, more: int) -> None:
        """Handle a block of a GNU sparse member's map. `more`: byte 504, not 0 if another block follows."""
        if not more and self._after_map is not None:
            self._passing, self._after_map = padded(self._after_map), None

    def _pax(self, header: bytes, size: int) -> bool:
        if size > LONGEST_PAX:
            raise ValueError(f"a pax header of {size} bytes, and no more than {LONGEST_PAX} are read")
        self._wanted = BLOCK + padded(size)
        if len(header) < self._wanted:
            return True
        self._wanted, self._ended = BLOCK, False
        records = dict(pax_records(header[BLOCK : BLOCK + size]))
        if header[156] == _GLOBAL:
            if strange := sorted(records.keys() - _HARMLESS):
                raise ValueError(
                    f"a global pax header sets {strange[0].decode(errors='replace')!r}, which would hold for "
                    "the members of all further archives, too; write the archive without it"
                )
            return True
        self._extends = True
        if (value := records.get(b"size")) is not None:
            if not value.isdigit():
                raise ValueError(f"a pax header with the size {value!r}")
            self._size = int(value)
        return True

    def end(self) -> Iterable[bytes]:
        if self._passing:
            raise self._fault(
                f"the object ends in the middle of a member, {counted(self._passing, 'byte')} too early"
            )
        if any(self._held) or (self._held and not self._ended) or self._after_map is not None:
            raise self._fault("the object ends in the middle of a header: it was cut off")
        if self._extends:
            raise self._fault("the object ends after a header about a next member: it was cut off")
        if not self._ended and self._offset:
            raise self._fault("the archive has no end mark (blocks of zeros): it may have been cut off")
        return []

    def finish(self) -> bytes:
        return END_MARK

    def _fault(self, message: str) -> BadContent:
        return BadContent(message, self._offset)
