"""Ranged GETs by a client of our own, and what HEADs (`heads`) share with them.

    kernel splice   plain HTTP into pipes: bodies never enter this process
    copying         TLS, or bytes that must be seen: read into the receiver's memory, once

`HttpClient` sends a signed request on a lane; the body is moved by one of `exchange`'s two ways. Whatever
this client is not made for (redirects, chunked bodies) is handed to the portable transport, part by part,
so all answer for the same bytes by the same rules.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.request import getproxies, proxy_bypass

from botocore import UNSIGNED

from streamer.errors import Gone, Skewed, SourceError, Transient, Where, WrongEndpoint
from streamer.source.answer import MAX_REFUSAL, Head, Refusal, Unusual
from streamer.source.credentials import renewing
from streamer.source.exchange import CopyExchange, SpliceExchange
from streamer.source.faults import CODE, MANY_REASONS, cut_off, deleted, from_answer, not_understood
from streamer.source.lanes import Lane
from streamer.source.pool import LanePool
from streamer.source.portable import PortableSource
from streamer.source.ranges import Receiver, check_head
from streamer.source.redirects import visible_id
from streamer.source.session import STALL_TIMEOUT
from streamer.source.signing import Place, RangeSigner
from streamer.source.watcher import Watcher

if TYPE_CHECKING:
    from streamer.source.tls import Trust

_MESSAGE = re.compile(rb"<Message>([^<]{0,500})</Message>")


def why_not(client: Any, buckets: set[str]) -> str | None:
    """Why `client`, aiobotocore's, cannot be stood in for at these buckets; None if it can."""
    endpoint_url = client.meta.endpoint_url
    scheme, _, rest = endpoint_url.partition("://")
    if scheme in getproxies() and not proxy_bypass(rest.split("/")[0]):
        return "a proxy is set for the endpoint"
    if any(bucket.endswith("--x-s3") for bucket in buckets):
        return "directory buckets need session credentials"
    if any(bucket.startswith("arn:") for bucket in buckets):
        return "an access point's requests are signed for the region in its name"
    version = client.meta.config.signature_version
    if version not in (UNSIGNED, "s3v4"):
        return f"requests must be signed by {version}"
    return None


def why_not_splice(endpoint_url: str) -> str | None:
    """Why bodies cannot stay out of this process; None if they can."""
    if not endpoint_url.startswith("http://"):
        return "the endpoint is TLS, so bodies must be decrypted in user space"
    return None


T_co = TypeVar("T_co", covariant=True)


class Answering(Protocol[T_co]):
    """What reads one answer on one lane; see `exchange`."""

    @property
    def heard(self) -> bool:
        """Whether any byte of an answer has come."""

    @property
    def keep_alive(self) -> bool:
        """Whether the lane may be used again, once `run` has returned."""

    async def run(self, waited: float) -> T_co:
        """Read it all. `waited`: seconds of the stall timeout that connecting took."""


class HttpClient:
    """Requests on lanes: one at a time on each, idle ones kept, by host."""

    def __init__(self, tls: Trust | None, *, stall_timeout: float) -> None:
        """`tls`: how to trust a TLS endpoint.

        `stall_timeout`: seconds for a connection and the response header together.
        """
        self._stall_timeout = stall_timeout
        self._loop = asyncio.get_running_loop()
        self._tls = tls
        self._watcher = Watcher()
        self._pools: dict[tuple[str, int], LanePool] = {}

    def close(self) -> None:
        """Close idle lanes; those in use close with the requests that use them, and are told nothing more."""
        for pool in self._pools.values():
            pool.close()
        self._watcher.close()

    async def ask(
        self,
        place: Place,
        where: Where,
        request: Callable[[], Awaitable[bytes]],
        answering: Callable[[Lane], Answering[T_co]],
        *,
        avoid: str | None = None,
    ) -> T_co:
        """One request; once more if an idle lane turns out to have been closed by the server.

        `avoid`: an address not to ask, if there is another.

        Raises SourceError, and whatever the reading of the answer raises.
        """
        pool = self._pools.get((place.host, place.port))
        if pool is None:
            tls = self._tls if place.tls else None
            pool = self._pools[place.host, place.port] = LanePool(
                place.host, place.port, self._watcher, tls=tls
            )
        while True:
            head = await request()
            began = self._loop.time()
            try:
                lane = await pool.take(where, avoid=avoid, within=self._stall_timeout)
            except SourceError:
                raise
            except Exception as error:
                raise not_understood(error, where) from error
            exchange = answering(lane)
            reused, lane.requests = lane.requests > 0, lane.requests + 1
            try:
                _send(lane, head, where)
                answer = await exchange.run(self._loop.time() - began)
            except Transient:
                lane.close()
                if reused and not exchange.heard:
                    continue  # it was closed as we took it; the request never reached anybody
                raise
            except (SourceError, Unusual):
                lane.close()
                raise
            except OSError as error:  # this machine refuses to watch the socket
                lane.close()
                raise Transient(f"the connection broke ({error.strerror or error})", where) from error
            except Exception as error:
                lane.close()
                raise not_understood(error, where) from error
            except BaseException:
                lane.close()
                raise
            if exchange.keep_alive:
                pool.give(lane)
            else:
                lane.close()
            return answer


