"""`RecordSpec`: what the records of a reader are, and how a stream is cut into them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streamer.formats.fixed import FixedReader
from streamer.formats.lines import LineReader
from streamer.formats.record_format import RecordFormat
from streamer.formats.recordio import RecordIOReader
from streamer.formats.tfrecord import TFRecordReader
from streamer.readers.core.config import PipeModeDatasetException, check_if_configured
from streamer.readers.core.epoch_skips import EpochSkips
from streamer.readers.core.memory import keep_memory
from streamer.readers.core.record_keys import RecordKeys
from streamer.readers.core.skipping import SkipCounts, check_skip

if TYPE_CHECKING:
    from collections.abc import Iterable

    from streamer.formats.window import RecordReader, Source
    from streamer.readers.core.position import ReaderPosition
    from streamer.readers.core.shuffle import Shuffle
    from streamer.readers.core.skipping import SkipPolicy
    from streamer.readers.core.stream import PipeStream

MXRECORDIO = "MXRecordIO"
"""RecordIO whose writer, MXNet's or dmlc's, drops the magic number where it cuts a record at it."""
RECORD_FORMATS = ("RecordIO", MXRECORDIO, "TFRecord", "TextLine")
FIXED = "fixed:"
"""Begin of the format of records without a frame; the number of bytes of each follows."""
WEBDATASET = "WebDataset"
"""Format of tar streams, whose records PyTorch's reader returns as dicts (`streamer.formats.tar`)."""
_NAMES = {"lines": "TextLine", "tar": WEBDATASET}
"""Readers' names of values of `Records.Format` that have another name there."""


@dataclass(frozen=True)
class RecordSpec:
    """What the records of a reader are. Raises as `check_skip`."""

    record_format: str
    key: bool = False
    """Whether records are `KeyedRecord`s."""
    skip: SkipPolicy | None = None
    shuffle: Shuffle | None = None
    placed: bool = field(default=False, kw_only=True)
    """Whether good records are `PlacedRecord`s with `skip`, for a reader that decodes them and skips some."""
    max_object_bytes: int | None = field(default=None, kw_only=True)
    """Most bytes of a record that is a whole object; None without a limit of the reader's own."""
    skipped: SkipCounts = field(default_factory=SkipCounts, compare=False, kw_only=True)
    """What `skip` has left out in this process so far."""

    def __post_init__(self) -> None:
        check_skip(self.skip, self.record_format)

    def reader(self, source: Source) -> RecordReader:
        """Return a reader of the records of one stream."""
        if self.max_object_bytes is not None:
            return RecordIOReader(source, max_payload=self.max_object_bytes)
        return record_reader(source, self.record_format)

    def keys(self, stream: PipeStream, position: ReaderPosition) -> RecordKeys | None:
        """Return the keys of a stream's records from a position on; None if they are not needed.

        A reader with `skip` uses a key list if the FIFO has one.
        """
        path = stream.key_list_path
        if not (self.key or (self.skip is not None and path is not None and os.path.lexists(path))):
            return None
        kind, _, size = self.record_format.partition(":")
        size_of_all = int(size) if kind == "fixed" else 0
        return RecordKeys(stream, offset=position.offset, number=position.number, size=size_of_all)

    def skips(self, stream: PipeStream, channel: str) -> EpochSkips | None:
        """Return what is left out of the epoch of a stream; None without `skip`."""
        if self.skip is None:
            return None
        return EpochSkips(self.skip, channel, stream.epoch, self.skipped, keyed=self.key, placed=self.placed)


def format_of(channels: Iterable[str], config_dir: str, given: str | None) -> str:
    """Return the format in which a reader reads `channels`: `given`, or else the channels' own.

    That is the `Records.Format` of the job file, which the sidecar writes into inputdataconfig.json as
    `RecordFormat`; with `RecordWrapperType: RecordIO` it is RecordIO. Raises PipeModeDatasetException for
    what is no Pipe channel, for a channel of another format, and if neither names a format.
    """
    record_format, hint, name = given, "", ""
    for name in channels:
        if (entry := check_if_configured(name, config_dir)) is None:
            hint = f"; {config_dir} has no inputdataconfig.json, from which readers take it"
            continue
        setting, own = f"Records.Format: {entry.get('RecordFormat')}", entry.get("RecordFormat")
        if entry.get("RecordWrapperType") == "RecordIO":
            setting, own = "RecordWrapperType: RecordIO", "RecordIO"
        if own is None:
            continue
        own = _NAMES.get(own, own)
        record_format = record_format or own
        if own.startswith(FIXED) and not record_format.startswith(FIXED):
            continue  # the size says where records are, and any format may have records of one size
        if own != record_format and (own, record_format) != ("RecordIO", MXRECORDIO):
            raise PipeModeDatasetException(
                f"channel {name} has {setting}, which record_format={own!r} reads, and this reader reads "
                f"{record_format}: correct the one that is wrong"
            )
    if record_format is None:
        raise PipeModeDatasetException(
            f"the record format of channel {name} is unknown: say record_format='TFRecord', or what the "
            "records are, or add Records: {Format: TFRecord} to the Penstock section of the channel" + hint
        )
    return record_format


def check_format(record_format: str, skip: int = 0) -> None:
    """Raise ValueError for an unknown format, PipeModeDatasetException for a skip that it does not allow."""
    if record_format.startswith(FIXED):
        RecordFormat.parse(record_format)
    elif record_format not in RECORD_FORMATS:
        raise ValueError(
            f"Invalid record format: {record_format}; the formats are {', '.join(RECORD_FORMATS)} and "
            f"{FIXED}BYTES, and {WEBDATASET} in PyTorch"
        )
    if skip < 0:
        raise PipeModeDatasetException(f"max_corrupted_records_to_skip is {skip}; it cannot be negative")
    if skip > 0 and record_format != "TFRecord":
        raise PipeModeDatasetException(
            "max_corrupted_records_to_skip can only be set for record_format='TFRecord'"
        )


def record_reader(source: Source, record_format: str) -> RecordReader:
    """Return the reader of a format that `check_format` accepts; let glibc keep the memory of its records."""
    keep_memory()
    if record_format == "TFRecord":
        return TFRecordReader(source)
    if record_format in {"RecordIO", MXRECORDIO}:
        return RecordIOReader(source, rejoin_magic=record_format == MXRECORDIO)
    if record_format.startswith(FIXED):
        return FixedReader(source, RecordFormat.parse(record_format).size)
    return LineReader(source)
