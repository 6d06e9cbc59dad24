"""What S3 may do to a channel, on a real socket: every byte right, or an error by name."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from streamer.relay.transport import Wish
from streamer.retry import RetryPolicy
from streamer.s3.client.doubt import DOUBTED
from tests.kit.faults import WRONG, resets_after
from tests.kit.harness import MORE_THAN_A_FIFO, RunChannel, Running, fill, running_channel
from tests.kit.pipes import eventually, off_loop, read_all, until_equal
from tests.kit.stub import Answer, Fault, S3Stub, cut_after, fails, stalls, whole, with_headers
from tests.kit.trailers import published_trailer

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")


async def failed_after(running: Running, reader_bytes: int) -> str:
    """Read until nothing more comes, see that it is no end of file, and return the error told."""
    with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb", buffering=0) as reader:
        got = b""
        while len(got) < reader_bytes:
            got += await off_loop(reader.read, reader_bytes - len(got))
        await eventually(lambda: running.channel.error)
        os.set_blocking(reader.fileno(), False)
        assert reader.read(1) is None, "an end of file, or more bytes, after a failure"
        trailer = published_trailer(running.directory, "train", 0)
        assert (trailer.state, trailer.bytes_delivered) == ("failed", reader_bytes)
        assert running.channel.statistics().state == "failed"
        running.channel.drain()
        await running.task
    assert trailer.error is not None
    return trailer.error


async def test_a_broken_body_resumes_at_the_next_byte(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    """The connection breaks once the reader holds what had arrived, but for the last 16 KiB of it."""
    truth = fill(stub, [45_000])
    stub.script(cut_after(40_000, once=stub.released))
    async with run(stub, tmp_path, requests_in_flight=1) as running:
        with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb") as reader:
            first = await off_loop(reader.read, 40_000 - DOUBTED)
            stub.release()
            assert first + await off_loop(reader.read) == truth
        await until_equal({"truncated": 1}, lambda: running.channel.statistics().counts["retries"])
        await until_equal({"part": 1}, lambda: running.channel.statistics().counts["resumes"])
        assert running.channel.statistics().records is None  # only the reader knows
    assert [seen.range for seen in stub.seen[:2]] == [
        "bytes=0-44999",
        f"bytes={40_000 - DOUBTED}-44999",
    ]


@pytest.mark.timeout(20)  # and not the 30 s after which silence counts as the end
async def test_a_reset_is_noticed_at_once(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    """libuv stops watching a socket that is in error, and uvloop then says nothing to its reader."""
    truth = fill(stub, [40_000])
    stub.script(resets_after(0), resets_after(10_000))
    async with run(stub, tmp_path, requests_in_flight=1) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        await until_equal(2, lambda: sum(running.channel.statistics().counts["retries"].values()))


async def test_every_range_names_the_listed_version(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    truth = fill(stub, [120_000])
    async with run(stub, tmp_path) as running:
        await off_loop(read_all, running.fifo(0))
    from tests.kit.raw import etag

    assert {seen.if_match for seen in stub.seen} == {f'"{etag(truth)}"'}


@pytest.mark.parametrize(
    "fault",
    [
        fails(500, "InternalError"),
        fails(503, "SlowDown"),
        fails(503, "ServiceUnavailable", **{"Retry-After": "0"}),
        fails(429, "TooManyRequests"),
        fails(400, "RequestTimeout"),
        cut_after(0),
    ],
)
async def test_what_may_pass_is_waited_out(
    run: RunChannel, stub: S3Stub, tmp_path: Path, fault: Callable[[Answer], Awaitable[web.StreamResponse]]
) -> None:
    # No two ranges share a part, whose requests are cancelled when another one fails.
    truth = fill(stub, [130_000])
    stub.script(*[fault] * 5)
    async with run(stub, tmp_path) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        await until_equal(5, lambda: sum(running.channel.statistics().counts["retries"].values()))
        assert running.channel.statistics().counts["resumes"] == {}


async def test_many_parts_that_fail_together_share_no_quota(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """botocore's own would be empty after a hundred, and fail the rest."""
    truth = fill(stub, [1000] * 64)
    stub.script(*[fails(500, "InternalError")] * 400)
    async with run(stub, tmp_path, requests_in_flight=64, parts=64) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        await eventually(lambda: running.channel.statistics().counts["retries"].get("transient", 0) > 200)


