"""The training side: what runs inside the trainer and reads the FIFOs that a sidecar fills.

    config      where things lie, and whether a channel is a Pipe channel
    state       which FIFO is next, kept in a file as the incumbent keeps it
    arrival     waiting until a FIFO exists
    stream      one FIFO as a binary file whose end is proven by its trailer
    plain       epochs and records of a channel in plain Python
    tensorflow  the same as a `tf.data.Dataset`: `PipeModeDataset`; its parts are `steps` (Python stepped by
                TensorFlow), `bulk` (small TFRecords by the block), `verdicts` (errors with a status of
                ours), `interrupts` (Ctrl-C), `memory` (glibc's thresholds) and `meter` (speed, printed)

Nothing here imports anything but the standard library, `streamer.formats`, `streamer.trailer` and
`streamer.errors`; TensorFlow and NumPy come in with `streamer.readers.tensorflow` alone, which is why that
module is not imported here. The names below are loaded when they are first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamer.readers.config import PipeModeDatasetException
    from streamer.readers.plain import PipeReader, open_channel
    from streamer.readers.stream import PipeStream

__all__ = ["PipeModeDatasetException", "PipeReader", "PipeStream", "open_channel"]

_HOMES = {
    "PipeModeDatasetException": "streamer.readers.config",
    "PipeReader": "streamer.readers.plain",
    "PipeStream": "streamer.readers.stream",
    "open_channel": "streamer.readers.plain",
}


def __getattr__(name: str) -> Any:
    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
