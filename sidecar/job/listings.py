"""The listings of a job: what finds their objects, and the tasks that go on while channels stream.

    JobPlanner ─ begin ─▶ task: pages ─▶ runs ─▶ OpenPlan.list ─▶ Growth ─▶ channels
    supervisor: `ended` for a FIFO that resumes, `check` before the first FIFO is offered

A listing that fails keeps its error in its plan. Before the FIFOs are offered it ends the job; after that it
fails the epochs of its channel (`streamer.s3.pages.open_plan`).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from streamer.aio import task_group
from streamer.s3.pages.control_client import ControlClient
from streamer.s3.pages.object_info import ObjectInspector
from streamer.s3.pages.pages import PageSource

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from sidecar.config.job import Job
    from streamer.s3.client.session import Clients
    from streamer.s3.pages.open_plan import OpenPlan


class Listings:
    """The listings of a job: what finds their objects, and the tasks that list open plans."""

    def __init__(self, pages: PageSource, inspector: ObjectInspector, tasks: asyncio.TaskGroup) -> None:
        self.pages = pages
        self.inspector = inspector
        """Finds the objects that manifests name, where pages do not."""
        self.by_channel: dict[str, OpenPlan] = {}
        """Open plans, by channel."""
        self._tasks = tasks
        self._running: list[asyncio.Task[None]] = []

    def begin(self, channel: str, plan: OpenPlan, listing: Coroutine[Any, Any, None]) -> None:
        """Run `listing`, which lists `plan`."""
        self.by_channel[channel] = plan
        self.attend(channel, listing)

    def attend(self, channel: str, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, for which no channel waits."""
        self._running.append(self._tasks.create_task(work, name=f"listing of {channel}"))

    async def ended(self, channel: str) -> None:
        """Wait until the channel's listing has ended. Raises its error."""
        if (plan := self.by_channel.get(channel)) is not None:
            await plan.ended()

    def check(self) -> None:
        """Raise the error of a listing that has failed."""
        for plan in self.by_channel.values():
            if plan.growth.error is not None:
                raise plan.growth.error

    def cancel(self) -> None:
        """End the listings and looks that go on."""
        for task in self._running:
            task.cancel()


@contextlib.asynccontextmanager
async def open_listings(job: Job, clients: Clients) -> AsyncIterator[Listings]:
    """Open the listings of a job; those that go on at the end of the block are cancelled."""
    with contextlib.closing(ControlClient(clients)) as control:
        inspector = ObjectInspector(control, give_up_after=job.penstock.give_up_after)
        async with task_group() as tasks:
            listings = Listings(PageSource(control), inspector, tasks)
            try:
                yield listings
            finally:
                listings.cancel()
