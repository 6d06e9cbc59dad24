"""A channel in plain Python: its epochs as binary files, its records as `bytes`.

`open_channel` gives the next epoch as a file-like object. `PipeReader` cuts it into records; each time it
is iterated it reads the next epoch:

    reader = PipeReader("train", "TFRecord")
    for epoch in range(3):
        for record in reader:          # bytes
            ...

PyTorch has a reader of its own (`streamer.readers.torch`), whose workers share a channel.

Which epoch is next is kept in the state file (`streamer.readers.core.state`), for all objects and processes
of the container; the FIFO is opened when the first record is asked for, and not before.

    checkpoint["data"] = reader.state_dict()          # between two records
    reader.load_state_dict(checkpoint["data"])        # in another process, later
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from streamer.errors import ChannelError
from streamer.formats.lines import LineReader
from streamer.formats.recordio import RecordIOReader
from streamer.formats.tfrecord import Skipped, TFRecordReader
from streamer.readers.core.config import Directories, PipeModeDatasetException, check_channel, directories
from streamer.readers.core.position import ReaderPosition
from streamer.readers.core.state import EpochState
from streamer.readers.core.stream import STDIN, PipeStream
from streamer.trailer import fifo_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from streamer.formats.window import RecordReader, Source

RECORD_FORMATS = ("RecordIO", "TFRecord", "TextLine")
TIMEOUT = 120.0
"""Seconds to wait for a FIFO, as the incumbent documents it (contract §6.2)."""


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
    TruncatedStream if the epoch ends before its end. For lines: `io.BufferedReader(open_channel(…))`.
    """
    where = directories(pipe_dir, config_dir, state_dir)
    _check_if_configured(channel, where)
    stream = next_stream(channel, where, epoch=epoch, timeout=timeout)
    stream.open()
    return stream


class PipeReader:
    """The records of a channel. Each `iter()` or `batches()` is one epoch, the next one.

    `record_format` is 'RecordIO', 'TFRecord' or 'TextLine'. With `epoch`, counting starts there and is kept
    in this object alone; otherwise the state file counts. `max_corrupted_records_to_skip` is for TFRecord:
    how many records in a row may fail their data CRC and be left out. Directories as in `open_channel`.

    Raises ValueError for an unknown format, PipeModeDatasetException for a channel that is not a Pipe
    channel. Iterating raises ChannelError, TruncatedStream and CorruptRecord.
    """

    def __init__(
        self,
        channel: str,
        record_format: str = "RecordIO",
        *,
        epoch: int | None = None,
        pipe_dir: str | None = None,
        state_dir: str | None = None,
        config_dir: str | None = None,
        timeout: float = TIMEOUT,
        max_corrupted_records_to_skip: int = 0,
    ) -> None:
        check_format(record_format, max_corrupted_records_to_skip)
        self.channel = channel
        self.record_format = record_format
        self._where = directories(pipe_dir, config_dir, state_dir)
        _check_if_configured(channel, self._where)
        self._epoch = epoch
        self._timeout = timeout
        self._skip = max_corrupted_records_to_skip
        self._place: ReaderPosition | None = None
        """Where the epoch that was begun last is."""
        self._left = 0
        """Records of its batch that have not been returned yet."""
        self._resume: ReaderPosition | None = None
        """Where the next iteration begins, if not with an epoch."""
        self._anyway = False
        self.skipped = Skipped()
        """Corrupt records left out so far: `records`, and `places` (stream and offset)."""

    def __iter__(self) -> Iterator[bytes]:
        for batch in self.batches():
            for left in range(len(batch) - 1, -1, -1):
                self._left = left
                yield batch[-1 - left]

    def batches(self) -> Iterator[list[bytes]]:
        """The next epoch as lists of records, one list per block that arrived. Cheaper than one by one."""
        epoch = self._epoch
        if epoch is not None:
            self._epoch = epoch + 1
        resume, self._resume = self._resume, None
        with next_stream(self.channel, self._where, epoch=epoch, timeout=self._timeout) as stream:
            stream.begin()
            place = resume or ReaderPosition(self.channel, stream.epoch, offset=stream.begun_at)
            place.enter(stream, anyway=self._anyway)
            self._place, self._left = place, 0
            yield from place.follow(
                record_reader(stream, self.record_format, skip=self._skip, skipped=self.skipped),
                stream.bytes_total,
            )

    def state_dict(self) -> dict[str, Any]:
        """The place behind the last record that was returned, or list of them, for `load_state_dict`.

        Plain numbers and text, fit for JSON and for a checkpoint; `streamer.readers.core.position` explains
        them.
        """
        if self._resume is not None:
            return self._resume.state()
        if self._place is None:
            epoch = EpochState(self._where.state, self.channel).peek() if self._epoch is None else self._epoch
            return ReaderPosition(self.channel, epoch).state()
        return self._place.returned(self._left)

    def load_state_dict(self, state: Mapping[str, Any], *, anyway: bool = False) -> None:
        """Have the next iteration begin where `state` was taken, with the rest of that epoch.

        The sidecar must offer that epoch: `penstock run --resume` begins there, and saves fetching what
        lies before it in the epoch. Raises ValueError if it is no state of this channel. Iterating raises
        ChannelError if the plan has changed since, unless `anyway`.
        """
        place = ReaderPosition.of(state, self.channel)
        if self._epoch is None:
            EpochState(self._where.state, self.channel).put(place.epoch)
        else:
            self._epoch = place.epoch
        self._resume, self._anyway = place, anyway


