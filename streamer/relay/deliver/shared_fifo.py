"""One FIFO of a stream that several channels share, as its channel uses it in place of a `Delivery`.

The channel opens and ends its epochs as any channel does. Between the two it waits in `deliver`, while the
shared stream (`streamer.relay.shared_stream`) writes to the outlet. Each FIFO ends its epoch at its own last
byte, or when its reader leaves; the stream discards the bytes that come for it after that.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streamer.errors import ReaderGone, SinkError
from streamer.relay.deliver.object_ends import ObjectEnds
from streamer.relay.statistics import Cause, ChannelCounters, State, StateTimer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from streamer.errors import SourceError
    from streamer.plan import Plan, Position
    from streamer.relay.deliver.object_ends import KeyList
    from streamer.schedule.budget import ChannelQuota
    from streamer.sink.outlet import Drainable, PipeOutlet

HELD_BACK: State = "held_back"


@dataclass(slots=True, eq=False)
class SharedGroup:
    """The FIFOs of one shared stream, and the state of the stream."""

    ranks: list[list[SharedFifo]]
    """FIFOs of each rank: its copies."""
    epoch: int
    """Epoch that the stream delivers, or will begin next."""
    quota: ChannelQuota | None = None
    """Quota of the stream; None in a group that has no stream."""
    counters: ChannelCounters = field(default_factory=ChannelCounters)
    """Counters of the requests, and of the parts. The group sets their timer."""
    settled: Callable[[], Awaitable[None]] | None = None
    """Waits until the requests of all delivered parts are counted; None: no stream has run."""
    blocked_by: list[SharedFifo] = field(default_factory=list)
    """FIFOs that are full, if the stream waits for them."""
    timer: SharedTimer = field(init=False)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a FIFO begins, leaves or ends an epoch."""

    def __post_init__(self) -> None:
        self.timer = self.counters.timer = SharedTimer(self)

    @property
    def fifos(self) -> list[SharedFifo]:
        """All FIFOs, in the order of their ranks."""
        return [fifo for fifos in self.ranks for fifo in fifos]

    def timers(self) -> list[StateTimer]:
        """Return the timers of the FIFOs that take bytes of the stream's epoch."""
        return [fifo.counters.timer for fifo in self.fifos if fifo.takes(self.epoch)]


