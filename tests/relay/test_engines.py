"""Engine processes: the bytes of the job's own process, whatever happens to a process."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import itertools
import os
import random
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from streamer.engines import engine
from streamer.engines.engine import Engines, EngineSettings, running
from streamer.engines.link import Link, frame
from streamer.engines.process import EngineProcess
from streamer.engines.source import EngineSource
from streamer.engines.wire import pack_part
from streamer.errors import SinkError
from streamer.plan import Arrangement, ObjectRef, Part, Span, cut
from streamer.retry import RetryPolicy
from streamer.s3.ranges import RangeRequest
from streamer.units import KIB, MIB
from tests.kit.faults import chunked
from tests.kit.harness import Running, fill, running_channel
from tests.kit.pipes import eventually, off_loop, read_all
from tests.kit.stub import Answer, S3Stub, fails, turns

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")

SMALL = [random.Random(7).randrange(1, 60_000) for _ in range(150)]


def source(running: Running) -> EngineSource:
    found = running.source
    assert isinstance(found, EngineSource)
    return found


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("sizes", "part_size", "wrap"),
    [
        (SMALL, MIB, False),
        (SMALL, MIB, True),
        ([9_000_000, 0, 3, 2_500_000], MIB, False),
        ([9_000_000, 0, 3, 2_500_000], 4 * MIB, True),
    ],
)
async def test_every_byte_arrives_in_order(
    stub: S3Stub, tmp_path: Path, processes: int, sizes: list[int], part_size: int, *, wrap: bool
) -> None:
    truth = fill(stub, sizes)
    arrangement = Arrangement(wrap=wrap)
    async with running_channel(
        stub, tmp_path, transport="splice", processes=processes, part_size=part_size, arrangement=arrangement
    ) as channel:
        got = await off_loop(read_all, channel.fifo(0))
        found = channel.channel.statistics()
        assert found.written_bytes == len(got)
        assert found.objects_completed == sum(size > 0 for size in sizes)
        await eventually(lambda: channel.channel.statistics().requests["ok"] >= found.objects_completed)
    if wrap:
        assert len(got) == channel.plan.total_bytes(0)
        assert all(body in got for body in stub.objects.values())
    else:
        assert got == truth


async def test_tls_is_decrypted_by_engines(tls_stub: S3Stub, tmp_path: Path) -> None:
    truth = fill(tls_stub, [*SMALL, 5_000_000])
    bundle = str(tmp_path / "ca.pem")
    async with running_channel(
        tls_stub, tmp_path, transport="splice", processes=2, part_size=MIB, ca_bundle=bundle
    ) as channel:
        assert await off_loop(read_all, channel.fifo(0)) == truth


async def test_small_objects_are_asked_for_together(stub: S3Stub, tmp_path: Path) -> None:
    """One span for all of them, and never more requests at once than the limit."""
    truth = fill(stub, [20 * KIB] * 40)
    async with running_channel(
        stub, tmp_path, transport="splice", processes=1, part_size=4 * MIB, requests_in_flight=3
    ) as channel:
        assert len(source(channel).engines.engines) == 1
        assert await off_loop(read_all, channel.fifo(0)) == truth
    assert stub.most_in_flight <= 3


async def test_a_part_that_waits_before_its_retry_is_not_hedged(stub: S3Stub, tmp_path: Path) -> None:
    """The wait is the engine's, so the parent's request is under way all the time."""
    fill(stub, SMALL)
    stub.script(*[fails(500, "InternalError", **{"Retry-After": "60"})] * 1000, key="b/data/0100")
    async with running_channel(
        stub, tmp_path, transport="splice", processes=1, hedge=0.05, policy=RetryPolicy(give_up_after=2)
    ) as running:
        with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb") as reader:
            await off_loop(reader.read, sum(SMALL[:100]))
            await eventually(lambda: running.channel.error)
        assert "InternalError" in str(running.channel.error)
        assert running.channel.statistics().hedges.get("issued", 0) < 5


@pytest.mark.parametrize("seed", range(4))
async def test_a_killed_process_loses_nothing(stub: S3Stub, tmp_path: Path, seed: int) -> None:
    """Each process is killed at a random byte of the stream; the rest comes from another."""
    chance = random.Random(seed)
    truth = fill(stub, [*SMALL, 3_000_000, *SMALL[:20], 2_000_000], seed=seed)
    kills = sorted(chance.randrange(len(truth)) for _ in range(6))
    async with running_channel(
        stub, tmp_path, transport="splice", processes=2, part_size=(512 * KIB, 2 * MIB)[seed % 2]
    ) as channel:
        engines = source(channel).engines
        got = bytearray()
        with open(await off_loop(os.open, channel.fifo(0), os.O_RDONLY), "rb", buffering=0) as reader:
            while data := await off_loop(reader.read, 64 * KIB):
                got += data
                while kills and kills[0] <= len(got):
                    kills.pop(0)
                    if forked := [each.pid for each in engines.engines if each.pid]:
                        os.kill(chance.choice(forked), signal.SIGKILL)
        assert got == truth
        assert engines.replaced


async def test_a_span_goes_on_inside_the_literals_after_an_object(stub: S3Stub, tmp_path: Path) -> None:
    """The first bytes need no request, so the response header to wait for is a later part's."""
    fill(stub, [1001, 2002])
    async with running_channel(
        stub, tmp_path, transport="splice", processes=1, arrangement=Arrangement(wrap=True)
    ) as channel:
        parts = list(cut(channel.plan.segments(0), part_size=lambda: MIB, epoch=0))
        first = len(parts[0].leading) + parts[0].body + 1  # of three bytes of padding
        body = await channel.source.open(RangeRequest(Span.of(parts), first))
        got = bytearray(body.left)

        def read() -> None:
            try:
                while body.left:
                    body.read_into(memoryview(got)[len(got) - body.left :])
            except BlockingIOError:
                body.notify(read)

        read()
        await body.taken()
        body.close()
        assert got == (await off_loop(read_all, channel.fifo(0)))[first:]


