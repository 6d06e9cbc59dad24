"""Chooses the transform of a plan, and makes one RecordIO record of each inflated object.

A RecordIO header holds the length of the content (contract §5.1), which is known only after inflating all of
it. So an object is spooled before its first byte is sent: up to 8 MiB in memory, a longer one in an unnamed
file in TMPDIR. If a wrapped object is damaged, no byte of it is delivered.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from streamer.errors import ReaderGone
from streamer.formats.transform import SKIP, BadContent, JoinLines, JoinTar, SkipHeaders, Transform
from streamer.plan import LONGEST_RECORD, frame
from streamer.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamer.plan import Plan
    from streamer.sink.outlet import Outlet

SPOOL_MEMORY = 8 * MIB
"""Bytes of a wrapped object that are kept in memory; a longer object is spooled to a file."""
_READ = 256 * KIB
"""Bytes read from the spool at a time."""


def transform_of(plan: Plan, outlet: Outlet) -> Transform:
    """Return a transform for one epoch of the plan's objects, after they were inflated."""
    if plan.inflate and plan.entries.wrap:
        return Wrap(outlet)
    if plan.join is None:
        return Transform()
    if plan.join.startswith(SKIP):
        return SkipHeaders(int(plan.join.removeprefix(SKIP)))
    return JoinTar() if plan.join == "tar" else JoinLines()


class Wrap(Transform):
    """Spools each object, and then passes it on as one record. Raises OSError if there is no space."""

    def __init__(self, outlet: Outlet) -> None:
        """`outlet` of the stream; its reader may leave while nothing is written."""
        self._outlet = outlet
        self._spool = tempfile.SpooledTemporaryFile(SPOOL_MEMORY)  # noqa: SIM115 - closed by `close`
        self._size = 0

    def __repr__(self) -> str:
        return f"<Wrap, {self._size} bytes spooled>"

    def begin(self) -> None:
        self.close()
        self._spool = tempfile.SpooledTemporaryFile(SPOOL_MEMORY)  # noqa: SIM115 - closed by `close`
        self._size = 0

    def feed(self, data: bytes | bytearray) -> list[bytes]:
        self._size += len(data)
        if self._size > LONGEST_RECORD:
            raise BadContent(
                f"the object inflates to more than the {LONGEST_RECORD} bytes that a RecordIO record holds; "
                "split it, or set RecordWrapperType: None"
            )
        if self._outlet.reader_gone:
            raise ReaderGone("the reader closed the pipe")
        self._spool.write(data)
        return []

    def end(self) -> Iterator[bytes]:
        header, padding = frame(self._size)
        yield header
        self._spool.seek(0)
        while content := self._spool.read(_READ):
            yield content
        yield padding

    def close(self) -> None:
        self._spool.close()
