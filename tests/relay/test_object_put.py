"""Objects that are written: whole or absent, from any number of bytes, whatever the server answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
from aiohttp import web

from streamer.errors import BadAnswer, Denied, ErrorContext, GaveUp, SourceError, Transient
from streamer.retry import RetryPolicy
from streamer.s3.object_put import ANY, MOST_PARTS, PART, NewObject, abort_upload, prove_writable, put_object
from tests.kit.harness import clients_of
from tests.kit.proxy import Line, standing_before
from tests.kit.puts import error, xml
from tests.kit.raw import etag
from tests.kit.stub import S3Stub

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking", "credentials")

SMALL = 3000
DATA = os.urandom(10_240)
KEY = "b/run/model.tar.gz"
PATIENT = RetryPolicy(give_up_after=30, first_wait=0.001, longest_wait=0.01)
KMS = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "alias/models", "Metadata": {"penstock-job": "run"}}


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamer.s3.object_put.PART", SMALL)


class Bytes:
    """The source of one object's bytes; notes what is asked for, and refuses to be asked twice at once."""

    def __init__(self, data: bytes, fails_at: int | None = None) -> None:
        self._data = data
        self._fails_at = fails_at
        self._offset = 0
        self._reading = False
        self.asked: list[int] = []

    async def read(self, count: int) -> bytes:
        assert not self._reading
        self._reading = True
        self.asked.append(count)
        await asyncio.sleep(0)
        start, self._offset = self._offset, min(self._offset + count, len(self._data))
        if self._fails_at is not None and self._fails_at < self._offset:
            raise ValueError
        self._reading = False
        return self._data[start : self._offset]


class Put:
    """Writes objects to one stub."""

    def __init__(self, stub: S3Stub, client: Any) -> None:
        self._client = client
        self.noted: list[tuple[str, bool]] = []
        self.stub = stub

    async def __call__(
        self,
        source: Bytes,
        *,
        most: int = len(DATA),
        replaces: str | None = ANY,
        policy: RetryPolicy = PATIENT,
        key: str = KEY,
        **options: Any,
    ) -> str | None:
        def note(upload: str, begun: bool) -> None:
            self.noted.append((upload, begun))

        new = NewObject(most, source.read, on_upload=note, **options)
        return await put_object(self._client, context(key), new, replaces=replaces, policy=policy)

    async def prove(self, headers: Mapping[str, Any]) -> None:
        new = NewObject(0, Bytes(b"").read, headers=headers)
        await prove_writable(self._client, context(), new, policy=PATIENT)

    async def abort(self, upload: str) -> None:
        await abort_upload(self._client, context(), upload)

    def operations(self) -> list[str]:
        return [seen[0] for seen in self.stub.puts.seen]


def context(key: str = KEY) -> ErrorContext:
    bucket, _, name = key.partition("/")
    return ErrorContext(bucket, name)


@pytest.fixture
async def put(stub: S3Stub) -> AsyncIterator[Put]:
    async with clients_of(stub) as clients:
        yield Put(stub, clients.control)


