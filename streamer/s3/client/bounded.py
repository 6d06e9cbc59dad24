"""Limits of time and memory on the responses that aiobotocore reads, and on the programs that it runs.

aiobotocore has two gaps: while interim (1xx) responses arrive it waits without a time limit, and it reads the
body of an error or a listing whole, whatever its length. `BoundedSession` ends each request after
`read_timeout` seconds without a response header, counted from the last bytes of the request's body that the
connection has taken, reads at most `MAX_ERROR_BODY` bytes of an error and
`MAX_DOCUMENT` bytes of a document, and reads either within the same time. The caller reads the body of a GET,
with its own limit (`stall.within_stall`).

`documents` checks a document before a parser gets it. The status alone decides about an error response whose
body is not plain XML.

If an error body breaks off, only its code is used. If it breaks off before the code, the session raises
RefusalCutOff, and botocore repeats the request as after any broken connection.

aiobotocore waits for the end of a `credential_process` and keeps all of its output; after a renewal that is
too late it leaves the program behind. `limit_credential_processes` bounds the output, ends the program, and
takes the terminal and standard input from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from xml.sax.saxutils import escape

import aiohttp
from aiobotocore.credentials import AioProcessProvider
from botocore.exceptions import (
    ConnectionClosedError,
    ConnectionError,  # noqa: A004 - botocore's
    ConnectTimeoutError,
    HTTPClientError,
    ProxyConnectionError,
    ReadTimeoutError,
)
from botocore.httpsession import ProxyConfiguration

from streamer.errors import ErrorContext, Transient
from streamer.retry import SILENCE, noting_silence
from streamer.s3.client.barriers import proxy_answer, proxy_failed, proxy_of, proxy_text, tls_failed
from streamer.s3.client.documents import (
    MAX_DOCUMENT,
    MAX_ERROR_BODY,
    check_xml,
    checked_document,
    is_plain_xml,
)
from streamer.s3.client.faults import CODE, MANY_REASONS, foreign_text
from streamer.s3.client.redirects import PinnedSession
from streamer.s3.client.request_body import RequestBody
from streamer.secrets import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FIRST_ERROR_STATUS = 300
MOST_OUTPUT = 1024 * 1024
"""Most bytes that a credential process may write to either of its outputs."""


class RefusalCutOff(HTTPClientError):  # type: ignore[misc]
    """The body of an error response with a status of `faults.MANY_REASONS` broke off before its code.

    botocore repeats the request.
    """

    fmt = "the response with status {status} broke off before its error code"


class _Proxies(ProxyConfiguration):  # type: ignore[misc]
    """The proxies of the environment, by the URL of each request."""

    def proxy_url_for(self, url: str) -> str | None:
        return proxy_of(url)


class BoundedSession(PinnedSession):
    """The HTTP session of one client."""

    def __init__(self, *args: Any, passed: set[str], **options: Any) -> None:
        """`passed`: see `barriers`."""
        super().__init__(*args, **options)
        self._proxy_config = _Proxies()
        self._passed = passed

    async def send(self, request: Any) -> Any:
        """Return the response, with its body unless it is streamed. Raises botocore's errors, SourceError."""
        proxy, host, url = proxy_of(request.url), urlsplit(request.url).netloc, request.url
        whom = f"the proxy {proxy_text(proxy, url)}" if proxy else host
        context, passed = ErrorContext(), self._passed
        try:
            with noting_silence(
                lambda: Transient(f"no answer from {whom} for {SILENCE:g} s", context)
            ) as restart:
                response = await self._send(request, restart)
        except ProxyConnectionError as error:
            raise proxy_failed(error, proxy or "", url, before=proxy in passed) from error
        except (HTTPClientError, ConnectionError) as error:
            if (refused := tls_failed(error, context, before=host in passed)) is not None:
                raise refused from error
            if proxy and isinstance(error, ReadTimeoutError | ConnectTimeoutError | ConnectionClosedError):
                text = (
                    f"no answer from {whom} ({quoted(str(error))}); look at it, or name the host in NO_PROXY"
                )
                raise Transient(text, context) from error
            raise
        if proxy and url.startswith("http:") and response.status_code >= FIRST_ERROR_STATUS:
            answer = proxy_answer(response, proxy, url, before=proxy in passed)
            if answer is not None:
                raise answer
        if response.status_code >= FIRST_ERROR_STATUS:
            response._content = _error_document(response._content, response.status_code)  # noqa: SLF001
        passed.update((host, proxy) if proxy else (host,))
        return response

    async def _send(self, request: Any, restart: Callable[[], None]) -> Any:
        streamed, request.stream_output = request.stream_output, True
        response: Any = None
        body, broken = bytearray(), False
        try:
            async with asyncio.timeout(self._timeout.sock_read) as limit:
                with _at_reads(request.body, partial(_extend, limit, self._timeout.sock_read), restart):
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
                body[:] = _body_before_break(body, response.status_code)
            response._content = bytes(body)  # noqa: SLF001
        return response


@contextlib.contextmanager
def _at_reads(body: object, *calls: Callable[[], None]) -> Iterator[None]:
    """Make the calls whenever a RequestBody is read in the block: a slow connection is not a silent one."""
    read = body if isinstance(body, RequestBody) else RequestBody(b"")
    read.on_read = calls
    try:
        yield
    finally:
        read.on_read = ()


def _extend(limit: asyncio.Timeout, seconds: float) -> None:
    if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time() + seconds)


def _error_document(body: bytes, status: int) -> bytes:
    """Return the body of an error, or a document of the words of one that is not S3's (`foreign_text`)."""
    if is_plain_xml(body) and (CODE.search(body) or body.startswith(b"{")):  # JSON: of a service for sign-on
        return body
    if not (text := foreign_text(body)):
        return b""
    return f"<Error><Code>{status}</Code><Message>{escape(text)}</Message></Error>".encode()


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


async def _outputs(process: asyncio.subprocess.Process) -> tuple[bytes, bytes]:
    """Return both outputs when the program has ended. Kill it if this is cancelled or fails."""
    outputs = (process.stdout, process.stderr)
    try:
        written = [asyncio.ensure_future(_read_output(each)) for each in outputs if each is not None]
        try:
            output, errors = await asyncio.gather(*written)
        finally:
            for each in written:
                each.cancel()
        await process.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            if interactive.get():
                process.kill()
            else:
                os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
        # Closes the pipes too: a child of the program may have kept them open.
        process._transport.close()  # type: ignore[attr-defined] # noqa: SLF001
        raise
    return output, errors


async def _read_output(stream: asyncio.StreamReader) -> bytes:
    """Read a stream to its end. Raises ValueError if it is too long."""
    data = bytearray()
    while piece := await stream.read(64 * 1024):
        data += piece
        if len(data) > MOST_OUTPUT:
            raise ValueError(f"the program wrote more than {MOST_OUTPUT} bytes")
    return bytes(data)


interactive: ContextVar[bool] = ContextVar("interactive", default=False)
"""Whether a program that the task starts may use the terminal, as at the start of `penstock cat` in one."""


async def _start(*command: str, **options: Any) -> asyncio.subprocess.Process:
    if not interactive.get():
        options |= {"stdin": asyncio.subprocess.DEVNULL, "start_new_session": True}
    process = await asyncio.create_subprocess_exec(*command, **options)
    process.communicate = partial(_outputs, process)  # type: ignore[method-assign] # aiobotocore's only call
    return process


def limit_credential_processes() -> None:
    """Make every provider that this process creates from now on start programs within these limits."""
    AioProcessProvider.__init__.__kwdefaults__["popen"] = _start
