"""One seed: channels of the product on a loop in virtual time, their readers, and the judgement."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import gzip
import os
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from streamer.errors import ChannelError, Denied, StreamError
from streamer.formats import recordio
from streamer.linux import PIPE_SIZE
from streamer.plan import Arrangement, Growth, ObjectRef, Plan
from streamer.readers.core.stream import PipeStream
from streamer.relay.channel import Channel
from streamer.relay.channel_spec import ChannelEvents, ChannelSpec
from streamer.relay.deliver import delivery, lookahead
from streamer.relay.deliver.shared_fifo import SharedFifo
from streamer.relay.shared_stream import SharedStream
from streamer.relay.staging import stage as stages
from streamer.relay.staging.buffers import BUFFER_SIZE, BufferPool, BufferStages
from streamer.relay.staging.pipes import PipePool, PipeStages
from streamer.relay.staging.stage import Stages
from streamer.relay.statistics import EpochRequests
from streamer.retry import RetryPolicy
from streamer.s3.client.endpoint import RequestOptions, Settings
from streamer.s3.client.session import S3Client
from streamer.s3.http_source import HttpSource, tls_context
from streamer.s3.ranges import RangeRequest
from streamer.s3.signing.requests import RangeSigner
from streamer.schedule.budget import MemoryBudget
from streamer.schedule.concurrency import ConcurrencyController
from streamer.schedule.hedging import Hedging
from streamer.trailer import Trailer
from tests.kit.raw import etag
from tests.kit.virtual import Hang, ScheduledLoop, virtual
from tests.machines.schedules.server import Server
from tests.machines.schedules.shared import share, shared_stream
from tests.machines.schedules.trial import BUCKET, LASTING, ChannelTrial, SeedTrial
from tests.machines.schedules.wire import authority

POLICY = RetryPolicy(give_up_after=300, first_wait=0.01, longest_wait=0.5, longest_retry_after=2)
STALL_TIMEOUT = 2.0
PROMPT = 0.5
"""Virtual seconds in which a channel notices that its reader has left; the loop's lateness is a tenth."""
LONGEST = 10_000.0
"""Virtual seconds after which a run counts as hung. 5,000 slow parts of 1 KiB take more than 2,000."""
SHARED_MEMORY = "/dev/shm"


class _Report(ChannelEvents):
    """Passes the trailers of ended epochs on."""

    def __init__(self, epoch_ended: Callable[[Trailer], None]) -> None:
        self._epoch_ended = epoch_ended

    def epoch_ended(self, trailer: Trailer, _: EpochRequests) -> None:
        self._epoch_ended(trailer)


class Broken(Exception):
    """A promise was not kept."""


@dataclass
class Got:
    """What a reader got of one epoch."""

    epoch: int
    data: bytearray = field(default_factory=bytearray, repr=False)
    end: str = "left"
    """How it ended: whole, left or error."""
    error: str = ""
    left_at: float = float("inf")
    """When it closed early, pauses of the process not counted."""


class _NoSource:
    """In the place of aiobotocore's transport: no answer of this server is for it."""

    together = 0

    async def open(self, request: RangeRequest) -> Any:
        raise Broken(f"{request} was handed to another transport")


async def _no_client() -> Any:
    """In the place of aiobotocore's client: no request is for it."""
    raise Broken("aiobotocore's client was opened")


