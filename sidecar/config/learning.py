"""The key `LearnIndex` of a channel's `Penstock` section."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, StrictInt, StrictStr

from sidecar.config.index_place import index_uri
from sidecar.config.model import Model
from streamer.errors import ConfigError
from streamer.formats.record_format import RecordFormat

MOST_EVERY = 2**32 - 1
"""Most records from one in the index to the next: the file has 4 bytes for the number."""


def _index_place(value: str) -> str:
    try:
        index_uri(value, "")
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return value


def _headed(value: str) -> str:
    if RecordFormat.parse(value).kind == "fixed":
        raise ValueError(
            f"{value} needs no bytes of the objects: remove LearnIndex, and run `penstock index build "
            f"--format {value}`, which reads none"
        )
    return value


IndexPlace = Annotated[StrictStr, Field(min_length=1), AfterValidator(_index_place)]
"""Folder of record indexes, or a prefix of S3 URIs."""


class LearnIndexConfig(Model):
    """The record index that a channel learns; the keys are the options of `penstock index build`."""

    to: IndexPlace
    """Folder of the index, or a prefix of S3 URIs."""
    format: Annotated[StrictStr, AfterValidator(_headed)]
    """Format of the objects' records: TFRecord, RecordIO, lines or tar."""
    every: Annotated[StrictInt, Field(ge=1, le=MOST_EVERY)] | None = None
    """Number of records from one in the index to the next. Unset: that of the index there is, or 256."""

    @property
    def record_format(self) -> RecordFormat:
        """The format of the objects' records."""
        return RecordFormat.parse(self.format)
