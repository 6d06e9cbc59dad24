"""Runs a job from its start to its end: list, offer, stream, stop.

    start    try what the job needs of this machine (`sidecar.job.rehearsal`); open the admin port, not ready
             resolve credentials; with checkpoints lock and lay out  An error in this phase ends the process
             the directory and restore them, else do the former      before a FIFO is offered. While storage
             after the next step; list every channel (concurrently)  is unavailable, the sidecar waits
             download every File channel, one after the other
             make every Pipe channel's first FIFO
    ready    the admin server is loaded, unless a client connected earlier (`sidecar.admin.port`)
             channels run concurrently and independently; one that fails holds its FIFO open and makes the job
             not ready, while the others continue
             with a keeper, channels start at the last sidecar's positions (`sidecar.job.resume`)
    end      a signal (after a drain) or the trainer's exit raises `Stop` in the task group

Every channel is a task in one TaskGroup, which the exception `Stop` ends. `serve` returns the exit code: 0,
or that of the first channel failure. The supervisor writes the state of the job into a `JobState`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from sidecar.admin.port import open_admin
from sidecar.download.channels import download_channels
from sidecar.download.restore import restore_checkpoints
from sidecar.index.learning import learn_indexes
from sidecar.job.channel_log import log_held_back, remind, watch_storage, watch_trainers
from sidecar.job.channels import (
    ChannelMaker,
    Fifo,
    fifos,
    footprint,
    job_clients,
    job_transport,
    watched_names,
)
from sidecar.job.environment import write_config_files
from sidecar.job.finish import FinishRequests, finish_requests
from sidecar.job.keeper_link import KeeperLink
from sidecar.job.layout import Layout
from sidecar.job.listings import open_listings
from sidecar.job.planning import JobPlanner
from sidecar.job.reader_state import set_reader_state
from sidecar.job.rehearsal import local, memory
from sidecar.job.resume import (
    over_before,
    parse_saved,
    saved_by_fifo,
    start_positions,
    with_published_digests,
)
from sidecar.job.state_source import read_states
from sidecar.job.uploads import upload_spec
from sidecar.observe.state import JobState
from sidecar.process.exits import Exit, exit_code
from sidecar.process.logs import WaitLog, log
from sidecar.process.resources import freeze_gc
from sidecar.upload.link import Ended, Uploader, open_uploader
from streamer.aio import TaskGroup, in_thread
from streamer.directory import Directory
from streamer.errors import SinkError
from streamer.plan import START
from streamer.s3.checksums import StoredChecksums

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from sidecar.config.hosts import Hosts
    from sidecar.config.job import Job
    from sidecar.index.learning import IndexLearner
    from sidecar.job.resume import Saved
    from streamer.errors import SourceError
    from streamer.plan import Plan
    from streamer.relay.channel_spec import StartPosition
    from streamer.relay.shared_stream import SharedStream
    from streamer.s3.client.session import Clients
    from streamer.step_state import StepState


class Stop(Exception):
    """Ends the job: raised by a task of its task group."""


class Supervisor:
    """Runs one job. Call `serve` once; its argument `until` may call `drain` and `hand_over`."""

    def __init__(
        self,
        job: Job,
        hosts: Hosts,
        layout: Layout,
        *,
        default_admin_port: int,
        keep_proof: bool = True,
        keeper: str | None = None,
        resume: str | None = None,
        resume_anyway: bool = False,
    ) -> None:
        """`job`: with the channels of this host only. `default_admin_port`: if the job file has none.

        `keep_proof`: whether the trailers stay after the end, for readers that are still reading. `keeper`:
        the socket of a keeper, or `auto` to start one if there is none. `resume`: the states at which
        channels start (`sidecar.job.state_source`). `resume_anyway`: start there even if plans have changed.
        """
        self.ask: Callable[[str], Awaitable[str]] | None = None
        """See `streamer.s3.client.session.open_clients`."""
        self.state = JobState(job, hosts, restarts=keep_proof)
        self.state.directory = layout.data
        self._layout = layout
        self._port = default_admin_port if job.penstock.admin.port is None else job.penstock.admin.port
        self._keep_proof = keep_proof
        self._starts_keeper = keeper == "auto"
        self._resume = resume
        self._resume_anyway = resume_anyway
        self._shared: list[SharedStream] = []
        """Streams that deliver to several channels."""
        self._learners: dict[str, IndexLearner] = {}
        self._keeper = KeeperLink(keeper, layout.keeper)
        self._cut_off: list[str] = []
        """Channels that were still streaming when `DrainFor` had passed."""
        self._uploader: Uploader | None = None
        self.uploaded: Ended | None = None
        """What has become of the trainer's files; None before `upload`, and if the job uploads nothing."""
        self.requests: FinishRequests
        """Requests of `penstock-finish`, from before the FIFOs are offered."""
        self._uploading = False
        self.all_uploaded = False
        """Whether a trainer has ended with 0, and the upload after it."""

    async def serve(self, until: Callable[[Supervisor], Awaitable[None]]) -> Exit:
        """Run the job until `until(self)` returns, which starts when every FIFO is offered.

        Return the exit code. Raises PenstockError if the job cannot start.
        """
        state, layout, job, hosts = self.state, self._layout, self.state.job, self.state.hosts
        log.info("host", name=hosts.current, index=hosts.index, of=len(hosts.names))
        async with contextlib.AsyncExitStack() as stack:
            fresh = not self._keeper.wanted and self._resume is None
            await local(job, layout, fresh=fresh, keeper=self._starts_keeper)
            admin_port = await stack.enter_async_context(open_admin(state, port=self._port))
            url = f"http://{job.penstock.admin.host}:{admin_port.number}/"
            log.info("starting", admin=url)
            clients = await stack.enter_async_context(job_clients(job, self._waiting(), ask=self.ask))
            state.waiting = ""
            state.control_requests = clients.request_counts
            offers = None
            if job.checkpoints is not None:
                offers = await self._take_tree(stack)
                if not self._keeper.held:  # else the trainer runs already
                    with Directory.at(layout.checkpoints) as root:
                        await restore_checkpoints(state, clients, job.checkpoints.uri, root)
            saved = await self._saved(clients)
            planning_began = time.monotonic()
            listings = await stack.enter_async_context(open_listings(job, hosts, clients))
            plans = await JobPlanner(
                state,
                listings,
                layout=layout,
                epochs={name: each.epoch for name, each in saved.items()},
            ).plan_all()
            state.planning_seconds = time.monotonic() - planning_began
            streams = fifos(job, plans)
            transport = await stack.enter_async_context(job_transport(state, clients, streams, plans))
            memory(job, footprint(job, transport, streams, keeper=self._starts_keeper))
            offers = offers or await self._take_tree(stack)
            for fifo in streams:
                if fifo.name in self._keeper.held or fifo.name in saved:
                    await listings.ended(fifo.channel.channel_name)  # its position is in the whole plan
            starts = await in_thread(self._start_positions, streams, saved)
            whole = {name: planned.whole for name, planned in plans.items()}
            await download_channels(state, whole, clients, layout.place)
            self._learners = await stack.enter_async_context(learn_indexes(job, clients, whole))
            listings.check()
            maker = ChannelMaker(
                state=state,
                transport=transport,
                stored_checksums=StoredChecksums(clients.control, clients.credentials)
                if job.checks
                else None,
                keeper=self._keeper.client,
                directory=layout.place,
                names=stack.enter_context(watched_names(layout.place)),
                learners=self._learners,
            )
            self._shared = maker.make(streams, plans, starts)
            if self._uploader is not None:
                self._uploader.begin()
            for channel in state.channels.values():
                stack.callback(channel.close, forget=not self._keep_proof)
                channel.prepare()
            offers()
            state.offered = state.started = True
            log.info("ready", directory=layout.data, admin=url)
            freeze_gc()
            admin_port.serve()
            await self._run(until)
            left = [
                channel for channel in state.channels.values() if channel.fifo_survives_exit
            ]  # after the keeper is connected
        for channel in left:
            if channel.error is not None:
                log.warning(
                    "left to the keeper, which holds the FIFO until its reader leaves",
                    channel=channel.name,
                    do=state.advice(channel),
                )
        return Exit.OK if state.failure is None else exit_code(state.failure[1])

    def _waiting(self) -> Callable[[SourceError], None]:
        """Return what notes and logs that the job waits for credentials."""
        waits = WaitLog(give_up_after=self.state.job.penstock.give_up_after)

        def waiting(error: SourceError) -> None:
            self.state.waiting = f"waiting for {error.awaited}: {error}"
            waits.waiting(error)

        return waiting

    async def _take_tree(self, stack: contextlib.AsyncExitStack) -> Callable[[], None]:
        """Make the directory tree and the config files; lock the tree until the end of `stack`.

        Start the uploader, connect to the keeper. Return what shows readers that the FIFOs are offered.
        """
        job, hosts, layout = self.state.job, self.state.hosts, self._layout
        layout.create()
        for exposed in layout.exposure():
            log.warning("directory exposed", why=exposed)
        offers = stack.enter_context(layout.locked(job.penstock.fifo_mode))
        write_config_files(layout, job, hosts)
        if (spec := upload_spec(job, hosts, layout)) is not None:
            uploader = self._uploader = await stack.enter_async_context(
                open_uploader(spec, renews=self._keep_proof)
            )
            self.state.uploads = lambda: uploader.figures
        stack.push_async_callback(self._keeper.close)
        await self._keeper.connect()
        self.requests = stack.enter_context(finish_requests(layout, fifo_mode=job.penstock.fifo_mode))
        return offers

    async def _saved(self, clients: Clients) -> dict[str, Saved | StepState]:
        """Return the states of `--resume`. Raises ConfigError, SourceError."""
        if self._resume is None:
            return {}
        job, value = self.state.job, self._resume
        if job.checkpoint_config is not None:
            value = job.checkpoint_config.on_disk(value, self._layout.base)
        text = await read_states(value, clients, give_up_after=job.penstock.give_up_after)
        return {} if text is None else parse_saved(text)

    def _start_positions(
        self, streams: list[Fifo], saved: Mapping[str, Saved | StepState]
    ) -> dict[str, StartPosition]:
        """Return the start position of every FIFO and write the epochs for the readers.

        Takes seconds for a large plan. Raises ConfigError, SinkError.
        """
        anyway, held = self._resume_anyway, with_published_digests(self._keeper.held, self._layout.place)
        plans = {fifo.name: fifo.plan for fifo in streams}
        by_channel: dict[str, dict[str, Plan]] = {}
        for fifo in streams:
            by_channel.setdefault(fifo.channel.channel_name, {})[fifo.name] = fifo.plan
        positions = saved_by_fifo(saved, by_channel, held, anyway=anyway)
        over = over_before(plans, held, self._layout.place)
        starts = start_positions(plans, held, positions, anyway=anyway, over=over)
        for name, start in starts.items():
            if start.position != START:
                log.info("resuming", channel=name, epoch=start.position.epoch, offset=start.position.offset)
        fresh = {name: start.position.epoch for name, start in starts.items() if name not in held}
        set_reader_state(self._layout, fresh, fifo_mode=self.state.job.penstock.fifo_mode)
        return starts

    async def _run(self, until: Callable[[Supervisor], Awaitable[None]]) -> None:
        async def stop_after_until() -> None:
            await until(self)
            raise Stop

        state = self.state
        try:
            async with TaskGroup() as group:
                for name, channel in state.channels.items():
                    group.create_task(channel.run(), name=f"channel {name}")
                for stream in self._shared:
                    group.create_task(stream.run(), name=repr(stream))
                for learner in self._learners.values():
                    group.create_task(learner.run(), name=repr(learner))
                group.create_task(stop_after_until(), name="stop")
                group.create_task(state.history.run(), name="history")
                group.create_task(remind(state), name="reminder")
                if self._shared:
                    group.create_task(log_held_back(state.channels), name="held back")
                group.create_task(watch_storage(state), name="storage watch")
                group.create_task(watch_trainers(state), name="trainer watch")
                if self._uploader is not None:
                    group.create_task(self._uploader.run(), name="uploader")
        except* Stop:
            state.offered = False
            self._log_cut_off()

    async def drain(self) -> None:
        """Begin no further epoch and wait at most `DrainFor` seconds until the running epochs end."""
        state = self.state
        state.offered = False
        for channel in state.channels.values():
            channel.drain()
        try:
            async with asyncio.timeout(state.job.penstock.drain_for):
                for channel in state.channels.values():
                    await channel.done.wait()
        except TimeoutError:
            channels = state.statistics()
            self._cut_off = [name for name, channel in channels.items() if channel.state == "streaming"]

    def _log_cut_off(self) -> None:
        """Log the channels that were cut off; after all bytes have stopped, or `missing_bytes` is wrong."""
        channels = self.state.statistics()
        for name in self._cut_off:
            channel = channels[name]
            total = channel.bytes_total
            missing = None if total is None else total - channel.bytes_consumed
            log.warning("cut off", channel=name, epoch=channel.epoch, missing_bytes=missing)

    async def upload(self, code: int) -> None:
        """Upload what the trainer has left, whose exit code is `code`, if the job says where to."""
        if self._uploader is None or self.all_uploaded:
            return
        self._uploading = True
        self.uploaded = await self._uploader.end(code)
        self._uploading, self.all_uploaded = False, code == 0
        for name, why in self.uploaded.left.items():
            log.error("not uploaded", name=name, reason=why)

    async def hand_over(self) -> None:
        """End every channel without a trailer and leave its FIFO to the keeper, for the next sidecar.

        Starts a keeper if there is none. `until` must return next. Raises SinkError.
        """
        if self._uploading:
            raise SinkError("the trainer's results are being uploaded; restart when that has ended")
        state = self.state
        keeper = await self._keeper.hand_over(state.channels)
        state.offered = False
        for channel in state.channels.values():
            channel.leave(keeper)
