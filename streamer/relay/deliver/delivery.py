"""The window's async shell: requests ahead, delivery in order.

A request is a task in the caller's TaskGroup, one per part in flight. Delivery is one coroutine, and
all decisions are made between its awaits: after anything that may have freed room (bytes delivered, a
request ended, an epoch dropped) `_start` admits what fits now. There is no scheduler task and no queue.

A part that fails for good does not stop the parts before it: its fetch keeps the error, and delivery
raises it on reaching the first byte that is missing. So an epoch fails at the exact byte, and a later
epoch's failure is its own.

An object that turns out to be changed before a byte of it has left may be replaced or left out, if `changes`
says so. `consumed` counts in bytes of the plan: it stands still while a replacement is delivered, and then
steps over what was planned.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from streamer.errors import GaveUp, ReaderGone, SourceError
from streamer.plan import NOWHERE, START, Part, Plan, Position, ResumePoint, Segment, cut
from streamer.relay.deliver.failure_policy import HOLD, FailurePolicy
from streamer.relay.deliver.object_changes import MOST_TRIES, Change, Changes, is_change
from streamer.relay.deliver.transform import MOST_TAKEN, BodyTransformer, joiner_of
from streamer.relay.fetch.hedger import Hedger
from streamer.relay.fetch.part_fetch import PartFetch
from streamer.relay.staging.buffers import MemoryStage
from streamer.relay.staging.stage import Stage, Stages
from streamer.retry import RetryPolicy
from streamer.schedule.window import Slot, Window
from streamer.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from streamer.plan import ObjectRef
    from streamer.relay.statistics import ChannelCounters
    from streamer.s3.checksums import ChecksumVerifier
    from streamer.s3.ranges import RangeSource
    from streamer.sink.outlet import Outlet

LONGEST_PAUSE = 0.5
"""Seconds until a limit of bandwidth is looked at again: it may be another by then."""

TURN = 1 * MIB
"""Bytes that delivery moves before it lets sockets and other channels have their turn. After one small object
each time they would have many turns for one of ours, and the FIFO would run dry."""
LEAST = 32 * KIB
"""What a move counts at least: however small parts are, a turn takes about a millisecond."""
MARK_EVERY = 8 * MIB
"""Bytes of a stream between two marks, at least: what is inflated or joined once more after a restart."""
LAST_ENDS = 64
"""Objects whose ends are remembered: more than a FIFO holds of such as are worth a look."""
MOST_BUFFERED = 128 * KIB
"""Bytes that readers take ahead of what they use: the buffer of Python's `open` from 3.14 on."""


@dataclass(slots=True)
class _Detour:
    """An object that is delivered in the place of a planned one."""

    listed: ObjectRef
    now: ObjectRef
    planned: int
    """Bytes of the plan that it stands for."""
    tries: int
    """Versions asked for, this one included."""
    delivered: int = 0


def all_epochs(plan: Plan, part_size: Callable[[], int], start: Position = START) -> Iterator[Part]:
    """The parts of every epoch from `start` on, without end; none at all if no epoch can have bytes."""
    epoch, first = start.epoch, start.mark.fetched if plan.rewrites else start.offset
    while plan.streams:
        yield from cut(plan.segments(epoch), part_size=part_size, epoch=epoch, behind=first)
        epoch, first = epoch + 1, 0


