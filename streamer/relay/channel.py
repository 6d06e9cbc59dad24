"""One channel: streams its epochs into one FIFO after the other, until it is drained or cancelled.

    prepare → run: epoch → epoch → … (`streamer.relay.epoch_runner`) → drained, or cancelled, or failed

The first parts of an epoch are requested before its reader opens the FIFO, and those of the next epoch while
this one is delivered, so bytes are ready when the reader opens the next FIFO. Three events end an epoch: the
delivery of its last byte (`complete`), an early close by its reader (`abandoned`; legal, contract §1.3), and
a final error of its source (`failed`).

This machine may refuse to write a trailer, or to make, open or remove a FIFO. The channel reports the refusal
and tries again for `GiveUpAfter` seconds, as it does for storage. After that the epoch has failed, and its
FIFO is held open under every policy. Only a dead keeper ends the process.

A failed epoch first gets its trailer, `failed`. Then the policy decides about its FIFO (`WhenFailed`): by
default it stays open, so no reader sees an end. The channel stays in state `failed` until the process stops;
a keeper holds the FIFO even longer. Other channels go on.

`drain` ends the channel at the next epoch border, and so does the last epoch of a plan that has one.
Cancelling `run` ends it at once, with a `stopped` trailer if a reader is in mid-epoch. In all cases every
descriptor and FIFO is gone when `run` returns.

An open plan (`streamer.plan.growth`) grows while its first epoch streams. Its trailers are `open` with a
partial digest, which is published before the bytes that it covers, and then with length and digest. The epoch
ends after the listing has.

With a keeper (`streamer.helpers.keeper`) a channel can begin where an earlier sidecar's channel ended
(`ChannelSpec.start`), and can `leave` its FIFO open for the next sidecar to continue. A channel that ends
without a drain, because its sidecar has a local failure, leaves its FIFO too.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from streamer.aio import TaskGroup
from streamer.errors import SinkError
from streamer.plan import Position
from streamer.relay.channel_spec import NO_EVENTS
from streamer.relay.channel_state import ChannelState, snapshot
from streamer.relay.deliver.delivery import Delivery
from streamer.relay.epoch_runner import EpochRunner
from streamer.relay.epoch_trailers import opening_trailer
from streamer.relay.fetch.prefetcher import Prefetcher, StreamSpec
from streamer.relay.staging.buffers import TappedStages
from streamer.relay.staging.taps import ChecksumTap
from streamer.relay.statistics import ChannelCounters
from streamer.sink.fifo import FifoDirectory
from streamer.sink.write_ends import LocalWriteEnds

if TYPE_CHECKING:
    from streamer.errors import SourceError
    from streamer.helpers.keeper_client import KeeperClient
    from streamer.plan import ObjectRef, ResumePoint
    from streamer.relay.channel_spec import ChannelEvents, ChannelSpec
    from streamer.relay.channel_state import ChannelFailure
    from streamer.relay.deliver.shared_fifo import SharedFifo
    from streamer.relay.staging.stage import Stages
    from streamer.relay.statistics import ChannelStatistics
    from streamer.s3.checksums import Outcome
    from streamer.s3.ranges import RangeSource
    from streamer.sink.fifo_names import NameWatch
    from streamer.sink.write_ends import WriteEnds


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
        names: NameWatch | None = None,
        shared: SharedFifo | None = None,
    ) -> None:
        """`write_ends`: holder of the FIFOs' write ends. Default: this process.

        `names` watches the FIFOs' directory. Default: as for `FifoDirectory`.
        `shared`: the FIFO of a shared stream that delivers the bytes. Default: this channel fetches them.
        """
        self.spec = spec
        self.done = asyncio.Event()
        """Set when `run` has ended."""
        self._plan = spec.plan
        self._source = source
        self._stages = stages
        self._shared = shared
        self._counters = ChannelCounters() if shared is None else shared.counters
        self._write_ends = write_ends or LocalWriteEnds(spec.name)
        self._fifos = FifoDirectory(
            spec.directory,
            spec.name,
            opening=partial(opening_trailer, spec),
            mode=spec.fifo_mode,
            write_ends=self._write_ends,
            names=names,
        )
        self._state = ChannelState.at(spec.start.position, self._counters, events)
        self._draining = asyncio.Event()
        self._leaves = False
        """Whether the FIFO stays open for the next sidecar."""
        self._epochs: EpochRunner | None = None
        """None before the channel runs."""
        if self._plan.growth is not None:
            self._plan.growth.watch(self._note_growth)

    @property
    def name(self) -> str:
        """Name of the FIFOs, without the epoch."""
        return self.spec.name

    @property
    def failure(self) -> ChannelFailure | None:
        """The failure that ended the channel's last epoch, if one has."""
        return self._state.failure

    @property
    def error(self) -> SourceError | SinkError | None:
        """Cause of the failure, if the channel has failed."""
        return None if self.failure is None else self.failure.error

    @property
    def refusal(self) -> str | None:
        """Error of the step that this machine refuses, while the channel repeats it."""
        return self._counters.refusal

    @property
    def mendable(self) -> bool:
        """Whether another sidecar can continue the failed epoch once the cause is removed."""
        return self.failure is not None and self.failure.fifo == "held"

    @property
    def fifo_survives_exit(self) -> bool:
        """Whether the failed epoch's FIFO stays open after this process has ended."""
        return self.failure is not None and not self.failure.fifo_ended and self._write_ends.lasting

    @property
    def held_back_by(self) -> tuple[str, ...]:
        """FIFOs of a shared stream that this one waits for now: they are full, or have no reader yet."""
        return () if self._shared is None else tuple(self._shared.held_back_by)

    @property
    def _interrupted(self) -> bool:
        """Whether the channel ends without a drain while a keeper holds its FIFO."""
        return self._write_ends.lasting and not self._draining.is_set()

    def __repr__(self) -> str:
        return f"<Channel {self.name} {self._state.phase}, epoch {self._state.epoch}, {self._stages.quota}>"

    def statistics(self) -> ChannelStatistics:
        """Return a snapshot for metrics and status.

        The first FIFO of a shared stream has the figures of the stream's requests and memory.
        """
        shared = self._shared
        return snapshot(
            self._plan,
            self._state,
            fetched=self._counters if shared is None else shared.fetched,
            quota=self._stages.quota if shared is None else shared.quota,
            held_back_by=self.held_back_by,
        )

    def prepare(self) -> None:
        """Make the FIFO of the first epoch, without a request to S3. Raises SinkError."""
        start = self._state.start
        if not self._plan.has_epoch(start.epoch):
            return  # its trailers say so to the next sidecar
        if not self.spec.start.held:
            self._fifos.clear(begin=start.epoch)
            self._fifos.prepare(start.epoch)
            return
        epoch = self._fifos.resume(start.epoch, successor=self._plan.has_epoch(start.epoch + 1))
        if epoch != start.epoch:
            self._state.start = Position(epoch)
        self._state.epoch = epoch

    def drain(self) -> None:
        """Begin no further epoch. `run` returns after the current one, or at once if that has no reader."""
        self._draining.set()

    def leave(self, keeper: KeeperClient) -> None:
        """Make `run` leave the FIFO open for another sidecar. The caller cancels `run` next.

        `run` hands the write end to `keeper`, unless a keeper holds it already.
        """
        self._leaves = True
        if isinstance(self._write_ends, LocalWriteEnds):
            self._write_ends.successor_keeper = keeper, self._plan.digest

    def close(self, *, forget: bool = False) -> None:
        """Remove the FIFOs that are left; with `forget`, the trailers too. `run` must have ended.

        If a keeper holds the FIFOs and the channel was not drained, they stay for the next sidecar.
        """
        if self._interrupted:
            self._fifos.let_go()
        elif not self._leaves:
            self._fifos.close(forget=forget)

    async def run(self) -> None:
        """Stream epoch after epoch until `drain`. Raises SinkError."""
        try:
            async with TaskGroup() as requests:
                delivery = self._state.delivery = self._delivery(requests)
                self._epochs = EpochRunner(
                    self.spec,
                    self._state,
                    delivery,
                    fifos=self._fifos,
                    draining=self._draining,
                    keeper=self._write_ends.lasting,
                )
                try:
                    await self._run_epochs(self._epochs)
                finally:
                    delivery.close()
        finally:
            self._finish()

    def _delivery(self, requests: TaskGroup) -> Delivery | SharedFifo:
        if self._shared is not None:
            return self._shared
        stages, stored = self._stages, self.spec.stored_checksums
        if stored is not None:
            stages = TappedStages(stages, stages, ChecksumTap(stored, self._checked))
        prefetcher = Prefetcher(
            StreamSpec(self._plan, self.spec.retry, self._state.start),
            self._source,
            stages,
            counters=self._counters,
            requests=requests,
            each_alone=stored is not None,
            on_batch=self._publish_digest,
        )
        return Delivery(prefetcher, on_resume_point=self._note_mark)

    async def _run_epochs(self, epochs: EpochRunner) -> None:
        if self.spec.start.refused is not None:
            await epochs.fail(self.spec.start.refused)
            return
        if self._state.start.offset:
            self._counters.counts["resumes"]["epoch"] += 1
        while self._plan.has_epoch(self._state.epoch) and await epochs.run():
            self._state.epoch += 1
        self._draining.set()  # after the last epoch nothing is left to a keeper or to a drain

    def _finish(self) -> None:
        """Close all descriptors; leave the FIFOs to the next sidecar, or remove them."""
        state = self._state
        state.phase = "stopped" if state.failure is None else "failed"
        self._counters.timer.enter("idle")
        # With a keeper the FIFO stays open: no reader may mistake the end of this process for an epoch's end.
        self._leaves = self._leaves or self.fifo_survives_exit or self._interrupted
        if self._leaves:
            outlet, state.outlet = state.outlet, None
            self._fifos.leave(self._state.position, outlet)
        else:
            if self._epochs is not None:
                self._epochs.stop()
            self._fifos.close()
        self.done.set()

    def _note_growth(self) -> None:
        """Go on after an open plan has grown, or its listing has ended."""
        if not self._plan.open:
            self._publish_digest()
        if self._state.delivery is not None:
            self._state.delivery.wake()

    def _publish_digest(self) -> None:
        """Publish the digest over the entries that may be streamed now, before their first byte.

        If the machine refuses, an epoch that is interrupted after these entries is not resumed: its trailer
        has a digest over fewer.
        """
        try:
            self._fifos.publish_openings()
        except SinkError as error:
            self._state.shortage(error)

    def _checked(self, ref: ObjectRef, outcome: Outcome) -> None:
        """Count a comparison with a stored checksum; report the first object that cannot be compared."""
        checked = self._counters.counts["checked"]
        checked[outcome] += 1
        if outcome == "unverifiable" and checked[outcome] == 1:
            self._state.events.unverifiable(ref)

    def _note_mark(self, mark: ResumePoint) -> None:
        self._state.mark = self._state.epoch, mark
        self._write_ends.mark(mark)
