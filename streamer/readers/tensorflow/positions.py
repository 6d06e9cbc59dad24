"""Where the iterators of a `PipeModeDataset` are, told with every element and not by the iterator.

tf.data reads ahead of the model, so the position of its stream is not that of the training. So a place
(`streamer.readers.core.position`) travels beside each element, through whatever pipeline follows, and the
last one that a training step has seen is where the training is. It is JSON in a scalar string, so a
`tf.Variable` holds it and `tf.train.Checkpoint` saves it:

    record reader -> (records, places) -> map, batch, prefetch -> step -> variable -> checkpoint

What changes the order of elements (shuffle, a mix of datasets, a map or interleave that is not deterministic)
takes that meaning away: then records before a place may not have been seen.

A dataset's first epoch may begin at a place. It is used up by the iterator that gets that epoch's FIFO, and
only once that is open; one that was thrown away before leaves it to the next.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from streamer.readers.core.position import ReaderPosition
from streamer.readers.tensorflow.steps import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from streamer.formats.window import RecordReader
    from streamer.readers.core.stream import PipeStream


def start_of(start: object, channel: str) -> ReaderPosition | None:
    """The place that a state tells: a dict, its JSON as text or bytes, or a string tensor or variable.

    None for None and for an empty text, which a variable holds before the first step. Raises ValueError.
    """
    if hasattr(start, "numpy"):
        start = start.numpy()
    if isinstance(start, (str, bytes)):
        start = json.loads(start) if start else None
    if start is None:
        return None
    if not isinstance(start, dict):
        raise ValueError(f"start is {start!r}: give a place, as a dict or as JSON")  # noqa: TRY004 - as a bad dict is
    return ReaderPosition.of(start, channel)


class StartPosition:
    """Where the first epoch of a dataset begins."""

    def __init__(self, channel: str, start: ReaderPosition | None, *, anyway: bool) -> None:
        self._channel = channel
        self._start = start
        self._anyway = anyway

    def take(self, stream: PipeStream) -> tuple[ReaderPosition, bool]:
        """The place at which an open stream is to be read, and whether a changed plan is let pass."""
        if self._start is not None and self._start.epoch == stream.epoch:
            place, self._start = self._start, None
            return place, self._anyway
        return ReaderPosition(self._channel, stream.epoch, offset=stream.begun_at), False


class EpochCursor:
    """One iterator's way through an epoch."""

    def __init__(self, begin: StartPosition) -> None:
        self._begin = begin
        self._place: ReaderPosition | None = None

    def batches(
        self, stream: PipeStream, reader: Callable[[PipeStream], RecordReader]
    ) -> Iterator[list[bytes]]:
        """The lists of records of `stream` from its place on; empty ones while there is nothing for now."""
        while not stream.begin(PATIENCE_S):
            yield []
        place, anyway = self._begin.take(stream)
        for _ in place.entering(stream, anyway=anyway):
            yield []
        self._place = place
        yield from place.follow(reader(stream), stream.bytes_total)

    def places(self, records: int, left: int, width: int | None) -> list[bytes]:
        """Of as many `records` the place behind each, or behind each row of `width`.

        `left`: how many further records of the same list follow them.
        """
        if self._place is None or not records:
            return []
        step = min(width or 1, records)
        return self._place.texts(range(left + records - step, left - 1, -step))
