"""Penstock's HTTP client: sends signed requests on persistent connections and reads response headers.

`HttpClient.send` returns a `Response` whose header is read and whose body is still in the connection. The
caller takes the body (`HttpBody`) or reads an error's body, and ends the response exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from streamer.errors import ErrorContext, InvalidResponse, SourceError, Transient
from streamer.s3.client.documents import MAX_DOCUMENT, MAX_ERROR_BODY, checked_document
from streamer.s3.client.faults import broken, not_understood
from streamer.s3.http.body import HttpBody
from streamer.s3.http.poller import FairPoller
from streamer.s3.http.pool import ConnectionPool
from streamer.s3.http.response import ResponseHeader, ResponseReader
from streamer.units import counted

if TYPE_CHECKING:
    from streamer.s3.http.connection import Connection
    from streamer.s3.http.tls import TlsContext
    from streamer.s3.signing.endpoints import BucketEndpoint


class Response:
    """A response whose header is read. It owns the connection until one of its methods ends the response."""

    header: ResponseHeader
    """The header, once it is read."""

    def __init__(
        self, reader: ResponseReader, connection: Connection, pool: ConnectionPool, *, stall_timeout: float
    ) -> None:
        self.reused = connection.requests > 0
        """Whether the connection has carried a request before."""
        self._reader = reader
        self._connection = connection
        self._pool = pool
        self._stall_timeout = stall_timeout
        self._ended = False

    @property
    def begun(self) -> bool:
        """Whether any byte has arrived."""
        return self._reader.begun

    @property
    def deadline(self) -> float:
        """Time of the event loop until which the header must have come."""
        return self._reader.deadline

    def read_header(self) -> None:
        """Read the header. Raises BlockingIOError until all of it has arrived, SourceError, OSError."""
        while not self._reader.read_header():
            pass
        self.header = self._reader.parsed

    def late(self) -> None:
        """Note that no byte came in time; close the other idle connections if this one had been idle."""
        if self.reused:
            self._pool.drop_idle(self._connection.peer)
        self.reused = False  # another connection would be as late

    def pause(self) -> None:
        """Stop watching the connection until `error_body` or `body` reads from it."""
        self._connection.pause()

    def body(self, length: int, context: ErrorContext) -> HttpBody:
        """Return the `length` bytes after the header as a body, which then owns the connection."""
        self._reader.release()
        return HttpBody(
            self._connection,
            length,
            context,
            stall_timeout=self._stall_timeout,
            give_back=self._pool.give if self.header.keep_alive else None,
            request_id=self.header.fields.get("x-amz-request-id"),
        )

    async def error_body(self) -> bytes:
        """Read the body, about 256 KiB at most, and end the response. Raises SourceError."""
        return (await self._read_body(MAX_ERROR_BODY))[0]

    async def document(self, context: ErrorContext) -> bytes:
        """Read the body, a page of a listing, and end the response. Raises SourceError."""
        body, whole, followed = await self._read_body(MAX_DOCUMENT)
        if followed:
            raise InvalidResponse("more bytes follow the end of the response", context)
        if not whole and len(body) <= MAX_DOCUMENT:
            raise Transient(f"the response broke off after {counted(len(body), 'byte')} of its body", context)
        return checked_document(body, context)

    async def _read_body(self, most: int) -> tuple[bytes, bool, bool]:
        """Return about `most` bytes of the body at most, and whether that is all; end the response.

        The last item: whether bytes follow the response.
        """
        whole = followed = False
        try:
            body = await self._reader.body(most)
            whole = self._reader.complete
            followed = whole and self._reader.followed
            return body, whole, followed
        finally:
            self.end(reuse=whole and not followed)

    def end(self, *, reuse: bool) -> None:
        """End the response. `reuse`: whether the connection may carry another request: no byte is left.

        Later calls do nothing: a cancelled task that reads the body ends the response, and so does its owner.
        """
        if self._ended:
            return
        self._ended = True
        self._reader.release()
        if reuse and self.header.keep_alive:
            self._pool.give(self._connection)
        else:
            self._connection.close()


class HttpClient:
    """Sends requests over pooled connections, one at a time on each."""

    def __init__(self, tls: TlsContext | None, *, stall_timeout: float) -> None:
        """`tls`: the certificates to trust, for a TLS endpoint.

        `stall_timeout`: seconds for connecting, the response header and an error's body together.
        """
        self._stall_timeout = stall_timeout
        self._loop = asyncio.get_running_loop()
        self._tls = tls
        self._poller = FairPoller()
        self._pools: dict[tuple[str, int], ConnectionPool] = {}

    def close(self) -> None:
        """Close idle connections. Connections in use get no more events; their requests close them."""
        for pool in self._pools.values():
            pool.close()
        self._poller.close()

    def pool(self, endpoint: BucketEndpoint) -> ConnectionPool:
        """Return the connections to an endpoint's host."""
        pool = self._pools.get((endpoint.host, endpoint.port))
        if pool is None:
            tls = self._tls if endpoint.tls else None
            pool = self._pools[endpoint.host, endpoint.port] = ConnectionPool(
                endpoint.host, endpoint.port, self._poller, tls=tls
            )
        return pool

    async def send(
        self,
        endpoint: BucketEndpoint,
        context: ErrorContext,
        request: Callable[[], Awaitable[bytes]],
        *,
        avoid: str | None = None,
        fresh: bool = False,
        on_sent: Callable[[str], None] | None = None,
    ) -> Response:
        """Send one request and read the header of its response.

        If the server has closed an idle connection, the request is sent again on another. `avoid`: an address
        not to use if the endpoint has another. `fresh`: use a new connection. `on_sent`: called with the
        address of the server. Raises SourceError.
        """
        pool = self.pool(endpoint)
        while True:
            request_bytes = await request()
            began = self._loop.time()
            try:
                connection = await pool.take(context, avoid=avoid, within=self._stall_timeout, fresh=fresh)
            except SourceError:
                raise
            except Exception as error:
                raise not_understood(error, context) from error
            reader = ResponseReader(
                connection,
                context,
                within=max(0.0, self._stall_timeout - (self._loop.time() - began)),
                stall_timeout=self._stall_timeout,
            )
            response = Response(reader, connection, pool, stall_timeout=self._stall_timeout)
            connection.requests += 1
            if on_sent is not None:
                on_sent(connection.peer)
            try:
                write_request(connection, request_bytes, context)
                response.header = await reader.header()
            except BaseException as error:
                connection.close()
                reader.release()
                if isinstance(error, Transient) and response.reused and not reader.begun:
                    if self._loop.time() < reader.deadline:
                        continue  # the server closed the idle connection before it read the request
                    response.late()
                if isinstance(error, OSError):  # the kernel cannot watch another socket
                    raise broken(error, context) from error
                if isinstance(error, Exception) and not isinstance(error, SourceError):
                    raise not_understood(error, context) from error
                raise
            return response


def write_request(connection: Connection, request: bytes, context: ErrorContext) -> None:
    try:
        sent = connection.send(request)
    except OSError as error:
        raise broken(error, context) from error
    if not sent:
        raise Transient("the socket did not take the whole request", context)
