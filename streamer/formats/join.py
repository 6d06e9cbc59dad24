"""Joins objects of a format that ends with a mark into one stream that ends with one mark.

Programs that read tar or Arrow IPC streams stop at the first end mark, so of several such objects, one after
the other, they read the first and report success. A joiner passes on what the marks enclose:

    object a: members, end mark ─┐
    object b: members, end mark ─┴▶ Joiner ─▶ members of a, members of b, end mark

A joiner walks the structure and never searches for a mark: data may look like one. It holds back a header at
the most, and passes on the data between headers without a copy. An object must end with its mark; anything
else raises NotJoinable, for what is cut off between two members looks whole. Pure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

Join = Literal["tar", "arrow"]


class NotJoinable(ValueError):
    """The object is not whole, or not of the format, or does not fit to the objects before it."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset
        """Bytes of the object's content before the place that the message is about."""


class Joiner(ABC):
    """Joins the objects of one epoch: for each `begin`, `feed` in order, `end`; then `finish`.

    Subclasses cut an object's content into units (headers, messages), each followed by data.
    """

    _UNIT = 0
    """Bytes at the beginning of a unit that tell what it is."""

    def __init__(self) -> None:
        self._held = bytearray()
        """The beginning of a unit that has not arrived whole."""
        self._wanted = self._UNIT
        """Bytes of the unit, as far as that is known."""
        self._passing = 0
        """Bytes of data to come before the next unit."""
        self._offset = 0
        """Bytes of the object's content before the unit that is under way."""
        self._ended = False
        """Whether the last unit of the object was its end mark."""

    @property
    def anchored(self) -> bool:
        """Whether an epoch may be resumed at the first byte of the object that is being joined."""
        return True

    def begin(self) -> None:
        """An object begins with the next byte."""
        self._held.clear()
        self._wanted, self._passing, self._offset = self._UNIT, 0, 0
        self._ended = False

    def feed(self, data: bytes) -> list[bytes | memoryview]:
        """What of the object's next bytes is part of the stream. Raises NotJoinable."""
        view, found = memoryview(data), list[bytes | memoryview]()
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
                found.append(view[first:at])
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
            if self._wanted > size:  # it is longer: go on with what there is of it
                if not self._held:
                    found.append(view[first : at - size])
                    self._held += unit
                    first = at
                continue
            if self._held:
                self._held.clear()
                if kept:
                    found.append(unit)
            elif not kept:
                found.append(view[first : at - size])
                first = at
            self._offset += size
        found.append(view[first:at])
        return [piece for piece in found if piece]

    @abstractmethod
    def _unit(self, unit: bytes) -> bool:
        """Whether the unit is part of the stream; sets `_passing` and `_ended`.

        Sets `_wanted` where the unit has more bytes than it was given, and is called again with all of them.
        """

    @abstractmethod
    def end(self) -> None:
        """The object's last byte has been fed. Raises NotJoinable if it does not end there."""

    @abstractmethod
    def finish(self) -> bytes:
        """What ends the stream after the last object."""
