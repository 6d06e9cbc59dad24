"""One stream that several channels share: it is fetched once, and delivered to the FIFOs of all of them.

    prefetcher ─▶ Delivery ─▶ DealtOutlet ─▶ the FIFOs of rank 0, of rank 1, … in turn

Each FIFO keeps a channel of its own, with its plan, trailers, epochs and position; only the bytes come from
here (`streamer.relay.deliver.shared_fifo`). The stream begins an epoch when every FIFO has a reader for it,
or has passed it. A FIFO passes an epoch that its reader leaves, and its bytes are then discarded. A channel
that has ended or failed has no part in later epochs. The first error of storage fails all channels of the
stream, each at its own offset.

The first epoch begins at the first byte that any FIFO lacks. FIFOs that have it already skip it, so channels
that resume at different positions get each their own bytes.

Ranks that are not read at one pace are separated, if they may be: once a rank has held back others for long
enough (`streamer.relay.deliver.held_back`), the stream ends where it is, and each rank has a stream of its
own from then on, which begins at the first byte that the rank lacks. Its channels do not notice: they wait in
the same epoch, with the same FIFO. The ranks stay separate, because a program that reads FIFO after FIFO
would wait again in every epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamer.aio import first_of, in_thread
from streamer.errors import ReaderGone, SinkError, SourceError
from streamer.plan import Position
from streamer.plan.dealing import DealtEpoch, deal_stream
from streamer.relay.deliver.dealt_outlet import DealtOutlet, SoleOutlet
from streamer.relay.deliver.delivery import Delivery
from streamer.relay.deliver.held_back import HeldBackWatch
from streamer.relay.deliver.shared_fifo import SharedFifo, SharedGroup
from streamer.relay.fetch.prefetcher import Prefetcher, StreamSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from streamer.plan import Plan
    from streamer.relay.channel_spec import StartPosition
    from streamer.relay.deliver.held_back import HeldBack
    from streamer.relay.staging.stage import Stages
    from streamer.retry import RetryPolicy
    from streamer.s3.ranges import RangeSource


@dataclass(frozen=True, slots=True)
class Separation:
    """How the ranks of a stream are separated."""

    stages: Callable[[], list[Stages]]
    """Returns the stages of each rank; those of the stream are used no more."""
    on_separated: Callable[[HeldBack], None]
    """Called when the ranks are separated."""
    grace: float
    """Seconds for which a rank may hold back others."""


class SharedStream:
    """Streams `plan` into the FIFOs of its ranks."""

    def __init__(
        self,
        plan: Plan,
        ranks: Sequence[Mapping[str, Plan]],
        starts: Mapping[str, StartPosition],
        *,
        source: RangeSource,
        stages: Stages,
        retry: RetryPolicy,
        separation: Separation | None = None,
    ) -> None:
        """`ranks`: of each rank of the plan, the names of its FIFOs, and the plan of each; with one rank, its
        FIFOs are copies of the whole stream. `starts`: start positions by FIFO. `separation`: None if ranks
        that hold back others are waited for.
        """
        names = [name for fifos in ranks for name in fifos]
        first = min(
            (starts[name].position.epoch for name in names if starts[name].refused is None), default=0
        )
        group = SharedGroup([], first, stages.quota)
        group.ranks = [
            [
                SharedFifo(name, each, starts[name].position, group, refused=starts[name].refused is not None)
                for name, each in fifos.items()
            ]
            for fifos in ranks
        ]
        self.fifos = group.fifos
        """The FIFOs, in the order of their ranks."""
        self._source = source
        self._retry = retry
        self._separation = separation if len(ranks) > 1 else None
        self._group = group
        self._streams = [_RankStream(plan, group, source=source, stages=stages, retry=retry)]
        """The stream of all ranks, or one of each rank."""

    def __repr__(self) -> str:
        return f"<SharedStream of {len(self.fifos)} FIFOs: {', '.join(map(repr, self._streams))}>"

    async def run(self) -> None:
        """Stream epoch after epoch until every channel has ended. Raises SinkError."""
        if self._separation is None:
            await self._streams[0].run()
            return
        held_back = await self._run_together(self._separation.grace)
        if held_back is not None:
            await self._run_apart(self._separation, held_back)

    async def _run_together(self, grace: float) -> HeldBack | None:
        """Stream until every channel has ended, or a rank has held back others for too long; return that."""
        group, held = self._group, asyncio.Event()
        found: list[HeldBack] = []

        def on_held_back(held_back: HeldBack) -> None:
            found.append(held_back)
            held.set()

        with contextlib.closing(HeldBackWatch(group.held_back_by, on_held_back, grace=grace)) as group.watch:
            await first_of(self._streams[0].run(), held.wait())
        group.watch = None
        return found[0] if found else None

    async def _run_apart(self, separation: Separation, held_back: HeldBack) -> None:
        """Stream each rank on its own, from its next byte on."""
        stages = separation.stages()
        groups = self._group.divided([each.quota for each in stages])
        self._streams = [
            _RankStream(group.fifos[0].plan, group, source=self._source, stages=each, retry=self._retry)
            for group, each in zip(groups, stages, strict=True)
        ]
        separation.on_separated(held_back)
        async with asyncio.TaskGroup() as tasks:
            for stream in self._streams:
                tasks.create_task(stream.run(), name=repr(stream))


class _RankStream:
    """A stream of one group of FIFOs: of several ranks, or of the copies of one."""

    def __init__(
        self, plan: Plan, group: SharedGroup, *, source: RangeSource, stages: Stages, retry: RetryPolicy
    ) -> None:
        self._plan = plan
        self._group = group
        self._source = source
        self._stages = stages
        self._retry = retry

    def __repr__(self) -> str:
        return f"<stream of {self._plan}, {len(self._group.fifos)} FIFOs, epoch {self._group.epoch}>"

    async def run(self) -> None:
        """Stream epoch after epoch until every channel has ended. Raises SinkError."""
        group = self._group
        offsets = [min(fifo.offset_in(group.epoch) for fifo in fifos) for fifos in group.ranks]
        try:
            dealt = await in_thread(self._deal, offsets)
        except (SourceError, SinkError) as error:
            self._fail(error)
            return
        try:
            outlet = self._outlet()
        except OSError as error:
            raise SinkError(f"cannot make a pipe: {error.strerror}; raise `ulimit -n`") from error
        try:
            async with asyncio.TaskGroup() as requests:
                prefetcher = Prefetcher(
                    StreamSpec(self._plan, self._retry, Position(group.epoch, dealt.offset)),
                    self._source,
                    self._stages,
                    counters=group.counters,
                    requests=requests,
                    large_spans=not self._sole,
                )
                group.settled = prefetcher.settled
                try:
                    await self._run_epochs(Delivery(prefetcher), outlet, dealt)
                finally:
                    prefetcher.close()
        finally:
            outlet.close()

    @property
    def _sole(self) -> bool:
        """Whether the stream has one FIFO."""
        return len(self._group.fifos) == 1

    def _outlet(self) -> DealtOutlet | SoleOutlet:
        if self._sole:
            return SoleOutlet(self._group)
        return DealtOutlet(self._group, give_up_after=self._retry.give_up_after)

    def _deal(self, offsets: Sequence[int]) -> DealtEpoch:
        """Return the pieces of the epoch from the first byte that any rank lacks. Raises as a plan."""
        if self._sole:
            return DealtEpoch(offsets[0], [*offsets], iter(()))
        return deal_stream(self._plan, self._group.epoch, offsets)

    async def _run_epochs(
        self, delivery: Delivery, outlet: DealtOutlet | SoleOutlet, dealt: DealtEpoch
    ) -> None:
        group = self._group
        delivery.allow(group.epoch)
        try:
            while await self._assembled():
                if any(fifo.takes(group.epoch) for fifo in group.fifos):
                    await self._run_epoch(delivery, outlet, dealt)
                delivery.abandon(group.epoch)
                group.epoch += 1
                delivery.allow(group.epoch)
                dealt = self._deal([0] * len(group.ranks))
        except (SourceError, SinkError) as error:
            self._fail(error)

    async def _run_epoch(
        self, delivery: Delivery, outlet: DealtOutlet | SoleOutlet, dealt: DealtEpoch
    ) -> None:
        group = self._group
        outlet.begin(dealt)
        delivery.activate(active=True)
        delivery.allow(group.epoch + 1)
        try:
            await delivery.deliver(group.epoch, outlet)
            outlet.end()
        except ReaderGone:
            pass  # every FIFO has its bytes, or has lost its reader
        finally:
            group.timer.enter("idle")
            group.counters.wasted_bytes += outlet.take_dropped()
            delivery.activate(active=False)

    async def _assembled(self) -> bool:
        """Wait until no FIFO is awaited in the epoch; return False if all channels have ended."""
        group = self._group
        while any(fifo.awaited_in(group.epoch) for fifo in group.fifos):
            if group.watch is not None and any(fifo.takes(group.epoch) for fifo in group.fifos):
                group.watch.wait()
            elif group.watch is not None:
                group.watch.go_on()
            group.changed.clear()
            await group.changed.wait()
        if group.watch is not None:
            group.watch.go_on()
        return not all(fifo.closed for fifo in group.fifos)

    def _fail(self, error: SourceError | SinkError) -> None:
        for fifo in self._group.fifos:
            fifo.error = error
            fifo.leave(error)
