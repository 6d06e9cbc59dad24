"""Description of a channel (plan, directory, policies, start), and the interface of its observer.

`ChannelSpec` is frozen. `streamer.relay.channel.Channel` takes the objects that a channel works with (source,
stages, write ends, observer) as further arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from streamer.plan import START, Position

if TYPE_CHECKING:
    from streamer.errors import SinkError, SourceError
    from streamer.plan import ObjectRef, Plan
    from streamer.relay.statistics import EpochRequests
    from streamer.retry import RetryPolicy
    from streamer.s3.checksums import StoredChecksums
    from streamer.trailer import Trailer

WhenFailed = Literal["hold", "close"]
"""The FIFO of a failed epoch stays open, so its reader waits, or is closed: an end of file that only the
trailer contradicts."""


@dataclass(frozen=True, slots=True)
class StartPosition:
    """Position at which a channel begins, and the state of the FIFO there."""

    position: Position = START
    held: bool = False
    """Whether the write ends already hold this epoch's FIFO, from an earlier sidecar."""
    digest: str = ""
    """Partial digest of the state that `--resume` has; see `Trailer.resumed`."""
    records_skipped: int = 0
    """Records of the epoch before its FIFO's first byte, if ranks share the channel by record; else 0."""
    changed: bool = False
    """Whether the plan is another one than that of the bytes before the position."""
    refused: SourceError | None = None
    """Reason why the epoch cannot be continued: the channel fails at once, and its FIFO is held open."""


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
    """Policy for failed requests to storage and for resources that this machine refuses."""
    start: StartPosition = BEGINNING
    when_failed: WhenFailed = "hold"
    """Policy for the FIFO of a failed epoch."""
    stored_checksums: StoredChecksums | None = None
    """Checksums that S3 stores, compared with every whole object; None: objects are not compared.

    The comparison needs bytes in memory.
    """
    lists_keys: bool = False
    """Whether each epoch has a key list (`streamer.key_list`)."""


class ChannelEvents:
    """Observer of one channel, which ignores each event that a subclass does not override.

    Its methods are called on the event loop and must return at once.
    """

    def epoch_ended(self, trailer: Trailer, requests: EpochRequests) -> None:
        """Note that an epoch has ended with this trailer and after these requests."""

    def unverifiable(self, ref: ObjectRef) -> None:
        """Note that `ref` has no stored checksum that can be compared; called once per channel."""

    def shortage(self, error: SinkError) -> None:
        """Note that the channel begins to wait because this machine refuses a resource."""

    def fifo_replaced(self, path: str) -> None:
        """Note that another program has removed or replaced the FIFO `path`, and that it is made anew."""

    def end_believed(self, epoch: int, offset: int) -> None:
        """Note that the reader stopped at the end of an object before the last, as at an end mark.

        `offset`: bytes of the epoch's stream that the reader took.
        """


NO_EVENTS = ChannelEvents()
