"""Reads a channel in plain Python: its epochs as binary files, its records as `bytes`.

`open_channel` opens the next epoch as a binary file. `PipeReader` cuts the epoch into records; each iteration
reads the next epoch:

    reader = PipeReader("train", "TFRecord")
    for epoch in range(3):
        for record in reader:          # bytes
            ...

An iteration opens the FIFO when the caller requests the first record. A state saved between two records
resumes the epoch, in another process too:

    checkpoint["data"] = reader.state_dict()
    reader.load_state_dict(checkpoint["data"])

`streamer.readers.core.epochs` counts the epochs. PyTorch has its own reader (`streamer.readers.torch`), whose
workers share a channel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from streamer.errors import ChannelError
from streamer.readers.core.channel_reader import ChannelReader, ShuffledReadOptions, paths_of, with_defaults
from streamer.readers.core.config import check_if_configured, directories
from streamer.readers.core.epochs import TIMEOUT, ChannelEpochs
from streamer.readers.core.record_spec import RecordSpec, check_format, format_of
from streamer.readers.core.shuffle import Shuffle
from streamer.readers.core.skipping import SkippedRecord, without_skipped
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from typing_extensions import Unpack

    from streamer.readers.core.stream import PipeStream


def open_channel(
    channel: str,
    *,
    epoch: int | None = None,
    pipe_dir: str | None = None,
    state_dir: str | None = None,
    config_dir: str | None = None,
    timeout: float = TIMEOUT,
) -> PipeStream:
    """Open the next epoch of `channel`, or the given one, as a binary file whose end is proven.

    With `epoch` the state file is neither read nor written. Directories default to `input/data`,
    `pipe_state` and `input/config` below `$SAGEMAKER_BASE_DIR` (default /opt/ml). Raises ChannelError if
    the channel is not a Pipe channel or its FIFO does not appear in `timeout` seconds. Reading raises
    TruncatedStream if the FIFO ends before the epoch. For lines: `io.BufferedReader(open_channel(…))`.
    """
    paths = directories(pipe_dir, config_dir, state_dir)
    check_if_configured(channel, paths.config)
    stream = ChannelEpochs(channel, paths, epoch=epoch, timeout=timeout).next_stream()
    stream.open()
    return stream


class PipeReader(ChannelReader):
    """The records of a channel. Each `iter()` or `batches()` reads the next epoch.

    `record_format`: 'RecordIO', 'MXRecordIO' (RecordIO of MXNet's writer, whose records of several parts get
    the magic number back between these), 'TFRecord', 'TextLine', or 'fixed:BYTES' for records of BYTES
    bytes; None for the channel's `Records.Format`.
    `epoch`: the first epoch, from which this object counts; None for the next epoch of the state file. Other
    arguments: `ShuffledReadOptions`. With `key` records are `KeyedRecord`s.

    Raises ValueError for an unknown format, a shuffle below 1, and for `skip` with TextLine,
    PipeModeDatasetException for a channel that is not a Pipe channel, or that has another format or none,
    ChannelError if the quarantine list cannot be written. Iterating
    raises ChannelError, TruncatedStream and CorruptRecord.
    """

    def __init__(
        self,
        channel: str,
        record_format: str | None = None,
        *,
        epoch: int | None = None,
        **options: Unpack[ShuffledReadOptions],
    ) -> None:
        chosen = with_defaults(options, ShuffledReadOptions)
        record_format = format_of([channel], paths_of(chosen).config, record_format)
        check_format(record_format)
        shuffle = Shuffle.of(chosen["shuffle"], chosen["seed"])
        spec = RecordSpec(record_format, chosen["key"], chosen["skip"], shuffle)
        super().__init__(channel, spec, chosen, epoch=epoch)
        self.shuffle = spec.shuffle
        """How records are shuffled; None if they are not."""
        self.record_format = record_format

    def __repr__(self) -> str:
        skipped = (
            f": skipped {counted(self.skipped.records, 'record')}, {counted(self.skipped.objects, 'object')}"
        )
        shown = self.record_format + (skipped if self._spec.skip else "")
        return f"<{type(self).__name__} {self.channel} [{shown}]>"

    def __iter__(self) -> Iterator[Any]:
        for batch in self._lists():
            for left in range(len(batch) - 1, -1, -1):
                self.left = left
                record = batch[-1 - left]
                if type(record) is not SkippedRecord:
                    yield record

    def __len__(self) -> int:
        """Return the number of records of an epoch, if ranks share the channel by record.

        Waits until the sidecar offers the first epoch. Raises TypeError if the channel has no known length.
        """
        return self._epochs.counts().records

    def batches(self) -> Iterator[list[Any]]:
        """Yield the next epoch as lists of records, one list per block that arrived; cheaper than `iter`.

        With `shuffle` a list is a part of a window.
        """
        if self._spec.skip is None:
            yield from self._lists()
        else:
            for batch in self._lists():
                yield without_skipped(batch)

    def _lists(self) -> Iterator[list[Any]]:
        """Yield the lists of the next epoch; a corrupt record has its place in them."""
        with self._next_epoch() as loop:
            yield from loop.lists()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last record, or list of records, that was returned.

        If ranks share the channel by record, it is the state of the whole job after the last global batch
        whose records were all returned (`streamer.step_state`). The dict is for JSON and checkpoints
        (`streamer.readers.core.position`). A record that was skipped counts.
        """
        return super().state_dict()


T = TypeVar("T")


def endless(passes: Iterable[T]) -> Iterator[T]:
    """Yield the elements of one pass over a reader, dataset or loader after the other, without end.

    Each pass is an epoch. A pass that resumes may have nothing left. Raises ChannelError if two successive
    passes are empty; otherwise as the passes do.
    """
    empty = 0
    while True:
        empty += 1
        for element in passes:
            empty = 0
            yield element
        if empty == 2:
            raise ChannelError(
                "two successive epochs have no record; give the channel objects, or end the loop earlier"
            )
