"""aiobotocore's HTTP session, which sends requests to no stranger and takes no response of another request.

Requests go to the endpoint that the job file names, or that AWS's endpoint rules yield.

    3xx that names a region    botocore resolves the endpoint anew for that region, signs, and asks once more
    3xx to the very same URL   Transient: the server asks for the same request again
    any other 3xx              WrongEndpoint: names the place, and sends nothing there

Nothing follows a redirect's Location: otherwise whoever answers would choose who gets the session token and
the SSE-C key, and whose bytes are streamed. aiobotocore's HTTP client would follow it. Our own HTTP client
leaves every redirect to aiobotocore's, so these rules are the only ones.
"""

from __future__ import annotations

import asyncio
import re
import select
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qsl, unquote, urljoin, urlsplit

from aiobotocore.httpsession import AIOHTTPSession

from streamer.errors import ErrorContext, Transient, WrongEndpoint
from streamer.linux import is_ready
from streamer.secrets import quoted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp.connector import Connection

REGION = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
"""A region's name is a label of a host's name; AWS's endpoint rules put it into one."""
_USUAL = {"http": 80, "https": 443}


class UnfollowingSession(AIOHTTPSession):  # type: ignore[misc]
    """aiobotocore's HTTP session, which follows no redirect and takes no stale response."""

    async def _create_connector(self, proxy_url: str | None) -> Any:
        connector = await super()._create_connector(proxy_url)
        connector.connect = partial(_unspoilt, connector.connect)
        return connector

    async def _get_session(self, proxy_url: str | None) -> _Unfollowing:
        return _Unfollowing(await super()._get_session(proxy_url))


class PinnedSession(UnfollowingSession):
    """The same for requests to S3: a redirect is an error that names its target, or names a region."""

    async def send(self, request: Any) -> Any:
        response = await super().send(request)
        if 300 <= response.status_code < 400:
            try:
                check_redirect(request.url, response.status_code, response.headers)
            except BaseException:
                response.raw.close()
                raise
        return response


async def _unspoilt(
    connect: Callable[..., Awaitable[Connection]], *request: Any, **options: Any
) -> Connection:
    """A connection on which nothing has come since its last response, from `connect` of the pool.

    aiohttp keeps a connection whose server sent more than its response, and takes the surplus for the next
    response: bytes of another object, or of another version.
    """
    while True:
        connection = await connect(*request, **options)
        protocol = connection.protocol
        if protocol is None or not (protocol.should_close or _readable(protocol.transport)):
            return connection
        connection.close()


def _readable(transport: asyncio.BaseTransport | None) -> bool:
    """Whether bytes, or the end, wait in the socket and have not reached aiohttp."""
    if transport is None or (sock := transport.get_extra_info("socket")) is None:
        return False
    return is_ready(sock.fileno(), select.POLLIN)


class _Unfollowing:
    """aiohttp's session, as far as aiobotocore uses it, without redirects and cookies."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def request(self, method: str, **options: Any) -> Any:
        self._session.cookie_jar.clear()  # S3 has none, so what a server sets is neither kept nor sent back
        return await self._session.request(method, **options, allow_redirects=False)


def check_redirect(url: str, status: int, headers: Any) -> None:
    """Return for a redirect that botocore's rules may follow. Raises WrongEndpoint, Transient."""
    context = ErrorContext(request_id=escaped_id(headers.get("x-amz-request-id")))
    if (region := headers.get("x-amz-bucket-region")) is not None:
        if not REGION.fullmatch(region):
            raise WrongEndpoint(f"S3 said {status} and named {quoted(region)!r}, which is no region", context)
        return
    location = headers.get("location")
    if not location:
        raise WrongEndpoint(f"S3 said {status} without saying where to, or which region", context)
    here = urlsplit(url)
    try:
        there = urlsplit(urljoin(url, location))
        origin = _origin(there)
    except ValueError:
        raise WrongEndpoint(f"S3 said {status} to a place that cannot be understood", context) from None
    if origin == _origin(here) and "@" not in there.netloc:
        if _resource(there) == _resource(here):
            raise Transient(f"S3 said {status}: the same request is to be sent again", context)
        raise WrongEndpoint(
            f"S3 said {status} to another path of the endpoint, which may be another object", context
        )
    raise WrongEndpoint(
        f"S3 said {status} to {quoted(origin)}, which is not the job's endpoint, and nothing was sent there; "
        "if the bucket is there, name it by Penstock.Endpoint.Url, or set Penstock.Endpoint.Region",
        context,
    )


def escaped_id(request_id: str | None) -> str | None:
    """A request id as errors may name it: a server may repeat a secret of the request there."""
    return quoted(request_id) if request_id else None


def _origin(url: SplitResult) -> str:
    """Scheme, host and port; neither credentials nor path, which may be secret."""
    host = url.hostname or ""
    host = f"[{host}]" if ":" in host else host
    port = url.port
    return f"{url.scheme}://{host}" + ("" if port in (None, _USUAL.get(url.scheme)) else f":{port}")


def _resource(url: SplitResult) -> tuple[str, list[tuple[str, str]]]:
    return unquote(url.path), sorted(parse_qsl(url.query, keep_blank_values=True))
