"""Sends the requests of planning and of checks, by our own client or by aiobotocore: HEADs, LISTs, GETs.

    ControlClient                                                          HEADs and LISTs
    open_object ─┬─ our own HTTP client: sign, send, read the socket       nearly all GETs
                 └─ aiobotocore's get_object                               all others

aiobotocore sends the requests that our own client does not support (`why_not`), or all of them if the job
asks for that, and repeats those that end in a redirect. An error's document in place of an object raises that
error. Nothing is retried here: the caller knows which bytes it has.
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, closing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from streamer.errors import ErrorContext, Transient
from streamer.retry import SILENCE, noting_silence
from streamer.s3.client.credentials import renewing
from streamer.s3.client.faults import ERROR_BYTES, error_inside, map_errors, may_be_error
from streamer.s3.client.final_answers import FINAL_STATUSES
from streamer.s3.client.stall import within_stall
from streamer.s3.http.client import HttpClient, Response
from streamer.s3.http_source import tls_context, why_not
from streamer.s3.range_gets import refusal
from streamer.s3.signing.requests import RangeSigner

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping

    from streamer.plan import ObjectRef
    from streamer.s3.client.session import Clients
    from streamer.s3.http.body import HttpBody
    from streamer.s3.signing.endpoints import BucketEndpoint


class ControlClient:
    """Our own HTTP client with the signer of planning's requests."""

    def __init__(self, clients: Clients) -> None:
        self.clients = clients
        self._http: HttpClient | None = None
        """Opened by the first request, because certificates take 5 to 15 ms to load."""
        self._supported: dict[str, bool] = {}
        self.signer = RangeSigner.of(clients.control, clients)

    def close(self) -> None:
        """Close the connections. No request may be running."""
        if self._http is not None:
            self._http.close()

    def supports(self, bucket: str) -> bool:
        """Return whether our own client can send the requests of this bucket."""
        supported = self._supported.get(bucket)
        if supported is None:
            own = not self.clients.by_aiobotocore
            supported = self._supported[bucket] = own and why_not(self.clients, {bucket}) is None
        return supported

    def leave_to_aiobotocore(self, bucket: str) -> None:
        """Note that aiobotocore must send all further requests of this bucket."""
        self._supported[bucket] = False

    async def send(
        self,
        operation: str,
        endpoint: BucketEndpoint,
        context: ErrorContext,
        request: Callable[[], Awaitable[bytes]],
    ) -> Response:
        """Count and send a request; return its response. `operation`: S3's name of it. Raises SourceError.

        After a final answer on a used connection, it is sent again on a fresh one (`final_answers`).
        """
        clients = self.clients
        if self._http is None:
            tls = tls_context(clients.ca_bundle, clients.passed) if clients.over_tls else None
            self._http = HttpClient(tls, stall_timeout=clients.stall_timeout)
        clients.request_counts[operation] += 1
        with noting_silence(
            lambda: Transient(f"no answer from {endpoint.authority} for {SILENCE:g} s", context)
        ):
            response = await self._http.send(endpoint, context, request)
        if response.reused and response.header.status in FINAL_STATUSES:
            response.end(reuse=False)
            clients.request_counts[operation] += 1
            response = await self._http.send(endpoint, context, request, fresh=True)
        if response.header.status < http.HTTPStatus.MULTIPLE_CHOICES and clients.credentials is not None:
            clients.credentials.note_accepted()
        return response


_READ_SIZE = 256 * 1024
_PARAMETERS = {"If-Match": "IfMatch", "Range": "Range", "x-amz-checksum-mode": "ChecksumMode"}
"""botocore's names of the request headers."""


class ObjectResponse(NamedTuple):
    """A response to the GET of an object, whose body is still to come."""

    status: int
    length: int | None
    fields: Mapping[str, str]
    """Its header fields, by lower-case name; our own client keeps some (`KEPT_FIELDS`)."""
    pieces: AsyncGenerator[bytes, None]

    @property
    def etag(self) -> str | None:
        return self.fields.get("etag")

    @property
    def last_modified(self) -> str | None:
        return self.fields.get("last-modified")

    @property
    def content_range(self) -> str | None:
        return self.fields.get("content-range")


