"""Reads a manifest from S3 in pieces, as one version.

A response that breaks off is resumed with If-Match and Range. So a manifest needs a Content-Length, by which
its end is proven, and an ETag, or a Last-Modified, for what is left after a failure. The last bytes of a
response that is not whole are passed on when the next one has agreed with them (`streamer.s3.client.doubt`).
`object_get` sends the requests.
"""

from __future__ import annotations

import asyncio
import http
from contextlib import aclosing, closing, nullcontext
from typing import TYPE_CHECKING

from streamer.errors import (
    BadAnswer,
    ErrorContext,
    SourceChanged,
    SourceError,
    Truncated,
)
from streamer.plan import ObjectRef, S3Uri, is_modified
from streamer.plan.validators import is_validator, validator_of
from streamer.retry import ANSWER_FAILED, Attempts, RetryPolicy, raising_the_last
from streamer.s3.client.doubt import Withheld
from streamer.s3.client.session import Clients, S3Client
from streamer.s3.pages.object_get import ControlClient, ObjectResponse, open_object
from streamer.s3.ranges import check_header, content_encoding, transformation
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

PATIENCE = 10.0
"""Seconds without a byte for which the rest of a manifest is requested again."""


async def read_manifest(
    clients: Clients,
    uri: S3Uri,
    policy: RetryPolicy | None,
    *,
    on_wait: Callable[[SourceError], None] | None,
    what: str = "the manifest",
) -> AsyncGenerator[bytes, None]:
    """Yield one version of an object in pieces; resume after a failure. Raises SourceError.

    While storage is unavailable, the rest is requested again as `policy` allows, and `on_wait` is called with
    each error. Without a policy it is requested again for `PATIENCE` seconds; a longer outage is an error, so
    that the caller can log it. `what`: names the object in errors.
    """
    with closing(ControlClient(clients)) as control:
        limits = policy or RetryPolicy(give_up_after=min(PATIENCE, clients.stall_timeout))
        context = ErrorContext(uri.bucket, uri.key)
        attempts = Attempts(limits, ANSWER_FAILED, what=f"a byte of {what}", context=context)
        attempts.on_noted = on_wait
        with raising_the_last() if policy is None else nullcontext():
            async with aclosing(_resumed(control, uri, attempts, on_wait)) as pieces:
                async for piece in pieces:
                    yield piece


async def _resumed(  # noqa: C901, PLR0912 - each way in which a response ends, in its order
    control: ControlClient,
    uri: S3Uri,
    attempts: Attempts[SourceError],
    on_wait: Callable[[SourceError], None] | None,
) -> AsyncGenerator[bytes, None]:
    furthest, size, etag = 0, -1, ""
    taken = Withheld()
    headers: dict[str, str] = {}
    asked_again = False
    while taken.received != size:
        first = taken.resume()
        context = ErrorContext(uri.bucket, uri.key, first, attempts.failures + 1)
        if size >= 0:
            headers = _of_rest(control.clients.data, etag, first, size)
        try:
            async with open_object(control, context, headers) as response:
                if size < 0:
                    size, etag = _checked_whole(response, context)
                    attempts.worked = True
                else:
                    _check_rest(response, ObjectRef(uri.bucket, uri.key, size, etag), first, context)
                async with aclosing(response.pieces) as pieces:
                    async for piece in pieces:
                        passed = taken.add(piece, context)
                        if taken.received > size:
                            raise BadAnswer(
                                f"the body is longer than its Content-Length, {size} bytes", context
                            )
                        if passed:
                            yield passed
            if taken.received != size:
                left = counted(size - taken.received, "byte")
                raise Truncated(f"the body ended {left} early", context)
        except SourceChanged:
            if asked_again:
                raise
            asked_again = True  # the response may belong to an earlier request on the connection
            continue
        except ANSWER_FAILED as error:
            taken.fail()
            if size >= 0 and not is_validator(etag):
                raise  # the rest may be of another version
            if taken.received > furthest:
                furthest = taken.received
                attempts.progressed()
            wait = attempts.wait_after(error)
            if on_wait is not None:
                on_wait(error)
        else:
            continue
        await asyncio.sleep(wait)
    yield taken.doubted


def _check_rest(response: ObjectResponse, ref: ObjectRef, first: int, context: ErrorContext) -> None:
    """Check that a response is the bytes of the manifest from `first` on. Raises SourceError."""
    check_header(
        ref,
        first,
        ref.size,
        context,
        status=response.status,
        content_length=response.length,
        fields=response.fields,
    )


def _of_rest(client: S3Client, etag: str, first: int, size: int) -> dict[str, str]:
    """Return the headers of the request for the bytes from `first` on, of the same version."""
    condition = {} if is_modified(etag) else client.if_match(f'"{etag}"')
    return condition | {"Range": f"bytes={first}-{size - 1}"}


def _checked_whole(response: ObjectResponse, context: ErrorContext) -> tuple[int, str]:
    """Return size and validator of the manifest; `response` is to a GET without a range. Raises BadAnswer."""
    if response.status != http.HTTPStatus.OK:
        raise BadAnswer(f"the response to a GET without a range has status {response.status}", context)
    if response.length is None:
        raise BadAnswer(
            "the response has no Content-Length, so its end cannot be proven"
            + transformation(response.fields, None),
            context,
        )
    if content_encoding(response.fields) not in ("", "gzip", "x-gzip"):  # `manifest_text` inflates gzip alone
        raise BadAnswer("the body is encoded" + transformation(response.fields, response.length), context)
    return response.length, validator_of(response.etag, response.last_modified)
