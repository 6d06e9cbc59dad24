"""aiobotocore's HTTP session, which follows no redirect to another server and reads no stale response.

Requests go to the endpoint in the job file, or to the one that AWS's endpoint rules yield.

    3xx that names a region    botocore resolves the endpoint for that region and sends the request again
    3xx to the very same URL   Transient: the server wants the same request again
    304                        WrongEndpoint: no request has a condition for it
    any other 3xx              WrongEndpoint, whose text names the target; no request goes there

No client follows a redirect's Location: otherwise the responding server would choose which server gets the
session token and the SSE-C key, and which server's bytes are streamed. aiobotocore's HTTP client follows it
by default. Our own HTTP client passes every redirected request to aiobotocore, so these rules are the only
ones.

aiobotocore's requests to metadata services of containers and instances carry an authorization or session
token, so the sessions of their fetchers follow none either (`refuse_redirects`). There a redirect counts as
any other response that is not 200.
"""

from __future__ import annotations

import asyncio
import http
import select
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qsl, unquote, urljoin, urlsplit
from weakref import WeakSet

from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.utils import AioContainerMetadataFetcher, AioIMDSFetcher
from aiohttp import ClientPayloadError
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import HttpProcessingError
from botocore.exceptions import ReadTimeoutError

from streamer.errors import ErrorContext, Transient, WrongEndpoint
from streamer.linux import is_ready
from streamer.s3.client.faults import REGION, escaped_id
from streamer.s3.client.final_answers import FINAL_STATUSES, fresh, on_fresh_connection, reused
from streamer.secrets import quoted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp.connector import Connection

token_unanswered: ContextVar[bool] = ContextVar("token_unanswered", default=False)
"""Whether an instance's metadata service has not answered the task's request for a token."""
_DEFAULT_PORTS = {"http": 80, "https": 443}


class UnfollowingSession(AIOHTTPSession):  # type: ignore[misc]
    """aiobotocore's HTTP session, which follows no redirect and reads no stale response."""

    async def _create_connector(self, proxy_url: str | None) -> Any:
        connector = await super()._create_connector(proxy_url)
        connector._factory = partial(_Protocol, asyncio.get_running_loop())  # noqa: SLF001
        connector.connect = partial(_clean_connection, connector.connect)
        connector._release = partial(_release_at_once, connector._release)  # noqa: SLF001
        return connector

    async def _get_session(self, proxy_url: str | None) -> _Unfollowing:
        return _Unfollowing(await super()._get_session(proxy_url))


class PinnedSession(UnfollowingSession):
    """Session for requests to S3; raises an error for a redirect that botocore may not follow."""

    async def send(self, request: Any) -> Any:
        response = await super().send(request)
        if response.status_code in FINAL_STATUSES and request.method in ("GET", "HEAD") and reused.get():
            response.raw.close()
            with on_fresh_connection():
                response = await super().send(request)
        if 300 <= response.status_code < 400:
            try:
                check_redirect(request.url, response.status_code, response.headers)
            except BaseException:
                response.raw.close()
                raise
        return response


class _ContainerSession(AioContainerMetadataFetcher._ref_counted_session_cls, UnfollowingSession):  # type: ignore[misc] # noqa: SLF001
    """The container fetcher's session, which follows no redirect."""


class _InstanceSession(AioIMDSFetcher._ref_counted_session_cls, UnfollowingSession):  # type: ignore[misc] # noqa: SLF001
    """The instance fetchers' session, which follows no redirect and asks no proxy, for none reaches it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "proxies": None})

    async def send(self, request: Any) -> Any:
        try:
            return await super().send(request)
        except ReadTimeoutError:
            token_unanswered.set(request.method == "PUT")
            raise


def refuse_redirects() -> None:
    """Make every metadata fetcher that this process creates from now on follow no redirect."""
    AioContainerMetadataFetcher._ref_counted_session_cls = _ContainerSession  # noqa: SLF001
    AioIMDSFetcher._ref_counted_session_cls = _InstanceSession  # noqa: SLF001


class _Protocol(ResponseHandler):
    """aiohttp's protocol of a connection, which loses no sign of bytes that follow a body."""

    unparsable = False
    """Whether bytes arrived that are no response."""

    def set_exception(self, exc: BaseException, *cause: BaseException) -> None:
        # The pool has the connection back before the bytes after a body are parsed. The next task that asks
        # the pool closes the connection, which clears aiohttp's own exception.
        self.unparsable |= isinstance(exc, HttpProcessingError)
        super().set_exception(exc, *cause)

    def connection_lost(self, exc: BaseException | None) -> None:
        body = self._payload
        if exc is not None and body is not None and not body.is_eof():
            # A slow reader pauses the parser, which may hold bytes after the body. aiohttp would drop them
            # now, and end a body whose last byte has arrived.
            body.set_exception(ClientPayloadError(f"the connection failed before the body's end: {exc}"))
        super().connection_lost(exc)


_used: WeakSet[Any] = WeakSet()
"""Protocols of connections that have carried a request."""