class SharedFifo:
    """One FIFO of a shared stream; its channel uses it as it would a `Delivery`."""

    def __init__(
        self, name: str, plan: Plan, start: Position, group: SharedGroup, *, refused: bool = False
    ) -> None:
        """`plan`: of this FIFO alone. `refused`: whether the channel cannot resume, and so takes no byte."""
        self.name = name
        self.group = group
        self.plan = plan
        self.start = start
        self.refused = refused
        self.counters = ChannelCounters()
        """Counters of the FIFO's channel, which sets them."""
        self.epoch = start.epoch
        """Epoch that the FIFO is in: the channel waits for its reader, or for the stream."""
        self.delivered = start.offset
        self._begun = start.epoch
        """Epoch that `delivered` is an offset in."""
        self.lead = 0
        """Bytes that the stream delivers again, because the FIFO had them before a restart."""
        self.ends = ObjectEnds()
        self.closed = False
        """Whether the channel has ended, or has failed."""
        self.error: SourceError | SinkError | None = None
        """Error of the stream, which fails the present epoch of each FIFO, or its next one."""
        self._keys: KeyList | None = None
        """Key list of the epoch, while the FIFO takes bytes of it."""
        self._outlet: PipeOutlet | None = None
        self._end: asyncio.Future[None] | None = None
        self._total: int | None = None
        """Bytes of the epoch that the stream has begun; None if the plan may change meanwhile."""

    def __repr__(self) -> str:
        return f"<SharedFifo {self.name}, epoch {self.epoch}, byte {self.delivered}>"

    @property
    def consumed(self) -> int:
        return self.delivered

    @property
    def outlet(self) -> PipeOutlet | None:
        """The write end, while the FIFO takes bytes of its epoch."""
        return None if self._end is None or self._end.done() else self._outlet

    def takes(self, epoch: int) -> bool:
        """Return whether the FIFO takes bytes of `epoch` now."""
        return self.epoch == epoch and self.outlet is not None

    def awaited_in(self, epoch: int) -> bool:
        """Return whether the FIFO will take bytes of `epoch`, and has no reader yet."""
        return not self.closed and self.epoch <= epoch and not self.takes(epoch)

    def offset_in(self, epoch: int) -> int:
        """Return the bytes of an epoch that the FIFO has, or will not take."""
        if self.closed or self.refused or self.epoch > epoch:
            return self.plan.total_bytes(epoch)
        return self.delivered if self._begun == epoch else 0

    @property
    def quota(self) -> ChannelQuota | None:
        """Quota of the stream, for its first FIFO."""
        return self.group.quota if self.first else None

    @property
    def first(self) -> bool:
        """Whether this FIFO is the first of the stream."""
        return self is self.group.ranks[0][0]

    @property
    def fetched(self) -> ChannelCounters:
        """Counters of the stream's requests, for the first FIFO; the others have none."""
        return self.group.counters if self.first else ChannelCounters()

    @property
    def held_back_by(self) -> list[str]:
        """Names of the FIFOs that this one waits for: they have no reader of its epoch, or they are full."""
        if self.outlet is None:
            return []
        group = self.group
        awaited = [fifo for fifo in group.fifos if fifo.awaited_in(self.epoch)]
        return [fifo.name for fifo in awaited or group.blocked_by if fifo is not self]

    def begin(self, epoch: int) -> None:
        """Wait for the stream's bytes of `epoch`, from its start position on."""
        self.epoch = self._begun = epoch
        self.delivered = self.start.offset if epoch == self.start.epoch else 0
        self.group.changed.set()

    async def deliver(self, epoch: int, outlet: PipeOutlet, keys: KeyList | None = None) -> None:
        """Wait until `outlet` has all bytes of `epoch`. Raises as `Delivery.deliver`.

        Raises SinkError, too, if the kernel refuses to write this FIFO or its key list.
        """
        try:
            self._keys = keys
            if self.error is not None:
                raise self.error
            if outlet.reader_gone:  # before this call, so `wake` did not see it
                raise ReaderGone("the reader closed the pipe")
            self.epoch, self._outlet = epoch, outlet
            self._end = asyncio.get_running_loop().create_future()
            self.counters.timer.enter(HELD_BACK)
            self.group.changed.set()
            await self._end
        finally:
            self._outlet = self._end = self._keys = None

    def begin_stream(self, before: int) -> None:
        """Note that the stream begins this FIFO's epoch, after `before` bytes of this FIFO."""
        self.lead = self.delivered - before
        self._total = self.plan.total_bytes(self.epoch)
        self._end_if_whole()

    def take(self, source: Drainable, most: int) -> int:
        """Move at most `most` bytes of `source` into the FIFO; return how many.

        0 if the reader leaves, or the kernel refuses the write for good. Raises BlockingIOError if the FIFO
        is full, or the machine refuses a line of the key list.
        """
        outlet = self.outlet
        if outlet is None:
            return 0
        try:
            if self._keys is not None:
                self._keys.reach(self.delivered, most, self.delivered)
            count = outlet.push(source, most)
        except (ReaderGone, SinkError) as error:
            self.leave(error)
            return 0
        self.delivered += count
        self.counters.written_bytes += count
        self.counters.consumed_bytes += count
        self._end_if_whole()
        return count

    async def writable(self) -> None:
        """Wait until the FIFO takes bytes, or its reader has left."""
        if (outlet := self.outlet) is None:
            return
        try:
            if self._keys is not None:
                await self._keys.writable(outlet)
            await outlet.writable()
        except (ReaderGone, SinkError) as error:
            self.leave(error)

    def _end_if_whole(self) -> None:
        total = self.plan.total_bytes(self.epoch) if self._total is None else self._total
        if self.delivered == total and self._end is not None and not self._end.done():
            self._end.set_result(None)

    def leave(self, error: SourceError | SinkError | ReaderGone) -> None:
        """End the FIFO's epoch before its last byte."""
        if self._end is not None and not self._end.done():
            self._end.set_exception(error)

    def wake(self) -> None:
        """Go on, because the reader may have left."""
        if self._outlet is not None and self._outlet.reader_gone:
            self.leave(ReaderGone("the reader closed the pipe"))
        self.group.changed.set()

    def abandon(self, epoch: int) -> None:
        """End `epoch`: discard its further bytes."""
        self.epoch = max(self.epoch, epoch + 1)
        self.group.changed.set()

    async def settled(self) -> None:
        """Wait until the requests of all delivered parts are counted."""
        if self.first and self.group.settled is not None:
            await self.group.settled()

    def close(self) -> None:
        """Take no further epoch."""
        self.closed = True
        self.group.changed.set()


class SharedTimer(StateTimer):
    """Timer of a shared stream: the FIFOs that take bytes are in the stream's state.

    While the stream is blocked they are `held_back`, except those that block it.
    """

    def __init__(self, group: SharedGroup) -> None:
        super().__init__()
        self._group = group

    def enter(self, state: State) -> None:
        """See `StateTimer.enter`; `block` says which FIFOs are blocked."""
        if state != self.state:
            super().enter(state)
            if state != "blocked":
                self._go_on()
                for timer in self._group.timers():
                    timer.enter(state)

    def starve(self, cause: Cause) -> None:
        super().starve(cause)
        self._go_on()
        for timer in self._group.timers():
            timer.starve(cause)

    def because(self, cause: Cause) -> None:
        super().because(cause)
        for timer in self._group.timers():
            timer.because(cause)

    def block(self, by: Sequence[SharedFifo]) -> None:
        """Note the full FIFOs that the stream waits for; all others are held back by them."""
        group = self._group
        group.blocked_by = list(by)
        for fifo in group.fifos:
            if fifo.takes(group.epoch):
                fifo.counters.timer.enter("blocked" if fifo in by else HELD_BACK)

    def _go_on(self) -> None:
        self._group.blocked_by = []