async def test_a_part_is_left_while_the_one_before_it_waits_for_a_retry(stub: S3Stub, tmp_path: Path) -> None:
    """The wait sends a report, so the span's last report lacks the response that was left."""
    truth = fill(stub, [30_000] * 4)
    first, second, *_ = sorted(stub.objects)
    left = asyncio.Event()

    async def leaves(answer: Answer) -> web.StreamResponse:
        response = await chunked(answer)
        left.set()
        return response

    async def slow_down(answer: Answer) -> web.StreamResponse:
        await left.wait()
        await turns()
        return await fails(503, "SlowDown")(answer)

    stub.script(slow_down, key=first)
    stub.script(leaves, key=second)
    async with running_channel(stub, tmp_path, transport="splice", processes=1, part_size=MIB) as channel:
        assert await off_loop(read_all, channel.fifo(0)) == truth
        assert not source(channel).engines.replaced


async def test_what_an_engine_leaves_is_fetched_here(stub: S3Stub, tmp_path: Path) -> None:
    """Bodies of unknown length, alone and inside a span."""
    truth = fill(stub, [30_000] * 10 + [3_000_000])
    names = sorted(stub.objects)
    for name in (names[0], names[4], names[10], names[10]):
        stub.script(chunked, key=name)
    async with running_channel(stub, tmp_path, transport="splice", processes=1, part_size=MIB) as channel:
        assert await off_loop(read_all, channel.fifo(0)) == truth


