"""Positions of a `PipeModeDataset`, each in one tuple with its element.

tf.data reads ahead of the model, so the position of its iterator is not the position of the training. So each
element carries its position (`streamer.readers.core.position`) through the pipeline. The position of the last
element that a training step has used is the position of the training. It is JSON in a scalar string, so a
`tf.Variable` holds it and `tf.train.Checkpoint` saves it:

    record reader -> (records, positions) -> map, batch, prefetch -> step -> variable -> checkpoint

If the pipeline changes the order of elements (shuffle, a mix of datasets, a map or interleave that is not
deterministic), records before a position may not have been used.

A dataset's first epoch may begin at a saved position. The iterator that opens that epoch's FIFO uses the
position up; if an iterator is dropped before, the next one uses it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from streamer.readers.core.position import ReaderPosition

if TYPE_CHECKING:
    from streamer.readers.core.shuffle import Shuffle


def parse_start(
    start: object, channel: str, shuffle: Shuffle | None = None, *, anyway: bool = False
) -> ReaderPosition | None:
    """Parse a saved position: a dict, its JSON as text or bytes, or a string tensor or variable.

    `shuffle`, `anyway`: those of the dataset. Returns None for None and for an empty text, which a variable
    holds before the first step. Raises ValueError.
    """
    if hasattr(start, "numpy"):
        start = start.numpy()
    if isinstance(start, (str, bytes)):
        start = json.loads(start) if start else None
    if start is None:
        return None
    if not isinstance(start, dict):
        raise ValueError(f"start is {start!r}: give a position, as a dict or as JSON")  # noqa: TRY004 - as a bad dict is
    return ReaderPosition.of(start, channel, shuffle, anyway=anyway)
