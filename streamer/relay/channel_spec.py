"""What a channel streams, where, and by which policies; and the observer of a channel.

`ChannelSpec` is the frozen description of one channel. What the channel works with (transport, stages, write
ends, observer) is not part of it: `streamer.relay.channel.Channel` takes those beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from streamer.plan import START, Position
from streamer.relay.deliver.failure_policy import HOLD, FailurePolicy
from streamer.relay.deliver.object_changes import FAIL, ChangePolicy

if TYPE_CHECKING:
    from streamer.errors import SinkError, SourceError
    from streamer.plan import ObjectRef, Plan
    from streamer.relay.deliver.object_changes import Change
    from streamer.retry import RetryPolicy
    from streamer.s3.checksums import StoredChecksums
    from streamer.trailer import Trailer


@dataclass(frozen=True, slots=True)
class StartPosition:
    """Where and how a channel begins."""

    position: Position = START
    held: bool = False
    """Whether the write ends hold the FIFO of that epoch already, from an earlier sidecar."""
    refused: SourceError | None = None
    """Why the epoch cannot be continued; the channel fails before it begins, and its FIFO is held."""


BEGINNING = StartPosition()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSpec:
    """One channel: a plan streamed into the FIFOs `<directory>/<name>_<epoch>`."""

    name: str
    plan: Plan
    directory: str
    fifo_mode: int = 0o640
    """Permission bits of the FIFOs."""
    retry: RetryPolicy
    """For requests to storage, and for what this machine refuses."""
    start: StartPosition = BEGINNING
    when_failed: FailurePolicy = HOLD
    when_changed: ChangePolicy = FAIL
    stored_checksums: StoredChecksums | None = None
    """Checksums that S3 keeps, to compare every whole object with. None: objects are not compared.

    Bytes must be read into memory to be compared, and also if `when_failed` needs records.
    """


class ChannelEvents(Protocol):
    """Observer of one channel. Its methods are called on the event loop and must return at once."""

    def epoch_ended(self, trailer: Trailer) -> None:
        """An epoch has ended with this trailer."""

    def object_changed(self, change: Change) -> None:
        """An object was not as listed, and was refetched or skipped."""

    def unverifiable(self, ref: ObjectRef) -> None:
        """`ref` could not be compared with a stored checksum; called once a channel."""

    def shortage(self, error: SinkError) -> None:
        """The channel begins to wait because this machine refuses a resource."""

    def end_believed(self, epoch: int, offset: int) -> None:
        """The reader left at the end of an object that is not the last, as it does at an end mark.

        `offset`: bytes of the epoch's stream that the reader took.
        """


class NoEvents(ChannelEvents):
    """An observer that does nothing."""

    def epoch_ended(self, trailer: Trailer) -> None:
        """Do nothing."""

    def object_changed(self, change: Change) -> None:
        """Do nothing."""

    def unverifiable(self, ref: ObjectRef) -> None:
        """Do nothing."""

    def shortage(self, error: SinkError) -> None:
        """Do nothing."""

    def end_believed(self, epoch: int, offset: int) -> None:
        """Do nothing."""


NO_EVENTS = NoEvents()
