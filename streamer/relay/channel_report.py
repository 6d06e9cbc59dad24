"""Counts the events of one channel for metrics, and reports them to the channel's observer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamer.relay.statistics import ChannelCounters

if TYPE_CHECKING:
    from streamer.errors import SinkError, SourceError
    from streamer.plan import ObjectRef
    from streamer.relay.channel_spec import ChannelEvents
    from streamer.relay.statistics import EpochRequests
    from streamer.s3.checksums import Outcome
    from streamer.trailer import Trailer


class ChannelReport:
    """Counters of one channel; each event is counted here and passed on to the observer."""

    def __init__(self, events: ChannelEvents) -> None:
        self.counters = ChannelCounters()
        self._events = events

    def epoch_ended(self, trailer: Trailer, requests: EpochRequests) -> None:
        """Count and report the end of an epoch."""
        self.counters.counts["epochs"][trailer.state] += 1
        self._events.epoch_ended(trailer, requests)

    def failed(self, error: SourceError | SinkError) -> None:
        """Count the error that fails the channel."""
        self.counters.note(error.kind, str(error))

    def shortage(self, error: SinkError) -> None:
        """Count and report a resource that this machine refuses; the channel waits for it."""
        self.counters.note("local", str(error))
        self._events.shortage(error)

    def fifo_replaced(self, path: str) -> None:
        """Report a FIFO whose name was removed or replaced before its reader came."""
        self._events.fifo_replaced(path)

    def checked(self, ref: ObjectRef, outcome: Outcome) -> None:
        """Count one comparison with a stored checksum; report the first object that cannot be compared."""
        checked = self.counters.counts["checked"]
        checked[outcome] += 1
        if outcome == "unverifiable" and checked[outcome] == 1:
            self._events.unverifiable(ref)

    def end_believed(self, epoch: int, offset: int) -> None:
        """Count and report a reader that stopped at the end of an object."""
        self.counters.readers_at_ends += 1
        self._events.end_believed(epoch, offset)