async def _clean_connection(
    connect: Callable[..., Awaitable[Connection]], *request: Any, **options: Any
) -> Connection:
    """Return a connection of the pool on which no byte has arrived since its last response.

    aiohttp keeps a connection on which more bytes than the response have arrived, and parses the surplus as
    the next response: bytes of another object, or of another version. `connect`: the pool's method.
    """
    while True:
        connection = await connect(*request, **options)
        protocol = connection.protocol
        if protocol is None:
            return connection
        used = protocol in _used
        _used.add(protocol)
        if not (protocol.should_close or _readable(protocol.transport) or (used and fresh.get())):
            reused.set(used)
            return connection
        connection.close()


def _release_at_once(release: Callable[..., None], key: Any, protocol: Any, **options: Any) -> None:
    """Give a connection back to the pool; if the pool closes it, close its socket at once.

    Over TLS asyncio waits up to 30 s for the server's end of a connection; a silent one sends none.
    aiohttp does not wait for asyncio, so a cancelled request's socket could outlast the client and the loop.
    `release`: the pool's method.
    """
    transport = protocol.transport
    if transport is not None and transport.is_closing():
        # Before the pool closes it again: after that Python 3.11.2's abort() over TLS is an AttributeError.
        transport.abort()
        transport = None
    release(key, protocol, **options)
    if transport is not None and transport.is_closing():
        transport.abort()


def surplus_after(response: Any) -> asyncio.Future[bool]:
    """Return a future that is done soon after the end of `response`: whether bytes of another one followed.

    aiohttp parses them at once. So they are the next message, or an error if they are no message.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[bool] = loop.create_future()
    protocol = response._protocol  # noqa: SLF001 - its connection is released with the last byte

    def look() -> None:
        if not found.done():
            found.set_result(bool(protocol._buffer) or protocol.unparsable)  # noqa: SLF001

    response.content.on_eof(lambda: loop.call_soon(look))  # the parser calls this before it goes on
    return found


def _readable(transport: asyncio.BaseTransport | None) -> bool:
    """Return whether the socket holds bytes, or the end of file, that aiohttp has not read."""
    if transport is None or (sock := transport.get_extra_info("socket")) is None:
        return False
    return is_ready(sock.fileno(), select.POLLIN)


class _Unfollowing:
    """aiohttp's session, as far as aiobotocore uses it, without redirects and cookies."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def request(self, method: str, **options: Any) -> Any:
        self._session.cookie_jar.clear()  # S3 sets no cookies, so no cookie is kept or sent back
        response = await self._session.request(method, **options, allow_redirects=False)
        return (
            response
            if b"".join(value for _, value in response.raw_headers).isascii()
            else _Decodable(response)
        )


class _Decodable:
    """aiohttp's response with header values in UTF-8, as which aiobotocore decodes them all.

    Some servers send user metadata in Latin-1.
    """

    def __init__(self, response: Any) -> None:
        self._response = response
        self.raw_headers = [
            (name, value.decode(errors="replace").encode()) for name, value in response.raw_headers
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._response, name)


def check_redirect(url: str, status: int, headers: Any) -> None:
    """Accept only a redirect that names a region; botocore follows it. Raises WrongEndpoint, Transient."""
    context = ErrorContext(request_id=escaped_id(headers.get("x-amz-request-id")))
    if status == http.HTTPStatus.NOT_MODIFIED:
        raise WrongEndpoint(
            "S3 responded 304 (Not Modified), which no request asked for; remove the cache or the proxy in "
            "front of the endpoint, or correct Penstock.Endpoint.Url",
            context,
        )
    if (region := headers.get("x-amz-bucket-region")) is not None:
        if not REGION.fullmatch(region):
            raise WrongEndpoint(
                f"S3 redirected ({status}) to {quoted(region)!r}, which is no region", context
            )
        return
    location = headers.get("location")
    if not location:
        raise WrongEndpoint(f"S3 redirected ({status}) without an address or a region", context)
    source = urlsplit(url)
    try:
        target = urlsplit(urljoin(url, location))
        origin = _origin(target)
    except ValueError:
        raise WrongEndpoint(f"S3 redirected ({status}) to an address that is no URL", context) from None
    if origin == _origin(source) and "@" not in target.netloc:
        if _resource(target) == _resource(source):
            raise Transient(f"S3 redirected ({status}) to the very same URL", context)
        raise WrongEndpoint(
            f"S3 redirected ({status}) to another path of the endpoint, which may be another object; correct "
            "S3Uri or Penstock.Endpoint.Url",
            context,
        )
    raise WrongEndpoint(
        f"S3 redirected ({status}) to {quoted(origin)}, which is not the job's endpoint; nothing was sent to "
        "it; if the bucket is there, set Penstock.Endpoint.Url to it, or set Penstock.Endpoint.Region",
        context,
    )


def _origin(url: SplitResult) -> str:
    """Return scheme, host and port of a URL, without credentials and path, which may be secret."""
    host = url.hostname or ""
    host = f"[{host}]" if ":" in host else host
    port = url.port
    return f"{url.scheme}://{host}" + ("" if port in (None, _DEFAULT_PORTS.get(url.scheme)) else f":{port}")


def _resource(url: SplitResult) -> tuple[str, list[tuple[str, str]]]:
    return unquote(url.path), sorted(parse_qsl(url.query, keep_blank_values=True))
