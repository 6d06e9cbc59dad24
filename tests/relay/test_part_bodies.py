"""Parts of several ranges by our own client: one body, the bytes and the errors of single ranges."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import web

from streamer.aio import TaskGroup
from streamer.errors import Denied, SourceError, Throttled, Truncated
from streamer.plan import Arrangement, Part, Plan, S3Uri, cut
from streamer.relay.deliver.delivery import Delivery
from streamer.relay.fetch.prefetcher import Prefetcher, StreamSpec
from streamer.relay.statistics import ChannelCounters
from streamer.relay.transport import TransportSpec, open_transport
from streamer.s3.client.endpoint import STALL_TIMEOUT
from streamer.s3.pages.pages import open_pages
from streamer.s3.range_gets import LeftToAiobotocore
from streamer.s3.ranges import Body, Outcome, RangeRequest, RangeSource, ignore
from streamer.sink.outlet import PipeOutlet
from streamer.units import KIB, MIB
from tests.kit.faults import chunked
from tests.kit.harness import EAGER, RunChannel, clients_of, fill
from tests.kit.pipes import off_loop, read_all
from tests.kit.planning import plan_prefix
from tests.kit.stub import Answer, Fault, S3Stub, cut_after, fails, stalls, turns, with_headers

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")

SIZES = [1, 40_000, 130_000, 0, 7, 70_000, 3_000, 90_000, 256, 64 * KIB]


def part_of_all(plan: Plan) -> Part:
    """Return the part of all objects."""
    (part,) = cut(plan.segments(0), part_size=lambda: MIB, epoch=0, together=lambda: (2 * MIB, 2 * MIB))
    return part


@contextlib.asynccontextmanager
async def opened(
    server: S3Stub,
    bundle: str | None,
    on_fallback: Callable[[LeftToAiobotocore], None] = ignore,
    *,
    stall_timeout: float = STALL_TIMEOUT,
) -> AsyncIterator[tuple[RangeSource, Part, bytes]]:
    """Open our own client; yield it, the part of all objects, and its bytes."""
    async with clients_of(server, ca_bundle=bundle, stall_timeout=stall_timeout) as clients:
        spec = TransportSpec(buckets={"b"}, channels=[None], budget=8 * MIB, on_fallback=on_fallback)
        async with open_transport(clients, spec) as transport:
            with open_pages(clients) as pages:
                plan = await plan_prefix(pages, S3Uri("b", "data/"), None)
            yield (
                transport.source,
                part_of_all(plan),
                b"".join(server.objects[key] for key in sorted(server.objects)),
            )


@pytest.fixture
def bundle(way: str, tmp_path: Path) -> str | None:
    return str(tmp_path / "ca.pem") if way == "decrypted" else None


async def pulled(body: Body) -> tuple[bytes, SourceError | None]:
    """Take all bytes of a body, and close it; return them, and the error that followed them."""
    room, whole = bytearray(body.left), body.left
    failed: SourceError | None = None

    def pull() -> None:
        try:
            while body.left:
                body.read_into(memoryview(room)[whole - body.left :])
        except BlockingIOError:
            body.notify(pull)
        except SourceError:
            return  # `Body.taken` raises it too

    pull()
    try:
        await body.taken()
    except SourceError as error:
        failed = error
    finally:
        body.close()
    return bytes(room[: whole - body.left]), failed


@pytest.mark.parametrize("wrap", [False, True])
async def test_every_rest_of_a_part_has_the_bytes_of_the_stream(
    server: S3Stub, run_own: RunChannel, *, wrap: bool
) -> None:
    """A retry and a resume begin anywhere, in an object and in literals."""
    fill(server, SIZES)
    async with run_own(arrangement=Arrangement(wrap=wrap)) as channel:
        truth = await off_loop(read_all, channel.fifo(0))
        part = part_of_all(channel.plan)
        for first in (0, 1, 5, 9, 11, 40_003, 170_009, len(truth) - 5, len(truth) - 1):
            body = await channel.source.open(RangeRequest(part, first, requests=4))
            assert await pulled(body) == (truth[first:], None)


async def test_requests_are_as_many_as_allowed_and_reported(server: S3Stub, run_own: RunChannel) -> None:
    truth = fill(server, [20_000] * 40)
    async with run_own(requests_in_flight=3) as channel:
        assert await off_loop(read_all, channel.fifo(0)) == truth
        found = channel.channel.statistics()
        assert found.objects_completed == 40
        assert found.counts["requests"]["ok"] >= 40
    assert server.most_in_flight <= 3


def denied_before(fault: Fault) -> tuple[Fault, Fault]:
    """Return the faults of two parts: the first responds by `fault` only after the second was denied."""
    refused = asyncio.Event()

    async def waits(answer: Answer) -> web.StreamResponse:
        await refused.wait()
        await turns()
        return await fault(answer)

    async def denies(answer: Answer) -> web.StreamResponse:
        refused.set()
        return await fails(403, "AccessDenied")(answer)

    return waits, denies


async def test_a_failed_range_ends_the_body_after_the_bytes_before_it(
    server: S3Stub, bundle: str | None
) -> None:
    """Also if its error is known first; nothing after it is requested any more.

    The requests do not wait for the first response, even if no connection is open yet.
    """
    fill(server, [30_000] * 12)
    keys = sorted(server.objects)
    waits, denies = denied_before(with_headers())
    outcomes: list[Outcome] = []
    async with opened(server, bundle) as (source, part, truth):
        server.script(waits, key=keys[0])
        server.script(denies, key=keys[3])
        request = RangeRequest(
            part, requests=5, on_request_ended=lambda outcome, *_: outcomes.append(outcome)
        )
        data, error = await pulled(await source.open(request))
    assert data == truth[:90_000]
    assert isinstance(error, Denied)
    assert error.context.key == "data/0003"
    assert outcomes.count("ok") == 3
    assert [type(each) for each in outcomes if isinstance(each, SourceError)] == [Denied]
    assert "data/0011" not in {seen.key for seen in server.seen}


async def test_a_part_fails_while_the_error_of_a_later_range_is_read(
    server: S3Stub, bundle: str | None
) -> None:
    """Both responses are ended once."""
    fill(server, [30_000] * 3)
    keys = sorted(server.objects)
    halved, ended = asyncio.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def half(answer: Answer) -> web.StreamResponse:
        loops.append(asyncio.get_running_loop())
        response = web.StreamResponse(status=403)
        response.content_length = 100
        await response.prepare(answer.request)
        await response.write(b"<Error>")
        halved.set()
        await ended.wait()
        return response

    async def denies(answer: Answer) -> web.StreamResponse:
        await halved.wait()
        await turns()
        return await fails(403, "AccessDenied")(answer)

    async with opened(server, bundle) as (source, part, truth):
        assert await pulled(await source.open(RangeRequest(part, 0, requests=3))) == (truth, None)
        server.script(denies, denies, key=keys[1])  # on a used connection, and on a fresh one
        server.script(half, key=keys[2])
        data, error = await pulled(await source.open(RangeRequest(part, 0, requests=3)))
        loops[0].call_soon_threadsafe(ended.set)
    assert data == truth[:30_000]
    assert isinstance(error, Denied)


async def test_a_response_that_never_comes_ends_the_body(server: S3Stub, bundle: str | None) -> None:
    """Also one that was requested after the first one, and is due later."""
    fill(server, [30_000] * 3)

    async def slow(answer: Answer) -> web.StreamResponse:
        await asyncio.sleep(0.1)
        return await with_headers()(answer)

    async def silent(answer: Answer) -> web.StreamResponse:
        await server.released.wait()
        return await with_headers()(answer)

    server.script(slow, key="b/data/0000")
    server.script(silent, key="b/data/0001")
    async with opened(server, bundle, stall_timeout=0.3) as (source, part, truth):
        data, error = await pulled(await source.open(RangeRequest(part, 0, requests=1)))
        server.release()
    assert data == truth[:30_000]
    assert "no response for 0.3 s" in str(error)


async def test_whole_objects_of_a_part_do_not_wait_for_a_late_one(
    server: S3Stub, run_own: RunChannel
) -> None:
    """Only bytes of the response that is not whole are in doubt."""
    truth = fill(server, [20_000, 10_000, 15_000])
    server.script(stalls(server, after=5_000), key="b/data/0002")

    def read_objects(path: Path) -> bytes:
        with open(path, "rb") as fifo:
            return fifo.read(30_000)

    async with run_own(part_size=MIB) as channel:
        assert await off_loop(read_objects, channel.fifo(0)) == truth[:30_000]
        server.release()


async def test_requests_that_a_part_needs_no_more_are_for_others(server: S3Stub, bundle: str | None) -> None:
    fill(server, [30_000] * 12)
    ended: list[int] = []
    async with opened(server, bundle) as (source, part, truth):
        request = RangeRequest(part, 0, requests=4, on_spare=ended.append)
        assert await pulled(await source.open(request)) == (truth, None)
    assert 2 <= sum(ended) < 4


async def test_a_retry_asks_for_one_range_first(server: S3Stub, bundle: str | None) -> None:
    """A server that refuses gets few requests whose responses cannot be used."""
    fill(server, [10_000] * 12)
    server.script(*[fails(503, "SlowDown")] * 3, key="b/data/0002")
    async with opened(server, bundle) as (source, part, truth):
        data, attempt = b"", 0
        while len(data) < len(truth):
            attempt += 1
            try:
                body = await source.open(RangeRequest(part, len(data), attempt, requests=8))
            except Throttled:
                continue
            more, error = await pulled(body)
            data += more
            assert error is None or isinstance(error, Throttled)
    assert data == truth
    assert attempt == 4
    asked = Counter(seen.key for seen in server.seen)
    assert asked["data/0002"] == 4
    assert asked["data/0005"] <= 2  # 1 if the first refusal came before its connection was open
    assert asked["data/0011"] == 1


@pytest.mark.parametrize(
    "fault",
    [fails(500, "InternalError"), fails(503, "SlowDown"), cut_after(0), cut_after(5_000)],
    ids=["error", "slow_down", "no_response", "cut"],
)
async def test_a_fault_in_a_part_passes(server: S3Stub, run_own: RunChannel, fault: Fault) -> None:
    truth = fill(server, [50_000] * 30)
    for key in sorted(server.objects)[::4]:
        server.script(fault, key=key)
    async with run_own() as channel:
        assert await off_loop(read_all, channel.fifo(0)) == truth


@pytest.mark.parametrize(
    "fault",
    [with_headers(), fails(503, "SlowDown"), cut_after(0), cut_after(200_000)],
    ids=["none", "slow_down", "no_response", "cut"],
)
async def test_a_large_part_of_a_few_ranges_is_delivered_from_its_sockets(
    server: S3Stub, bundle: str | None, fault: Fault
) -> None:
    """Its bodies wait in their sockets, with any fault of one of them; also one of the first part."""
    truth = fill(server, [300_000, 1, 299_999, 250_000, 40_000, 0, 260_000, 310_000] * 4)
    for key in sorted(server.objects)[2::5]:
        server.script(fault, key=key)
    async with clients_of(server, ca_bundle=bundle) as clients:
        spec = TransportSpec(buckets={"b"}, channels=[None], budget=8 * MIB)
        async with open_transport(clients, spec) as transport:
            with open_pages(clients) as pages:
                plan = await plan_prefix(pages, S3Uri("b", "data/"), None)
            read_end, write_end = os.pipe()
            reader = asyncio.create_task(off_loop(_read_to_end, read_end))
            async with TaskGroup() as requests:
                prefetcher = Prefetcher(
                    StreamSpec(plan, EAGER),
                    transport.source,
                    transport.stages(),
                    counters=ChannelCounters(),
                    requests=requests,
                    large_together=True,
                )
                delivery = Delivery(prefetcher)
                with contextlib.closing(PipeOutlet(write_end, on_gone=delivery.wake)) as outlet:
                    await delivery.deliver(0, outlet, next_too=False)
                delivery.close()
            assert await reader == truth


def _read_to_end(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as file:
        return file.read()


async def test_a_parked_part_calls_once_for_an_error(server: S3Stub, bundle: str | None) -> None:
    """A stage that waits for a full socket is called when the body that it takes next has failed."""
    fill(server, [300_000] * 3)
    server.script(cut_after(200_000, once=server.released), key="b/data/0000")
    async with opened(server, bundle) as (source, part, truth):
        body = await source.open(RangeRequest(part, 0, requests=3))
        called = asyncio.Event()
        body.park(called.set)
        server.release()
        await called.wait()
        data, error = await pulled(body)
    assert data == truth[: len(data)]
    assert len(data) <= 200_000
    assert isinstance(error, Truncated)


async def test_connections_that_end_with_each_response(server: S3Stub, run_own: RunChannel) -> None:
    truth = fill(server, [5_000] * 40)

    async def last(answer: Answer) -> web.StreamResponse:
        response = await with_headers()(answer)
        response.force_close()
        return response

    server.script(*[last] * 200)
    async with run_own() as channel:
        assert await off_loop(read_all, channel.fifo(0)) == truth


async def test_a_body_of_unknown_length_in_a_part(server: S3Stub, run_own: RunChannel) -> None:
    """Our own client leaves it to aiobotocore, with the rest of its part."""
    truth = fill(server, [5_000] * 20)

    keys = sorted(server.objects)
    server.script(chunked, key=keys[0])
    server.script(*[chunked] * 3, key=keys[7])
    async with run_own() as channel:
        assert await off_loop(read_all, channel.fifo(0)) == truth


def unless_by_aiobotocore(fault: Fault, otherwise: Fault) -> Fault:
    async def answers(answer: Answer) -> web.StreamResponse:
        by_aiobotocore = "Botocore" in answer.request.headers.get("User-Agent", "")
        return await (otherwise if by_aiobotocore else fault)(answer)

    return answers


async def test_what_is_left_to_aiobotocore_is_requested_at_once(server: S3Stub, bundle: str | None) -> None:
    """The responses come when four requests wait for them; the cause is reported once."""
    fill(server, [20_000] * 20)
    waiting, enough = Counter[str](), asyncio.Event()

    async def together(answer: Answer) -> web.StreamResponse:
        waiting["requests"] += 1
        if waiting["requests"] == 4:
            enough.set()
        await enough.wait()
        return await chunked(answer)

    server.script(*[unless_by_aiobotocore(chunked, together)] * 200)
    causes: list[LeftToAiobotocore] = []
    async with opened(server, bundle, on_fallback=causes.append) as (source, part, truth):
        for first in (0, 130_000):
            body = await source.open(RangeRequest(part, first, requests=4))
            assert await pulled(body) == (truth[first:], None)
    assert [(error.context.key, "without its length" in error.message) for error in causes] == [
        ("data/0000", True)
    ]
    assert server.most_in_flight <= 5  # a request that our own client has cancelled may be among them


async def test_an_error_of_aiobotocore_comes_after_the_bytes_before_it(stub: S3Stub) -> None:
    """Also if it is known before them. Requests for later parts are cancelled."""
    fill(stub, [20_000] * 20)
    keys, (waits, denies) = sorted(stub.objects), denied_before(chunked)

    async def stands(_: Answer) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    for index, key in enumerate(keys):
        fault = {2: waits, 4: denies}.get(index, stands if index > 4 else chunked)
        stub.script(*[unless_by_aiobotocore(chunked, fault)] * 5, key=key)
    async with opened(stub, None) as (source, part, truth):
        data, error = await pulled(await source.open(RangeRequest(part, 0, requests=4)))
    assert data == truth[:80_000]
    assert isinstance(error, Denied)
    assert error.context.key == "data/0004"
    assert "data/0009" not in {seen.key for seen in stub.seen}