async def test_a_random_storm_changes_no_byte(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    truth = fill(stub, [random.Random(5).randrange(90_000) for _ in range(25)])
    dice = random.Random(9)
    kinds = [
        lambda: cut_after(dice.randrange(1000)),
        lambda: fails(500, "InternalError"),
        lambda: fails(503, "SlowDown"),
    ]
    stub.script(*[dice.choice(kinds)() for _ in range(60)])
    async with run(stub, tmp_path) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        assert await off_loop(read_all, running.fifo(1)) == truth


async def test_an_object_replaced_after_the_listing_fails_by_name(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """The bytes before it are delivered, not one of the new version is, and the FIFO shows no end."""
    truth = fill(stub, [30_000, 20_000])
    async with run(stub, tmp_path, part_size=30_000, requests_in_flight=1, parts=2) as running:
        await eventually(lambda: len(stub.seen) == 2)  # both parts of epoch 0 are on their way or here
        stub.objects["b/data/0001"] = bytes(20_000)
        assert await off_loop(read_all, running.fifo(0)) == truth
        assert running.states[0].state == "complete"
    stub.seen.clear()
    (tmp_path / "again").mkdir()
    stub.script(*[fails(412, "PreconditionFailed")] * 2, key="b/data/0001")
    async with run(stub, tmp_path / "again", requests_in_flight=1) as running:
        error = await failed_after(running, 30_000)
        statistics = running.channel.statistics()
    assert "s3://b/data/0001" in error
    assert "replaced" in error
    assert "REQERR" in error
    assert statistics.counts["requests"]["changed"] == 1
    assert statistics.counts["retries"] == {}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (fails(404, "NoSuchKey"), "deleted after it was listed"),
        (fails(501, "NotImplemented"), "does not support"),
        (fails(403, "AccessDenied"), "access denied"),
        (fails(416, "416"), "shorter than when it was listed"),  # as of a response without a body
        (with_headers(ETag='"other"'), "replaced"),
        (with_headers(Content_Range="bytes 0-9/10"), "has 10 bytes now"),
        (with_headers(Content_Range="bytes 1-40000/40000"), "the response has bytes 1-40000"),
        (with_headers(Content_Range="bytes 0-39998/40000"), "the response has bytes 0-39998"),
        (with_headers(Content_Range="nonsense"), "Content-Range"),
        (with_headers(200, Content_Range=""), None),
    ],
)
async def test_a_wrong_answer_is_an_error_or_right(
    run: RunChannel,
    stub: S3Stub,
    tmp_path: Path,
    fault: Callable[[Answer], Awaitable[web.StreamResponse]],
    words: str | None,
) -> None:
    """200 with the whole object for a range that is the whole object is a right answer."""
    truth = fill(stub, [40_000])
    stub.script(*[fault] * 3)
    async with run(stub, tmp_path, requests_in_flight=1) as running:
        if words is None:
            assert await off_loop(read_all, running.fifo(0)) == truth
        else:
            assert words in await failed_after(running, 0)


@pytest.mark.parametrize("kind", ["range", "no range"])
async def test_a_wrong_answer_that_does_not_come_again_is_mended(
    run: RunChannel, stub: S3Stub, tmp_path: Path, kind: str
) -> None:
    """Two of three front ends may be sick; what they sent reaches nobody."""
    truth = fill(stub, [45_000])
    stub.script(*[WRONG[kind](random.Random(1), 50_000)] * 2)
    async with run(stub, tmp_path, requests_in_flight=1) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        await until_equal({"bad_answer": 2}, lambda: running.channel.statistics().counts["retries"])


