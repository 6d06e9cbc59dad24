"""The training side: what runs inside the trainer and reads the FIFOs that a sidecar fills.

    config      where things lie, and whether a channel is a Pipe channel
    state       which FIFO is next, kept in a file as the incumbent keeps it
    arrival     waiting until a FIFO exists
    stream      one FIFO as a binary file whose end is proven by its trailer
    plain       epochs and records of a channel in plain Python
    interleave  several FIFOs as one stream of records: the rank FIFOs of a channel
    tensorflow  the same as a `tf.data.Dataset`: `PipeModeDataset`; its parts are `steps` (Python stepped by
                TensorFlow), `bulk` (small TFRecords by the block), `states` (errors with a status of
                ours), `interrupts` (Ctrl-C), `memory` (glibc's thresholds) and `meter` (speed, printed)
    places      where its elements are, told beside each of them
    place       a place in a channel's records, saved and gone back to
    turns       one epoch read by several processes, each record by one of them
    book        the file in which one turn leaves what the next one needs
    torch       the same as an `IterableDataset`: `PipeIterableDataset`
    loader      a DataLoader that saves what has come out of its workers: `ResumableLoader`
    progress    what of an epoch a trainer has had, where several workers read it for him
    samples     records put together again that an augmented manifest streams one by one
    protobuf    SageMaker's protobuf records as NumPy arrays

Nothing here imports anything but the standard library, `streamer.formats`, `streamer.trailer` and
`streamer.errors`; TensorFlow, PyTorch and NumPy come in with the modules that are called so, and `loader`
and `protobuf`, which is why those are not imported here. The names below are loaded when they are first
asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamer.readers.core.config import PipeModeDatasetException
    from streamer.readers.core.interleave import InterleavedReader, rank_channel, rank_channels
    from streamer.readers.core.plain import PipeReader, open_channel
    from streamer.readers.core.stream import PipeStream

__all__ = [
    "InterleavedReader",
    "PipeModeDatasetException",
    "PipeReader",
    "PipeStream",
    "open_channel",
    "rank_channel",
    "rank_channels",
]

_HOMES = {
    "InterleavedReader": "streamer.readers.core.interleave",
    "PipeModeDatasetException": "streamer.readers.core.config",
    "PipeReader": "streamer.readers.core.plain",
    "PipeStream": "streamer.readers.core.stream",
    "rank_channel": "streamer.readers.core.interleave",
    "rank_channels": "streamer.readers.core.interleave",
    "open_channel": "streamer.readers.core.plain",
}


def __getattr__(name: str) -> Any:
    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
