"""One channel: streams its epochs into one FIFO after the other, until it is drained or cancelled.

    prepare → run: epoch → epoch → … (`streamer.relay.epoch_runner`) → drained, or cancelled, or failed

The first parts of an epoch are requested before its reader opens the FIFO, and those of the next epoch while
this one is delivered, so bytes are ready when the reader opens the next FIFO. Three events end an epoch: the
delivery of its last byte (`complete`), an early close by its reader (`abandoned`; legal, contract §1.3), and
a final error of its source (`failed`).

This machine may refuse to write a trailer, or to make, open or remove a FIFO. The channel reports the refusal
and tries again for `GiveUpAfter` seconds, as it does for storage. After that the epoch has failed, and its
FIFO is held open under every policy. Only a dead keeper ends the process.

A failed epoch first gets its trailer, `failed` (`streamer.relay.failed_epoch`). Then the policy decides about
its FIFO (`streamer.relay.deliver.failure_policy`): by default it stays open, so no reader sees an end. The
channel stays in state `failed` until the process stops; a keeper holds the FIFO even longer. Other channels
go on.

`drain` ends the channel at the next epoch border. Cancelling `run` ends it at once, with a `stopped`
trailer if a reader is in mid-epoch. Either way every descriptor and FIFO is gone when `run` returns.

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

from streamer.aio import in_thread
from streamer.errors import SinkError
from streamer.plan import Position
from streamer.plan.folds import object_starts
from streamer.relay.channel_report import ChannelReport
from streamer.relay.channel_spec import NO_EVENTS
from streamer.relay.channel_state import ChannelState, snapshot
from streamer.relay.deliver.delivery import Delivery
from streamer.relay.deliver.key_list import KeyList
from streamer.relay.epoch_runner import EpochRunner
from streamer.relay.epoch_trailers import EpochTrailers
from streamer.relay.fetch.prefetcher import Prefetcher, StreamSpec
from streamer.retry import retry_while_refused
from streamer.s3.checksums import ChecksumVerifier
from streamer.sink.fifo import FifoDirectory
from streamer.sink.write_ends import LocalWriteEnds

if TYPE_CHECKING:
    from streamer.errors import SourceError
    from streamer.helpers.keeper_client import KeeperClient
    from streamer.plan import ResumePoint
    from streamer.relay.channel_spec import ChannelEvents, ChannelSpec
    from streamer.relay.channel_state import ChannelFailure
    from streamer.relay.deliver.epoch_delivery import EpochDelivery
    from streamer.relay.deliver.shared_fifo import SharedFifo
    from streamer.relay.staging.stage import Stages
    from streamer.relay.statistics import ChannelStatistics
    from streamer.s3.ranges import RangeSource
    from streamer.sink.key_list import KeyListWriter
    from streamer.sink.name_watch import NameWatch
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
        self._report = ChannelReport(events)
        self._counters = self._report.counters
        if shared is not None:
            shared.counters = self._counters
            shared.key_lists = self._key_list if spec.lists_keys else None
        trailers = EpochTrailers(spec)
        self._write_ends = write_ends or LocalWriteEnds(spec.name)
        self._fifos = FifoDirectory(
            spec.directory,
            spec.name,
            opening=trailers.opening,
            mode=spec.fifo_mode,
            write_ends=self._write_ends,
            names=names,
        )
        self._state = ChannelState.at(spec.start.position)
        self._draining = asyncio.Event()
        self._leaves = False
        """Whether the FIFO stays open for the next sidecar."""
        self._epochs = EpochRunner(
            spec,
            self._state,
            fifos=self._fifos,
            trailers=trailers,
            report=self._report,
            draining=self._draining,
            keeper=self._write_ends.lasting,
        )
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
            counters=self._counters,
            fetched=self._counters if shared is None else shared.fetched,
            quota=self._stages.quota if shared is None else shared.quota,
            held_back_by=self.held_back_by,
        )

    def prepare(self) -> None:
        """Make the FIFO of the first epoch, without a request to S3. Raises SinkError."""
        start = self._state.start
        if not self.spec.start.held:
            self._fifos.clear(begin=start.epoch)
            self._fifos.prepare(start.epoch)
            return
        epoch = self._fifos.resume(start.epoch)
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
            async with asyncio.TaskGroup() as requests:
                delivery = self._state.delivery = self._delivery(requests)
                try:
                    await self._run_epochs(delivery)
                finally:
                    delivery.close()
        finally:
            self._finish()

    def _delivery(self, requests: asyncio.TaskGroup) -> EpochDelivery:
        if self._shared is not None:
            return self._shared
        stored = self.spec.stored_checksums
        prefetcher = Prefetcher(
            StreamSpec(self._plan, self.spec.retry, self._state.start),
            self._source,
            self._stages,
            counters=self._counters,
            requests=requests,
            verifier=None if stored is None else ChecksumVerifier(stored, self._report.checked),
            on_batch=self._publish_digest,
        )
        return Delivery(
            prefetcher,
            on_resume_point=self._note_mark,
            key_lists=self._key_list if self.spec.lists_keys else None,
        )

    async def _key_list(self, epoch: int, consumed: int) -> KeyList:
        """See `KeyLists`. Raises SinkError."""
        begun = epoch == self._state.start.epoch
        if begun and self.spec.start.changed:
            raise SinkError(
                f"the key list of {self.spec.name}_{epoch} cannot be continued, because the plan has changed "
                "since; restart sidecar and trainer, or remove RecordKeys"
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
                    held=begun and self.spec.start.held,
                )
            )

        try:
            await retry_while_refused(partial(in_thread, make), self.spec.retry, self._report.shortage)
        except asyncio.CancelledError:
            for writer in made:
                writer.close()
            raise
        return KeyList(made[0], self.spec.retry, self._report.shortage)

    async def _run_epochs(self, delivery: EpochDelivery) -> None:
        if self.spec.start.refused is not None:
            delivery.begin(self._state.epoch)
            await self._epochs.fail(delivery, self.spec.start.refused)
            return
        if self._state.start.offset:
            self._counters.counts["resumes"]["epoch"] += 1
        delivery.allow(self._state.epoch)
        while await self._epochs.run(delivery):
            self._state.epoch += 1

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
            self._epochs.stop()
            self._fifos.close()
        self.done.set()

    def _note_growth(self) -> None:
        """Go on after an open plan has grown, or its listing has ended."""
        if not self._plan.open:
            self._publish_digest()
        if self._state.delivery is not None:
            self._state.delivery.plan_grew()

    def _publish_digest(self) -> None:
        """Publish the digest over the entries that may be streamed now, before their first byte.

        If the machine refuses, an epoch that is interrupted after these entries is not resumed: its trailer
        has a digest over fewer.
        """
        try:
            self._fifos.publish_openings()
        except SinkError as error:
            self._report.shortage(error)

    def _note_mark(self, mark: ResumePoint) -> None:
        self._state.mark = self._state.epoch, mark
        self._write_ends.mark(mark)