def check_format(record_format: str, skip: int) -> None:
    """Raise ValueError for an unknown format, PipeModeDatasetException for a skip that has no meaning."""
    if record_format not in RECORD_FORMATS:
        raise ValueError(f"Invalid record format: {record_format}")
    if skip < 0:
        raise PipeModeDatasetException(f"max_corrupted_records_to_skip is {skip}; it cannot be negative")
    if skip > 0 and record_format != "TFRecord":
        raise PipeModeDatasetException(
            "max_corrupted_records_to_skip can only be set for record_format='TFRecord'"
        )


def record_reader(
    source: Source, record_format: str, *, skip: int = 0, skipped: Skipped | None = None
) -> RecordReader:
    """The reader of a format that `check_format` let pass."""
    if record_format == "TFRecord":
        return TFRecordReader(source, max_corrupted_records_to_skip=skip, skipped=skipped)
    if record_format == "RecordIO":
        return RecordIOReader(source)
    return LineReader(source)


def next_stream(
    channel: str,
    where: Directories,
    *,
    epoch: int | None = None,
    timeout: float = TIMEOUT,
    patience: float | None = None,
) -> PipeStream:
    """The next epoch of a channel, taken from the state file and not opened yet.

    If it is closed without having been opened, the epoch goes back.
    """
    if epoch is not None:
        return PipeStream(fifo_path(where.pipe, channel, epoch), timeout=timeout, patience=patience)
    state = EpochState(where.state, channel)
    taken = state.take()
    return PipeStream(
        fifo_path(where.pipe, channel, taken),
        timeout=timeout,
        patience=patience,
        hint=f"the state file {state.path} says {taken}; if the sidecar was restarted, delete that file",
        unused=lambda: state.give_back(taken),
    )


def source_stream(
    path: str | os.PathLike[str],
    *,
    timeout: float = TIMEOUT,
    patience: float | None = None,
    proof: bool = False,
) -> Callable[[], PipeStream]:
    """Streams of one path, one after the other: a FIFO, a regular file, or /dev/stdin, which gives one.

    The second stream of standard input raises ChannelError: what was read is gone, and an empty epoch
    would be a lie.
    """
    used = False

    def following() -> PipeStream:
        nonlocal used
        if used and os.fspath(path) == STDIN:
            raise ChannelError(
                "standard input was read already, and can be read once: use a channel for epochs"
            )
        used = True
        return PipeStream(path, timeout=timeout, patience=patience, proof=proof)

    return following


def _check_if_configured(channel: str, where: Directories) -> None:
    # A bare FIFO without config files is enough for the plain reader; a file that is there must agree.
    if os.path.exists(os.path.join(where.config, "inputdataconfig.json")):
        check_channel(channel, where.config)
