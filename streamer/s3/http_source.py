"""Ranged GETs by our own HTTP client (`streamer.s3.http`).

A body stays in its socket until the relay splices or reads it. If this client does not support a response (a
redirect, a chunked body), the aiobotocore transport fetches that part. Both check responses by the same
rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamer.errors import ConfigError, ErrorContext, SourceError
from streamer.s3.client.barriers import proxy_of
from streamer.s3.client.endpoint import STALL_TIMEOUT
from streamer.s3.client.session import certificate_file
from streamer.s3.http.client import HttpClient
from streamer.s3.part_body import PartBody
from streamer.s3.range_gets import LeftToAiobotocore, RangeGets
from streamer.s3.ranges import NO_HEADER, ignore
from streamer.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.s3.client.session import Clients
    from streamer.s3.http.tls import TlsContext
    from streamer.s3.ranges import Body, Outcome, RangeRequest, RangeSource
    from streamer.s3.signing.requests import RangeSigner


TOGETHER = 1 * MIB
"""Bytes of small ranges in one part: what a pipe holds."""


def why_not(clients: Clients, buckets: set[str]) -> str | None:
    """Return why our own client cannot send the requests for these buckets; None if it can."""
    if proxy_of(clients.endpoint_url) is not None:
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


def why_not_splice(endpoint_url: str) -> str | None:
    """Return why bodies cannot be spliced; None if they can."""
    if not endpoint_url.startswith("http://"):
        return "the endpoint is TLS, so bodies must be decrypted in user space"
    return None


def tls_context(ca_bundle: str | None, passed: set[str] | None = None) -> TlsContext:
    """Return TLS that trusts the given bundle, or botocore's certificates. Raises ConfigError.

    `passed`: see `barriers`.
    """
    from streamer.s3.http.tls import TlsContext  # takes about 30 ms

    path = certificate_file(ca_bundle)
    try:
        return TlsContext(path, passed)
    except OSError as error:
        raise ConfigError(
            f"cannot read certificates from {path} ({error}); correct Penstock.Endpoint.CaBundle"
        ) from error


class HttpSource:
    """A `RangeSource` over our own HTTP client."""

    together = TOGETHER

    def __init__(
        self,
        signer: RangeSigner,
        others: RangeSource,
        *,
        on_left: Callable[[LeftToAiobotocore], None] = ignore,
        tls: TlsContext | None = None,
        stall_timeout: float = STALL_TIMEOUT,
    ) -> None:
        """`others`: aiobotocore's, fetches what this client does not support. `tls`: see `HttpClient`.

        `on_left`: called with the first error of each cause. A request costs aiobotocore ten times the CPU,
        so the operator is shown the cause.
        `stall_timeout`: seconds without a byte after which a request fails.
        """
        self._signer = signer
        self._others = others
        self._on_left = on_left
        self._causes: set[str] = set()
        self._client = HttpClient(tls, stall_timeout=stall_timeout)
        self._spliceable = tls is None
        self._left_one = False
        """Whether this client did not support the first response to the last part's requests."""

    def close(self) -> None:
        """Close idle connections; a connection in use closes with its body."""
        self._client.close()

    async def open(self, request: RangeRequest) -> Body:
        try:
            return await self._open(request)
        except LeftToAiobotocore as left:
            if left.message not in self._causes:
                self._causes.add(left.message)
                self._on_left(left)
            return await self._others.open(request)

    async def _open(self, request: RangeRequest) -> PartBody:
        body = PartBody(request, await self._gets(request), spliceable=self._spliceable, alone=self._left_one)
        try:
            await body.open()
        except BaseException as error:
            body.close()
            self._left_one = isinstance(error, LeftToAiobotocore)
            raise
        self._left_one = False
        return body

    async def _gets(self, request: RangeRequest) -> RangeGets:
        """Return how the requests of a part are sent now."""
        signer, part = self._signer, request.part
        request.on_phase("credentials")
        try:
            buckets = {item.object.bucket for item in part.items if not isinstance(item, bytes)}
            for bucket in buckets:
                _check_bucket(bucket, request.context)
            endpoints = {bucket: await signer.endpoint(bucket) for bucket in buckets}
            keys = await signer.keys(part.object)
        except BaseException as error:
            if not isinstance(error, LeftToAiobotocore):
                outcome: Outcome = error if isinstance(error, SourceError) else "cancelled"
                request.on_request_ended(outcome, 0, 0.0, 0.0, NO_HEADER)
            raise
        return RangeGets(self._client, signer, endpoints, keys, request.on_whole)
