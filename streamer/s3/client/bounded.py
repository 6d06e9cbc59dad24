"""aiobotocore's HTTP session with limits of time and memory on every response.

aiobotocore has two gaps: while interim (1xx) responses arrive it waits without a time limit, and it reads the
body of an error or a listing whole, whatever its length. This session ends each request after `read_timeout`
seconds without a response header, reads at most `MAX_ERROR_BODY` bytes of an error and `MAX_DOCUMENT` bytes
of a document, and reads either within the same time. The caller reads the body of a GET, with its own limit
(`within_stall`).

`documents` checks a document before a parser gets it. The status alone decides about an error response whose
body is not plain XML.

If an error body breaks off, only its code is used. If it breaks off before the code, the session raises
RefusalCutOff, and botocore repeats the request as after any broken connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import aiohttp
from botocore.exceptions import ConnectionClosedError, ReadTimeoutError

from streamer.errors import ErrorContext, Transient
from streamer.s3.client.documents import MAX_DOCUMENT, MAX_ERROR_BODY, checked_document, is_plain_xml
from streamer.s3.client.faults import CODE, MANY_REASONS, RefusalCutOff
from streamer.s3.client.redirects import PinnedSession

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

FIRST_ERROR_STATUS = 300
RESCHEDULE_FRACTION = 1 / 64
"""Fraction of the stall timeout that passes before a body's timer is moved again."""


class BoundedSession(PinnedSession):
    """The HTTP session of one client."""

    async def send(self, request: Any) -> Any:
        """Return the response, with its body unless it is streamed. Raises botocore's errors, BadAnswer."""
        streamed, request.stream_output = request.stream_output, True
        response: Any = None
        body, broken = bytearray(), False
        try:
            async with asyncio.timeout(self._timeout.sock_read):
                response = await super().send(request)
                if response.status_code >= FIRST_ERROR_STATUS:
                    await _read_body(response.raw, MAX_ERROR_BODY, body)
                elif not streamed:
                    response._content = await _read_document(response.raw)  # noqa: SLF001
        except TimeoutError as error:
            if response is None or response.status_code < FIRST_ERROR_STATUS:
                raise ReadTimeoutError(endpoint_url=request.url, error=error) from error
            broken = True
        except aiohttp.ClientError as error:
            if response is None or response.status_code < FIRST_ERROR_STATUS:
                raise ConnectionClosedError(error=error, request=request, endpoint_url=request.url) from error
            broken = True
        finally:
            request.stream_output = streamed
        if response.status_code >= FIRST_ERROR_STATUS:
            if broken:
                response._content = _body_before_break(body, response.status_code)  # noqa: SLF001
            else:
                response._content = bytes(body) if is_plain_xml(body) else b""  # noqa: SLF001
        return response


def _body_before_break(body: bytearray, status: int) -> bytes:
    """Return the code of an error whose body broke off, as a document; empty if the status suffices.

    Raises RefusalCutOff.
    """
    if code := CODE.search(body):
        return b"<Error>%s</Error>" % code[0]
    if status in MANY_REASONS:
        raise RefusalCutOff(status=status)
    return b""


async def _read_body(raw: Any, limit: int, body: bytearray) -> None:
    """Read at least `limit` bytes of the body, or all of it; close the connection unless it was all."""
    try:
        while len(body) <= limit and (data := await raw.content.readany()):
            body += data
    finally:
        if raw.content.at_eof():
            raw.release()
        else:
            raw.close()


async def _read_document(raw: Any) -> bytes:
    """Read the body of a listing. Raises BadAnswer."""
    body = bytearray()
    await _read_body(raw, MAX_DOCUMENT, body)
    return checked_document(body)


class Stall:
    """The timer of one body: `moved` restarts the timer, `pause` stops it until the next `moved`.

    A body can arrive in a hundred thousand pieces, so not every piece moves the timer. The timer ends
    between `seconds` and `(1 + RESCHEDULE_FRACTION) * seconds` after the last byte.
    """

    def __init__(self, seconds: float, limit: asyncio.Timeout) -> None:
        self._seconds = seconds
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._due = 0.0
        """Time of the loop's clock before which the timer is not moved."""

    def moved(self) -> None:
        """Restart the timer: a byte of the body has arrived, or the receiver has room again."""
        now = self._loop.time()
        if now >= self._due:
            self._due = now + RESCHEDULE_FRACTION * self._seconds
            self._limit.reschedule(self._due + self._seconds)

    def pause(self) -> None:
        """Stop the timer: the receiver is full, so the body waits for the receiver and not for S3."""
        self._due = 0.0
        self._limit.reschedule(None)


@contextlib.asynccontextmanager
async def within_stall(seconds: float, context: ErrorContext) -> AsyncIterator[Stall]:
    """Raise Transient when `seconds` pass without a byte of the body."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield Stall(seconds, limit)
    except TimeoutError as error:
        if limit.expired():
            raise Transient(f"no byte for {seconds:g} s", context, silent=seconds) from error
        raise
