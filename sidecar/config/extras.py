"""The `Penstock` section of a channel: settings that SageMaker does not have.

`sidecar.config.request` has the rules between these and the other keys of a channel.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    model_validator,
)

from sidecar.config.byte_size import Size
from sidecar.config.launcher import FROM_LAUNCHER, count_of
from sidecar.config.mixing import MixConfig
from sidecar.config.model import Model
from sidecar.config.records import RecordsConfig
from sidecar.config.selecting import LimitConfig, SplitConfig
from sidecar.config.uris import SourceUri
from streamer.errors import ConfigError
from streamer.plan import Join
from streamer.plan.globs import compile_globs
from streamer.plan.record_order import BLOCK, Remainder
from streamer.plan.record_selection import RecordSelection
from streamer.plan.selection import Selection
from streamer.relay.deliver.failure_policy import WhenFailed

MOST_GLOBS = 100
"""Most globs of one list; each takes time for every key."""
MOST_SOURCES = 100
"""Most prefixes that a channel has besides S3Uri."""
MOST_RANKS = 64
"""Most rank FIFOs of a channel on one host."""
LARGEST_BATCH = 1 << 26
"""Most records of a global batch; a higher number is a mistake, and takes minutes to repeat records."""
LARGEST_BLOCK = 1 << 40
"""Most bytes of a block: 1 TiB."""
SELECTING_FILES = ("Include", "Exclude", "Split", "Limit")
"""Keys that select objects in File mode too."""
SELECTING = (*SELECTING_FILES, "AlsoFrom")
"""Keys that select objects."""


def _glob(value: str) -> str:
    try:
        compile_globs([value])
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return value


Glob = Annotated[StrictStr, AfterValidator(_glob)]
"""A glob on keys (`streamer.plan.globs`)."""


_Fifos = Annotated[StrictInt, Field(ge=1, le=MOST_RANKS)]
"""A number of rank FIFOs."""


class RanksConfig(Model):
    """Rank FIFOs of a channel. With a global batch they share it by record, else by object."""

    count: Annotated[
        _Fifos, BeforeValidator(count_of, json_schema_input_type=_Fifos | Literal["from launcher"])
    ]
    """Rank FIFOs on each host. `from launcher`: as many as the launcher starts processes."""
    global_batch: Annotated[StrictInt, Field(ge=1, le=LARGEST_BATCH)] | None = None
    """Records of a global batch, over all ranks of all hosts."""
    remainder: Remainder = "drop"
    """What becomes of the last records, which fill no global batch."""
    block: Annotated[Size, Field(gt=0, le=LARGEST_BLOCK)] | None = None
    """Bytes of a block, which the shuffle keeps together. Unset: 1 MiB."""
    copies: Annotated[StrictInt, Field(ge=1, le=MOST_RANKS)] = 1
    """FIFOs of each rank, which all get the same bytes, from one download."""
    fetch: Literal["auto", "separately", "together"] = "auto"
    """`together`: the ranks of a host are fetched as one stream, in large parts, and read at one pace.

    `auto`: likewise if their slices are small, else `separately`.
    """

    @model_validator(mode="after")
    def _by_record_or_not(self) -> Self:
        if self.global_batch is None:
            given = (name for name in self.model_fields_set if getattr(self, name) is not None)
            if idle := sorted({*given} - {"count"}):
                key = type(self).model_fields[idle[0]].alias
                raise ValueError(f"{key} has no meaning without GlobalBatch; add it")
            return self
        if self.global_batch % self.count:
            raise ValueError(
                f"GlobalBatch {self.global_batch} cannot be divided over {self.count} ranks in equal slices; "
                "make it a multiple of Count times the hosts"
            )
        if self.count * self.copies > MOST_RANKS:
            raise ValueError(
                f"Count {self.count} times Copies {self.copies} are more than {MOST_RANKS} FIFOs; lower one"
            )
        return self

    @property
    def fifos(self) -> int:
        """Number of FIFOs on each host."""
        return self.count * self.copies

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return BLOCK if self.block is None else int(self.block)


def _counted(value: Any) -> Any:
    """Return the section that a number of rank FIFOs stands for."""
    if isinstance(value, int) or value == FROM_LAUNCHER:
        return {"Count": value}
    if isinstance(value, (dict, RanksConfig)):
        return value
    raise ValueError(
        f"must be a number of rank FIFOs, or a mapping such as {{Count: 4, GlobalBatch: 128}}, and not "
        f"{value!r}"
    )


Ranks = Annotated[
    RanksConfig,
    BeforeValidator(
        _counted,
        json_schema_input_type=_Fifos | Literal["from launcher"] | RanksConfig,
    ),
]
"""`Ranks: 4` is short for `Ranks: {Count: 4}`."""


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
    """Format and index of the records that ranks share, or whose index the channel learns. Unset: unknown."""

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
