"""Readers of Pipe channels for PyTorch, TensorFlow and plain Python: the part that runs in the trainer.

    core        config (directories, channels), options (arguments of readers), state (the state file),
                state_file (of `--resume`), epochs (which epoch is next), arrival, stream, read_end and proof
                (one FIFO as a file with a proven end), record_spec and read_loop (the records of one FIFO),
                plain (a reader in plain Python, epoch after epoch), position (saved and resumed), start
                (brings a stream to it), record_keys and record_names (the object of each record), shuffle (of
                records in windows), skipping (corrupt records)
    tensorflow  a `tf.data.Dataset`: `PipeModeDataset`; with steps (Python stepped by TensorFlow), bulk and
                checksums (small TFRecords by the block), failures (statuses of errors), interrupts (Ctrl-C),
                memory (glibc's thresholds)
    torch       an `IterableDataset`: `PipeIterableDataset`; with elements, progress (records of an element,
                and those received), workers (one epoch read by several processes), shared_cursor (what one of
                them reads, and passes on)
    loader      a DataLoader that saves the progress of all its workers: `ResumableLoader`
    lightning   a callback that saves its state beside Lightning's checkpoints; checkpoint, the same for those
                of `torch.distributed.checkpoint`; tensorflow.backup, weights and state by Keras
    tables      Parquet and Arrow objects as record batches: `TableReader`; with table_decoder (one object)
                and table_dataset (`TableIterableDataset`, for PyTorch)
    tokens      raw tokens as NumPy arrays: `TokenReader`; with token_blocks (the arrays)
    examples    tf.train.Example as NumPy arrays: `ExampleDecoder`
    samples     the records of an augmented manifest, grouped into samples

`core` and `samples` import the standard library, `streamer.formats`, `streamer.trailer` and
`streamer.errors` only. `tensorflow`, `torch`, `loader`, `table_dataset`, `tokens` and `examples` import
TensorFlow, PyTorch and NumPy, so this module does not import them; `table_decoder` imports pyarrow and
`examples` protobuf late. This module loads the names below at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamer.readers.core.config import PipeModeDatasetException, rank_channel, rank_channels
    from streamer.readers.core.plain import PipeReader, endless, open_channel
    from streamer.readers.core.record_names import KeyedRecord
    from streamer.readers.core.skipping import SkipPolicy
    from streamer.readers.core.state_file import load_state, save_state
    from streamer.readers.core.stream import PipeStream

__all__ = [
    "KeyedRecord",
    "PipeModeDatasetException",
    "PipeReader",
    "PipeStream",
    "SkipPolicy",
    "endless",
    "load_state",
    "open_channel",
    "rank_channel",
    "rank_channels",
    "save_state",
]

_HOMES = {
    "KeyedRecord": "streamer.readers.core.record_names",
    "PipeModeDatasetException": "streamer.readers.core.config",
    "PipeReader": "streamer.readers.core.plain",
    "PipeStream": "streamer.readers.core.stream",
    "SkipPolicy": "streamer.readers.core.skipping",
    "rank_channel": "streamer.readers.core.config",
    "rank_channels": "streamer.readers.core.config",
    "endless": "streamer.readers.core.plain",
    "load_state": "streamer.readers.core.state_file",
    "open_channel": "streamer.readers.core.plain",
    "save_state": "streamer.readers.core.state_file",
}


def __getattr__(name: str) -> Any:
    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
