"""Record formats whose records have an address: names, scanners, and the check of a border."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from streamer.formats import recordio, tar, tfrecord
from streamer.formats.borders import (
    BadRecord,
    BorderScanner,
    LineScanner,
    RecordIOScanner,
    TarScanner,
    TFRecordScanner,
)
from streamer.units import KIB

Kind = Literal["TFRecord", "RecordIO", "lines", "tar", "fixed"]

_SCANNERS: dict[str, type[BorderScanner]] = {
    "TFRecord": TFRecordScanner,
    "RecordIO": RecordIOScanner,
    "lines": LineScanner,
    "tar": TarScanner,
}
_HEADER_BYTES = {"TFRecord": tfrecord.HEADER_BYTES, "RecordIO": recordio.HEADER.size, "tar": tar.BLOCK}
WHOLE = 64 * KIB
"""Most bytes that are looked at whole, if no header states the length of a record."""
_NOT_ONE = "the index has 1 record from here to the next one, and the object has not"


@dataclass(frozen=True)
class RecordFormat:
    """A record format: its kind, and the size of a record if that is fixed."""

    kind: Kind
    size: int = 0
    """Bytes of every record of kind `fixed`; else 0."""

    @classmethod
    def parse(cls, text: str) -> RecordFormat:
        """Return the format that `str` writes as `text`. Raises ValueError."""
        kinds: tuple[Kind, ...] = ("TFRecord", "RecordIO", "lines", "tar")
        for kind in kinds:
            if text.lower() == kind.lower():
                return cls(kind)
        if (match := re.fullmatch(r"fixed:([1-9][0-9]{0,8})", text)) is not None:
            return cls("fixed", int(match[1]))
        raise ValueError(
            f"{text!r} is no record format; write TFRecord, RecordIO, lines, tar, or fixed:BYTES for records "
            "of a fixed size"
        )

    def __str__(self) -> str:
        return f"fixed:{self.size}" if self.kind == "fixed" else self.kind

    def scanner(self) -> BorderScanner:
        """Return a scanner for one object. Not for records of one size, whose offsets are arithmetic."""
        return _SCANNERS[self.kind]()

    def evidence(self, begin: int, end: int) -> tuple[int, int]:
        """Return the range of an object's bytes that shows whether a record lies from `begin` up to `end`.

        Its header states its length, if a record is one frame. Other formats need all bytes, so of more than
        `WHOLE` only the first ones are looked at. The range is empty if there is nothing to look at.
        """
        first = max(0, begin - 1) if self.kind == "lines" else begin
        if self.kind in ("lines", "tar") and end - begin <= WHOLE:
            return first, end
        return first, min(end, begin + _HEADER_BYTES.get(self.kind, 0))

    def fault(self, data: bytes, begin: int, end: int) -> str:
        """Return why `data`, the bytes of `evidence`, are not of one record; empty if they may be."""
        size = end - begin
        if self.kind == "lines":
            if begin and data[:1] != b"\n":
                return "no line begins here: the byte before it ends none"
            text = data[1:] if begin else data
            one = bool(text) and b"\n" not in text[:-1]  # a scanner refuses what begins no object
            return "" if one or len(text) != size or not size else _NOT_ONE  # 0: an end of a line
        scanner, whole = self.scanner(), len(data) == size
        try:
            if self.kind == "tar":  # the scanner accepts an end mark too
                tar.read_header(data[: tar.BLOCK])
            scanner.feed(data)
            if whole and self.kind == "tar":
                scanner.finish()
        except BadRecord as error:
            return str(error)
        except ValueError as error:
            return f"no tar member begins here: {error}"
        if self.kind == "tar":
            fits = len(scanner.offsets) == 1 or not whole
        elif not scanner.offsets:
            return f"no {self.kind} begins here: the object ends before its header does"
        else:
            fits = scanner.reached < size if scanner.inside else scanner.reached == size
        return "" if fits else _NOT_ONE
