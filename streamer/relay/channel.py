"""One channel: its epochs, one FIFO after the other, until it is told to stop.

    per epoch   open (idle until a reader comes) → deliver → retire with its state → next epoch at once

The first parts of an epoch are requested before its reader comes, and the next epoch's as soon as an
epoch is being delivered, so a reader that turns the epoch finds bytes waiting. Three things end an
epoch: its last byte (complete), its reader (abandoned; legal, contract §1.3), its source (failed).

What this machine refuses of a channel (a trailer that cannot be written, a FIFO that cannot be made, opened
or removed) is told, and waited for as storage is: `GiveUpAfter` seconds. Then the epoch has failed, and its
FIFO is held open whatever the policy. Only a keeper that has died ends the process.

A failed epoch is told first by its trailer, `failed`, and then to readers that know no trailers as the
channel's policy has it (`streamer.relay.deliver.failure_policy`): by default the FIFO stays open, and
never looks like an end. The channel stays in state `failed` until the process stops, and a keeper holds the
FIFO beyond that. Other channels go on.

`drain` ends the channel at the next epoch border; cancelling `run` ends it now, with a `stopped`
trailer if a reader is in mid-epoch. Either way every descriptor and FIFO is gone when `run` returns.

With a keeper (`streamer.helpers.keeper`) a channel can begin where an earlier sidecar's ended:
`ChannelSpec.start`. And
it can `leave`: then everything that a reader sees stays as it is, for the next sidecar to go on with. A
channel that ends without having been told to (its sidecar fails at something local) leaves too.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from streamer.aio import first_of
from streamer.errors import KeeperLost, ReaderGone, Shortage, SinkError, SourceError
from streamer.plan import NOWHERE, Position, ResumePoint
from streamer.relay.channel_spec import NO_EVENTS
from streamer.relay.deliver.delivery import Prefetcher
from streamer.relay.deliver.object_changes import Changes, is_change
from streamer.relay.deliver.transform import ByteQueue
from streamer.relay.staging.stage import Stages
from streamer.relay.statistics import ChannelCounters, ChannelStatistics
from streamer.retry import retry_while_refused
from streamer.s3.checksums import ChecksummingSource, ChecksumVerifier
from streamer.sink.fifo import FifoDirectory
from streamer.sink.write_ends import LocalWriteEnds
from streamer.trailer import Trailer

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from streamer.helpers.keeper_client import KeeperClient
    from streamer.plan import ObjectRef
    from streamer.relay.channel_spec import ChannelEvents, ChannelSpec
    from streamer.relay.deliver.failure_policy import FifoFate
    from streamer.retry import RetryPolicy
    from streamer.s3.checksums import Outcome
    from streamer.s3.ranges import RangeSource
    from streamer.sink.outlet import PipeOutlet
    from streamer.sink.write_ends import WriteEnds
    from streamer.trailer import TrailerState

Phase = Literal["waiting", "streaming", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class ChannelFailure:
    """Why a channel has failed for good, and the state of its last FIFO."""

    error: SourceError | SinkError
    fifo: FifoFate
    """What happens to the FIFO; a restart can go on with a held one."""
    at: float
    """Time of the failure, by time.monotonic()."""
    fifo_ended: bool = False
    """Whether a FIFO that is not held has been closed, and the next epoch's FIFO exists."""


