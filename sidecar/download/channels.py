"""Downloads File channels: every object becomes a file, before any FIFO is offered.

    check     map keys to paths below `<data>/<channel>` (`sidecar.download.paths`)
    continue  find the whole files of an earlier start (`sidecar.download.directory`)
    fetch     stream the rest of the plan as a Pipe channel does, into files (`streamer.relay.files`)
    publish   flush to the disk, and rename the temporary directory to the channel's directory

So the directory is absent or complete. Fetching is `stream_once`: transport, memory budget, concurrency
limit, bandwidth limit, retries and hedges are those of a Pipe channel. Channels are downloaded one after the
other, each with the whole budget, since no FIFO is offered yet. Whole files of a download that ends early, by
an error, a signal or a kill, stay beside the directory, and the next start fetches the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sidecar.config.transport import transport_spec
from sidecar.download.directory import DownloadDirectory, Rest
from sidecar.download.paths import file_paths, without_markers
from sidecar.observe.state import DownloadStatistics
from sidecar.process.logs import log, shows_text
from sidecar.process.progress import progress_line, transferred
from streamer.aio import in_thread
from streamer.directory import Directory
from streamer.errors import SinkError
from streamer.plan import Plan
from streamer.relay.files.outlet import WRITERS, FilesOutlet, Written, batch_size
from streamer.relay.once import stream_once
from streamer.relay.statistics import ChannelCounters, sum_of
from streamer.relay.transport import open_transport

if TYPE_CHECKING:
    from sidecar.observe.state import JobState
    from streamer.relay.files.target import TargetFile
    from streamer.relay.staging.stage import Stages
    from streamer.relay.staging.taps import Tap
    from streamer.relay.transport import TransportSpec
    from streamer.s3.client.session import Clients

PROGRESS_EVERY = 10.0
"""Seconds between log lines while a channel is downloaded."""


async def download_channels(state: JobState, plans: Mapping[str, Plan], clients: Clients, place: str) -> None:
    """Download every File channel into `place`, the directory of all channels: absolute, without links.

    `state` has the progress. Raises SourceError, SinkError, ConfigError.
    """
    job = state.job
    for channel in job.channels("File"):
        name = channel.channel_name
        download = Download(name, plans[name], place)
        state.downloading, state.downloads[name] = download.text, download.statistics
        fetched = await download.run(clients, transport_spec(job, download.plan.entries.buckets, [None]))
        state.downloading = None
        log.info(
            "downloaded" if fetched else "downloaded before",
            channel=name,
            objects=download.plan.objects(0),
            bytes=download.plan.total_bytes(0),
        )


class Download:
    """The download of one channel. Call `run` once."""

    def __init__(self, channel: str, plan: Plan, data: str) -> None:
        """`data`: the directory of all channels, an absolute path without links."""
        self._channel = channel
        self.plan = plan
        """The objects to download; once `run` has begun, without folder markers."""
        self._data = data
        self._counters = ChannelCounters()
        self._rest: Rest | None = None
        self._written = Written()
        self._began = 0.0
        """Start of the transfer, in monotonic seconds."""
        self._complete = False

    def statistics(self) -> DownloadStatistics:
        """Return a snapshot of the download."""
        share, total = float(self._complete), self.plan.total_bytes(0)
        if self._rest is not None and not self._complete and total:
            share = (self._rest.bytes_done + self._written.bytes) / total
        counts = sum_of([self._counters.counts])
        return DownloadStatistics(self._written.bytes, self._written.files, share, counts)

    def text(self) -> str:
        """Return, in one line, how far the download is."""
        if self._rest is None:
            return f"{self._channel}: looking for the files of an earlier download"
        return f"downloading {self._transferred(self._rest)}"

    def _transferred(self, rest: Rest) -> str:
        """Return the text of the progress line."""
        seconds, total = time.monotonic() - self._began, self.plan.total_bytes(0)
        return f"{self._channel}: {transferred(self._written.bytes, total, seconds, before=rest.bytes_done)}"

    async def run(self, clients: Clients, spec: TransportSpec) -> bool:
        """Download the plan's objects; return False if they are there already.

        Raises SourceError, SinkError, ConfigError, and then leaves the channel's directory as it was.
        """
        plan = self.plan = await in_thread(without_markers, self.plan)
        await in_thread(file_paths, plan)
        with contextlib.ExitStack() as stack:
            with local_errors():
                data = stack.enter_context(Directory.at(self._data))
            directory = stack.enter_context(contextlib.closing(DownloadDirectory(data, self._channel)))
            if await in_thread(directory.has, plan):
                with local_errors():  # a kill may have left them
                    await in_thread(directory.tidy)
                self._complete = True
                return False
            with local_errors():
                rest = await in_thread(directory.begin, plan)
            await self.fetch(directory.files(plan, rest), rest, clients, spec)
            with local_errors():
                await in_thread(directory.publish, plan)
            self._complete = True
            return True

    async def fetch(
        self,
        files: Iterator[TargetFile],
        rest: Rest,
        clients: Clients,
        spec: TransportSpec,
        tap: Tap | None = None,
    ) -> None:
        """Write the objects of `rest` to `files`, each of which is one; `tap` sees their bytes.

        Raises SourceError, SinkError.
        """
        batch = batch_size(spec.budget)
        spec = replace(spec, budget=spec.budget - WRITERS * batch)
        outlet = FilesOutlet(files, batch=batch)
        self._rest, self._written, self._began = rest, outlet.written, time.monotonic()
        self._log(rest)
        try:
            async with open_transport(clients, spec) as transport:
                stages: Stages = transport.stages(spec.channels[0])
                with progress_line(partial(self._transferred, rest), quiet=not shows_text()):
                    await stream_once(
                        rest.plan,
                        transport.source,
                        stages if tap is None else transport.tapped(stages, tap),
                        policy=spec.retry,
                        counters=self._counters,
                        open_outlet=lambda _: outlet,
                    )
            await outlet.finish()
        finally:
            self._timer.cancel()
            await outlet.end()

    def _log(self, rest: Rest) -> None:
        """Log how far the download is, now and every `PROGRESS_EVERY` seconds."""
        log.info(
            "downloading",
            channel=self._channel,
            objects=self.plan.objects(0),
            bytes=self.plan.total_bytes(0),
            objects_done=rest.objects_done + self._written.files,
            bytes_done=rest.bytes_done + self._written.bytes,
        )
        self._timer = asyncio.get_running_loop().call_later(PROGRESS_EVERY, self._log, rest)


@contextlib.contextmanager
def local_errors() -> Iterator[None]:
    """Have an OSError of the block be a SinkError."""
    try:
        yield
    except OSError as error:
        raise SinkError(f"cannot write {error.filename or 'a downloaded file'}: {error.strerror}") from error
