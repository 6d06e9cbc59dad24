"""Base of joiners: they join objects that each end with an end mark into one stream with one end mark.

Programs that read tar or Arrow IPC streams stop at the first end mark, so they read only the first of several
concatenated objects and report success. A joiner passes on the contents without the marks:

    object a: members, end mark ─┐
    object b: members, end mark ─┴▶ Joiner ─▶ members of a, members of b, end mark

Objects of text may lack a mark, the line feed after their last line; `line_joiner` adds it. A joiner of units
parses the structure and never searches for a mark, because data may look like one. It keeps at most
one header, and passes on the data between headers without a copy. An object must end with its mark, or
NotJoinable is raised: an object that is cut off between two members looks whole otherwise. Pure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

Join = Literal["tar", "arrow", "lines"]
"""Formats of joined objects. A plan also knows `skip:BYTES` (`header_skipper`)."""


class NotJoinable(ValueError):
    """The object is incomplete, of another format, or does not match the objects before it."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset
        """Offset of the fault in the object's content."""


class Joiner(ABC):
    """Joins the objects of one epoch: for each `begin`, `feed` in order, `end`; then `finish`."""

    @property
    def anchored(self) -> bool:
        """Whether an epoch may be resumed at the first byte of the current object."""
        return True

    @abstractmethod
    def begin(self) -> None:
        """Start a new object with the next byte."""

    @abstractmethod
    def feed(self, data: bytes) -> list[bytes | memoryview]:
        """Return the parts of the object's next bytes that belong to the stream. Raises NotJoinable."""

    @abstractmethod
    def end(self) -> bytes:
        """Check that the object is complete after its last byte, and return what the stream has after it.

        Raises NotJoinable.
        """

    @abstractmethod
    def finish(self) -> bytes:
        """Return the bytes that end the stream after the last object."""


class UnitJoiner(Joiner):
    """Cuts an object's content into units (headers, messages), each followed by data."""

    _UNIT = 0
    """Bytes at the start of a unit that determine its kind."""

    def __init__(self) -> None:
        self._held = bytearray()
        """Start of a unit that has not arrived completely."""
        self._wanted = self._UNIT
        """Bytes of the unit, from its start, that `_unit` needs next."""
        self._passing = 0
        """Bytes of data left before the next unit."""
        self._offset = 0
        """Offset of the current unit in the object's content."""
        self._ended = False
        """Whether the last unit of the object was its end mark."""

    def begin(self) -> None:
        self._held.clear()
        self._wanted, self._passing, self._offset = self._UNIT, 0, 0
        self._ended = False

    def feed(self, data: bytes) -> list[bytes | memoryview]:
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
                unit = bytes(self._held)
            else:
                unit = bytes(view[at : at + step])
                at += step
            size = len(unit)
            self._wanted = self._UNIT
            kept = self._unit(unit)
            if self._wanted > size:  # the unit is longer: hold its start and go on
                if not self._held:
                    pieces.append(view[first : at - size])
                    self._held += unit
                    first = at
                continue
            if self._held:
                self._held.clear()
                if kept:
                    pieces.append(unit)
            elif not kept:
                pieces.append(view[first : at - size])
                first = at
            self._offset += size
        pieces.append(view[first:at])
        return [piece for piece in pieces if piece]

    @abstractmethod
    def _unit(self, unit: bytes) -> bool:
        """Return whether the unit is part of the stream; set `_passing` and `_ended`.

        If the unit is longer than the bytes given, set `_wanted`; the method is then called again with all
        bytes.
        """
