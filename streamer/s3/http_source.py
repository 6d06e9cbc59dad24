"""Ranged GETs by our own HTTP client (`streamer.s3.http`).

A body stays in its socket until the relay splices or reads it. If this client does not support a response (a
redirect, a chunked body), the aiobotocore transport fetches that part. Both check responses by the same
rules.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from streamer.errors import ClockSkew, ConfigError, ErrorContext, ObjectMissing, SourceError, WrongEndpoint
from streamer.plan import Span, is_modified
from streamer.s3.client.credentials import renewed, renewing
from streamer.s3.client.documents import MAX_ERROR_BODY
from streamer.s3.client.endpoint import STALL_TIMEOUT
from streamer.s3.client.faults import (
    CODE,
    MANY_REASONS,
    cut_off,
    deleted,
    error_from_response,
    escaped_id,
)
from streamer.s3.client.final_answers import is_final
from streamer.s3.client.session import certificate_file
from streamer.s3.fallback import Fallback, LeftToAiobotocore
from streamer.s3.http.client import HttpClient, Response
from streamer.s3.http.response import ResponseHeader
from streamer.s3.http_span import HttpSpan
from streamer.s3.ranges import check_header, suggest_omission
from streamer.s3.span_requests import RequestMethods
from streamer.units import MIB

if TYPE_CHECKING:
    from streamer.plan import ObjectRef, Part
    from streamer.s3.client.session import Clients
    from streamer.s3.http.body import HttpBody
    from streamer.s3.http.tls import TlsContext
    from streamer.s3.ranges import Body, RangeRequest
    from streamer.s3.signing.requests import RangeSigner


SPAN_SIZE = 1 * MIB
"""Bytes of small parts in one span: what a pipe holds."""
_MESSAGE = re.compile(rb"<Message>([^<]{0,500})</Message>")


def why_not(clients: Clients, buckets: set[str]) -> str | None:
    """Return why our own client cannot send the requests for these buckets; None if it can."""
    if _proxied(clients.endpoint_url):
        return "a proxy is set for the endpoint"
    for bucket in buckets:
        if (why := _why_not_bucket(bucket)) is not None:
            return why
    if clients.signature not in ("none", "s3v4"):
        return f"requests must be signed by {clients.signature}"
    return None


def _check_bucket(bucket: str, context: ErrorContext) -> None:
    """Raise LeftToAiobotocore for a bucket of a row of a manifest that has just been read."""
    if (why := _why_not_bucket(bucket)) is not None:
        raise LeftToAiobotocore(why, context)


def _why_not_bucket(bucket: str) -> str | None:
    """Return why our own client cannot send the requests for this bucket; None if its name is no obstacle."""
    if bucket.endswith("--x-s3"):
        return "directory buckets need session credentials"
    if bucket.startswith("arn:"):
        return "an access point's requests are signed for the region in its name"
    return None


def _proxied(endpoint_url: str) -> bool:
    """Return whether the environment names a proxy for the endpoint."""
    if not any(name.lower().endswith("_proxy") for name in os.environ):
        return False
    from urllib.request import getproxies, proxy_bypass  # takes 10 ms

    scheme, _, rest = endpoint_url.partition("://")
    return scheme in getproxies() and not proxy_bypass(rest.split("/")[0])


def why_not_splice(endpoint_url: str) -> str | None:
    """Return why bodies cannot be spliced; None if they can."""
    if not endpoint_url.startswith("http://"):
        return "the endpoint is TLS, so bodies must be decrypted in user space"
    return None


def tls_context(ca_bundle: str | None) -> TlsContext:
    """Return TLS that trusts the given bundle, or botocore's certificates. Raises ConfigError."""
    from streamer.s3.http.tls import TlsContext  # takes about 30 ms

    path = certificate_file(ca_bundle)
    try:
        return TlsContext(path)
    except OSError as error:
        raise ConfigError(
            f"cannot read certificates from {path} ({error}); correct Penstock.Endpoint.CaBundle"
        ) from error


