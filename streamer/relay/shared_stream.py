"""One stream that several channels share: it is fetched once, and delivered to the FIFOs of all of them.

    prefetcher ─▶ Delivery ─▶ DealtOutlet ─▶ the FIFOs of rank 0, of rank 1, … in turn

Each FIFO keeps a channel of its own, with its plan, trailers, epochs and position; only the bytes come from
here (`streamer.relay.deliver.shared_fifo`). The stream begins an epoch when every FIFO has a reader for it,
or has passed it. A FIFO passes an epoch that its reader leaves, and its bytes are then discarded. A channel
that has ended or failed has no part in later epochs. The first error of storage fails all channels of the
stream, each at its own offset.

The first epoch begins at the first byte that any FIFO lacks. FIFOs that have it already skip it, so channels
that resume at different positions get each their own bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamer.aio import TaskGroup, in_thread
from streamer.errors import ReaderGone, SinkError, SourceError
from streamer.plan import Position
from streamer.plan.dealing import DealtEpoch, deal_stream
from streamer.relay.deliver.dealt_outlet import DealtOutlet
from streamer.relay.deliver.delivery import Delivery
from streamer.relay.deliver.shared_fifo import SharedFifo, SharedGroup
from streamer.relay.fetch.prefetcher import Prefetcher, StreamSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from streamer.plan import Plan
    from streamer.relay.channel_spec import StartPosition
    from streamer.relay.staging.stage import Stages
    from streamer.retry import RetryPolicy
    from streamer.s3.ranges import RangeSource


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
    ) -> None:
        """`ranks`: of each rank of the plan, the names of its FIFOs, and the plan of each; with one rank, its
        FIFOs are copies of the whole stream. `starts`: start positions by FIFO.
        """
        names = [name for fifos in ranks for name in fifos]
        first = min(
            (starts[name].position.epoch for name in names if starts[name].refused is None), default=0
        )
        group = self._group = SharedGroup([], first, stages.quota)
        group.ranks = [
            [
                SharedFifo(name, each, starts[name].position, group, refused=starts[name].refused is not None)
                for name, each in fifos.items()
            ]
            for fifos in ranks
        ]
        self.fifos = group.fifos
        """The FIFOs, in the order of their ranks."""
        self._plan = plan
        self._source = source
        self._stages = stages
        self._retry = retry

    def __repr__(self) -> str:
        return f"<SharedStream of {self._plan}, {len(self.fifos)} FIFOs, epoch {self._group.epoch}>"

    async def run(self) -> None:
        """Stream epoch after epoch until every channel has ended. Raises SinkError."""
        group = self._group
        offsets = [min(fifo.offset_in(group.epoch) for fifo in fifos) for fifos in group.ranks]
        try:
            dealt = await in_thread(deal_stream, self._plan, group.epoch, offsets)
        except (SourceError, SinkError) as error:
            self._fail(error)
            return
        try:
            outlet = DealtOutlet(group, give_up_after=self._retry.give_up_after)
        except OSError as error:
            raise SinkError(f"cannot make a pipe: {error.strerror}; raise `ulimit -n`") from error
        try:
            async with TaskGroup() as requests:
                prefetcher = Prefetcher(
                    StreamSpec(self._plan, self._retry, Position(group.epoch, dealt.offset)),
                    self._source,
                    self._stages,
                    counters=group.counters,
                    requests=requests,
                    large_together=True,
                )
                group.settled = prefetcher.settled
                try:
                    await self._run_epochs(Delivery(prefetcher), outlet, dealt)
                finally:
                    prefetcher.close()
        finally:
            outlet.close()

    async def _run_epochs(self, delivery: Delivery, outlet: DealtOutlet, dealt: DealtEpoch) -> None:
        group = self._group
        delivery.begin(group.epoch)
        try:
            while await self._assembled():
                if any(fifo.takes(group.epoch) for fifo in group.fifos):
                    await self._run_epoch(delivery, outlet, dealt)
                delivery.abandon(group.epoch)
                group.epoch += 1
                delivery.begin(group.epoch)
                if self._plan.has_epoch(group.epoch):  # else the channels end
                    dealt = deal_stream(self._plan, group.epoch, [0] * len(group.ranks))
        except (SourceError, SinkError) as error:
            self._fail(error)

    async def _run_epoch(self, delivery: Delivery, outlet: DealtOutlet, dealt: DealtEpoch) -> None:
        group = self._group
        outlet.begin(dealt)
        try:
            await delivery.deliver(group.epoch, outlet)
            outlet.end()
        except ReaderGone:
            pass  # every FIFO has its bytes, or has lost its reader
        finally:
            group.timer.enter("idle")
            group.counters.wasted_bytes += outlet.take_dropped()

    async def _assembled(self) -> bool:
        """Wait until no FIFO is awaited in the epoch; return False if all channels have ended."""
        group = self._group
        while any(fifo.awaited_in(group.epoch) for fifo in group.fifos):
            group.changed.clear()
            await group.changed.wait()
        return not all(fifo.closed for fifo in group.fifos)

    def _fail(self, error: SourceError | SinkError) -> None:
        for fifo in self._group.fifos:
            fifo.error = error
            fifo.leave(error)
