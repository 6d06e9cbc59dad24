"""Runs one epoch: opens its FIFO, delivers, retires the FIFO; or fails the epoch.

    run    open (idle until a reader comes; again if the FIFO is replaced) → withdraw its name (open again
           if its reader has left and another has come) → deliver → retire with its state
    fail   publish the failure → hold or end the FIFO, by the policy → wait for a drain
    stop   close the FIFO when the channel ends in mid-epoch

The epoch's trailer changes before its FIFO does, so the proof exists before the reader sees the end of file.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from streamer.aio import first_of, in_thread, task_group
from streamer.errors import KeeperLost, ReaderGone, Shortage, SinkError, SourceError
from streamer.relay.channel_state import ChannelFailure
from streamer.relay.deliver.failure_policy import fifo_fate
from streamer.relay.failed_epoch import FailedEpoch
from streamer.relay.statistics import EpochRequests
from streamer.retry import retry_while_refused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from streamer.relay.channel_report import ChannelReport
    from streamer.relay.channel_spec import ChannelSpec
    from streamer.relay.channel_state import ChannelState
    from streamer.relay.deliver.epoch_delivery import EpochDelivery
    from streamer.relay.epoch_trailers import EpochTrailers
    from streamer.sink.fifo import FifoDirectory
    from streamer.sink.outlet import PipeOutlet
    from streamer.trailer import Trailer, TrailerState

T = TypeVar("T")


class EpochRunner:
    """Runs the current epoch of one channel."""

    def __init__(
        self,
        spec: ChannelSpec,
        state: ChannelState,
        *,
        fifos: FifoDirectory,
        trailers: EpochTrailers,
        report: ChannelReport,
        draining: asyncio.Event,
        keeper: bool,
    ) -> None:
        """`draining`: once set, no further epoch begins. `keeper`: whether a keeper holds the write ends."""
        self._spec = spec
        self._plan = spec.plan
        self._state = state
        self._fifos = fifos
        self._trailers = trailers
        self._report = report
        self._counters = report.counters
        self._draining = draining
        self._keeper = keeper
        self._next_known = True
        """Whether the next epoch's trailer needs no computation."""

    async def run(self, delivery: EpochDelivery) -> bool:
        """Run one epoch from open to retire; return whether another may follow."""
        self._state.phase = "waiting"
        epoch = self._state.epoch
        delivery.begin(epoch)
        state: TrailerState = "abandoned"
        try:
            if self._plan.varies:
                # Takes seconds for millions of records, but no time if it was known before (`_offer`).
                await in_thread(self._plan.total_bytes, epoch)
            try:
                outlet = await self._open_withdrawn(delivery)
                if outlet is None:
                    return False
                self._state.fifo_capacity, self._state.phase = outlet.capacity, "streaming"
                state = await self._deliver(delivery, outlet)
            except ReaderGone:
                outlet = None  # the reader left while no sidecar ran
                delivery.allow(epoch + 1)
            return await self._conclude(delivery, outlet, state)
        except KeeperLost:
            raise
        except (SourceError, SinkError) as error:
            await self.fail(delivery, error)
            return False

    async def _open(self, delivery: EpochDelivery) -> PipeOutlet | None:
        """Wait for a reader and return the epoch's write end, or None if the channel drains first.

        Raises SinkError, and ReaderGone if the reader came and left while no sidecar ran.
        """
        epoch, replaced = self._state.epoch, False
        failure: SinkError | None = None

        async def open_or_fail() -> None:
            nonlocal failure
            try:
                await open_kept()
            except ReaderGone as error:
                self._counters.readers_come += 1
                self._counters.readers_gone += 1
                failure = error
            except SinkError as error:
                failure = error

        async def open_now() -> PipeOutlet:
            nonlocal replaced
            if replaced:
                self._fifos.prepare(epoch)
                replaced = False
                self._report.fifo_replaced(self._fifos.path(epoch))
            return await self._fifos.open(self._state.position, on_gone=reader_left)

        async def open_kept() -> None:
            # Stored without an await between, so that the outlet has an owner if this channel is cancelled.
            outlet = await self._repeat(open_now)
            self._state.outlet = outlet
            outlet.give_up_after, outlet.on_short = self._spec.retry.give_up_after, self._report.shortage
            self._counters.readers_come += 1

        def reader_left() -> None:
            self._counters.readers_gone += 1
            delivery.wake()

        while True:
            await first_of(open_or_fail(), self._draining.wait(), self._fifos.replaced(epoch))
            if failure is not None:
                raise failure
            if self._state.outlet is not None or self._draining.is_set():
                return self._state.outlet
            replaced = True

    async def _open_withdrawn(self, delivery: EpochDelivery) -> PipeOutlet | None:
        """Open the FIFO, and take its name away so that no further reader opens it; see `_open`."""
        epoch = self._state.epoch
        self._next_known = not self._plan.varies

        async def withdraw() -> None:
            self._fifos.withdraw(epoch)

        while True:
            gone: ReaderGone | None = None
            try:
                outlet = await self._open(delivery)
                if outlet is None:
                    return None
            except ReaderGone as error:
                outlet, gone = None, error
            if self._next_known:
                self._prepare(epoch + 1)
            await self._repeat(withdraw)
            # Until now a program could open the FIFO that its reader had left. Now nobody comes any more, and
            # whoever is there before the first byte is the reader.
            position = self._state.position
            touched = position.offset > position.skipped
            if (
                (outlet is not None and not outlet.look())
                or touched
                or not await self._repeat(partial(self._fifos.regain, position))
            ):
                if gone is not None:
                    raise gone
                return outlet
            if outlet is not None:
                self._state.outlet = None
                outlet.close()

    async def _deliver(self, delivery: EpochDelivery, outlet: PipeOutlet) -> TrailerState:
        """Deliver the epoch until its last byte or until the reader leaves; return the trailer state."""
        epoch = self._state.epoch
        delivery.activate(active=True)
        try:
            async with task_group() as tasks:
                if not self._next_known:
                    tasks.create_task(self._offer(epoch + 1))
                delivery.allow(epoch + 1)
                await delivery.deliver(epoch, outlet)
            self._counters.timer.enter("blocked")
            accepted = await self._fifos.settle()
            # Before the trailer says `complete`, which must be there when the reader sees the end of file.
            await self._repeat(partial(self._fifos.read_up, epoch, outlet))
        except ReaderGone:
            with contextlib.suppress(ReaderGone):
                await self._fifos.settle()  # raises KeeperLost if the keeper died, which looks the same
            outlet.note_gone()
            return "abandoned"
        due = delivery.delivered - self._state.start.skipped_in(epoch)
        if accepted not in (None, due):
            raise RuntimeError(f"the FIFO of epoch {epoch} accepted {accepted} bytes of {due}")
        return "complete"

    async def _repeat(self, step: Callable[[], Awaitable[T]]) -> T:
        """Call `retry_while_refused` with the channel's policy."""
        return await retry_while_refused(step, self._spec.retry, self._report.shortage)

    async def _offer(self, epoch: int) -> None:
        """Make the FIFO of an epoch whose length must be computed, while the epoch before is delivered.

        If the length cannot be computed, the epoch before fails at its end, when it is needed.
        """
        with contextlib.suppress(SourceError, SinkError):
            await in_thread(self._plan.total_bytes, epoch)
            self._next_known = True
            self._prepare(epoch)

    def _prepare(self, epoch: int) -> None:
        """Make the FIFO of the next epoch; if the machine refuses, it is made at the end of this one."""
        try:
            self._fifos.prepare(epoch)
        except Shortage as error:
            self._report.shortage(error)

    async def _conclude(
        self, delivery: EpochDelivery, outlet: PipeOutlet | None, state: TrailerState
    ) -> bool:
        """End the epoch; return whether another may follow.

        Raises SinkError if this machine refuses a step; the FIFO is still open then.
        """
        self._counters.timer.enter("idle")
        delivery.activate(active=False)
        delivery.abandon(self._state.epoch)
        if state == "abandoned" and outlet is not None:
            self._note_end_believed(delivery, outlet)
        try:
            await delivery.settled()
        finally:
            successor = await self._retire(delivery, outlet, state)
        return successor

    async def _retire(self, delivery: EpochDelivery, outlet: PipeOutlet | None, state: TrailerState) -> bool:
        """End the FIFO and report the epoch, whose requests are counted; as `_conclude`."""
        trailer = self._trailer(state)
        successor = not self._draining.is_set()

        async def conclude() -> None:
            self._fifos.conclude(trailer, successor=successor)

        await self._repeat(conclude)
        if state == "complete" and (records := self._plan.records(self._state.epoch)):
            self._counters.records += records
        self._state.outlet = None
        self._fifos.retire(self._state.epoch, outlet)
        self._report.epoch_ended(trailer, delivery.take_requests(trailer.epoch))
        return successor

    async def fail(self, delivery: EpochDelivery, error: SourceError | SinkError) -> None:
        """Publish the epoch's failure, hold or end its FIFO as the policy decides, and wait for a drain."""
        state, outlet = self._state, self._state.outlet
        fate = fifo_fate(
            self._spec.when_failed, local=isinstance(error, SinkError), reader_came=outlet is not None
        )
        failure = state.failure = ChannelFailure(error, fate, at=time.monotonic())
        self._report.failed(error)
        state.phase = "failed"
        self._counters.timer.enter("idle")
        trailer = self._trailer("failed")
        known = outlet is not None and self._next_known
        successor = self._trailers.successor(trailer) if known else None
        epoch = FailedEpoch(self._fifos, trailer, successor, self._spec.retry)
        try:
            epoch.publish()
        except Shortage as shortage:
            self._report.shortage(shortage)
        # The log reports the failure even if the trailer cannot be written.
        self._report.epoch_ended(trailer, delivery.take_requests(trailer.epoch))
        delivery.close()
        if not epoch.published:
            await epoch.publish_before(self._draining.wait())
        if epoch.published and outlet is not None and fate != "held":
            await epoch.end_fifo(self._report.shortage)
            state.outlet, state.failure = None, replace(failure, fifo_ended=True)
            self._fifos.retire(state.epoch, outlet)
        await self._draining.wait()

    def stop(self) -> None:
        """Close the FIFO of an epoch that is still open when the channel ends."""
        state = self._state
        if state.outlet is None:
            return
        outlet, state.outlet = state.outlet, None
        if state.failure is not None:
            outlet.close()
            return
        trailer = self._trailer("stopped")
        try:
            self._fifos.conclude(trailer, successor=False)
        except Shortage as error:  # the trailer stays `open`, which proves no end either
            self._report.shortage(error)
        self._fifos.retire(state.epoch, outlet)
        delivery = state.delivery
        requests = EpochRequests() if delivery is None else delivery.take_requests(trailer.epoch)
        self._report.epoch_ended(trailer, requests)

    def _trailer(self, state: TrailerState) -> Trailer:
        """Return the current epoch's last trailer."""
        return self._trailers.ended(
            self._state.epoch,
            state,
            delivered=self._state.delivered,
            error=None if self._state.failure is None else self._state.failure.error,
        )

    def _note_end_believed(self, delivery: EpochDelivery, outlet: PipeOutlet) -> None:
        """Report a reader that stopped at an object's end; with a keeper its position is unknown."""
        if self._plan.framed or self._plan.one_archive or self._keeper:
            return
        epoch, taken = self._state.epoch, delivery.delivered - outlet.unread
        total = self._plan.known_bytes(epoch)
        if delivery.ends.stopped_at_one(taken) and (total is None or delivery.consumed < total):
            self._report.end_believed(epoch, taken)
