"""aiobotocore's HTTP session with limits of time and memory on every response.

aiobotocore has two gaps: while interim (1xx) responses arrive it waits without a time limit, and it reads the
body of an error or a listing whole, whatever its length. This session ends each request after `read_timeout`
seconds without a response header, reads at most `MAX_ERROR_BODY` bytes of an error and `MAX_DOCUMENT` bytes
of a document, and reads either within the same time. The caller reads the body of a GET, with its own limit
(`stall.within_stall`).

`documents` checks a document before a parser gets it. The status alone decides about an error response whose
body is not plain XML.

If an error body breaks off, only its code is used. If it breaks off before the code, the session raises
RefusalCutOff, and botocore repeats the request as after any broken connection.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from botocore.exceptions import ConnectionClosedError, ReadTimeoutError

from streamer.s3.client.documents import (
    MAX_DOCUMENT,
    MAX_ERROR_BODY,
    check_xml,
    checked_document,
    is_plain_xml,
)
from streamer.s3.client.faults import CODE, MANY_REASONS
from streamer.s3.client.foreign import RefusalCutOff
from streamer.s3.client.redirects import PinnedSession

FIRST_ERROR_STATUS = 300


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
                    response._content = document = await _read_document(response.raw)  # noqa: SLF001
                    if document and "list-type=2" in request.url:
                        check_xml(document)
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
