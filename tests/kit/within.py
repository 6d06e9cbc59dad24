"""A trial in this process: channels over one transport, their readers in threads."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from streamer.errors import BadAnswer
from streamer.plan import Plan
from streamer.relay.channel import Channel
from streamer.relay.channel_spec import ChannelEvents, ChannelSpec
from streamer.relay.statistics import EpochRequests
from streamer.relay.transport import Transport, TransportSpec, open_transport, why_read
from streamer.s3.catalog.pages import open_pages
from streamer.s3.checksums import StoredChecksums
from streamer.s3.client.session import Clients, open_clients
from streamer.trailer import Trailer
from tests.kit.outcomes import POLICY, Broken, Scene, moved, read_epoch
from tests.kit.patience import progress_timeout
from tests.kit.truth import BUCKET

LONGEST_RUN = 100.0
"""Seconds without progress after which a run counts as hung."""


class _Count(ChannelEvents):
    """Counts ended epochs by state."""

    def __init__(self, epochs: Counter[str]) -> None:
        self._epochs = epochs

    def epoch_ended(self, trailer: Trailer, _: EpochRequests) -> None:
        self._epochs[trailer.state] += 1


class Run:
    """One trial without kills."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._trial = scene.trial
        self._dice = random.Random(f"{scene.trial.seed} readers")

    async def run(self, directory: Path) -> None:
        """Raises Broken."""
        trial = self._trial
        async with contextlib.AsyncExitStack() as stack:
            clients = await stack.enter_async_context(
                open_clients(
                    self._scene.endpoint,
                    connections=64,
                    stall_timeout=1,
                    by_aiobotocore=trial.transport == "aiobotocore",
                )
            )
            try:
                plans = await self._scene.plans(clients)
            except BadAnswer:
                return
            transport = await stack.enter_async_context(
                open_transport(
                    clients,
                    TransportSpec(
                        wish=trial.transport,
                        buckets={BUCKET},
                        channels=[why_read(plan, check=trial.check) for plan in plans.values()],
                        budget=trial.budget,
                        requests_in_flight=trial.requests_in_flight,
                        part_size=trial.part_size,
                        hedge=trial.hedge,
                    ),
                )
            )
            streamed = await self._streamed(plans, clients, stack)
            channels = []
            for name, plan in streamed.items():
                channel = self._channel(name, plan, transport, clients, directory)
                stack.callback(channel.close)
                channel.prepare()
                channels.append(channel)
            self._scene.change()
            await self._read_all(channels, plans, directory)
            for channel in channels:
                found = channel.statistics()
                moved(found.retries, self._scene.account.retries)
                moved(found.hedges, self._scene.account.hedges)

    async def _streamed(
        self, plans: dict[str, Plan], clients: Clients, stack: contextlib.AsyncExitStack
    ) -> dict[str, Plan]:
        """The plans of the channels: those that judge them, or the same while they are listed."""
        if not self._trial.early:
            return plans
        pages = stack.enter_context(open_pages(clients))
        listings: list[asyncio.Task[None]] = []

        async def end() -> None:
            for task in listings:
                task.cancel()
            await asyncio.gather(*listings, return_exceptions=True)

        stack.push_async_callback(end)
        return await self._scene.open_plans(pages, listings)

    def _channel(
        self, name: str, plan: Plan, transport: Transport, clients: Clients, directory: Path
    ) -> Channel:
        check = self._trial.check
        spec = ChannelSpec(
            name=name,
            plan=plan,
            directory=str(directory),
            retry=POLICY,
            stored_checksums=StoredChecksums(clients.control, clients.credentials) if check else None,
        )
        stages = transport.stages(why_read(plan, check=check))
        return Channel(spec, transport.source, stages, events=_Count(self._scene.account.epochs))

    async def _read_all(self, channels: list[Channel], plans: dict[str, Plan], directory: Path) -> None:
        tasks = [asyncio.create_task(channel.run(), name=channel.name) for channel in channels]
        # Threads of their own: the loop's are few, and are what looks up the server's name.
        threads = ThreadPoolExecutor(len(plans), thread_name_prefix="reader")
        whole = False
        try:
            async with progress_timeout(LONGEST_RUN), asyncio.TaskGroup() as group:
                watching = group.create_task(_none_ends(tasks))
                async with asyncio.TaskGroup() as readers:
                    for name, plan in plans.items():
                        readers.create_task(self._read(name, plan, directory, threads))
                watching.cancel()
            whole = True
        except TimeoutError as error:
            now = [channel.statistics() for channel in channels]
            raise Broken(f"hangs after {LONGEST_RUN:g} s: {now}") from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            # A reader that nobody tells anything waits for minutes.
            threads.shutdown(wait=whole, cancel_futures=True)
            for task in tasks:
                if not task.cancelled() and (ended := task.exception()) is not None:
                    raise Broken(f"{task.get_name()} ended with what no channel may raise") from ended

    async def _read(self, name: str, plan: Plan, directory: Path, threads: Executor) -> None:
        loop = asyncio.get_running_loop()
        dice = random.Random(f"{self._trial.seed} reader {name}")
        left = False
        for epoch in range(self._trial.epochs):
            leaves = dice.random() < self._trial.leaves
            # One byte at least: a reader that goes before its writer has come leaves no trace in a FIFO.
            most = 1 + dice.randrange(1 + plan.total_bytes(epoch)) if leaves else None
            step = dice.choice([4096, 65536, 1 << 20])
            reading = partial(read_epoch, directory / f"{name}_{epoch}", step=step, most=most)
            got = await loop.run_in_executor(threads, reading)
            self._scene.judge(name, plan, epoch, got, after_left=left)
            if got.error is not None:
                return
            left = got.left


async def _none_ends(tasks: list[asyncio.Task[None]]) -> None:
    """Raises Broken when a channel ends, which none does while it has readers."""
    ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    raise Broken(f"{', '.join(task.get_name() for task in ended)} ended under its readers")
