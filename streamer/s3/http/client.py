"""Penstock's HTTP client: sends signed requests on persistent connections and reads their responses.

`HttpClient.send` returns a `Response` whose header is read and whose body is still in the connection. The
caller takes the body (`HttpBody`) or reads an error's body, and ends the response exactly once.

A header is peeked at (MSG_PEEK, SSL_peek), and then read alone, so the next byte of the connection is the
first of the body, where splice(2) can begin. Connection, header and an error's body have `stall_timeout`
seconds together, because their bytes are no progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import httptools

from streamer.aio import FairPoller
from streamer.errors import ErrorContext, InvalidResponse, SourceError, Transient
from streamer.s3.client.documents import MAX_DOCUMENT, MAX_ERROR_BODY, checked_document
from streamer.s3.client.faults import broken, not_understood
from streamer.s3.http.body import HttpBody
from streamer.s3.http.pool import ConnectionPool
from streamer.s3.http.response import HeaderParser, ResponseHeader
from streamer.units import counted

if TYPE_CHECKING:
    from streamer.s3.http.connection import Connection
    from streamer.s3.http.tls import TlsContext
    from streamer.s3.signing.endpoints import BucketEndpoint

HEADER_READ = 2 * 1024
"""Bytes to peek at for a header; S3's headers are shorter."""
_SCRATCH = memoryview(bytearray(HEADER_READ))
"""Buffer for reading headers; no call relies on its content."""
BODY_READ = 64 * 1024


class Response:
    """The response to one request. It owns the connection until `body` or `end` ends the response."""

    header: ResponseHeader
    """The header, once it is read."""

    def __init__(
        self,
        connection: Connection,
        pool: ConnectionPool,
        context: ErrorContext,
        *,
        within: float,
        stall_timeout: float,
    ) -> None:
        """`within`: seconds that are left of `stall_timeout` for header and error body."""
        self.reused = connection.requests > 0
        """Whether the connection has carried a request before."""
        self.begun = False
        """Whether any byte has arrived."""
        self._connection = connection
        self._pool = pool
        self._context = context
        self._stall_timeout = stall_timeout
        self._loop = asyncio.get_running_loop()
        self.deadline = self._loop.time() + within
        """Time of the event loop until which header and error body must have come."""
        self._parser = HeaderParser(context)
        self._ended = False

    def send(self, request: bytes) -> None:
        """Send the request. Raises SourceError."""
        self._connection.requests += 1
        try:
            sent = self._connection.send(request)
        except OSError as error:
            raise broken(error, self._context, before=self._pool.passed) from error
        if not sent:
            raise Transient("the socket did not take the whole request", self._context)

    def read_header(self) -> None:
        """Read the header. Raises BlockingIOError until all of it has arrived, SourceError, OSError."""
        whole = False
        while not whole:
            count = self._connection.peek(_SCRATCH)
            if not count:
                raise Transient("the connection was closed before a response", self._context)
            if not (self.begun or self.reused):
                self._pool.note_passed()
            self.begun = True
            used, whole = self._parser.feed(bytes(_SCRATCH[:count]))
            self._connection.recv_into(_SCRATCH[:used])
        self.header = self._parser.message.header

    async def receive_header(self) -> None:
        """Wait for the header, and read it. Raises SourceError."""
        if not await self._run(self.read_header):
            raise Transient(f"no response for {self._stall_timeout:g} s", self._context)

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
        self._release()
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
        """Return what arrives of the body in time, and whether that is all; end the response.

        `most`: about the most bytes to read. The last item: whether bytes follow the response.
        """
        message, whole, followed = self._parser.message, False, False
        try:
            if not message.complete:
                await self._run(partial(self._read_some, most))
            whole = message.complete
            followed = whole and (message.followed or self._connection.has_surplus())
            return bytes(message.body), whole, followed
        finally:
            self.end(reuse=whole and not followed)

    def _read_some(self, most: int) -> None:
        """Read the body to its end or the limit. Raises BlockingIOError until then, SourceError, OSError."""
        message, memory = self._parser.message, memoryview(bytearray(BODY_READ))
        count = len(memory)
        while count and not message.complete and len(message.body) <= most:
            count = self._connection.recv_into(memory)
            try:
                message.feed(bytes(memory[:count]))
            except httptools.HttpParserError as error:
                raise InvalidResponse(f"not an HTTP response ({error})", self._context) from error
            if not count and not message.header.has_length:
                message.complete = True

    def end(self, *, reuse: bool) -> None:
        """End the response. `reuse`: whether the connection may carry another request: no byte is left.

        Later calls do nothing: a cancelled task that reads the body ends the response, and so does its owner.
        """
        if self._ended:
            return
        self._release()
        if reuse and self.header.keep_alive:
            self._pool.give(self._connection)
        else:
            self._connection.close()

    def _release(self) -> None:
        """Note that another object owns the connection now, and drop the parser, with the body it has."""
        self._ended = True
        self._parser.message.release()
        del self._parser

    async def _run(self, step: Callable[[], None]) -> bool:
        """Call `step` as bytes arrive until it has them all; return false after the deadline.

        No attribute refers to `step`, a method of this object, because such a cycle would keep each request's
        objects until the next garbage collection.
        """
        done: asyncio.Future[bool] = self._loop.create_future()
        timer = self._loop.call_at(self.deadline, _time_out, done)
        try:
            on_readable = partial(self._on_readable, step, done)
            self._connection.expect(1)
            self._connection.watch(on_readable)
            if self._connection.pending:
                on_readable()  # epoll does not report decrypted bytes
            return await done
        finally:
            timer.cancel()

    def _on_readable(self, step: Callable[[], None], done: asyncio.Future[bool]) -> None:
        if done.done():
            self._connection.pause()  # bytes of the body that nobody takes yet would be reported for ever
            return
        try:
            step()
            done.set_result(True)
        except BlockingIOError:
            return
        except OSError as error:
            done.set_exception(broken(error, self._context, before=self._pool.passed))
        except Exception as error:  # noqa: BLE001 - raised by the task that waits
            done.set_exception(error)