async def test_an_error_comes_after_the_bytes_before_it(stub: S3Stub, tmp_path: Path) -> None:
    """An object in the middle of a span is denied: the stream has every byte before that object."""
    truth = fill(stub, [10_000] * 8)
    name = sorted(stub.objects)[5]
    stub.script(*[fails(403, "AccessDenied")] * 50, key=name)
    async with running_channel(stub, tmp_path, transport="splice", processes=1, part_size=MIB) as channel:
        fd = await off_loop(os.open, channel.fifo(0), os.O_RDONLY)
        with open(fd, "rb", buffering=0) as reader:
            got = b""
            while len(got) < 50_000:
                got += await off_loop(reader.read, 50_000 - len(got))
            await eventually(lambda: channel.channel.error)
            os.set_blocking(fd, False)
            assert reader.read(1) is None
            assert got == truth[:50_000]
            error = channel.channel.error
            assert error is not None
            assert name in str(error)
            channel.channel.drain()
            await channel.task


@pytest.fixture
def settings() -> Callable[..., EngineSettings]:
    def made() -> EngineSettings:
        return EngineSettings(
            anonymous=False,
            headers={"x-amz-server-side-encryption-customer-key": "a-customer-key"},
            sends_if_match=True,
            stall_timeout=5.0,
            retry={},
        )

    return made


async def replaced(engines: Engines, count: int = 1) -> None:
    await eventually(lambda: engines.replaced and sum(each.serves for each in engines.engines) == count)


async def test_a_process_that_does_not_answer_is_replaced(settings: Callable[..., EngineSettings]) -> None:
    async with running(1, settings(), None, silent_after=0.1, ping_every=0.1) as engines:
        pid = engines.engines[0].pid
        os.kill(pid, signal.SIGSTOP)
        await replaced(engines)
        assert engines.engines[0].pid != pid
        with pytest.raises(ProcessLookupError):  # the template has reaped it, to fork the next
            os.kill(pid, 0)


async def test_a_process_whose_end_the_socket_does_not_report_is_replaced(
    settings: Callable[..., EngineSettings],
) -> None:
    """Its pidfd reports the end, with no ping."""
    async with running(1, settings(), None, silent_after=60) as engines:
        first = engines.engines[0]
        asyncio.get_running_loop().remove_reader(first._link._sock.fileno())  # noqa: SLF001 - no end comes
        os.kill(first.pid, signal.SIGKILL)
        await replaced(engines)


async def test_a_process_without_its_pidfd_is_refused(settings: Callable[..., EngineSettings]) -> None:
    """The kernel drops the pidfd if this process has no descriptor left. The template runs on."""
    async with running(1, settings(), None, silent_after=60) as engines:
        template = parent_of(engines.engines[0].pid)
        ours, theirs = socket.socketpair()
        with theirs:
            started = engine.Engine(0, ours, settings())
            theirs.sendall(frame(("forked", os.getpid()), 1))
            assert not await engines._run(started)  # noqa: SLF001 - the limit would hit other parts too
            assert started.refusal == "Too many open files"
        os.kill(template, 0)


async def test_a_template_that_refuses_a_process_forks_the_next(
    settings: Callable[..., EngineSettings],
) -> None:
    """Another template would cost the start of an interpreter for each refusal."""
    async with running(1, settings(), None, silent_after=60) as engines:
        first = engines.engines[0].pid
        template = parent_of(first)
        used = {int(each.name) for each in Path(f"/proc/{template}/fd").iterdir()}
        free = next(fd for fd in itertools.count() if fd not in used)
        limits = resource.prlimit(template, resource.RLIMIT_NOFILE)
        # The socket of the next process takes the last descriptor, so its pidfd has none.
        resource.prlimit(template, resource.RLIMIT_NOFILE, (free + 1, limits[1]))
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: engines.replaced > 1)
        resource.prlimit(template, resource.RLIMIT_NOFILE, limits)
        await replaced(engines)
        assert parent_of(engines.engines[0].pid) == template


@pytest.fixture
def subreaper() -> Iterator[None]:
    """The kernel makes this process the parent of orphans, as it does with PID 1."""
    set_subreaper = functools.partial(ctypes.CDLL(None).prctl, 36)  # PR_SET_CHILD_SUBREAPER
    set_subreaper(1, 0, 0, 0)
    yield
    set_subreaper(0, 0, 0, 0)