class HttpSource:
    """A `RangeSource` over our own HTTP client."""

    name = "http"
    span_size = SPAN_SIZE

    def __init__(
        self,
        signer: RangeSigner,
        fallback: Fallback,
        *,
        tls: TlsContext | None = None,
        stall_timeout: float = STALL_TIMEOUT,
    ) -> None:
        """`fallback`: fetches what this client does not support. `tls`: see `HttpClient`.

        `stall_timeout`: seconds without a byte after which a request fails.
        """
        self._signer = signer
        self._fallback = fallback
        self._client = HttpClient(tls, stall_timeout=stall_timeout)
        self._stall_timeout = stall_timeout
        self._spliceable = tls is None
        self._left_one = False
        """Whether this client did not support the first response of the last span."""

    def close(self) -> None:
        """Close idle connections; a connection in use closes with its body."""
        self._client.close()

    async def open(self, request: RangeRequest) -> Body:
        try:
            if isinstance(request.part, Span):
                return await self._open_span(request)
            return await self._open_part(request)
        except LeftToAiobotocore as left:
            return await self._fallback.open(request, left)

    async def _open_part(self, request: RangeRequest) -> Body:
        part, context = request.part, request.context
        _check_bucket(part.object.bucket, context)
        endpoint = await self._signer.endpoint(part.object.bucket)

        async def signed() -> bytes:
            request.on_phase("credentials")
            request_bytes = await self._signer.ranged_get(endpoint, part, request.first)
            request.on_phase("connect")
            return request_bytes

        def sent(peer: str) -> None:
            request.peer = peer
            request.on_phase("first_byte")

        with renewing(self._signer.credentials):
            for fresh in (False, True):
                response = await self._client.send(
                    endpoint, context, signed, avoid=request.avoid, fresh=fresh, on_sent=sent
                )
                try:
                    body = _body(response, part.object, request.first, part.end, context)
                    if body is not None:
                        return body
                    error = await self._error(response, part.object, context)
                except SourceError as failure:
                    response.end(reuse=False)
                    error = failure
                if not (response.reused and is_final(error)):
                    break
            raise error

    async def _error(self, response: Response, ref: ObjectRef, context: ErrorContext) -> SourceError:
        """End a response without a body that can be taken, and return its error."""
        status = response.header.status
        if 300 <= status < 400:
            response.end(reuse=False)
            return LeftToAiobotocore(f"the server redirects requests (status {status})", context)
        if status in (200, 206):
            response.end(reuse=False)
            return LeftToAiobotocore("the server sends a body without its length, as a chunked one", context)
        error = await refusal(response, context, self._signer)
        if error is None:
            return LeftToAiobotocore("the bucket is in another region than the job file names", context)
        if self._signer.sends_if_match and not is_modified(ref.etag):
            suggest_omission(error)
        return deleted(error) if isinstance(error, ObjectMissing) else error

    async def _open_span(self, request: RangeRequest) -> HttpSpan:
        """Send a request for each part of a span."""
        signer, sent_at = self._signer, time.monotonic()
        request.on_phase("credentials")
        buckets = {part.object.bucket for part in request.part.pieces if part.body}
        for bucket in buckets:
            _check_bucket(bucket, request.context)
        endpoints = {bucket: await signer.endpoint(bucket) for bucket in buckets}
        keys = await signer.keys(request.part.object)

        async def error_of_response(response: Response, part: Part, context: ErrorContext) -> SourceError:
            return renewed(await self._error(response, part.object, context), signer.credentials, sent_at)

        span = HttpSpan(
            request,
            RequestMethods(
                pool=lambda part: self._client.pool(endpoints[part.object.bucket]),
                build=lambda part: signer.ranged_get_by(
                    keys, endpoints[part.object.bucket], part, part.start
                ),
                body=lambda response, part, context: _body(
                    response, part.object, part.start, part.end, context
                ),
                judge=error_of_response,
                stall_timeout=self._stall_timeout,
                alone=self._left_one,
            ),
            spliceable=self._spliceable,
        )
        try:
            await span.open()
        except BaseException as error:
            span.close()
            self._left_one = isinstance(error, LeftToAiobotocore)
            raise
        self._left_one = False
        return span


def _body(response: Response, ref: ObjectRef, first: int, end: int, context: ErrorContext) -> HttpBody | None:
    """Return the body, bytes `first` to `end` of the object; None if it is not one that can be taken.

    Raises SourceError if it is another version's, or other bytes.
    """
    header = response.header
    length, fields = header.content_length, header.fields
    if header.status not in (200, 206) or length is None or "transfer-encoding" in fields:
        return None
    try:
        check_header(
            ref,
            first,
            end,
            context,
            status=header.status,
            content_length=length,
            fields=fields,
        )
    except SourceError as error:
        error.context = replace(context, request_id=escaped_id(fields.get("x-amz-request-id")))
        raise
    return response.body(length, context)


async def refusal(response: Response, context: ErrorContext, signer: RangeSigner) -> SourceError | None:
    """Return the error of a response that is neither a success nor a redirect; None for WrongEndpoint.

    After None the caller lets aiobotocore repeat the request, because botocore resolves the bucket's region.
    ClockSkew sets `signer.ahead`, so the signer's next signature uses S3's time. Reads the body, and ends
    the response.
    """
    error = error_of(response.header, await response.error_body(), context)
    if isinstance(error, WrongEndpoint):
        return None
    if isinstance(error, ClockSkew):
        signer.ahead = error.ahead
    return error


def error_of(header: ResponseHeader, body: bytes, context: ErrorContext) -> SourceError:
    """Return the error for a response that is neither a success nor a redirect. `body` may be cut off."""
    code, message = CODE.search(body), _MESSAGE.search(body)
    cut = len(body) < min(header.content_length or 0, MAX_ERROR_BODY)
    if code is None and cut and header.status in MANY_REASONS:
        return cut_off(header.status, context)
    fields: Any = header.fields
    return error_from_response(
        status=header.status,
        code=code[1].decode("utf-8", "replace") if code else str(header.status),
        message=message[1].decode("utf-8", "replace") if message else "",
        request_id=fields.get("x-amz-request-id"),
        retry_after=fields.get("retry-after"),
        date=fields.get("date"),
        context=context,
    )