class SeedRun:
    """One run in `directory`."""

    def __init__(self, trial: SeedTrial, loop: ScheduledLoop, directory: str) -> None:
        self.counts: Counter[str] = Counter()
        """Counts of what has happened."""
        self.broken: list[str] = []
        self._trial = trial
        self._loop = loop
        self._directory = directory
        self._server = Server(trial, loop)
        loop.connect = self._server.connect
        self._states: dict[str, list[Trailer]] = {each.name: [] for each in trial.channels}
        self._told_at: dict[tuple[str, int], float] = {}
        """By channel and epoch, when its last trailer was told."""
        self._got: dict[str, list[Got]] = {each.name: [] for each in trial.channels}
        self._stopped: set[str] = set()
        """What an operator has done."""
        self._plans: dict[str, Plan] = {}
        self._listings: list[asyncio.Task[None]] = []
        self._shared: SharedStream | None = None

    async def run(self) -> None:
        """Make the channels, let everybody act, and check what came of it."""
        trial = self._trial
        source = self._http()
        concurrency = ConcurrencyController(
            trial.requests_in_flight,
            trial.part_size,
            fixed_limit=not trial.adaptive,
            fixed_part=True,
            most=16,
        )
        memory_budget = MemoryBudget(
            trial.budget,
            concurrency,
            members=len(trial.channels) if trial.shared is None else 1,
            hedging=Hedging(trial.hedge),
            unit=1 if trial.splice else BUFFER_SIZE,
        )
        memory_budget.ahead = trial.ahead
        pipes, buffers = PipePool(64 * PIPE_SIZE, most=64), BufferPool()
        channels: list[Channel] = []
        fifos: dict[str, SharedFifo] = {}
        supply: Stages | None = None
        if trial.shared is not None:
            supply = self._stages(memory_budget, pipes, buffers)
            self._shared = shared_stream(trial.shared, trial.channels, source, supply, POLICY)
            fifos = {each.name: each for each in self._shared.fifos}
            self._plans |= {each.name: each.plan for each in self._shared.fifos}
        for each in trial.channels:
            stages = supply or self._stages(memory_budget, pipes, buffers)
            channels.append(self._channel(each, source, stages, fifos.get(each.name)))
        tasks = await self._play(channels, memory_budget)
        for task in tasks:
            if not task.cancelled() and task.exception() is not None:
                raise Broken(f"{task.get_name()} ended with what it may not raise") from task.exception()
        for channel in channels:
            self._check(channel, memory_budget)
            channel.close()
        source.close()
        await self._server.close()
        pipes.close()
        await asyncio.sleep(100)  # threads of a loop return, and sockets that are closed are told
        self._count("fault", self._server.struck)

    def _stages(self, memory_budget: MemoryBudget, pipes: PipePool, buffers: BufferPool) -> Stages:
        quota = memory_budget.quota()
        return PipeStages(quota, pipes) if self._trial.splice else BufferStages(quota, buffers)

    def _http(self) -> HttpSource:
        """Our own transport."""
        trial = self._trial
        bundle = None
        if trial.tls:
            bundle = f"{self._directory}/.ca.pem"
            with open(bundle, "wb") as file:
                file.write(authority()[1])
        settings = Settings(
            f"{'https' if trial.tls else 'http'}://s3.test:9000",
            "us-east-1",
            path_style=True,
            keys=None,
            ca_bundle=bundle,
        )
        client, reading = S3Client(_no_client, settings, stall_timeout=STALL_TIMEOUT), RequestOptions()
        return HttpSource(
            RangeSigner(client, None, anonymous=True, reading=reading),
            _NoSource(),
            tls=tls_context(bundle) if trial.tls else None,
            stall_timeout=STALL_TIMEOUT,
        )

    async def _play(self, channels: list[Channel], memory_budget: MemoryBudget) -> list[asyncio.Task[None]]:
        """Run the channels, readers and actions until all have ended. Raises Broken.

        Returns the tasks of the channels, and that of their stream if they share one.
        """
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(LONGEST):
                for channel in channels:
                    channel.prepare()
                    tasks.append(self._loop.create_task(channel.run(), name=channel.name))
                if self._shared is not None:
                    tasks.append(self._loop.create_task(self._shared.run(), name="shared stream"))
                others = [self._loop.create_task(self._change())]
                others += [
                    self._loop.create_task(self._act(when, what, channels, tasks, memory_budget))
                    for when, what in self._trial.actions
                ]
                others += self._listings
                readers = [self._loop.create_task(self._read(each)) for each in self._trial.channels]
                await asyncio.gather(*readers, *others)
                for channel in channels:
                    channel.drain()
                await asyncio.wait(tasks)
        except TimeoutError:
            now = [str(channel.statistics()) for channel in channels]
            raise Broken(f"hangs: readers have {self._got}; {now}") from None
        return tasks

    def _channel(self, each: ChannelTrial, source: Any, supply: Any, shared: SharedFifo | None) -> Channel:
        if shared is None:
            refs = [ObjectRef(BUCKET, key, len(data), etag(data)) for key, data in each.objects.items()]
            arrangement = Arrangement(wrap=each.wrap, seed=each.shuffle, inflate=each.inflate)
            plan = self._plans[each.name] = Plan.of(refs, arrangement)
            if each.listing is not None:
                plan = self._open_plan(each, refs, arrangement)
        else:
            plan = shared.plan
        spec = ChannelSpec(
            name=each.name,
            plan=plan,
            directory=self._directory,
            retry=POLICY,
            when_failed=each.when_failed,
        )
        return Channel(spec, source, supply, events=_Report(self._epoch_ended), shared=shared)

    def _open_plan(self, each: ChannelTrial, refs: list[ObjectRef], arrangement: Arrangement) -> Plan:
        """Return a plan of the first object, and list the others as drawn."""
        entries = arrangement.entries()
        growth = Growth(entries)

        def add(first: int, end: int) -> None:
            run = arrangement.entries()
            for ref in refs[first:end]:
                run.add(ref)
            for _ in growth.add(run):
                pass

        async def listing() -> None:
            named = 1
            for number, pause in enumerate(each.listing or (), 1):
                if pause:
                    add(named, number)
                    named = number
                    await asyncio.sleep(pause)
            if each.listing_fails:
                self.counts["fault listing"] += 1
                growth.fail(Denied("the listing failed"))
                return
            add(named, len(refs))
            growth.close()

        add(0, 1)
        self._listings.append(self._loop.create_task(listing()))
        return Plan(entries, arrangement, growth=growth)

    def _epoch_ended(self, trailer: Trailer) -> None:
        self._states[trailer.channel].append(trailer)
        self._told_at[trailer.channel, trailer.epoch] = self._loop.now - self._loop.paused

    async def _change(self) -> None:
        if self._trial.changed is not None:
            key, when, now = self._trial.changed
            await asyncio.sleep(when)
            if now is None:
                del self._server.objects[key]
            else:
                self._server.objects[key] = now
            self.counts["fault changed"] += 1

    async def _act(
        self,
        when: float,
        what: str,
        channels: list[Channel],
        tasks: list[asyncio.Task[None]],
        memory_budget: MemoryBudget,
    ) -> None:
        await asyncio.sleep(when)
        self.counts[f"fault {what}"] += 1
        match what:
            case "drain":
                self._stopped.add(what)
                for channel in channels:
                    channel.drain()
            case "cancel":
                self._stopped.add(what)
                for task in tasks:
                    task.cancel()
            case "requests":
                memory_budget.change_requests(1)
            case "budget":
                memory_budget.change_budget(max(memory_budget.least_budget, self._trial.budget // 2))
            case "bandwidth":
                memory_budget.bandwidth.change(50_000, self._loop.now)
            case _:
                memory_budget.bandwidth.change(None, self._loop.now)

    # The reader

    async def _read(self, each: ChannelTrial) -> None:
        dice = random.Random(f"{self._trial.seed} reader {each.name}")
        total = sum(map(len, each.objects.values()))
        for epoch in range(each.epochs):
            leaves = dice.random() < each.leaves
            most = 1 + dice.randrange(1 + total) if leaves else None
            got = Got(epoch)
            self._got[each.name].append(got)
            await asyncio.sleep(dice.choice([0.0, dice.expovariate(10), dice.expovariate(1)]))
            step = dice.choice([100, 5000, 1 << 16, 1 << 20])
            await self._read_epoch(each, got, dice, most=most, step=step)
            if got.end == "error":
                return

    async def _read_epoch(
        self, each: ChannelTrial, got: Got, dice: random.Random, *, most: int | None, step: int
    ) -> None:
        path = f"{self._directory}/{each.name}_{got.epoch}"
        try:
            with PipeStream(path, timeout=300, patience=0.0) as stream:
                wait = 0.001
                while not stream.open(0):
                    await asyncio.sleep(wait)
                    wait = min(1.0, 2 * wait)
                self._loop.try_to_open()
                wait, capacity = 0.001, each.fifo
                while most is None or len(got.data) < most:
                    data = stream.read(step)
                    if data is None:
                        await asyncio.sleep(wait)
                        wait = min(1.0, 2 * wait)
                        continue
                    if not data:
                        got.end = "whole"
                        return
                    wait = 0.001
                    got.data += data
                    if capacity is not None:
                        with contextlib.suppress(OSError):  # more is in it now
                            fcntl.fcntl(stream.fileno(), fcntl.F_SETPIPE_SZ, capacity)
                            capacity = None
                    if each.pause and dice.random() < 0.3:
                        await asyncio.sleep(dice.expovariate(1 / each.pause))
                    else:
                        await asyncio.sleep(0)
                if dice.random() < 0.5:
                    await asyncio.sleep(dice.expovariate(20))
            got.left_at = self._loop.now - self._loop.paused
        except (StreamError, ChannelError) as error:
            got.end, got.error = "error", str(error)

    # The judgement

    def _check(self, channel: Channel, memory_budget: MemoryBudget) -> None:
        each = next(one for one in self._trial.channels if one.name == channel.name)
        now, states, name = channel.statistics(), self._states[channel.name], channel.name
        if now.reserved_bytes or now.requests_in_flight or memory_budget.active:
            raise Broken(
                f"{name} holds {now.reserved_bytes} bytes and {now.requests_in_flight} requests at its end"
            )
        if dict(Counter(each.state for each in states)) != now.counts["epochs"]:
            raise Broken(f"{name} counts {now.counts['epochs']} and told {states}")
        if [each.epoch for each in states] != sorted({each.epoch for each in states}):
            raise Broken(f"{name} told epochs out of order, or twice: {states}")
        if now.written_bytes != sum(trailer.bytes_delivered for trailer in states):
            raise Broken(f"{name} wrote {now.written_bytes} bytes, by its trailers {states}")
        if now.error is not None:
            self._blame(each, now.error)
        for got in self._got[name]:
            self.counts["bytes"] += len(got.data)
            self.counts[f"epoch {got.end}"] += 1
            self._judge(each, got, now.error, {trailer.epoch: trailer for trailer in states})
        self._count("retry", now.counts["retries"])
        self._count("hedge", now.counts["hedges"])

    def _count(self, what: str, counts: Mapping[str, int]) -> None:
        self.counts.update({f"{what} {name}": count for name, count in counts.items()})

    def _judge(self, each: ChannelTrial, got: Got, error: str | None, states: dict[int, Trailer]) -> None:
        name, trailer = f"{each.name}_{got.epoch}", states.get(got.epoch)
        whole = got.end == "whole"
        if not self._right(each, got.epoch, bytes(got.data), whole=whole):
            raise Broken(f"{name}: {len(got.data)} bytes ({got.end}) are not the truth")
        if whole and (trailer is None or trailer.state != "complete"):
            raise Broken(f"{name} is whole for its reader, and the channel says {trailer}")
        if whole and trailer and trailer.bytes_delivered != len(got.data):
            raise Broken(f"{name} has {len(got.data)} bytes for its reader, and the channel says {trailer}")
        noticed = self._told_at.get((each.name, got.epoch), 0.0) - got.left_at
        if noticed > PROMPT and trailer and trailer.state == "abandoned":
            raise Broken(f"{name}: {noticed:.3f} s until the channel noticed that its reader had left")
        if got.end == "error" and error is None and not self._stopped:
            raise Broken(f"{name} failed for its reader alone: {got.error}")
        unopened = got.end == "error" and "no process opened" in got.error
        if unopened and error is not None and not self._stopped:
            raise Broken(f"{name}: the reader was not told why: {got.error}; the channel: {error}")

    def _blame(self, each: ChannelTrial, error: str) -> None:
        lasting = self._trial.lasting.items()
        texts = [text for key, status in lasting if key in each.objects for text in LASTING[status]]
        if self._trial.changed is not None and self._trial.changed[0] in each.objects:
            texts += ["was replaced", "is gone", "no such object", "cannot be inflated", "bytes now"]
        if each.listing_fails:
            texts.append("the listing failed")
        if not any(text in error for text in texts):
            raise Broken(f"{each.name} failed for no reason that it was given: {error}")

    def _right(self, each: ChannelTrial, epoch: int, data: bytes, *, whole: bool) -> bool:
        """Whether `data` is the FIFO's part of the objects in order, or the beginning of that."""
        plan = self._plans[each.name]
        if self._shared is None:
            truth = b"".join(self._streamed(each, ref.key) for ref in plan.refs(epoch))
        else:
            truth = share(plan, each.objects, epoch)
        return data == truth if whole else truth.startswith(data)

    def _streamed(self, each: ChannelTrial, key: str) -> bytes:
        """Return an object as it is streamed."""
        data = each.objects[key]
        if each.inflate and data:
            data = gzip.decompress(data)
        return recordio.encode(data) if each.wrap else data


def run_trial(trial: SeedTrial, *, lines: list[str] | None = None) -> Counter[str]:
    """Run it, and append its events to `lines`. Raises Broken, and what should never be raised."""
    before = set(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        with (
            tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="schedules-") as directory,
            warnings.catch_warnings(),
            patch.object(stages, "SMALL_PART", trial.small_part),
            patch.object(delivery, "TURN", trial.turn),
            patch.object(lookahead, "LEAST_AHEAD", 1000),
            virtual(trial.seed) as loop,
        ):
            warnings.simplefilter("error")
            loop.lines = lines
            run = SeedRun(trial, loop, directory)
            asyncio.set_event_loop(loop)
            try:
                loop.run_until_complete(run.run())
            except Hang as error:
                raise Broken(str(error)) from None
            except BaseException:
                _end_all(loop)
                raise
            finally:
                asyncio.set_event_loop(None)
            left = [task for task in asyncio.all_tasks(loop) if not task.done()]
            if left:
                raise Broken(f"tasks are left: {left}")
            if loop.opening:
                raise Broken(f"threads are left in open(2): {loop.opening}")
            if loop.faults:
                raise Broken(f"told to the exception handler: {loop.faults}")
            names = [name for name in os.listdir(directory) if not name.startswith(".")]
            if names:
                raise Broken(f"left in the directory: {names}")
            run.counts["turns of the loop"] = loop.steps
    finally:
        gc.enable()
    gc.collect()
    if left_open := set(os.listdir("/proc/self/fd")) - before:
        found = {}
        for fd in left_open:
            with contextlib.suppress(FileNotFoundError):
                found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        if found:
            raise Broken(f"descriptors are left: {found}")
    return run.counts


def _end_all(loop: ScheduledLoop) -> None:
    """Cancel what is left after a broken promise, so that it does not complain later."""
    for task in asyncio.all_tasks(loop):
        task.cancel()
    with contextlib.suppress(Hang):
        loop.run_until_complete(asyncio.sleep(100))