def _time_out(done: asyncio.Future[bool]) -> None:
    if not done.done():
        done.set_result(False)


class HttpClient:
    """Sends requests over pooled connections, one at a time on each."""

    def __init__(self, tls: TlsContext | None, *, stall_timeout: float) -> None:
        """`tls`: the certificates to trust, for a TLS endpoint.

        `stall_timeout`: seconds for connecting, the response header and an error's body together.
        """
        self.stall_timeout = stall_timeout
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
        fresh: bool = False,
    ) -> Response:
        """Send one request and read the header of its response. Raises SourceError.

        If the server has closed an idle connection, the request is sent again on another. `fresh`: use a new
        connection.
        """
        pool = self.pool(endpoint)
        while True:
            request_bytes = await request()
            began = self._loop.time()
            try:
                connection = await pool.take(context, within=self.stall_timeout, fresh=fresh)
            except SourceError:
                raise
            except Exception as error:
                raise not_understood(error, context) from error
            left = max(0.0, self.stall_timeout - (self._loop.time() - began))
            response = Response(connection, pool, context, within=left, stall_timeout=self.stall_timeout)
            try:
                response.send(request_bytes)
                await response.receive_header()
            except BaseException as error:
                response.end(reuse=False)
                if isinstance(error, Transient) and response.reused and not response.begun:
                    if self._loop.time() < response.deadline:
                        continue  # the server closed the idle connection before it read the request
                    response.late()
                if isinstance(error, OSError):  # the kernel cannot watch another socket
                    raise broken(error, context) from error
                if isinstance(error, Exception) and not isinstance(error, SourceError):
                    raise not_understood(error, context) from error
                raise
            return response
