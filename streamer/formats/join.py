"""Base of joiners: they join objects that each end with an end mark into one stream with one end mark.

Programs that read tar streams stop at the first end mark, so they read only the first of several concatenated
objects and report success. A joiner passes on the contents without the marks:

    object a: members, end mark ─┐
    object b: members, end mark ─┴▶ Joiner ─▶ members of a, members of b, end mark

Objects of text may lack a mark, the line feed after their last line; `line_joiner` adds it. Pure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

Join = Literal["tar", "lines"]
"""Formats of joined objects. A plan also knows `skip:BYTES` (`header_skipper`)."""


class NotJoinable(ValueError):
    """The object is incomplete, of another format, or does not match the objects before it."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset
        """Offset of the fault in the object's content."""


class Joiner(ABC):
    """Joins the objects of one epoch: for each `begin`, `feed` in order, `end`; then `finish`."""

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
