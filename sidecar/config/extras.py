"""The `Penstock` section of a channel: settings that SageMaker does not have.

`sidecar.config.request` has the rules between these and the other keys of a channel.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StrictBool, StrictFloat, StrictInt, StrictStr, model_validator

from sidecar.config.mistakes import RuleError
from sidecar.config.model import Model, Size, valid_for
from sidecar.config.records import Ranks, RanksConfig, RecordsConfig
from sidecar.config.sources import SourceUri
from streamer.errors import ConfigError
from streamer.plan import Join
from streamer.plan.globs import compile_globs
from streamer.plan.mix import Mix, MixBy, MixChange, Until, lowest_terms
from streamer.plan.record_selection import RecordLimit, RecordSelection
from streamer.plan.selection import Limit, Selection
from streamer.plan.split import MOST_FOLDS, Split, parse_folds
from streamer.relay.channel_spec import WhenFailed

MOST_GLOBS = 100
"""Most globs of one list; each takes time for every key."""
MOST_SOURCES = 100
"""Most prefixes that a channel has besides S3Uri."""
SELECTING_FILES = ("Include", "Exclude", "Split", "Limit")
"""Keys that select objects in File mode too."""
SELECTING = (*SELECTING_FILES, "AlsoFrom")
"""Keys that select objects."""


Glob = Annotated[StrictStr, valid_for(lambda glob: compile_globs([glob]))]
"""A glob on keys (`streamer.plan.globs`)."""


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


Weight = Annotated[StrictFloat, Field(gt=0, allow_inf_nan=False)]
"""A number, whole or not."""
Number = Annotated[StrictInt, Field(ge=0, lt=1 << 62)]
MOST_CHANGES = 100
"""Most changes of the weights: states and trailers have all, and each has a table of picks."""


class MixChangeConfig(Model):
    """Other weights, from a global batch on."""

    epoch: Number
    step: Number = 0
    """Number of the first global batch of the epoch with these weights."""
    weights: Annotated[tuple[Weight, ...], Field(min_length=2)]
    """Weight of each prefix, in the order of `Mix.Weights`."""


class MixConfig(Model):
    """How the prefixes of a channel are mixed."""

    weights: Annotated[tuple[Weight, ...], Field(min_length=2)]
    """Shares of the records, in any unit: that of S3Uri, then one for each prefix of AlsoFrom."""
    until: Until = "first"
    """End of an epoch: before a prefix would begin again, or when every prefix has been read."""
    by: MixBy = "block"
    """What comes from one prefix at a time: a block, or a record."""
    then: Annotated[tuple[MixChangeConfig, ...], Field(max_length=MOST_CHANGES)] = ()
    """Schedule of other weights, in the order of their steps."""

    @model_validator(mode="after")
    def _exact(self) -> Self:
        _terms(self.weights, "Weights")
        last = (0, 0)
        for number, change in enumerate(self.then):
            if len(change.weights) != len(self.weights):
                raise RuleError(
                    f"the change has {len(change.weights)} Weights, and Mix {len(self.weights)}; write one "
                    "weight for each prefix",
                    at=("Then", number, "Weights"),
                )
            if (change.epoch, change.step) <= last:
                after = f"step {last[1]} of epoch {last[0]}"
                raise RuleError(
                    f"the change is not after {after}; write the changes in the order of Epoch and Step, "
                    "without the weights of the first step, which Mix.Weights has",
                    at=("Then", number),
                )
            _terms(change.weights, "Then", number, "Weights")
            last = change.epoch, change.step
        return self

    @property
    def mix(self) -> Mix:
        """The weights in lowest terms."""
        then = (MixChange(each.epoch, each.step, lowest_terms(each.weights)) for each in self.then)
        return Mix(lowest_terms(self.weights), self.until, self.by, tuple(then))


def _terms(weights: tuple[float, ...], *at: str | int) -> None:
    """Check that the weights have lowest terms. Raises RuleError."""
    try:
        lowest_terms(weights)
    except ConfigError as error:
        raise RuleError(str(error), at=at) from None


class ChannelExtras(Model):
    """The `Penstock` section of a channel: settings that SageMaker does not have."""

    when_failed: WhenFailed = "hold"
    """How the FIFO of a failed epoch ends for readers that do not check trailers."""
    join: Join | None = None
    """Format of the objects, whose contents the channel joins into one archive or file of this format."""
    skip_bytes: Annotated[Size, Field(gt=0)] | None = None
    """Bytes at the start of every object that are left out of the stream, such as a header."""
    record_keys: StrictBool = False
    """Keep a list of the objects' keys beside each FIFO, so that a reader can name the object of a record."""
    integrity: Literal["none", "checksum"] = "none"
    """`checksum`: compare every whole object with the checksum that S3 stores."""
    ranks: Ranks | None = None
    """Rank FIFOs, which share the objects or their records. Unset: one FIFO with the channel's own name."""
    bandwidth: Annotated[Size, Field(gt=0)] | None = None
    """Bytes per second into the channel's FIFOs. Unset: no limit for this channel."""
    include: Annotated[tuple[Glob, ...], Field(min_length=1, max_length=MOST_GLOBS)] | None = None
    """Globs on keys, one of which must match. Unset: every key."""
    exclude: Annotated[tuple[Glob, ...], Field(max_length=MOST_GLOBS)] = ()
    """Globs on keys; a key that matches one of them is left out."""
    split: SplitConfig | None = None
    """Some folds of the keys or blocks, as for a holdout set. Unset: all objects."""
    limit: LimitConfig | None = None
    """The first objects or records, or a sample. Unset: no limit."""
    also_from: Annotated[tuple[SourceUri, ...], Field(max_length=MOST_SOURCES)] = ()
    """Further prefixes, whose objects follow those of S3Uri."""
    mix: MixConfig | None = None
    """Weights by which the records of these prefixes are mixed. Unset: one prefix after the other."""
    records: RecordsConfig | None = None
    """Format of the records, and their index, which ranks read or the channel learns. Unset: unknown."""

    @property
    def given(self) -> list[str]:
        """Keys whose values are not the defaults."""
        fields = type(self).model_fields
        return [
            str(field.alias) for name, field in fields.items() if getattr(self, name) != field.get_default()
        ]

    @property
    def by_record(self) -> RanksConfig | None:
        """The rank FIFOs if they share the channel by record, else None."""
        return None if self.ranks is None or self.ranks.global_batch is None else self.ranks

    @property
    def index(self) -> str | None:
        """Folder or prefix of the record index that the channel reads or learns; None if it has none."""
        return None if self.records is None else self.records.index

    @property
    def joining(self) -> str | None:
        """The setting by which objects are joined, as it is written; None if they are not."""
        if self.skip_bytes is not None:
            return f"SkipBytes: {self.skip_bytes}"
        return None if self.join is None else f"Join: {self.join}"

    @property
    def selecting(self) -> list[str]:
        """Keys that are given and select objects."""
        return [key for key in self.given if key in SELECTING]

    @property
    def selection(self) -> Selection:
        """What the channel streams of the objects that its source names."""
        limit = None if self.limit is None else self.limit.limit
        split = None if self.split is None or self.split.by != "key" else self.split.split
        return Selection(self.include or (), self.exclude, limit, split)

    @property
    def record_selection(self) -> RecordSelection:
        """Which records of these objects the channel's ranks share."""
        limit = None if self.limit is None else self.limit.record_limit
        split = None if self.split is None or self.split.by != "block" else self.split.split
        return RecordSelection(split, limit)