class OwnSource:
    """A `RangeSource`. Its receivers must be `SpliceReceiver`s if it splices, else `CopyReceiver`s."""

    def __init__(
        self,
        signer: RangeSigner,
        fallback: PortableSource,
        *,
        splice: bool,
        tls: Trust | None = None,
        stall_timeout: float = STALL_TIMEOUT,
    ) -> None:
        """`tls`: as of HttpClient. `stall_timeout`: seconds without a byte that end a request."""
        self.name = "kernel splice" if splice else "copying"
        self._signer = signer
        self._fallback = fallback
        self._exchange: Any = SpliceExchange if splice else CopyExchange
        self._stall_timeout = stall_timeout
        self._client = HttpClient(tls, stall_timeout=stall_timeout)

    def close(self) -> None:
        """Close idle lanes; those in use close with the fetches that use them."""
        self._client.close()

    async def fetch(self, into: Receiver, *, attempt: int) -> None:
        part, first = into.part, into.part.start + into.received
        where = Where(part.object.bucket, part.object.key, first, attempt)
        place = await self._signer.place(part.object.bucket)

        def check(head: Head) -> None:
            headers = head.headers
            try:
                check_head(
                    part.object,
                    first,
                    part.end,
                    where,
                    status=head.status,
                    content_range=headers.get("content-range"),
                    content_length=head.content_length,
                    etag=headers.get("etag"),
                    version=headers.get("x-amz-version-id"),
                )
            except SourceError as error:
                error.where = replace(where, request_id=visible_id(headers.get("x-amz-request-id")))
                raise

        async def request() -> bytes:
            into.doing("credentials")
            head = await self._signer.head(place, part, first)
            into.doing("connect")
            return head

        def answering(lane: Lane) -> Answering[Refusal | None]:
            into.doing("first_byte")
            into.peer = lane.peer
            exchange: Answering[Refusal | None] = self._exchange(
                lane, into, where, check=check, stall_timeout=self._stall_timeout
            )
            return exchange

        with renewing(self._signer.credentials):
            try:
                refusal = await self._client.ask(place, where, request, answering, avoid=into.avoid)
            except Unusual:
                await self._fallback.fetch(into, attempt=attempt)
                return
            if refusal is not None:
                error = _mapped(refusal, where)
                if isinstance(error, WrongEndpoint):
                    await self._fallback.fetch(into, attempt=attempt)  # it has botocore resolve the region
                    return
                if isinstance(error, Gone):
                    error = deleted(error)
                if isinstance(error, Skewed):
                    self._signer.ahead = error.ahead  # what is signed next is right, whatever the clock says
                raise error


def _send(lane: Lane, request: bytes, where: Where) -> None:
    try:
        sent = lane.send(request)
    except OSError as error:
        raise Transient(f"the connection broke ({error.strerror or error})", where) from error
    if not sent:
        raise Transient("the request did not fit the socket", where)


def _mapped(refusal: Refusal, where: Where) -> SourceError:
    headers: Any = refusal.head.headers
    code, message = CODE.search(refusal.body), _MESSAGE.search(refusal.body)
    broken = len(refusal.body) < min(refusal.head.content_length or 0, MAX_REFUSAL)
    if code is None and broken and refusal.head.status in MANY_REASONS:
        return cut_off(refusal.head.status, where)
    return from_answer(
        status=refusal.head.status,
        code=code[1].decode("utf-8", "replace") if code else str(refusal.head.status),
        message=message[1].decode("utf-8", "replace") if message else "",
        request_id=headers.get("x-amz-request-id"),
        retry_after=headers.get("retry-after"),
        date=headers.get("date"),
        where=where,
    )
