"""Compares the records of a FIFO with the number that its trailer promises to the ranks of a channel.

Ranks that share a channel by record have the number from the record index. If the index is not of the
objects, or the reader has another format, a rank would take more or fewer steps than the others, which then
wait for it for ever. So the reader raises an error: before the first surplus record, or at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamer.errors import StreamError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamer.formats.window import RecordReader
    from streamer.readers.core.stream import PipeStream


class RecordCount:
    """Counts the records of one stream."""

    def __init__(self, stream: PipeStream, number: int = 0) -> None:
        self._stream = stream
        self.number = number
        """Number in the epoch of the next record, surplus ones included."""

    @property
    def fits(self) -> bool:
        """Whether the epoch has no further record; True if the trailer has no number of records."""
        return self.number == self._due or self._due is None

    @property
    def _due(self) -> int | None:
        return self._stream.trailer.records if self._stream.trailer else None

    def checked(
        self, lists: Iterator[tuple[Any, int | None]], reader: RecordReader
    ) -> Iterator[tuple[Any, int | None]]:
        """Yield the lists of `reader`, each with what comes with it, without surplus records.

        Raises StreamError after the last record that the trailer promises if another one follows, and at the
        end of a stream that has fewer.
        """
        left_out = reader.skipped_records
        while True:
            # Before the next list, because another process may have found the surplus (`TurnReader`).
            if (due := self._due) is not None and self.number > due:
                raise self._error(f"more than {due}")
            records, before = next(lists, (None, None))
            if records is None:
                break
            first = self.number
            self.number += len(records) + reader.skipped_records - left_out
            left_out = reader.skipped_records
            if (due := self._due) is None or self.number <= due:
                yield records, before
            elif first < due and hasattr(records, "__getitem__"):  # a batch in place cannot be divided
                yield records[: due - first], before
        if not self.fits:
            raise self._error(f"{self.number} of {due}")

    def _error(self, found: str) -> StreamError:
        order = self._stream.trailer.order if self._stream.trailer else None
        kind = order["format"] if order is not None and "format" in order else "the record index"
        return StreamError(
            f"{self._stream.name} has {found} records that the sidecar promised: the record index lacks "
            f"records of the objects or has two as one, or this reader's format is not that of {kind}; read "
            "by the format of the index, or run `penstock index verify --all`, remove the index and build it "
            "again"
        )
