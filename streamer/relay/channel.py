"""One channel: its epochs, one FIFO after the other, until it is told to stop.

    per epoch   open (idle until a reader comes) → deliver → retire with its verdict → next epoch at once

The first parts of an epoch are requested before its reader comes, and the next epoch's as soon as an
epoch is being delivered, so a reader that turns the epoch finds bytes waiting. Three things end an
epoch: its last byte (complete), its reader (abandoned; legal, contract §1.3), its source (failed).

A failed epoch never looks like an end: the trailer says `failed`, the FIFO stays open, and the channel
stays in state `failed` until the process stops. Other channels go on.

`drain` ends the channel at the next epoch border; cancelling `run` ends it now, with a `stopped`
trailer if a reader is in mid-epoch. Either way every descriptor and FIFO is gone when `run` returns.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from streamer.errors import ReaderGone, SourceError
from streamer.relay.prefetch import Prefetcher
from streamer.relay.race import first_of
from streamer.relay.stages import Stages
from streamer.relay.statistics import ChannelStatistics, Tally
from streamer.sink.fifo import FifoDirectory
from streamer.trailer import Trailer

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.plan import Plan
    from streamer.relay.retry import RetryPolicy
    from streamer.sink.outlet import PipeOutlet
    from streamer.source.ranges import RangeSource
    from streamer.trailer import Verdict

Phase = Literal["waiting", "streaming", "failed", "stopped"]


class Channel:
    """Streams `plan` into the FIFOs `<directory>/<name>_<epoch>`."""

    def __init__(
        self,
        name: str,
        plan: Plan,
        source: RangeSource,
        stages: Stages,
        *,
        directory: str,
        fifo_mode: int = 0o640,
        policy: RetryPolicy,
        on_verdict: Callable[[Trailer], None],
    ) -> None:
        """`on_verdict` is called with every epoch's last trailer, at the epoch's end."""
        self.name = name
        self.error: SourceError | None = None
        """Why the channel failed, once it has."""
        self._plan = plan
        self._source = source
        self._policy = policy
        self._tally = Tally()
        self._stages = stages
        self._share = stages.share
        self._template = Trailer(
            channel=name,
            epoch=0,
            verdict="open",
            bytes_total=0,
            digest=plan.digest,
        )
        self._fifos = FifoDirectory(directory, name, opening=self._opening, mode=fifo_mode)
        self._phase: Phase = "waiting"
        self._epoch = 0
        self._ended: Counter[str] = Counter()
        self._outlet: PipeOutlet | None = None
        self._capacity = 0
        self._prefetcher: Prefetcher | None = None
        self._draining = asyncio.Event()
        self._on_verdict = on_verdict
        self.done = asyncio.Event()
        """Set when `run` is over, or when the channel has drained."""

    def __repr__(self) -> str:
        return f"<Channel {self.name} {self._phase}, epoch {self._epoch}, {self._share}>"

    def prepare(self) -> None:
        """Offer the FIFO of epoch 0; nothing reads S3 yet. Raises SinkError."""
        self._fifos.clear()
        self._fifos.prepare(0)

    def drain(self) -> None:
        """Begin no further epoch; `run` returns when the current one, if any is read, has ended."""
        self._draining.set()

    def close(self, *, forget: bool = False) -> None:
        """Remove what `prepare` or `run` has left; with `forget`, the trailers too. `run` must be over."""
        self._fifos.close(forget=forget)

    async def run(self) -> None:
        """Stream epoch after epoch. Returns after `drain`; SinkError and cancellation pass through."""
        try:
            async with asyncio.TaskGroup() as requests:
                prefetcher = self._prefetcher = Prefetcher(
                    self._plan,
                    self._source,
                    stages=self._stages,
                    tally=self._tally,
                    requests=requests,
                    policy=self._policy,
                )
                try:
                    prefetcher.allow(0)
                    while await self._run_epoch(prefetcher):
                        self._epoch += 1
                finally:
                    prefetcher.close()
        finally:
            self._phase = "stopped" if self.error is None else "failed"
            self._tally.watch.enter("idle")
            self._stop_outlet()
            self._fifos.close()
            self.done.set()

    async def _run_epoch(self, prefetcher: Prefetcher) -> bool:
        """One epoch from open to retire; whether another may follow."""
        self._phase = "waiting"
        prefetcher.delivered = prefetcher.consumed = 0
        if self._plan.varies:
            # Seconds for millions of entries; the trailers of this epoch and the next need the results.
            await asyncio.to_thread(self._plan.total_bytes, self._epoch + 1)
        outlet = await self._open(prefetcher)
        if outlet is None:
            return False
        self._capacity, self._phase = outlet.capacity, "streaming"
        prefetcher.activate(active=True)
        self._fifos.prepare(self._epoch + 1)
        prefetcher.allow(self._epoch + 1)
        try:
            await prefetcher.deliver(self._epoch, outlet)
            verdict: Verdict = "complete"
        except ReaderGone:
            verdict = "abandoned"
            self._tally.readers_gone += not outlet.reader_gone  # the pipe may tell before the epoll does
        except SourceError as error:
            await self._hold(prefetcher, error)
            return False
        self._tally.watch.enter("idle")
        prefetcher.activate(active=False)
        prefetcher.abandon(self._epoch)
        trailer = self._trailer(verdict)
        self._outlet = None
        self._fifos.retire(self._epoch, outlet, trailer, successor=not self._draining.is_set())
        self._count(trailer)
        return not self._draining.is_set()

    async def _open(self, prefetcher: Prefetcher) -> PipeOutlet | None:
        """The epoch's write end once a reader has come, or None if drained before."""

        async def opened() -> None:
            # Kept at once, so that it has an owner even if this channel is cancelled now.
            self._outlet = await self._fifos.open(self._epoch, on_gone=gone)
            self._tally.readers_come += 1

        def gone() -> None:
            self._tally.readers_gone += 1
            prefetcher.wake()

        await first_of(opened(), self._draining.wait())
        return self._outlet

    async def _hold(self, prefetcher: Prefetcher, error: SourceError) -> None:
        """Keep the failed epoch's FIFO open, so that no reader takes the failure for its end."""
        self.error = error
        self._tally.note(error.kind, error)
        self._phase = "failed"
        self._tally.watch.enter("idle")
        trailer = self._trailer("failed")
        self._fifos.publish(trailer)
        self._count(trailer)
        prefetcher.close()
        await self._draining.wait()

    def _stop_outlet(self) -> None:
        """Close what is still open when the channel ends in mid-epoch."""
        if self._outlet is None:
            return
        outlet, self._outlet = self._outlet, None
        if self.error is not None:
            outlet.close()
            return
        trailer = self._trailer("stopped")
        self._fifos.retire(self._epoch, outlet, trailer, successor=False)
        self._count(trailer)

    def _opening(self, epoch: int) -> Trailer:
        """The trailer that an epoch begins with."""
        return replace(
            self._template,
            epoch=epoch,
            bytes_total=None if self._plan.inflate else self._plan.total_bytes(epoch),
            objects=self._plan.objects(epoch),
        )

    def _trailer(self, verdict: Verdict) -> Trailer:
        delivered = self._prefetcher.delivered if self._prefetcher else 0
        error = {
            "failed": str(self.error),
            "stopped": "the sidecar was stopped in mid-epoch",
        }.get(verdict)
        trailer = replace(self._opening(self._epoch), verdict=verdict, bytes_delivered=delivered, error=error)
        if verdict == "complete" and trailer.bytes_total is None:
            return replace(trailer, bytes_total=delivered)
        return trailer

    def _count(self, trailer: Trailer) -> None:
        self._ended[trailer.verdict] += 1
        self._on_verdict(trailer)

    def statistics(self) -> ChannelStatistics:
        """A snapshot for metrics and status."""
        tally, share = self._tally, self._share
        return ChannelStatistics(
            state=self._phase,
            epoch=self._epoch,
            bytes_total=self._plan.total_bytes(self._epoch),
            bytes_consumed=self._prefetcher.consumed if self._prefetcher else 0,
            bytes_delivered=self._prefetcher.delivered if self._prefetcher else 0,
            objects=self._plan.objects(self._epoch),
            written_bytes=tally.written_bytes,
            consumed_bytes=tally.consumed_bytes,
            received_bytes=tally.received_bytes,
            wasted_bytes=tally.wasted_bytes,
            objects_completed=tally.objects_completed,
            epochs=dict(self._ended),
            seconds=tally.watch.seconds(),
            starved=tally.watch.starved(),
            reader_connected=self._outlet is not None and not self._outlet.reader_gone,
            readers_come=tally.readers_come,
            readers_gone=tally.readers_gone,
            fifo_capacity=self._capacity,
            fifo_bytes=0 if self._outlet is None else self._outlet.unread,
            staged_bytes=share.held,
            budget_bytes=share.quota,
            inflight=share.in_flight,
            limit=share.lanes,
            bandwidth_limit=share.bandwidth.limit,
            requests=dict(tally.requests),
            retries=dict(tally.retries),
            first_byte=tally.first_byte.snapshot(),
            part=tally.part.snapshot(),
            head_wait=tally.head_wait.snapshot(),
            errors=tuple(tally.notes),
            error=None if self.error is None else str(self.error),
            error_kind=None if self.error is None else self.error.kind,
        )