@pytest.mark.parametrize("most", [None, 15_000])
@pytest.mark.parametrize("size", [0, 1, 2999, 3000, 3001, 6000, 10_240])
async def test_bytes_of_unknown_number_are_written_whole(
    put: Put, stub: S3Stub, size: int, most: int | None
) -> None:
    source = Bytes(DATA[:size])
    etag = await put(source, most=size if most is None else most, replaces=None)
    assert stub.objects == {KEY: DATA[:size]}
    assert etag
    assert set(source.asked) == {SMALL}
    parts = -(-size // SMALL)
    in_parts = ["CreateMultipartUpload", *["UploadPart"] * parts, "CompleteMultipartUpload"]
    assert put.operations() == (["PutObject"] if size < SMALL else in_parts)
    assert stub.puts.seen[-1][2] == "*"
    assert len(put.noted) == (0 if size < SMALL else 2)


@pytest.mark.parametrize("most", [0, 1, PART * MOST_PARTS, PART * MOST_PARTS + 1, 300 * 10**9, 5 << 40])
async def test_no_object_has_more_parts_than_s3_allows(
    put: Put, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamer.s3.object_put.PART", PART)
    source = Bytes(b"")
    await put(source, most=most)
    [size] = source.asked
    assert -(-most // size) <= MOST_PARTS
    assert size == PART or (size - 1) * MOST_PARTS < most


async def test_the_headers_go_with_the_request_that_begins_the_object(put: Put, stub: S3Stub) -> None:
    seen: list[tuple[str, bool]] = []

    def note(operation: str, request: web.Request, response: web.Response) -> web.Response:
        names = ("x-amz-server-side-encryption-aws-kms-key-id", "x-amz-meta-penstock-job")
        seen.append((operation, [request.headers.get(name) for name in names] == ["alias/models", "run"]))
        return response

    stub.puts.spoil = note
    for size in (1, SMALL):
        await put(Bytes(DATA[:size]), headers=KMS)
    assert seen == [
        ("PutObject", True),
        ("CreateMultipartUpload", True),
        ("UploadPart", False),
        ("CompleteMultipartUpload", False),
    ]


async def test_whoever_waits_takes_no_request_from_those_before_it(put: Put, stub: S3Stub) -> None:
    """The object that all others wait for begins last, and has the most parts."""
    requests, before = asyncio.Semaphore(2), [asyncio.Event() for _ in range(6)]
    before[0].set()
    sizes = [10_240, 10, 3000, 20, 9000]

    async def write(number: int) -> None:
        async def wait() -> None:
            await before[number].wait()

        source = Bytes(DATA[: sizes[number]])
        await put(source, before_made=wait, key=f"b/{number}", requests=requests)
        before[number + 1].set()

    async with asyncio.TaskGroup() as group:
        for number in reversed(range(5)):
            group.create_task(write(number))
    made = [
        key for operation, key, _ in stub.puts.seen if operation in {"PutObject", "CompleteMultipartUpload"}
    ]
    assert made == [f"b/{number}" for number in range(5)]
    assert {key: len(data) for key, data in stub.objects.items()} == {
        f"b/{n}": s for n, s in enumerate(sizes)
    }
    assert not requests.locked()


@pytest.mark.parametrize("size", [0, 1, 10_240])
async def test_each_part_is_admitted_once(put: Put, stub: S3Stub, size: int) -> None:
    admitted: list[int] = []

    async def admit(count: int) -> None:
        admitted.append(count)

    stub.puts.refused.extend([(503, "SlowDown")] * 3)
    await put(Bytes(DATA[:size]), admit=admit)
    assert sum(admitted) == size
    assert max(admitted) <= SMALL
    assert stub.objects == {KEY: DATA[:size]}


@pytest.mark.parametrize("how", ["read", "before", "part", "cancel", "complete"])
async def test_what_ends_an_upload_leaves_nothing(put: Put, stub: S3Stub, how: str) -> None:
    requests = asyncio.Semaphore(2)
    stub.objects[KEY] = b"live"
    reached = asyncio.Event()

    async def before_made() -> None:
        reached.set()
        if how == "before":
            raise ValueError
        if how == "cancel":
            await asyncio.Event().wait()

    def refuse(operation: str, _: web.Request, response: web.Response) -> web.Response:
        refused = {"part": "UploadPart", "complete": "CompleteMultipartUpload"}.get(how) == operation
        if refused:
            stub.objects[KEY] = b"live"
        return error(403, "AccessDenied") if refused else response

    stub.puts.spoil = refuse
    source = Bytes(DATA, 7000 if how == "read" else None)
    writing = asyncio.create_task(put(source, before_made=before_made, requests=requests))
    if how == "cancel":
        await reached.wait()
        writing.cancel()
    with contextlib.suppress(asyncio.CancelledError, ValueError, ExceptionGroup, Denied):
        await writing
        raise AssertionError
    assert (stub.objects, stub.puts.uploads) == ({KEY: b"live"}, {})
    assert [begun for _, begun in put.noted] == [True, False]
    for _ in range(2):
        await asyncio.wait_for(requests.acquire(), 1)


SAYS = "User: u is not authorized to perform: kms:GenerateDataKey on resource: k with an explicit deny"
CIPHER = "The ciphertext refers to a customer master key that does not exist"


@pytest.mark.parametrize("way", ["prove", "put"])
@pytest.mark.parametrize("message", ["Access Denied", "", SAYS, CIPHER])
async def test_a_denial_begins_with_the_words_of_s3(put: Put, stub: S3Stub, way: str, message: str) -> None:
    stub.puts.spoil = lambda *_: error(403, "AccessDenied" if message else "", message)
    with pytest.raises(Denied) as raised:
        await (put.prove(KMS) if way == "prove" else put(Bytes(DATA), headers=KMS))
    text = raised.value.message
    own = (
        "the credentials may not write this object; they need s3:PutObject on it, and kms:GenerateDataKey and"
    )
    assert text.startswith(message if message in {SAYS, CIPHER} else own)
    assert (own in text) == (message != SAYS), "the policy that S3 names is the remedy"
    assert "ListBucket" not in text


async def test_the_proof_leaves_nothing(put: Put, stub: S3Stub) -> None:
    await put.prove(KMS)
    assert put.operations() == ["CreateMultipartUpload", "AbortMultipartUpload"]
    assert (stub.objects, stub.puts.uploads) == ({}, {})
    await put.abort("upload1")

    def refuse(operation: str, _: web.Request, response: web.Response) -> web.Response:
        return error(403, "AccessDenied") if operation == "AbortMultipartUpload" else response

    stub.puts.spoil = refuse
    with pytest.raises(Denied, match="they need s3:AbortMultipartUpload on it"):
        await put.prove({})


Answer = Callable[[web.Response], web.Response]


def broken(_: web.Response) -> web.Response:
    return web.Response(status=503)


def closed(response: web.Response) -> web.Response:
    """Nothing: the connection is reset."""
    return response


def without(text: str) -> Answer:
    def spoil(response: web.Response) -> web.Response:
        response.headers.pop("ETag", None)
        if response.text:
            response.text = response.text.replace(f"{text}>", "Other>")
        return response

    return spoil


@pytest.mark.parametrize("size", [100, len(DATA)])
@pytest.mark.parametrize(
    "answer",
    [broken, closed, lambda _: error(200, "InternalError"), lambda _: error(500, "InternalError")],
    ids=["503", "reset", "error in 200", "500"],
)
async def test_an_answer_that_is_lost_is_asked_for_again(
    put: Put, stub: S3Stub, answer: Answer, size: int
) -> None:
    """Each request is carried out once before its answer is lost, so each is repeated on what it has made."""
    lost: set[tuple[str, str]] = set()

    def lose(operation: str, request: web.Request, response: web.Response) -> web.Response:
        each = operation, request.query.get("partNumber", "")
        if each in lost or (operation == "PutObject" and answer not in {broken, closed}):
            return response
        lost.add(each)
        if answer is closed and request.transport is not None:
            request.transport.abort()
        return answer(response)

    stub.puts.spoil = lose
    for replaces in (None, ANY):
        lost.clear()
        stub.objects.clear()
        assert await put(Bytes(DATA[:size]), replaces=replaces)
        assert stub.objects == {KEY: DATA[:size]}


@pytest.mark.parametrize("size", [100, len(DATA)])
@pytest.mark.parametrize("replaces", [None, ANY])
async def test_an_object_that_is_there_is_no_failure_though_no_answer_ever_came(
    put: Put, stub: S3Stub, size: int, replaces: str | None
) -> None:
    made = {"PutObject", "CompleteMultipartUpload"}
    stub.puts.spoil = lambda operation, _, response: broken(response) if operation in made else response
    policy = RetryPolicy(give_up_after=0.5, first_wait=1)
    assert await put(Bytes(DATA[:size]), replaces=replaces, policy=policy)
    stub.puts.refused.extend([(503, "SlowDown")] * 99)
    with pytest.raises(GaveUp, match="SlowDown"):
        await put(Bytes(DATA[:size][::-1]), policy=policy)


@pytest.mark.parametrize(
    ("operation", "answer", "words"),
    [
        ("CreateMultipartUpload", without("UploadId"), "has no UploadId"),
        ("UploadPart", without("ETag"), "has no ETag"),
        (
            "CompleteMultipartUpload",
            lambda _: xml(
                "CompleteMultipartUploadResult",
                "<ETag>e</ETag><ChecksumCRC64NVME>AAAAAAAAAAA=</ChecksumCRC64NVME>",
            ),
            "has stored other bytes than were sent",
        ),
    ],
)
async def test_an_answer_that_proves_nothing_is_no_success(
    put: Put, stub: S3Stub, operation: str, answer: Answer, words: str
) -> None:
    stub.puts.spoil = lambda asked, _, response: answer(response) if asked == operation else response
    with pytest.raises(BadAnswer, match=words):
        await put(Bytes(DATA))


@pytest.mark.parametrize("stays", [True, False])
async def test_a_completion_without_an_etag_is_looked_at(put: Put, stub: S3Stub, stays: bool) -> None:
    """Ceph 16 responds so to the first one."""

    def spoil(operation: str, _: web.Request, response: web.Response) -> web.Response:
        if operation == "CompleteMultipartUpload":
            response.text = "<CompleteMultipartUploadResult><ETag></ETag></CompleteMultipartUploadResult>"
            if not stays:
                stub.objects[KEY], stub.checksums[KEY] = b"another", {}
        return response

    stub.puts.spoil = spoil
    if stays:
        assert await put(Bytes(DATA)) == etag(DATA)
    else:
        with pytest.raises(BadAnswer, match="has no ETag"):
            await put(Bytes(DATA))


@pytest.mark.parametrize("replaces", [None, ANY])
async def test_an_upload_that_another_program_aborts_is_no_conflict(
    put: Put, stub: S3Stub, replaces: str | None
) -> None:
    stub.objects[KEY] = b"live"

    def abort(operation: str, _: web.Request, response: web.Response) -> web.Response:
        if operation == "CreateMultipartUpload":
            stub.puts.uploads.clear()
        return response

    stub.puts.spoil = abort
    with pytest.raises(SourceError, match="another program has removed the parts"):
        await put(Bytes(DATA), replaces=replaces)
    assert stub.objects == {KEY: b"live"}


@pytest.mark.parametrize("size", [100, len(DATA)])
async def test_ceph_replaces_what_is_named_and_nothing_else(put: Put, stub: S3Stub, size: int) -> None:
    stub.puts.as_ceph = True
    written = await put(Bytes(DATA[:size]), replaces=None)
    stub.objects[KEY] = b"another program's"
    for replaces in (written, None):
        assert await put(Bytes(DATA[:size]), replaces=replaces) is None
    assert stub.objects == {KEY: b"another program's"}
    assert await put(Bytes(DATA[:size]), replaces=etag(b"another program's")) == written
    assert stub.objects == {KEY: DATA[:size]}


async def test_a_slow_connection_is_not_a_silent_one(stub: S3Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The body takes longer than a server may be silent for; without the reads it would never arrive."""
    monkeypatch.setattr("streamer.s3.object_put.PART", PART * 4)
    data, silence, began = os.urandom(PART * 3), 4.0, time.monotonic()
    with standing_before(stub.url) as proxy:
        proxy.lines = lambda _: Line(latency=0.02)
        near = S3Stub(url=f"http://127.0.0.1:{proxy.port}")
        async with clients_of(near, stall_timeout=silence) as clients:
            await Put(near, clients.control)(Bytes(data), policy=RetryPolicy(give_up_after=0))
    assert time.monotonic() - began > silence
    assert [seen[0] for seen in stub.puts.seen] == ["PutObject"]
    assert stub.objects == {KEY: data}


async def test_a_server_that_takes_no_byte_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamer.s3.object_put.PART", PART * 4)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        silent = S3Stub(url=f"http://127.0.0.1:{listening.getsockname()[1]}")
        async with clients_of(silent, stall_timeout=0.2) as clients:
            with pytest.raises(Transient, match="Read timeout"):
                await Put(silent, clients.control)(
                    Bytes(bytes(PART * 3)), policy=RetryPolicy(give_up_after=0)
                )
