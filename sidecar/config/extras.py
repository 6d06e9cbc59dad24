"""The `Penstock` section of a channel: settings that SageMaker does not have.

`sidecar.config.request` has the rules between these and the other keys of a channel.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictStr

from sidecar.config.model import Model, Size, valid_for
from sidecar.config.records import Ranks, RanksConfig, RecordsConfig
from sidecar.config.selecting import LimitConfig, MixConfig, SplitConfig
from sidecar.config.sources import SourceUri
from streamer.plan import Join
from streamer.plan.globs import compile_globs
from streamer.plan.record_selection import RecordSelection
from streamer.plan.selection import Selection
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