async def test_progress_forgets_wrong_answers(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    """Two before the part's first byte and two after it are not three in a row."""
    truth = fill(stub, [40_000])
    wrong = [with_headers(Content_Range="nonsense")] * 2
    stub.script(*wrong, cut_after(10_000), *wrong)
    async with run(stub, tmp_path, requests_in_flight=1) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        retries = {"bad_answer": 4, "truncated": 1}
        await until_equal(retries, lambda: running.channel.statistics().counts["retries"])


async def test_the_whole_object_for_a_range_of_it_is_refused(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    fill(stub, [80_000])
    stub.script(*[whole(stub)] * 3)
    async with run(stub, tmp_path, requests_in_flight=1) as running:
        assert "Content-Range" in await failed_after(running, 0)


async def test_giving_up_tells_the_first_and_the_last_error(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    fill(stub, [1000])
    stub.script(fails(500, "InternalError"), *[fails(503, "SlowDown")] * 10_000)
    policy = RetryPolicy(give_up_after=2, first_wait=0.001, longest_wait=0.01)
    async with run(stub, tmp_path, policy=policy, requests_in_flight=1) as running:
        error = await failed_after(running, 0)
    assert "gave up" in error
    assert "InternalError" in error
    assert "SlowDown" in error


async def test_a_part_whose_reader_waits_is_given_up_once(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """Also if each body fails as soon as it is there; and the error has the id of the response."""

    def named(fault: Fault) -> Fault:
        async def with_id(answer: Answer) -> web.StreamResponse:
            answer.headers["x-amz-request-id"] = "R1"
            return await fault(answer)

        return with_id

    truth, second = fill(stub, [45_000]), asyncio.Event()
    bodies = [cut_after(25_000, once=stub.released), cut_after(25_000, once=second)]
    bodies += [cut_after(0)] * 10_000
    count = 25_000 - DOUBTED  # bytes that each of the two delivers
    stub.script(*map(named, bodies))
    policy = RetryPolicy(give_up_after=1, first_wait=0.001, longest_wait=0.01)
    async with run(stub, tmp_path, policy=policy, requests_in_flight=1) as running:
        with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb") as reader:
            assert await off_loop(reader.read, count) == truth[:count]
            stub.release()
            assert await off_loop(reader.read, count) == truth[count : 2 * count]
            assert stub.loop is not None
            stub.loop.call_soon_threadsafe(second.set)
            await eventually(lambda: running.channel.error)
            error = str(running.channel.error)
    assert "attempt 1," not in error, "requested again after it was given up"
    assert error.count("request id R1") == 2


async def test_a_part_given_up_before_its_reader_came_is_asked_for_again(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """An outage while nobody reads must not fail the epoch that is read when storage is well again."""
    truth = fill(stub, [1000])
    stub.script(*[fails(503, "SlowDown")] * 3)
    policy = RetryPolicy(give_up_after=0, first_wait=0.001)
    async with run(stub, tmp_path, policy=policy) as running:
        await eventually(lambda: running.channel.statistics().counts["requests"].get("throttled") == 1)
        stub.faults.clear()
        assert await off_loop(read_all, running.fifo(0)) == truth
    assert running.channel.error is None


async def test_progress_restarts_the_clock(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    """Many short bodies are slow, not dead: never given up, though in all they last longer than allowed."""
    truth = fill(stub, [20_000])
    stub.script(*[cut_after(500)] * 36)
    policy = RetryPolicy(give_up_after=1, first_wait=0.1, longest_wait=0.1)
    async with run(stub, tmp_path, policy=policy) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        await eventually(lambda: running.channel.statistics().counts["retries"].get("truncated", 0) >= 32)


async def test_time_is_booked_on_who_is_slow(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    """Storage silent: starved. Reader silent: blocked. Nobody there: idle."""
    truth = fill(stub, [MORE_THAN_A_FIFO])
    stub.script(stalls(stub), key="b/data/0000", first=0)
    async with run(stub, tmp_path, parts=4, part_size=4_000_000) as running:
        assert running.channel.statistics().seconds["starved"] == 0
        with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb", buffering=0) as reader:
            await eventually(lambda: running.channel.statistics().seconds["starved"] > 0.05)
            before = running.channel.statistics().seconds["blocked"]
            stub.release()
            await eventually(lambda: running.channel.statistics().seconds["blocked"] > before + 0.05)
            assert await off_loop(reader.readall) == truth
        starved = running.channel.statistics().seconds["starved"]
        await eventually(lambda: running.channel.statistics().seconds["idle"] > 0)
        assert running.channel.statistics().seconds["starved"] == starved


async def test_ending_a_channel_drops_its_connections(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    """Cancelled requests are closed at once, not left to finish behind our back."""
    fill(stub, [400_000])
    stub.script(*[stalls(stub)] * 4)
    async with run(stub, tmp_path) as running:
        await eventually(lambda: stub.requests_in_flight == 4)
        running.task.cancel()
        await asyncio.wait({running.task})
        await eventually(lambda: running.channel.statistics().counts["requests"].get("cancelled") == 4)


@pytest.mark.parametrize("status", [400, 403])
@pytest.mark.parametrize("transport", ["splice", "buffered", "aiobotocore"])
async def test_a_refusal_whose_reason_is_cut_off_is_asked_again(
    stub: S3Stub, tmp_path: Path, transport: Wish, status: int
) -> None:
    """It may be that credentials have expired, or that the clock is wrong, both of which are mended."""

    async def cut_off(answer: Answer) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        response.content_length = 300
        await response.prepare(answer.request)
        await response.write(b"<Error><Co")
        assert answer.request.transport is not None
        answer.request.transport.close()
        return response

    truth = fill(stub, [5000])
    stub.script(cut_off)
    async with running_channel(stub, tmp_path, transport=transport, requests_in_flight=1) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        assert running.channel.statistics().counts["retries"] == {"truncated": 1}
