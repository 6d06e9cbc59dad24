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
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from streamer.aio import first_of, in_thread, task_group
from streamer.errors import KeeperLost, ReaderGone, Shortage, SinkError, SourceError
from streamer.plan.folds import object_starts
from streamer.relay.deliver.object_ends import KeyList
from streamer.relay.epoch_trailers import fail_epoch, last_trailer
from streamer.retry import retry_while_refused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from streamer.relay.channel_spec import ChannelSpec
    from streamer.relay.channel_state import ChannelState
    from streamer.relay.deliver.delivery import Delivery
    from streamer.relay.deliver.shared_fifo import SharedFifo
    from streamer.sink.fifo import FifoDirectory
    from streamer.sink.key_list import KeyListWriter
    from streamer.sink.outlet import PipeOutlet
    from streamer.trailer import Trailer, TrailerState

T = TypeVar("T")


class EpochRunner:
    """Runs the current epoch of one channel."""

    def __init__(
        self,
        spec: ChannelSpec,
        state: ChannelState,
        delivery: Delivery | SharedFifo,
        *,
        fifos: FifoDirectory,
        draining: asyncio.Event,
        keeper: bool,
    ) -> None:
        """`draining`: once set, no further epoch begins. `keeper`: whether a keeper holds the write ends."""
        self._spec = spec
        self._plan = spec.plan
        self._state = state
        self._fifos = fifos
        self._counters = state.counters
        self._delivery = delivery
        self._draining = draining
        self._keeper = keeper
        self._next_known = True
        """Whether the next epoch's trailer needs no computation."""

    async def run(self) -> bool:
        """Run one epoch from open to retire; return whether another may follow."""
        self._state.phase = "waiting"
        epoch = self._state.epoch
        self._delivery.begin(epoch)
        state: TrailerState = "abandoned"
        try:
            if self._plan.varies:
                # Takes seconds for millions of records, but no time if it was known before (`_offer`).
                await in_thread(self._plan.total_bytes, epoch)
            try:
                outlet = await self._open_withdrawn()
                if outlet is None:
                    return False
                self._state.fifo_capacity, self._state.phase = outlet.capacity, "streaming"
                state = await self._deliver(outlet)
            except ReaderGone:
                outlet = None  # the reader left while no sidecar ran
            return await self._conclude(outlet, state)
        except KeeperLost:
            raise
        except (SourceError, SinkError) as error:
            await self.fail(error)
            return False

    async def _open(self) -> PipeOutlet | None:
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
                self._state.events.fifo_replaced(self._fifos.path(epoch))
            return await self._fifos.open(self._state.position, on_gone=reader_left)

        async def open_kept() -> None:
            # Stored without an await between, so that the outlet has an owner if this channel is cancelled.
            outlet = await self._repeat(open_now)
            self._state.outlet = outlet
            outlet.give_up_after, outlet.on_short = self._spec.retry.give_up_after, self._state.refused
            self._counters.readers_come += 1

        def reader_left() -> None:
            self._counters.readers_gone += 1
            self._delivery.wake()

        while True:
            await first_of(open_or_fail(), self._draining.wait(), self._fifos.replaced(epoch))
            if failure is not None:
                raise failure
            if self._state.outlet is not None or self._draining.is_set():
                return self._state.outlet
            replaced = True

    async def _open_withdrawn(self) -> PipeOutlet | None:
        """Open the FIFO, and take its name away so that no further reader opens it; see `_open`."""
        epoch = self._state.epoch
        self._next_known = not self._plan.varies

        async def withdraw() -> None:
            self._fifos.withdraw(epoch)

        while True:
            gone: ReaderGone | None = None
            try:
                outlet = await self._open()
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

    async def _deliver(self, outlet: PipeOutlet) -> TrailerState:
        """Deliver the epoch until its last byte or until the reader leaves; return the trailer state."""
        epoch, keys = self._state.epoch, None
        try:
            async with task_group() as tasks:
                if not self._next_known and self._plan.has_epoch(epoch + 1):
                    tasks.create_task(self._offer(epoch + 1))
                if self._spec.lists_keys:
                    keys = await self._key_list(epoch, self._delivery.consumed)
                with contextlib.nullcontext() if keys is None else contextlib.closing(keys):
                    await self._delivery.deliver(epoch, outlet, keys)
            self._counters.timer.enter("blocked")
            accepted = await self._fifos.settle()
            # Before the trailer says `complete`, which must be there when the reader sees the end of file.
            await self._repeat(partial(self._fifos.read_up, epoch, outlet))
        except ReaderGone:
            with contextlib.suppress(ReaderGone):
                await self._fifos.settle()  # raises KeeperLost if the keeper died, which looks the same
            outlet.note_gone()
            return "abandoned"
        due = self._delivery.delivered - self._state.start.skipped_in(epoch)
        if accepted not in (None, due):
            raise RuntimeError(f"the FIFO of epoch {epoch} accepted {accepted} bytes of {due}")
        return "complete"

    async def _key_list(self, epoch: int, consumed: int) -> KeyList:
        """Return the epoch's key list, from byte `consumed` of its plan on. Raises SinkError."""
        begun = epoch == self._state.start.epoch
        if begun and self._spec.start.changed:
            raise SinkError(
                f"the key list of {self._spec.name}_{epoch} cannot be continued, because the plan has "
                "changed since; restart sidecar and trainer, or remove RecordKeys"
            )
        # Offsets of the stream are those of the plan, unless objects are rewritten.
        ahead = not self._plan.rewrites
        made: list[KeyListWriter] = []

        def make() -> None:  # a call after a refused one makes the list anew: its FIFO has had no byte
            made.append(
                self._fifos.key_list(
                    epoch,
                    partial(object_starts, self._plan, epoch),
                    first=self._state.start.skipped_in(epoch) if ahead else consumed,
                    consumed=consumed,
                    ahead=ahead,
                    held=begun and self._spec.start.held,
                )
            )

        try:
            await self._repeat(partial(in_thread, make))
        except asyncio.CancelledError:
            for writer in made:
                writer.close()
            raise
        return KeyList(made[0], self._spec.retry, self._state.refused)

    async def _repeat(self, step: Callable[[], Awaitable[T]]) -> T:
        """Call `retry_while_refused` with the channel's policy."""
        return await retry_while_refused(step, self._spec.retry, self._state.refused)

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
            if self._plan.has_epoch(epoch):
                self._fifos.prepare(epoch)
        except Shortage as error:
            self._state.shortage(error)

    async def _conclude(self, outlet: PipeOutlet | None, state: TrailerState) -> bool:
        """End the epoch; return whether another may follow.

        Raises SinkError if this machine refuses a step; the FIFO is still open then.
        """
        self._counters.timer.enter("idle")
        self._delivery.abandon(self._state.epoch)
        if state == "abandoned" and outlet is not None:
            self._note_end_believed(outlet)
        try:
            await self._delivery.settled()
        finally:
            successor = await self._retire(outlet, state)
        return successor

    async def _retire(self, outlet: PipeOutlet | None, state: TrailerState) -> bool:
        """End the FIFO and report the epoch, whose requests are counted; as `_conclude`."""
        trailer = self._trailer(state)
        successor = not self._draining.is_set() and self._plan.has_epoch(self._state.epoch + 1)

        async def conclude() -> None:
            self._fifos.conclude(trailer, successor=successor)

        await self._repeat(conclude)
        if state == "complete" and (records := self._plan.records(self._state.epoch)):
            self._counters.records += records
        self._state.outlet = None
        self._fifos.retire(self._state.epoch, outlet)
        self._state.epoch_ended(trailer)
        return successor

    async def fail(self, error: SourceError | SinkError) -> None:
        """See `fail_epoch`."""
        await fail_epoch(
            self._spec,
            self._state,
            self._fifos,
            error,
            draining=self._draining,
            next_known=self._next_known,
        )

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
            self._state.shortage(error)
        self._fifos.retire(state.epoch, outlet)
        state.epoch_ended(trailer)

    def _trailer(self, state: TrailerState) -> Trailer:
        """Return the current epoch's last trailer."""
        return last_trailer(
            self._spec,
            self._state.epoch,
            state,
            delivered=self._state.delivered,
            error=None if self._state.failure is None else self._state.failure.error,
        )

    def _note_end_believed(self, outlet: PipeOutlet) -> None:
        """Report a reader that stopped at an object's end; with a keeper its position is unknown."""
        if self._plan.framed or self._plan.one_archive or self._keeper:
            return
        epoch, taken = self._state.epoch, self._delivery.delivered - outlet.unread
        total = self._plan.known_bytes(epoch)
        if self._delivery.ends.stopped_at_one(taken) and (total is None or self._delivery.consumed < total):
            self._counters.readers_at_ends += 1
            self._state.events.end_believed(epoch, taken)