@asynccontextmanager
async def open_object(
    control: ControlClient, context: ErrorContext, headers: dict[str, str]
) -> AsyncIterator[ObjectResponse]:
    """Send a GET with these headers; close the response at the end of the block. Raises SourceError.

    `context`: has bucket and key.
    """
    async with _opened(control, context, headers) as response, aclosing(response.pieces) as pieces:
        first = bytearray()
        if may_be_error(response.fields, response.length):
            with renewing(control.signer.credentials):
                async for piece in pieces:
                    first += piece
                    if len(first) >= ERROR_BYTES:
                        break
                if error := error_inside(response.status, bytes(first), response.fields, context):
                    raise error
        yield response._replace(pieces=_after(bytes(first), pieces))


async def _after(first: bytes, pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    if first:
        yield first
    async for piece in pieces:
        yield piece


@asynccontextmanager
async def _opened(
    control: ControlClient, context: ErrorContext, headers: dict[str, str]
) -> AsyncIterator[ObjectResponse]:
    """Send the GET by the client that can; close the response at the end of the block."""
    if (response := await _sent(control, context, headers)) is not None:
        header, length = response.header, response.header.content_length or 0
        with closing(response.body(length, context)) as body:
            yield ObjectResponse(header.status, length, header.fields, _read(body))
        return
    parameters = {_PARAMETERS[name]: value for name, value in headers.items()}
    client = control.clients.data  # which repeats no request
    control.clients.request_counts["GetObject"] += 1
    with map_errors(context):
        parameters |= {"Bucket": context.bucket or "", "Key": context.key or ""}
        answer = await client.send("get_object", context, **parameters)
        async with answer["Body"] as body:
            metadata = answer["ResponseMetadata"]
            yield ObjectResponse(
                metadata["HTTPStatusCode"],
                answer.get("ContentLength"),
                metadata["HTTPHeaders"],
                _read_by_aiobotocore(body.raw_stream.content, client.stall_timeout, context),
            )


async def read_first(
    control: ControlClient, ref: ObjectRef, headers: dict[str, str], *, least: int = 1
) -> tuple[ObjectResponse, bytes]:
    """Send a GET with these headers; return the response and the first bytes of its body. Raises SourceError.

    These are at least `least`, or all if there are fewer, with what came together with them.
    """
    data = bytearray()
    async with (
        open_object(control, ErrorContext(ref.bucket, ref.key), headers) as response,
        aclosing(response.pieces) as pieces,
    ):
        async for piece in pieces:
            data += piece
            if len(data) >= least:
                break
    return response, bytes(data)


async def _sent(control: ControlClient, context: ErrorContext, headers: dict[str, str]) -> Response | None:
    """Send the GET by our own client; return None if aiobotocore must send it. Raises SourceError."""
    bucket, key = context.bucket or "", context.key or ""
    if not control.supports(bucket):
        return None
    signer = control.signer
    endpoint = await signer.endpoint(bucket)
    with renewing(signer.credentials):
        response = await control.send(
            "GetObject", endpoint, context, lambda: signer.get(endpoint, bucket, key, headers)
        )
        header = response.header
        if header.status in (200, 206) and header.content_length and "transfer-encoding" not in header.fields:
            return response
        if header.status < 400:
            response.end(reuse=False)
            return None
        if (error := await refusal(response, context, signer)) is not None:
            raise error
        return None


async def _read(body: HttpBody) -> AsyncGenerator[bytes, None]:
    """Yield the body in pieces. Raises SourceError."""
    loop, memory = asyncio.get_running_loop(), memoryview(bytearray(_READ_SIZE))
    while body.left:
        try:
            count = body.read_into(memory)
        except BlockingIOError:
            readable: asyncio.Future[None] = loop.create_future()
            body.notify(partial(_wake, readable))
            await readable
        else:
            yield bytes(memory[:count])


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


async def _read_by_aiobotocore(
    content: Any, stall_timeout: float, context: ErrorContext
) -> AsyncGenerator[bytes, None]:
    """Yield the body in pieces. Raises Transient."""
    with map_errors(context):
        async with within_stall(stall_timeout, context) as stall:
            while data := await content.read(_READ_SIZE):
                stall.pause()
                yield data
                stall.moved()