@pytest.mark.usefixtures("subreaper")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_engines_need_no_template_and_get_another(
    settings: Callable[..., EngineSettings], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """An engine outlives its template; the next one comes from a new template. No zombie is left."""
    async with running(2, settings(), None, silent_after=60, ping_every=0.1) as engines:
        monkeypatch.setattr(engine, "START_WITHIN", 1.0)
        first, second = engines.engines
        template = parent_of(first.pid)
        os.kill(template, number)
        os.kill(first.pid, signal.SIGKILL)
        await replaced(engines, 2)
        assert second in engines.engines
        assert parent_of(engines.engines[0].pid) != template
        with pytest.raises(ProcessLookupError):
            os.kill(first.pid, 0)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


reads_engines = pytest.mark.skipif(os.geteuid() != 0, reason="only root may read the memory of engines")


@reads_engines
async def test_engines_share_the_pages_of_their_template(
    settings: Callable[..., EngineSettings], tls_stub: S3Stub, tmp_path: Path
) -> None:
    """With TLS, less than half of an engine's resident memory is its own."""
    async with running(2, settings(), str(tmp_path / "ca.pem"), silent_after=60) as engines:
        for each in engines.engines:
            rollup = Path(f"/proc/{each.pid}/smaps_rollup").read_text(encoding="ascii").split("\n")[1:-1]
            kib = {line.split(":")[0]: int(line.split()[1]) for line in rollup}
            assert kib["Rss"] < 35 * KIB
            assert kib["Private_Clean"] + kib["Private_Dirty"] < kib["Rss"] / 2


async def test_a_process_that_cannot_start_is_an_error(
    settings: Callable[..., EngineSettings], tmp_path: Path
) -> None:
    with pytest.raises(SinkError, match="before it was ready"):
        async with running(1, settings(), str(tmp_path / "none.pem"), silent_after=5):
            pass


@pytest.fixture
def collector() -> Iterator[None]:
    """An engine process sets the garbage collector for itself."""
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)


async def test_a_span_that_is_closed_before_it_begins_ends(
    settings: Callable[..., EngineSettings], collector: None
) -> None:
    """Else the parent and the engine kept it, and the engine's pool its memory."""
    ours, theirs = socket.socketpair()
    messages: list[tuple[Any, ...]] = []
    part = Part(0, ObjectRef("b", "k", 1000, "e"), 0, 1000, 0)
    async with asyncio.TaskGroup() as tasks:
        process = EngineProcess(theirs, tasks, None)
        link = Link(ours, lambda message, _: messages.append(message), lambda: None)
        link.send(("settings", settings()))
        link.send(("open", 1, 1, None, False, [pack_part(part)]))
        link.send(("close", 1))
        await eventually(lambda: any(what == "ended" for what, *_ in messages))
        process.close()
        link.close()


async def test_a_process_that_is_killed_with_messages_unread_has_ended() -> None:
    """uvloop reports the reset once; what the process had sent before comes first, then its end."""
    ours, theirs = socket.socketpair()
    messages: list[tuple[Any, ...]] = []
    ended = asyncio.Event()
    link = Link(ours, lambda message, _: messages.append(message), ended.set)
    other = Link(theirs, lambda *_: None, lambda: None)
    other.send(("pong",))
    link.send(("open", 1))
    other.close()  # before a turn of the loop, so `open` is unread
    await ended.wait()
    assert messages == [("pong",)]
    link.close()


@reads_engines
async def test_no_secret_is_in_arguments_or_environment(
    credentials: None, settings: Callable[..., EngineSettings]
) -> None:
    async with running(1, settings(), None, silent_after=5) as engines:
        pid = engines.engines[0].pid

        def public() -> bytes:
            return Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()

        found = await asyncio.to_thread(public)
    assert b"streamer.engines" in found
    for secret in (b"a-customer-key", b"AWS_", os.environ["AWS_SECRET_ACCESS_KEY"].encode()):
        assert secret not in found
