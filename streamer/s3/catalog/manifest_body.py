"""Reads a manifest from S3 in pieces, as one version.

    _opened ─┬─ our own HTTP client: sign, send, read the socket       nearly all manifests
             └─ aiobotocore's get_object                               all others

A response that breaks off is resumed at its next byte, with If-Match and Range. So a manifest needs a
Content-Length, by which its end is proven, and an ETag for what is left after a failure. aiobotocore sends
the requests that our own client does not support (`why_not`), and repeats those that end in a redirect.
"""

from __future__ import annotations

import asyncio
import http
from contextlib import ExitStack, aclosing, asynccontextmanager, closing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from streamer.errors import (
    BadAnswer,
    ErrorContext,
    GaveUp,
    SourceError,
    Truncated,
)
from streamer.plan import ObjectRef, S3Uri, bare_etag, is_etag
from streamer.retry import UNAVAILABLE, Attempts, RetryPolicy
from streamer.s3.catalog.control_client import ControlClient
from streamer.s3.client.credentials import renewing
from streamer.s3.client.faults import map_errors
from streamer.s3.client.session import Clients
from streamer.s3.client.stall import within_stall
from streamer.s3.http_source import refusal
from streamer.s3.ranges import check_header

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from streamer.s3.http.body import HttpBody
    from streamer.s3.http.client import Response

PATIENCE = 10.0
"""Seconds without a byte for which the rest of a manifest is requested again."""
_READ_SIZE = 256 * 1024


class _Response(NamedTuple):
    """A response to the GET of a manifest, whose body is still to come."""

    status: int
    length: int | None
    etag: str | None
    content_range: str | None
    pieces: AsyncGenerator[bytes, None]


async def read_manifest(
    clients: Any,
    uri: S3Uri,
    policy: RetryPolicy | None = None,
    *,
    on_wait: Callable[[SourceError], None] | None = None,
) -> AsyncGenerator[bytes, None]:
    """Yield one version of an object in pieces; resume after a failure. Raises SourceError.

    `clients`: the process's `Clients`, or aiobotocore's client to use it alone. While storage is unavailable,
    the rest is requested again as `policy` allows, and `on_wait` is called with each error. Without a policy
    it is requested again for `PATIENCE` seconds; a longer outage is an error, so that the caller can log it.
    """
    control, client = None, clients
    with ExitStack() as stack:
        if isinstance(clients, Clients):
            control, client = stack.enter_context(closing(ControlClient(clients))), clients.control
        limits = policy or RetryPolicy(give_up_after=min(PATIENCE, client.stall_timeout))
        attempts = Attempts(limits, UNAVAILABLE, what="a byte of the manifest")
        try:
            async with aclosing(_resumed(control, client, uri, attempts, on_wait)) as pieces:
                async for piece in pieces:
                    yield piece
        except GaveUp as error:
            if policy is not None or error.__cause__ is None:
                raise
            last = error.__cause__
        else:
            return
    raise last


async def _resumed(
    control: ControlClient | None,
    client: Any,
    uri: S3Uri,
    attempts: Attempts[SourceError],
    on_wait: Callable[[SourceError], None] | None,
) -> AsyncGenerator[bytes, None]:
    received, size, etag = 0, -1, ""
    headers: dict[str, str] = {}
    while received != size:
        context = ErrorContext(uri.bucket, uri.key, received, attempts.failures + 1)
        before = received
        try:
            async with _opened(control, client, context, headers) as response:
                if size < 0:
                    size, etag = _checked_whole(response, context)
                else:
                    check_header(
                        ObjectRef(uri.bucket, uri.key, size, bare_etag(etag)),
                        received,
                        size,
                        context,
                        status=response.status,
                        content_range=response.content_range,
                        content_length=response.length,
                        etag=response.etag,
                        version=None,
                    )
                async with aclosing(response.pieces) as pieces:
                    async for piece in pieces:
                        received += len(piece)
                        if received > size:
                            raise BadAnswer(
                                f"the body is longer than its Content-Length, {size} bytes", context
                            )
                        yield piece
            if received != size:
                raise Truncated(f"the body ended {size - received} bytes early", context)
        except UNAVAILABLE as error:
            if size >= 0:
                if not is_etag(bare_etag(etag)):
                    raise  # without an ETag the rest may be of another version
                headers = client.if_match(etag) | {"Range": f"bytes={received}-{size - 1}"}
            if received > before:
                attempts.progressed()
            wait = attempts.wait_after(error)
            if on_wait is not None:
                on_wait(error)
        else:
            continue
        await asyncio.sleep(wait)


def _checked_whole(response: _Response, context: ErrorContext) -> tuple[int, str]:
    """Return size and ETag of the manifest, from the response to a GET without a range. Raises BadAnswer."""
    if response.status != http.HTTPStatus.OK:
        raise BadAnswer(f"the response to a GET without a range has status {response.status}", context)
    if response.length is None:
        raise BadAnswer("the response has no Content-Length, so its end cannot be proven", context)
    return response.length, response.etag or ""


@asynccontextmanager
async def _opened(
    control: ControlClient | None, client: Any, context: ErrorContext, headers: dict[str, str]
) -> AsyncIterator[_Response]:
    """Send the GET, by our own client if that can; close the response at the end of the block."""
    if control is not None and (response := await _sent(control, context, headers)) is not None:
        header, length = response.header, response.header.content_length or 0
        etag, content_range = header.fields.get("etag"), header.fields.get("content-range")
        with closing(response.body(length, context)) as body:
            yield _Response(header.status, length, etag, content_range, _read(body))
        return
    parameters = {name.replace("-", ""): value for name, value in headers.items()}
    with map_errors(context):
        answer = await client.get_object(Bucket=context.bucket, Key=context.key, **parameters)
        async with answer["Body"] as body:
            yield _Response(
                answer["ResponseMetadata"]["HTTPStatusCode"],
                answer.get("ContentLength"),
                answer.get("ETag"),
                answer.get("ContentRange"),
                _read_by_aiobotocore(body.raw_stream.content, client.stall_timeout, context),
            )


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