class Prefetcher:
    """Fetches a plan's parts ahead of delivery, within a window, over object and epoch borders."""

    def __init__(  # noqa: PLR0913 - called in one place, by keyword
        self,
        plan: Plan,
        source: RangeSource,
        *,
        stages: Stages,
        counters: ChannelCounters,
        requests: asyncio.TaskGroup,
        policy: RetryPolicy,
        changes: Changes | None = None,
        verifier: ChecksumVerifier | None = None,
        start: Position = START,
        on_resume_point: Callable[[ResumePoint], None] | None = None,
        when_failed: FailurePolicy = HOLD,
    ) -> None:
        """Nothing is requested before `allow`; tasks are started in `requests`.

        `verifier`: where whole objects are compared with their checksums; `source` then sums what it fetches.
        `start`: where the first epoch begins. `on_resume_point` is told now and then where an object does
        that is inflated or joined, and when the stream leaves the plan. `when_failed` decides whether whole
        records must be delivered; bytes must be in memory then.
        """
        self._verifier = verifier
        self._changes = changes or Changes()
        self._amends = self._changes.policy.when_changed != "fail"
        self._detour: _Detour | None = None
        self._when_failed = when_failed
        self._transformer: BodyTransformer | None = None
        """Of the epoch that is being delivered, or was last, where there is one."""
        self._plan = plan
        self._source = source
        self._quota = stages.quota
        self._quota.on_available = self._start
        self._window = Window(
            all_epochs(plan, stages.part_size, start), stages.quota, reserved_bytes=stages.reserved_bytes
        )
        self._counters = counters
        self._requests = requests
        self._policy = policy
        self._hedger = Hedger(self, source, quota=stages.quota, counters=counters, requests=requests)
        self._first = start
        self._on_mark = on_resume_point
        self._marked = (start.epoch, start.offset)
        """Epoch and place of the last mark told."""
        self._next_mark: ResumePoint | None = None
        """The first byte of the object that is being delivered, to be told once it may be resumed there."""
        self._ends: deque[tuple[int, int]] = deque(maxlen=LAST_ENDS)
        """Of the last objects delivered, the offset in the stream after them, and their sizes."""
        self._supply = stages
        self._fetches: dict[Slot, PartFetch] = {}
        self._changed = asyncio.Event()
        self.delivered = 0
        """Bytes of the epoch's stream that lie behind: its outlet has accepted them, or had never to."""
        self.consumed = 0
        """Bytes of the plan that are done with: `delivered`, unless objects are rewritten or changed."""

    def begin(self, epoch: int) -> None:
        """Set the counts to where the epoch begins."""
        start = self._first if epoch == self._first.epoch else Position(epoch)
        self.delivered = start.offset
        self.consumed = start.mark.fetched if self._plan.rewrites else start.offset
        self._next_mark = None
        self._ends.clear()

    def allow(self, epoch: int) -> None:
        """Parts of epochs up to `epoch` may be fetched from now on."""
        self._window.last_epoch = max(self._window.last_epoch, epoch)
        self._start()

    def activate(self, *, active: bool) -> None:
        """The reader is there, or not: its channel's share of room and requests depends on it."""
        self._quota.activate(active=active)

    def wake(self) -> None:
        """Have a waiting delivery look again: its reader may have gone."""
        self._changed.set()

    async def deliver(self, epoch: int, outlet: Outlet) -> None:
        """Move all bytes of `epoch` into `outlet`.

        Raises ReaderGone if the outlet's reader closes before the last byte, SourceError if a part
        cannot be had or an object is not what its checksum says. `delivered` then tells how far it came.
        """
        self.begin(epoch)
        self._changes.begin()
        with contextlib.ExitStack() as stack:
            transformer = self._transformer = None
            rewrites, join = self._plan.rewrites, self._plan.join
            if rewrites or self._when_failed.needs_records:
                first = self._first if epoch == self._first.epoch else Position(epoch)
                transformer = self._transformer = BodyTransformer(
                    outlet,
                    inflate=self._plan.inflate,
                    wrap=self._plan.entries.wrap,
                    timer=self._counters.timer,
                    account=self._written,
                    again=self.delivered - first.mark.streamed if rewrites and first is self._first else 0,
                    # A FIFO begins with a record, and what another sidecar has put into it may end anywhere.
                    aligner=self._when_failed.aligner(at_record=self.delivered == first.skipped),
                    joiner=None if join is None else joiner_of(join, resumed=first.mark.streamed > 0),
                )
                stack.callback(transformer.close)
            await self._deliver(epoch, outlet, transformer)
            if transformer is not None:
                await transformer.finish()

    def ended_object_at(self, offset: int) -> bool:
        """Whether a reader that has taken `offset` bytes of the stream stopped at the end of an object.

        A buffered reader has read on by less than a buffer; a 64th of the object, so that chance has no part.
        """
        return any(0 <= offset - end <= min(MOST_BUFFERED, size // 64) for end, size in self._ends)

    @property
    def at_border(self) -> bool:
        """Whether `delivered` is surely between two records; never where none are separated."""
        return self._transformer is not None and self._transformer.at_border

    async def _deliver(self, epoch: int, outlet: Outlet, transformer: BodyTransformer | None) -> None:
        timer, total = self._counters.timer, self._plan.total_bytes(epoch)
        left = TURN
        while self.consumed < total:
            if left <= 0:
                left = TURN
                await asyncio.sleep(0)
            fetch = self._head_fetch(epoch)
            if outlet.reader_gone:
                raise ReaderGone("the reader closed the pipe")
            if (error := self._torn()) is not None:
                await self._amend(error)
                continue
            if fetch is None or not fetch.stage.ready:
                if fetch is not None and fetch.error is not None:
                    self._second_chance(fetch)
                timer.starve("queued" if fetch is None else fetch.phase)
                if fetch is not None and self._window.head_of_line is not None:
                    self._hedger.starving(self._window.head_of_line, fetch)
                since = time.monotonic()
                await self._news(fetch)
                waited = time.monotonic() - since
                self._counters.head_wait.add(waited)
                self._quota.starved(waited)
                continue
            if self._quota.limited and (seconds := self._quota.wait(time.monotonic())):
                timer.enter("limited")
                await self._pause(seconds)
                continue
            timer.enter("moving")
            stage = fetch.stage
            if transformer is not None:
                left -= max(LEAST, await self._transform(stage, transformer))
                continue
            try:
                count = outlet.push(stage)
            except BlockingIOError:
                timer.enter("blocked")
                await outlet.writable()
                continue
            if count:
                self._account(count)
                left -= max(LEAST, count)

    def _torn(self) -> SourceError | None:
        """Why the object at the head of line is not the one listed, if that is known and may be mended."""
        head = self._window.head_of_line
        if not self._amends or head is None or head.part.start or head.delivered:
            return None
        errors = (self._fetches[slot].error for slot in self._window.object_at_head())
        return next((error for error in errors if is_change(error)), None)

    async def _amend(self, error: SourceError) -> None:
        """Leave out the object at the head of line, or put in its place what S3 has now."""
        head, detour, changes = self._window.head_of_line, self._detour, self._changes
        if head is None:
            raise error
        part, now = head.part, None
        listed, tries = (detour.listed, detour.tries + 1) if detour else (part.object, 1)
        if changes.policy.when_changed == "refetch":
            if changes.policy.stat is None or tries > MOST_TRIES:
                raise error
            self._counters.timer.starve("first_byte")
            now = await changes.policy.stat(listed.bucket, listed.key, listed.version)
        parts: Iterator[Part] = iter(())
        reserved_bytes = 0
        if now and now.size:
            # Whatever the size of the old one, so that much is not asked for in little pieces.
            size = min(now.size, max(part.body, self._supply.part_size()))
            parts = cut([Segment(now, 0, now.size)], part_size=lambda: size, epoch=part.epoch)
            reserved_bytes = self._supply.reserved_bytes(Part(part.epoch, now, 0, size, 0))
        if self._on_mark is not None:
            self._on_mark(ResumePoint(NOWHERE, self.delivered))
        replaced, dropped = self._window.replace_head(parts, reserved_bytes=reserved_bytes)
        planned = detour.planned if detour else replaced
        self._drop(dropped)
        changes.note(Change(part.epoch, listed, "refetched" if now else "skipped", now))
        self._detour = _Detour(listed, now, planned, tries) if now and now.size else None
        if self._detour is None:
            self.consumed += planned
        self._start()

    async def _transform(self, stage: Stage, transformer: BodyTransformer) -> int:
        """Move some of the head of line through `transformer`; return how much."""
        slot = self._window.head_of_line
        if slot is None or not isinstance(stage, MemoryStage):
            raise RuntimeError("what passes through our hands must be in memory: tell the transport so")
        if (
            self._on_mark
            and self._plan.rewrites
            and not transformer.held
            and slot.delivered == len(slot.part.leading)
            and slot.part.start == 0
            and slot.part.body
        ):
            self._note_begin(slot)
        if not (data := stage.take(MOST_TAKEN)):
            return 0  # the socket has nothing yet
        await transformer.pass_on(slot.part, slot.delivered, data)
        if self._next_mark is not None and transformer.anchored:
            self._tell_mark(slot.part.epoch, self._next_mark)
        self._consumed(len(data))
        return len(data)

    def _note_begin(self, slot: Slot) -> None:
        """An object begins here: to be told, if the last mark that was told is far before it."""
        epoch = slot.part.epoch
        last = self._marked if self._marked[0] == epoch else (epoch, 0)
        due = self.delivered - last[1] >= MARK_EVERY
        self._next_mark = ResumePoint(self.consumed, self.delivered) if due else None

    def _tell_mark(self, epoch: int, mark: ResumePoint) -> None:
        self._next_mark = None
        self._marked = (epoch, mark.streamed)
        if self._on_mark is not None:
            self._on_mark(mark)

    def _second_chance(self, fetch: PartFetch) -> None:
        """Ask again for a part that was given up while nobody waited for it; raise any other failure.

        An outage in the night must not fail the epoch that a reader opens in the morning.
        """
        slot = self._window.head_of_line
        if slot is None or fetch.last_chance or not isinstance(fetch.error, GaveUp):
            raise fetch.error or RuntimeError("no failure to judge")
        fetch.last_chance, fetch.error = True, None
        self._window.relaunch(slot)
        self._launch(slot, fetch)

    async def _pause(self, seconds: float) -> None:
        """Wait as a limit of bandwidth asks, but not beyond the next change of it or of the reader."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, LONGEST_PAUSE)):
                await self._changed.wait()

    async def _news(self, fetch: PartFetch | None) -> None:
        """Wait until the head of line has bytes or an error, is another, or the reader has gone."""
        self._changed.clear()
        if fetch is not None:
            fetch.stage.awaited = True
            fetch.on_phase = self._counters.timer.because
        await self._changed.wait()

    def _head_fetch(self, epoch: int) -> PartFetch | None:
        """The fetch of the part whose bytes come next, proven to be at this place of the stream."""
        slot = self._window.head_of_line
        if slot is None:
            return None
        due = self.consumed if self._detour is None else self._detour.delivered
        if (slot.part.epoch, slot.part.offset + slot.delivered) != (epoch, due):
            raise RuntimeError(f"head of line is {slot}, but byte {due} of epoch {epoch} is due")
        return self._fetches[slot]

    def _account(self, count: int) -> None:
        self._written(count)
        self._consumed(count)

    def _written(self, count: int) -> None:
        self.delivered += count
        self._counters.written_bytes += count
        if self._quota.limited:
            self._quota.sent(count, time.monotonic())

    def _consumed(self, count: int) -> None:
        self._counters.consumed_bytes += count
        detour = self._detour
        if detour is None:
            self.consumed += count
        else:
            detour.delivered += count
            if detour.delivered == detour.now.size:
                self.consumed += detour.planned
                self._detour = None
        done = self._window.deliver(count)
        if done is not None:
            self._fetches.pop(done).stage.discard()
            if done.part.ends_object:
                self._counters.objects_completed += 1
                self._ends.append((self.delivered, done.part.object.size))
            self._changed.set()
            self._start()
            if self._verifier is not None and done.part.body:
                self._verifier.delivered(done.part)

    def abandon(self, epoch: int) -> None:
        """Drop what is left of `epoch`: its bytes, its requests, its parts to come."""
        self._detour = None
        self._drop(self._window.abandon(epoch))
        self._start()

    def close(self) -> None:
        """Drop everything; nothing is requested any more."""
        self._quota.on_available = None
        self._quota.activate(active=False)
        self._hedger.close()
        self._drop(self._window.close())

    def _drop(self, slots: list[Slot]) -> None:
        for slot in slots:
            fetch = self._fetches.pop(slot)
            self._counters.wasted_bytes += fetch.stage.staged
            fetch.stage.discard()
            self._hedger.forget(slot)
            if fetch.task is not None:
                fetch.task.cancel()

    def _start(self) -> None:
        head = self._window.head_of_line
        if head is not None and not head.in_flight and head not in self._fetches:
            self._window.relaunch(head)  # the next part of a replacement
            self._stage(head)
        while admitted := self._window.admit():
            for slot in admitted:
                self._stage(slot)

    def _stage(self, slot: Slot) -> None:
        """A stage for an admitted part, and its request."""
        stage = self._supply.make(slot.part, on_change=self._changed.set, counters=self._counters)
        if self._verifier is not None and isinstance(stage, MemoryStage):
            stage.on_leave = partial(self._verifier.update, slot.part)
        fetch = self._fetches[slot] = PartFetch(
            stage, self._source, policy=self._policy, counters=self._counters, quota=self._quota
        )
        if slot is self._window.head_of_line:
            self._changed.set()  # a delivery may be waiting for want of any part at all
        if slot.part.body:
            self._launch(slot, fetch)
        else:
            self._window.landed(slot)  # literals alone: nothing to request, so no request

    def _launch(self, slot: Slot, fetch: PartFetch) -> None:
        name = f"GET {slot.part.object.key} {slot.part.start}-{slot.part.end}"
        fetch.task = self._requests.create_task(self.bring(slot, fetch), name=name)

    async def bring(self, slot: Slot, fetch: PartFetch, failed: SourceError | None = None) -> None:
        """As of `hedger.Owner`: bring what is missing of the part, or note why it cannot be had."""
        try:
            await fetch.run(failed)
        except SourceError as error:
            fetch.error, stage = error, fetch.stage
            if stage.awaited:
                fetch.last_chance, stage.awaited = True, False
                self._changed.set()
        self.landed(slot)

    def is_head(self, slot: Slot) -> bool:
        """As of `hedger.Owner`."""
        return slot is self._window.head_of_line

    def replace(self, slot: Slot, task: asyncio.Task[None]) -> None:
        """As of `hedger.Owner`."""
        fetch = self._fetches[slot]
        if fetch.task is not None:
            fetch.task.cancel()
        fetch.task = task

    def request_ended(self) -> None:
        """As of `hedger.Owner`."""
        self._start()

    def landed(self, slot: Slot) -> None:
        """The part's request has ended: well, or for good."""
        self._hedger.forget(slot)
        if (fetch := self._fetches.get(slot)) is not None:
            fetch.task = None
        self._window.landed(slot)
        self._start()
