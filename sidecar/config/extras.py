"""The `Penstock` section of a channel: settings that SageMaker does not have.

`sidecar.config.request` has the rules between these and the other keys of a channel.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, ByteSize, Field, StrictInt, StrictStr, model_validator

from sidecar.config.model import Model
from sidecar.config.uris import SourceUri
from streamer.errors import ConfigError
from streamer.plan import Join
from streamer.plan.globs import compile_globs
from streamer.plan.selection import Limit, Selection
from streamer.relay.deliver.frame_aligner import Framing, WhenFailed
from streamer.relay.deliver.object_changes import WhenChanged

MOST_GLOBS = 100
"""Most globs of one list; each takes time for every key."""
MOST_SOURCES = 100
"""Most prefixes that a channel has besides S3Uri."""
SELECTING_FILES = ("Include", "Exclude", "Limit")
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


class LimitConfig(Model):
    """How much of a channel is streamed: so many objects, or so many bytes."""

    objects: Annotated[StrictInt, Field(ge=1)] | None = None
    """Objects; lines of an augmented manifest."""
    bytes: Annotated[ByteSize, Field(gt=0)] | None = None
    """Bytes of whole objects."""
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    """Draw a sample with this seed. Unset: take the first."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.objects is None) == (self.bytes is None):
            raise ValueError(
                "must have either Objects or Bytes, such as {Objects: 1000}; Seed makes it a sample"
            )
        return self

    @property
    def limit(self) -> Limit:
        return Limit(self.objects, None if self.bytes is None else int(self.bytes), self.seed)


class ChannelExtras(Model):
    """The `Penstock` section of a channel: settings that SageMaker does not have."""

    when_changed: WhenChanged = "fail"
    """How the channel treats an object that is replaced or deleted after it was listed."""
    when_failed: WhenFailed = "hold"
    """How the FIFO of a failed epoch ends for readers that do not check trailers."""
    framing: Framing | None = None
    """Record format of the objects. `poison` needs it unless RecordWrapperType is set."""
    join: Join | None = None
    """Format of the objects, whose contents the channel joins into one archive or file of this format."""
    integrity: Literal["none", "checksum"] = "none"
    """`checksum`: compare every whole object with the checksum that S3 stores."""
    ranks: Annotated[StrictInt, Field(ge=1, le=64)] | None = None
    """Number of rank FIFOs, which share the objects. Unset: one FIFO with the channel's own name."""
    bandwidth: Annotated[ByteSize, Field(gt=0)] | None = None
    """Bytes per second into the channel's FIFOs. Unset: no limit for this channel."""
    include: Annotated[tuple[Glob, ...], Field(min_length=1, max_length=MOST_GLOBS)] | None = None
    """Globs on keys, one of which must match. Unset: every key."""
    exclude: Annotated[tuple[Glob, ...], Field(max_length=MOST_GLOBS)] = ()
    """Globs on keys, none of which may match."""
    limit: LimitConfig | None = None
    """The first objects, or a sample. Unset: no limit."""
    also_from: Annotated[tuple[SourceUri, ...], Field(max_length=MOST_SOURCES)] = ()
    """Further prefixes, whose objects follow those of S3Uri."""

    @property
    def given(self) -> list[str]:
        """Keys whose values are not the defaults."""
        fields = type(self).model_fields
        return [
            str(field.alias) for name, field in fields.items() if getattr(self, name) != field.get_default()
        ]

    @property
    def selecting(self) -> list[str]:
        """Keys that are given and select objects."""
        return [key for key in self.given if key in SELECTING]

    @property
    def selection(self) -> Selection:
        """What the channel streams of the objects that its source names."""
        return Selection(self.include or (), self.exclude, None if self.limit is None else self.limit.limit)
