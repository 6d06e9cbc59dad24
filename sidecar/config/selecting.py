"""The keys `Split` and `Limit` of a channel's `Penstock` section."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StrictInt, StrictStr, model_validator

from sidecar.config.byte_size import Size
from sidecar.config.model import Model
from streamer.errors import ConfigError
from streamer.plan.record_selection import RecordLimit
from streamer.plan.selection import Limit
from streamer.plan.split import MOST_FOLDS, Split, parse_folds


def _named(value: Any) -> Any:
    """Return the text of a fold's number."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return value


_Text = Annotated[StrictStr, Field(min_length=1)]
Folds = Annotated[
    _Text,
    BeforeValidator(_named, json_schema_input_type=_Text | Annotated[StrictInt, Field(ge=0)]),
]
"""Folds as text; the number of one fold stands for its text."""


class SplitConfig(Model):
    """The part of a channel that is streamed, drawn by key or by block: some folds of all."""

    of: Annotated[StrictInt, Field(ge=2, le=MOST_FOLDS)]
    """Number of folds."""
    take: Folds
    """The folds to stream, numbered from 0: a number, a range such as `0-98`, or several with commas."""
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] = 0
    """Divides the keys into folds in another way."""
    by: Literal["key", "block"] = "key"
    """What is in a fold: whole objects, or blocks of about 1 MiB of records."""

    @model_validator(mode="after")
    def _folds(self) -> Self:
        _ = self.split
        return self

    @property
    def split(self) -> Split:
        """The folds that are taken. Raises ValueError for folds that do not exist."""
        try:
            return Split(self.of, parse_folds(self.take, self.of), self.seed)
        except ConfigError as error:
            raise ValueError(f"Take: {error}") from None


class LimitConfig(Model):
    """How much of a channel is streamed: a number of objects, of bytes, or of records."""

    objects: Annotated[StrictInt, Field(ge=1)] | None = None
    """Objects; lines of an augmented manifest."""
    bytes: Annotated[Size, Field(gt=0)] | None = None
    """Bytes of whole objects."""
    records: Annotated[StrictInt, Field(ge=1)] | None = None
    """Records, of a channel that its ranks share by record."""
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    """Draw a sample with this seed. Unset: take the first."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if [self.objects, self.bytes, self.records].count(None) != 2:
            raise ValueError(
                "must have one of Objects, Bytes and Records, such as {Objects: 1000}; Seed makes it a sample"
            )
        return self

    @property
    def limit(self) -> Limit | None:
        """The limit on objects; None: there is none."""
        if self.records is not None:
            return None
        return Limit(self.objects, None if self.bytes is None else int(self.bytes), self.seed)

    @property
    def record_limit(self) -> RecordLimit | None:
        """The limit on records; None: there is none."""
        return None if self.records is None else RecordLimit(self.records, self.seed)
