"""Size and ETag of objects that are named one by one: HEADs, many at once.

    find() ─ a turn of 128 ─┬─ our own HTTP client: sign, send, parse a response header    nearly always
                            └─ aiobotocore's head_object, 64 at once                      the rest

The rest is what our own client does not stand in for (`why_not`), and each answer that it was not made for:
a redirect, or 400, which S3 also gives for a request signed for another region. Both ways give the same
objects and the same errors. A HEAD is repeated as a part is: for `give_up_after` seconds, with growing
waits; it keeps its turn meanwhile, so a server that throttles is asked less.

The answer to HEAD has no body whatever its Content-Length says (RFC 9110 §9.3.2), also where it is an error;
so S3's own error code is never heard, and its status decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

from streamer.errors import BadAnswer, ErrorContext, Transient
from streamer.plan import ObjectRef, bare_etag, is_etag
from streamer.retry import UNAVAILABLE, Attempts, RetryPolicy, retry
from streamer.s3.catalog.validation import described_object
from streamer.s3.client.faults import error_from_response, map_errors
from streamer.s3.client.redirects import escaped_id
from streamer.s3.http.client import HttpClient
from streamer.s3.http_source import tls_context, why_not
from streamer.s3.ranges import check_version
from streamer.s3.signing.requests import RangeSigner

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from streamer.s3.client.session import Clients

HEADS = 128
"""HEADs in flight for the whole process, and so its connections for them."""
PORTABLE_HEADS = 64
"""Of those by aiobotocore; its pool has so many connections."""
LONGEST_WAIT = 20.0
"""Seconds at most before a repetition, unless the server asks for more."""


class ObjectInspector(Protocol):
    """Finds objects, many at once."""

    async def stat(self, bucket: str, key: str, version: str | None = None) -> ObjectRef:
        """The object as S3 has it now, or that version of it. Raises SourceError."""


class AiobotocoreHeadClient:
    """By aiobotocore's client, which it does not own and which repeats by itself."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._turns = asyncio.Semaphore(PORTABLE_HEADS)

    async def stat(self, bucket: str, key: str, version: str | None = None) -> ObjectRef:
        """See `ObjectInspector`."""
        context = ErrorContext(bucket, key)
        asked = {"VersionId": version} if version else {}
        async with self._turns:
            with map_errors(context):
                answer = await self._client.head_object(Bucket=bucket, Key=key, **asked)
        found = answer.get("VersionId")
        return _found(context, version, found, length=answer.get("ContentLength"), etag=answer.get("ETag"))


class HttpHeadClient:
    """By our own HTTP client, and by `AiobotocoreHeadClient` where that does not serve."""

    def __init__(self, clients: Clients, *, give_up_after: float) -> None:
        """`give_up_after`: seconds that one HEAD may fail for, if repeating may help."""
        self._clients = clients
        self._policy = RetryPolicy(give_up_after, longest_wait=LONGEST_WAIT)
        self._fallback = AiobotocoreHeadClient(clients.control)
        self._signer = RangeSigner(
            clients.control, clients.credentials, anonymous=clients.anonymous, reading=clients.reading
        )
        self._turns = asyncio.Semaphore(HEADS)
        self._by_aiobotocore: dict[str, bool] = {}
        """Of each bucket met, whether it is left to the fallback."""

    @cached_property
    def _http(self) -> HttpClient:
        secure = self._clients.control.meta.endpoint_url.startswith("https://")
        return HttpClient(
            tls_context(self._clients.ca_bundle) if secure else None,
            stall_timeout=self._clients.stall_timeout,
        )

    def close(self) -> None:
        """Close the connections. No `find` may be under way."""
        self._http.close()

    async def stat(self, bucket: str, key: str, version: str | None = None) -> ObjectRef:
        """See `ObjectInspector`. Raises GaveUp for what went on failing."""
        async with self._turns:
            attempts = Attempts(self._policy, UNAVAILABLE, what="an answer")
            try:
                return await self._ask(bucket, key, version)
            except Transient as error:
                failed = error
            ask = partial(self._ask, bucket, key, version)
            return await retry(partial(attempts.bounded, ask), attempts, failed=failed)

    async def _ask(self, bucket: str, key: str, version: str | None) -> ObjectRef:
        by_aiobotocore = self._by_aiobotocore.get(bucket)
        if by_aiobotocore is None:
            by_aiobotocore = self._by_aiobotocore[bucket] = (
                why_not(self._clients.control, {bucket}) is not None
            )
        if by_aiobotocore:
            return await self._fallback.stat(bucket, key, version)
        context = ErrorContext(bucket, key)
        endpoint = await self._signer.endpoint(bucket)
        self._clients.request_counts["HeadObject"] += 1
        response = await self._http.send(
            endpoint, context, lambda: self._signer.inquiry(endpoint, bucket, key, version=version)
        )
        response.end(reuse=True)
        status, headers = response.header.status, response.header.fields
        context = ErrorContext(bucket, key, request_id=escaped_id(headers.get("x-amz-request-id")))
        if status == http.HTTPStatus.OK:
            found = headers.get("x-amz-version-id")
            return _found(
                context, version, found, length=response.header.content_length, etag=headers.get("etag")
            )
        if 300 <= status < 400 or status == http.HTTPStatus.BAD_REQUEST:
            # A redirected bucket will redirect the others too, and botocore remembers where to.
            self._by_aiobotocore[bucket] = status != http.HTTPStatus.BAD_REQUEST
            return await self._fallback.stat(bucket, key, version)
        raise error_from_response(
            status=status,
            code=str(status),
            message=http.client.responses.get(status, ""),
            request_id=context.request_id,
            retry_after=headers.get("retry-after"),
            date=headers.get("date"),
            context=context,
        )


@contextlib.asynccontextmanager
async def open_inspector(
    clients: Clients, *, give_up_after: float, by_aiobotocore: bool
) -> AsyncIterator[ObjectInspector]:
    """The HEADs of the whole process, until the end of the block. `by_aiobotocore`: by aiobotocore alone."""
    if by_aiobotocore:
        yield AiobotocoreHeadClient(clients.control)
        return
    with contextlib.closing(HttpHeadClient(clients, give_up_after=give_up_after)) as inspector:
        yield inspector


def _found(
    context: ErrorContext, version: str | None, found: str | None, *, length: int | None, etag: str | None
) -> ObjectRef:
    if length is None or not etag or not is_etag(bare_etag(etag)):
        raise BadAnswer("answered HEAD without Content-Length or ETag", context)
    check_version(version, found, context)
    return described_object(context, context.key or "", size=length, etag=etag, version=version)
