"""The key `Records` of a channel's `Penstock` section."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, Field, StrictStr, model_validator

from sidecar.config.index_place import index_uri
from sidecar.config.model import Model
from streamer.errors import ConfigError
from streamer.formats.record_format import RecordFormat


def _index_place(value: str) -> str:
    try:
        index_uri(value, "")
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return value


def _format(value: str) -> str:
    return str(RecordFormat.parse(value))


IndexPlace = Annotated[StrictStr, Field(min_length=1), AfterValidator(_index_place)]
"""Folder of record indexes, or a prefix of S3 URIs."""


class RecordsConfig(Model):
    """The records of a channel's objects: their format, and where the index of their offsets is."""

    format: Annotated[StrictStr, AfterValidator(_format)]
    """TFRecord, RecordIO, lines, tar, or fixed:BYTES for records of one size, which need no index."""
    index: IndexPlace | None = None
    """Folder of the record index, or a prefix of S3 URIs."""

    @model_validator(mode="after")
    def _indexed(self) -> Self:
        if self.record_format.size and self.index is not None:
            raise ValueError(f"Index has no meaning with Format: {self.format}, which needs none; remove it")
        return self

    @property
    def place(self) -> str:
        """The place of the index, which records have unless they are of one size."""
        if self.index is None:
            raise AssertionError
        return self.index

    @property
    def record_format(self) -> RecordFormat:
        """The format of the objects' records."""
        return RecordFormat.parse(self.format)