class Channel:
    """Streams the plan of `spec` into its FIFOs, and reports to `events`."""

    def __init__(
        self,
        spec: ChannelSpec,
        source: RangeSource,
        stages: Stages,
        *,
        events: ChannelEvents = NO_EVENTS,
        write_ends: WriteEnds | None = None,
    ) -> None:
        """`write_ends`: who holds the write ends of the FIFOs; this process unless given."""
        self.spec = spec
        self.failure: ChannelFailure | None = None
        self._plan = spec.plan
        self._source = (
            source if spec.stored_checksums is None else ChecksummingSource(source, spec.stored_checksums)
        )
        self._checked: Counter[str] = Counter()
        self._events = events
        self._counters = ChannelCounters()
        self._changes = Changes(spec.when_changed, events.object_changed)
        self._stages = stages
        self._quota = stages.quota
        self._template = Trailer(
            channel=spec.name,
            epoch=0,
            state="open",
            bytes_total=0,
            digest=spec.plan.digest,
        )
        self._write_ends = write_ends or LocalWriteEnds(spec.name)
        self._fifos = FifoDirectory(
            spec.directory,
            spec.name,
            opening=self._opening,
            mode=spec.fifo_mode,
            write_ends=self._write_ends,
        )
        self._phase: Phase = "waiting"
        start = self._start = spec.start.position
        self._mark = start.epoch, start.mark
        """The epoch and the last mark in it."""
        self._left = False
        self._epoch = start.epoch
        self._ended: Counter[str] = Counter()
        self._outlet: PipeOutlet | None = None
        self._capacity = 0
        self._prefetcher: Prefetcher | None = None
        self._draining = asyncio.Event()
        self.done = asyncio.Event()
        """Set when `run` is over, or when the channel has drained."""

    @property
    def name(self) -> str:
        """Name of the FIFOs, without the epoch."""
        return self.spec.name

    @property
    def error(self) -> SourceError | SinkError | None:
        """Why the channel failed, if it has."""
        return None if self.failure is None else self.failure.error

    @property
    def mendable(self) -> bool:
        """Whether another sidecar can go on with the failed epoch, once its cause is gone."""
        held = self.failure is not None and self.failure.fifo == "held"
        return held and self._position().mark.fetched != NOWHERE

    @property
    def fifo_survives_exit(self) -> bool:
        """Whether the failed epoch's FIFO stays open when this process has ended."""
        return self.failure is not None and not self.failure.fifo_ended and self._write_ends.lasting

    def __repr__(self) -> str:
        return f"<Channel {self.name} {self._phase}, epoch {self._epoch}, {self._quota}>"

    def prepare(self) -> None:
        """Offer the FIFO of the first epoch; nothing reads S3 yet. Raises SinkError."""
        if self.spec.start.held:
            start = self._start
            self._epoch = self._fifos.resume(start.epoch, accepted=start.offset - start.skipped)
            if self._epoch != self._start.epoch:
                self._start = Position(self._epoch)
            return
        self._fifos.clear(begin=self._epoch)
        self._fifos.prepare(self._epoch)

    def drain(self) -> None:
        """Begin no further epoch; `run` returns when the current one, if any is read, has ended."""
        self._draining.set()

    def leave(self, keeper: KeeperClient) -> None:
        """Have `run`, which is cancelled next, end without a word to the reader: another goes on.

        `keeper`: gets what no keeper holds yet.
        """
        self._left = True
        if isinstance(self._write_ends, LocalWriteEnds):
            self._write_ends.successor_keeper = keeper, self._plan.digest

    def close(self, *, forget: bool = False) -> None:
        """Remove what `prepare` or `run` has left; with `forget`, the trailers too. `run` must be over.

        What a keeper holds of a channel that was not told to end stays, for the next sidecar.
        """
        if self._unasked:
            self._fifos.let_go()
        elif not self._left:
            self._fifos.close(forget=forget)

    @property
    def _unasked(self) -> bool:
        """Whether the channel ends without having been told to, and a keeper holds its FIFO beyond that."""
        return self._write_ends.lasting and not self._draining.is_set()

    async def run(self) -> None:
        """Stream epoch after epoch. Returns after `drain`; SinkError and cancellation pass through."""
        try:
            async with asyncio.TaskGroup() as requests:
                prefetcher = self._prefetcher = Prefetcher(
                    self._plan,
                    self._source,
                    stages=self._stages,
                    counters=self._counters,
                    requests=requests,
                    policy=self.spec.retry,
                    changes=self._changes,
                    verifier=self._verifier(),
                    start=self._start,
                    on_resume_point=self._note_mark,
                    when_failed=self.spec.when_failed,
                )
                try:
                    if self.spec.start.refused is not None:
                        prefetcher.begin(self._epoch)
                        await self._fail(prefetcher, self.spec.start.refused)
                        return
                    if self._start.offset:
                        self._counters.resumes["epoch"] += 1
                    prefetcher.allow(self._epoch)
                    while await self._run_epoch(prefetcher):
                        self._epoch += 1
                finally:
                    prefetcher.close()
        finally:
            self._phase = "stopped" if self.error is None else "failed"
            self._counters.timer.enter("idle")
            # A keeper holds on: nobody who reads may take our end for that of the epoch.
            self._left = self._left or self.fifo_survives_exit or self._unasked
            if self._left:
                outlet, self._outlet = self._outlet, None
                self._fifos.leave(self._position(), outlet)
            else:
                self._stop_outlet()
                self._fifos.close()
            self.done.set()

    async def _run_epoch(self, prefetcher: Prefetcher) -> bool:
        """One epoch from open to retire; whether another may follow."""
        self._phase = "waiting"
        prefetcher.begin(self._epoch)
        if self._plan.varies:
            # Seconds for millions of entries; the trailers of this epoch and the next need the results.
            await asyncio.to_thread(self._plan.total_bytes, self._epoch + 1)
        state: TrailerState = "abandoned"
        try:
            try:
                outlet = await self._open(prefetcher)
                if outlet is None:
                    return False
                self._capacity, self._phase = outlet.capacity, "streaming"
                state = await self._deliver(prefetcher, outlet)
            except ReaderGone:
                outlet = None  # it left while no sidecar was there
                prefetcher.allow(self._epoch + 1)
            return await self._conclude(prefetcher, outlet, state)
        except KeeperLost:
            raise
        except (SourceError, SinkError) as error:
            await self._fail(prefetcher, error)
            return False

    async def _conclude(self, prefetcher: Prefetcher, outlet: PipeOutlet | None, state: TrailerState) -> bool:
        """End the epoch; whether another may follow. Raises SinkError; the reader has seen no end then."""
        self._counters.timer.enter("idle")
        prefetcher.activate(active=False)
        prefetcher.abandon(self._epoch)
        trailer = self._trailer(state)
        successor = not self._draining.is_set()

        async def conclude() -> None:
            self._fifos.conclude(trailer, successor=successor)

        await retry_while_refused(conclude, self.spec.retry, self._note_shortage)
        if state == "complete" and (records := self._plan.records(self._epoch)):
            self._counters.records += records
        self._outlet = None
        self._fifos.retire(self._epoch, outlet)
        self._count(trailer)
        return successor

    def _note_shortage(self, error: SinkError) -> None:
        self._counters.note("local", error)
        self._events.shortage(error)

    async def _deliver(self, prefetcher: Prefetcher, outlet: PipeOutlet) -> TrailerState:
        """Deliver the epoch to the reader who has come, until it has all of it or leaves."""
        prefetcher.activate(active=True)
        try:
            self._fifos.prepare(self._epoch + 1)
        except Shortage as error:
            self._note_shortage(error)  # this epoch need not wait: its end makes the next one's FIFO
        prefetcher.allow(self._epoch + 1)
        try:
            await prefetcher.deliver(self._epoch, outlet)
            self._counters.timer.enter("blocked")
            accepted = await self._fifos.settle()
        except ReaderGone:
            with contextlib.suppress(ReaderGone):
                await self._fifos.settle()  # a keeper that has died looks like a reader that has gone
            self._counters.readers_gone += not outlet.reader_gone  # the pipe may tell before the epoll does
            self._look_where_left(prefetcher, outlet)
            return "abandoned"
        due = prefetcher.delivered - self._skipped
        if accepted not in (None, due):
            raise RuntimeError(f"the FIFO of epoch {self._epoch} accepted {accepted} bytes of {due}")
        return "complete"

    def _look_where_left(self, prefetcher: Prefetcher, outlet: PipeOutlet) -> None:
        """Notice a reader that left at the end of an object; with a keeper nobody knows what it has read."""
        if self._plan.framed or self._plan.join is not None or self._write_ends.lasting:
            return
        taken = prefetcher.delivered - outlet.unread
        if prefetcher.ended_object_at(taken) and prefetcher.consumed < self._plan.total_bytes(self._epoch):
            self._counters.readers_at_ends += 1
            self._events.end_believed(self._epoch, taken)

    @property
    def _skipped(self) -> int:
        """Bytes of the epoch that its FIFO never has."""
        return self._start.skipped if self._epoch == self._start.epoch else 0

    async def _open(self, prefetcher: Prefetcher) -> PipeOutlet | None:
        """The epoch's write end once a reader has come, or None if drained before.

        Raises ReaderGone if the reader came and left while no sidecar was there, and SinkError.
        """
        failure: SinkError | None = None

        async def opened() -> None:
            nonlocal failure
            try:
                await open_kept()
            except ReaderGone as error:
                self._counters.readers_come += 1
                self._counters.readers_gone += 1
                failure = error
            except SinkError as error:
                failure = error

        def open_now() -> Awaitable[PipeOutlet]:
            return self._fifos.open(self._position(), on_gone=left)

        async def open_kept() -> None:
            # Kept at once, so that it has an owner even if this channel is cancelled now.
            outlet = self._outlet = await retry_while_refused(open_now, self.spec.retry, self._note_shortage)
            outlet.give_up_after, outlet.on_short = self.spec.retry.give_up_after, self._note_shortage
            self._counters.readers_come += 1

        def left() -> None:
            self._counters.readers_gone += 1
            prefetcher.wake()

        await first_of(opened(), self._draining.wait())
        if failure is not None:
            raise failure
        return self._outlet

    async def _fail(self, prefetcher: Prefetcher, error: SourceError | SinkError) -> None:
        """Tell of the failed epoch by its trailer, do with its FIFO what the policy says, and wait.

        After a failure of this machine the FIFO is held, for its policy might need what has failed.
        """
        outlet = self._outlet
        fate = self.spec.when_failed.fifo_fate(
            local=isinstance(error, SinkError),
            reader_came=outlet is not None,
            at_border=prefetcher.at_border,
        )
        poison = self.spec.when_failed.poison if fate == "poisoned" else b""
        self.failure = ChannelFailure(error, fate, at=time.monotonic())
        self._counters.note(error.kind, error)
        if isinstance(error, SourceError) and is_change(error):
            self._changes.totals["failed"] += 1
        self._phase = "failed"
        self._counters.timer.enter("idle")
        trailer = replace(self._trailer("failed"), poison=len(poison))

        def publish() -> None:
            self._fifos.publish(trailer)
            if outlet is not None:
                # The next epoch's FIFO is there, and nobody will write into it: a reader that has left this
                # epoch early, and waits there, is told why.
                after = self._opening(self._epoch + 1)
                self._fifos.publish(replace(after, state="failed", error=trailer.error, poison=0))

        published = False

        async def publish_later() -> None:
            nonlocal published
            publish()
            published = True

        endless = replace(self.spec.retry, give_up_after=math.inf)
        try:
            publish()
            published = True
        except Shortage as shortage:
            self._note_shortage(shortage)
        self._count(trailer)  # whoever reads the log need not wait for the trailer
        prefetcher.close()
        if not published:
            await first_of(retry_while_refused(publish_later, endless, lambda _: None), self._draining.wait())
        if published and outlet is not None and fate != "held":
            await self._end_failed(outlet, trailer, poison, endless)
            self.failure = replace(self.failure, fifo_ended=True)
            self._fifos.retire(self._epoch, outlet)
        await self._draining.wait()

    async def _end_failed(
        self, outlet: PipeOutlet, trailer: Trailer, poison: bytes, policy: RetryPolicy
    ) -> None:
        """Write `poison`, and close the FIFO, once its reader has taken what comes before."""
        left = ByteQueue([poison])
        with contextlib.suppress(ReaderGone):
            while left:
                try:
                    outlet.push(left)
                except BlockingIOError:
                    await outlet.writable()
            await self._fifos.settle()

        async def conclude() -> None:
            self._fifos.conclude(trailer)

        await retry_while_refused(conclude, policy, self._note_shortage)
        self._outlet = None

    def _stop_outlet(self) -> None:
        """Close what is still open when the channel ends in mid-epoch."""
        if self._outlet is None:
            return
        outlet, self._outlet = self._outlet, None
        if self.error is not None:
            outlet.close()
            return
        trailer = self._trailer("stopped")
        try:
            self._fifos.conclude(trailer, successor=False)
        except Shortage as error:  # the trailer says `open` then, which is no proof of an end either
            self._note_shortage(error)
        self._fifos.retire(self._epoch, outlet)
        self._count(trailer)

    @property
    def _open_ended(self) -> bool:
        """Whether nobody knows an epoch's length before its end."""
        return self._plan.rewrites or self.spec.when_changed.when_changed != "fail"

    def _note_mark(self, mark: ResumePoint) -> None:
        self._mark = self._epoch, mark
        self._write_ends.mark(mark)

    def _position(self) -> Position:
        """How far the epoch has come."""
        if self.failure is not None and self.failure.fifo_ended:
            return Position(self._epoch + 1)
        delivered = self._prefetcher.delivered if self._prefetcher else self._start.offset
        epoch, mark = self._mark
        return Position(
            self._epoch,
            delivered,
            skipped=self._skipped,
            mark=mark if epoch == self._epoch else ResumePoint(),
        )

    def _opening(self, epoch: int) -> Trailer:
        """The trailer that an epoch begins with."""
        return replace(
            self._template,
            epoch=epoch,
            bytes_total=None if self._open_ended else self._plan.total_bytes(epoch),
            bytes_skipped=self._start.skipped if epoch == self._start.epoch else 0,
            objects=self._plan.objects(epoch),
            poison=len(self.spec.when_failed.poison),
        )

    def _trailer(self, state: TrailerState) -> Trailer:
        delivered = self._prefetcher.delivered if self._prefetcher else 0
        error = {
            "failed": str(self.error),
            "stopped": "the sidecar was stopped in mid-epoch",
        }.get(state)
        trailer = replace(
            self._opening(self._epoch),
            state=state,
            bytes_delivered=max(0, delivered - self._skipped),
            error=error,
            changed=self._changes.count,
            changes=tuple(self._changes.listed),
            poison=0,
        )
        if state == "complete" and trailer.bytes_total is None:
            return replace(trailer, bytes_total=delivered)
        return trailer

    def _count(self, trailer: Trailer) -> None:
        self._ended[trailer.state] += 1
        self._events.epoch_ended(trailer)

    def _verifier(self) -> ChecksumVerifier | None:
        stored = self.spec.stored_checksums
        return None if stored is None else ChecksumVerifier(stored.known, self._note_checked)

    def _note_checked(self, ref: ObjectRef, outcome: Outcome) -> None:
        self._checked[outcome] += 1
        if outcome == "unverifiable" and self._checked[outcome] == 1:
            self._events.unverifiable(ref)

    def statistics(self) -> ChannelStatistics:
        """A snapshot for metrics and status."""
        counters, quota = self._counters, self._quota
        return ChannelStatistics(
            state=self._phase,
            epoch=self._epoch,
            bytes_total=self._plan.total_bytes(self._epoch),
            bytes_consumed=self._prefetcher.consumed if self._prefetcher else 0,
            bytes_delivered=self._prefetcher.delivered if self._prefetcher else 0,
            objects=self._plan.objects(self._epoch),
            written_bytes=counters.written_bytes,
            consumed_bytes=counters.consumed_bytes,
            received_bytes=counters.received_bytes,
            wasted_bytes=counters.wasted_bytes,
            objects_completed=counters.objects_completed,
            records=counters.records if self._plan.framed else None,
            epochs=dict(self._ended),
            seconds=counters.timer.seconds(),
            starved=counters.timer.starved(),
            reader_connected=self._outlet is not None and not self._outlet.reader_gone,
            readers_come=counters.readers_come,
            readers_gone=counters.readers_gone,
            readers_at_ends=counters.readers_at_ends,
            fifo_capacity=self._capacity,
            fifo_bytes=0 if self._outlet is None else self._outlet.unread,
            reserved_bytes=quota.reserved_bytes,
            quota_bytes=quota.byte_limit,
            requests_in_flight=quota.requests_in_flight,
            requests_in_flight_limit=quota.requests_limit,
            bandwidth_limit=quota.bandwidth.limit,
            requests=dict(counters.requests),
            retries=dict(counters.retries),
            resumes=dict(counters.resumes),
            hedges=dict(counters.hedges),
            first_byte=counters.first_byte.snapshot(),
            part=counters.part.snapshot(),
            head_wait=counters.head_wait.snapshot(),
            errors=tuple(counters.notes),
            changed=dict(self._changes.totals),
            checked=dict(self._checked),
            error=None if self.error is None else str(self.error),
            error_kind=None if self.error is None else self.error.kind,
        )
