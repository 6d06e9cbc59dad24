"""Record formats whose records have an address: names, scanners, and the check of a border."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from streamer.formats import recordio, tar, tfrecord
from streamer.formats.borders import (
    STRIDE,
    FixedScanner,
    RecordIOScanner,
    TFRecordScanner,
)
from streamer.formats.line_borders import LineScanner
from streamer.formats.tar_borders import TarScanner

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.formats.borders import BorderScanner

Kind = Literal["TFRecord", "RecordIO", "lines", "tar", "fixed"]

_SCANNERS: dict[Kind, Callable[[int], BorderScanner]] = {
    "TFRecord": lambda stride: TFRecordScanner(stride=stride),
    "RecordIO": lambda stride: RecordIOScanner(stride=stride),
    "lines": lambda stride: LineScanner(stride=stride),
    "tar": lambda stride: TarScanner(stride=stride),
}
_EVIDENCE = {
    "TFRecord": (0, tfrecord.HEADER_BYTES),
    "RecordIO": (0, recordio.HEADER.size),
    "tar": (0, tar.BLOCK),
    "lines": (-1, 0),
}
"""By kind, the bytes that show whether a record begins at an offset: from, to, relative to it."""


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

    def scanner(self, *, stride: int = STRIDE) -> BorderScanner:
        """Return a scanner for one object. `stride`: records from one indexed record to the next."""
        if self.kind == "fixed":
            return FixedScanner(self.size, stride=stride)
        return _SCANNERS[self.kind](stride)

    def evidence(self, offset: int, size: int) -> tuple[int, int]:
        """Return the range of an object's bytes that shows whether a record begins at `offset`.

        `size`: the object's bytes. The range is empty if there is nothing to look at.
        """
        if self.kind == "fixed" or (self.kind == "lines" and not offset):
            return offset, offset
        first, end = _EVIDENCE[self.kind]
        return offset + first, min(offset + end, size)

    def fault(self, data: bytes) -> str:
        """Return why no record begins where `data`, the bytes of `evidence`, were found; empty if one may."""
        if self.kind == "lines":
            return "" if data in (b"", b"\n") else "no line begins here: the byte before it ends none"
        if self.kind == "fixed":
            return ""
        if len(data) < _EVIDENCE[self.kind][1]:
            return f"no {self.kind} record begins here: the object ends before its header does"
        if self.kind == "tar":
            try:
                tar.read_header(data)
            except ValueError as error:
                return f"no tar member begins here: {error}"
            return ""
        scanner = self.scanner(stride=1)
        try:
            scanner.feed(data)
        except ValueError as error:
            return str(error)
        return ""
