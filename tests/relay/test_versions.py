"""Bytes of another version than the one listed or asked for: refused by name, over all transports."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from sidecar.process.exits import Exit, exit_code
from streamer.errors import BadAnswer, SourceChanged, SourceError
from streamer.plan import ObjectRef, Plan, S3Uri
from streamer.retry import RetryPolicy
from streamer.s3.checksums import StoredChecksums
from streamer.s3.client.doubt import DOUBTED
from streamer.s3.pages.object_info import open_inspector
from tests.kit.harness import PagesFrom, RunChannel, clients_of
from tests.kit.pipes import eventually, off_loop, read_all
from tests.kit.planning import alone, plan_augmented, plan_prefix
from tests.kit.raw import RawServer, Request, answer, listing, raw_server

pytestmark = [pytest.mark.usefixtures("no_leaks", "no_blocking", "credentials")]

OLD, NEW = b"old!" * 1000, b"new!" * 1000
SOON = RetryPolicy(give_up_after=0.2, first_wait=0.001, longest_wait=0.01)


def server_of(data: bytes = NEW, **headers: str) -> AbstractContextManager[RawServer]:
    """Sends this object for any key, under these headers; If-Match and versionId are ignored."""

    def reply(request: Request) -> bytes:
        if request.span is None:
            body = b"" if request.method == "HEAD" else data
            return answer(200, body, Content_Length=str(len(data)), **headers)
        start, end = request.span
        return answer(206, data[start:end], Content_Range=f"bytes {start}-{end - 1}/{len(data)}", **headers)

    return raw_server(reply)


async def outcome(
    run: RunChannel,
    server: RawServer,
    tmp_path: Path,
    ref: ObjectRef,
) -> tuple[bytes, SourceError | None]:
    """What is streamed of the object, and how that fails."""

    async def plan(_: Any) -> Plan:
        return Plan.of([ref])

    async with run(
        server, tmp_path, policy=SOON, make_plan=plan, requests_in_flight=1, part_size=1000
    ) as running:
        reading = asyncio.create_task(off_loop(read_all, running.fifo(0)))
        await eventually(lambda: running.channel.error or reading.done())
        if running.channel.error is None:
            return await reading, None
        running.channel.drain()  # which ends what the reader waits for
        await running.task
        assert isinstance(running.channel.error, SourceError)
        return await reading, running.channel.error


@pytest.mark.parametrize(
    ("version", "headers", "words"),
    [
        (None, {}, "has no ETag"),
        (None, {"x_amz_version_id": "v9"}, "has no ETag"),
        (None, {"ETag": '""'}, "the response has the invalid ETag"),
        ("v1", {"ETag": '"e"'}, "states no version"),
        ("v1", {"ETag": '"e"', "x_amz_version_id": "v9"}, "is of version v9"),
        ("null", {"ETag": '"e"', "x_amz_version_id": "v9"}, "is of version v9"),
        ("null", {}, "has no ETag"),
    ],
)
async def test_a_body_without_proof_of_its_version_is_refused(
    run: RunChannel, tmp_path: Path, version: str | None, headers: dict[str, Any], words: str
) -> None:
    with server_of(**headers) as server:
        got, error = await outcome(run, server, tmp_path, ObjectRef("b", "k", len(NEW), "e", version))
    assert not got
    assert words in str(error)
    assert "s3://b/k" in str(error)


@pytest.mark.parametrize(
    ("version", "headers"),
    [("v1", {"x_amz_version_id": "v1"}), ("null", {"ETag": '"e"'}), (None, {"ETag": 'W/"e"'})],
)
async def test_any_proof_will_do(
    run: RunChannel, tmp_path: Path, version: str | None, headers: dict[str, Any]
) -> None:
    with server_of(**headers) as server:
        got, error = await outcome(run, server, tmp_path, ObjectRef("b", "k", len(NEW), "e", version))
    assert error is None
    assert got == NEW


async def test_what_was_listed_and_is_not_there_was_deleted(run: RunChannel, tmp_path: Path) -> None:
    with raw_server(lambda _: answer(404, b"<Error><Code>NoSuchKey</Code></Error>")) as server:
        got, error = await outcome(run, server, tmp_path, ObjectRef("b", "k", len(NEW), "e"))
    assert not got
    assert "the object was deleted after it was listed" in str(error)
    assert error is not None
    assert exit_code(error) is Exit.CHANGED


@pytest.mark.parametrize("by_aiobotocore", [True, False], ids=["aiobotocore", "own"])
@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"ETag": '"e"'}, "states no version"),
        ({"ETag": '"e"', "x_amz_version_id": "v9"}, "is of version v9"),
        ({"ETag": '""', "x_amz_version_id": "v1"}, "HEAD has no Content-Length, or neither"),
        ({"ETag": '"e\u00e9"', "x_amz_version_id": "v1"}, "HEAD has no Content-Length, or neither"),
        ({"ETag": '"e e"', "x_amz_version_id": "v1"}, "HEAD has no Content-Length, or neither"),
    ],
)
async def test_a_head_without_proof_of_its_version_is_refused(
    by_aiobotocore: bool, headers: dict[str, Any], words: str
) -> None:
    with server_of(**headers) as server:
        async with clients_of(server, by_aiobotocore=by_aiobotocore) as clients:
            with (
                open_inspector(clients, give_up_after=1) as inspector,
                pytest.raises(BadAnswer, match=words),
            ):
                await inspector.stat("b", "k", "v1")


async def test_a_checksum_is_of_the_version_asked_for() -> None:
    with server_of(ETag='"e"', x_amz_version_id="v9") as server:
        async with clients_of(server) as clients:
            with pytest.raises(BadAnswer, match="is of version v9"):
                await StoredChecksums(clients.control, None).of(ObjectRef("b", "k", 9, "e", "v1"), attempt=1)


LINES = b'{"a": "one"}\n{"a": "two"}\n'
LONG = LINES * 2000
BREAK = len(LINES) * 1500
"""Offset at which the first response breaks off, after a line."""


def rest_of(data: bytes, **headers: str) -> bytes:
    """Answer the request after the break, which repeats the bytes in doubt."""
    first = BREAK - DOUBTED
    return answer(206, data[first:], Content_Range=f"bytes {first}-{len(data) - 1}/{len(data)}", **headers)


OWN = pytest.mark.parametrize("own", [True, False], ids=["http", "aiobotocore"])


@OWN
@pytest.mark.parametrize(
    ("second", "error", "words"),
    [
        (rest_of(LONG), BadAnswer, "has no ETag"),
        (rest_of(LONG, ETag='"f"'), SourceChanged, "replaced"),
        (rest_of(LONG + b"\n", ETag='"e"'), SourceChanged, f"{len(LONG) + 1} bytes now"),
        (answer(200, LONG, ETag='"e"'), BadAnswer, "Content-Range"),
    ],
)
async def test_the_rest_of_a_manifest_is_of_the_same_version(
    own: bool, second: bytes, error: type[SourceError], words: str
) -> None:
    """The first response breaks off after a line. A final answer is asked for twice."""
    replies = [answer(200, LONG, ETag='"e"')[: BREAK - len(LONG)], second, second]
    with raw_server(lambda _: replies.pop(0)) as server:
        async with clients_of(server) as clients:
            with pytest.raises(error, match=words):
                await plan_augmented(clients if own else alone(clients), S3Uri("b", "m"), ["a"])


@OWN
async def test_a_piece_of_a_manifest_is_not_taken_for_all_of_it(own: bool) -> None:
    with raw_server(lambda _: answer(206, LINES[:13], Content_Range="bytes 0-12/26", ETag='"e"')) as server:
        async with clients_of(server) as clients:
            with pytest.raises(BadAnswer, match="without a range has status 206"):
                await plan_augmented(clients if own else alone(clients), S3Uri("b", "m"), ["a"])


@pytest.mark.parametrize("etag", ["e e", "e\u00e9", "e&#13;&#10;X-Evil: 1", "modified now"])
async def test_an_etag_that_proves_nothing_makes_no_plan(etag: str, pages_from: PagesFrom) -> None:
    """A line end in it would begin another header of our requests."""
    _, _, page = listing(("data/a", 1, "!")).partition(b"\r\n\r\n")
    page = page.replace(b"quot;!&", f"quot;{etag}&".encode())
    with raw_server(lambda _: answer(200, page)) as server:
        async with pages_from(server) as pages:
            with pytest.raises(BadAnswer, match="invalid ETag"):
                await plan_prefix(pages, S3Uri("b", "data/"))
