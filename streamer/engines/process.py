"""The engine process: serves the spans that the parent asks for, until the socket ends.

    open    begin a span: `ServedSpan` in a task of its own
    pipe    the write end of the pipe for the span's bytes
    close   the parent needs no further byte of the span
    keys    new credentials

The process holds no state that its parent lacks, so it ends at once when the socket does. Signals of the
terminal and of the container end the parent, and thereby this process, which ignores them.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import uvloop

from streamer.engines.link import Link, Message
from streamer.engines.served_span import ServedSpan
from streamer.engines.wire import pack_error, pack_report, unpack_parts
from streamer.errors import BadAnswer, Expired, GaveUp, ReaderGone, SourceError, Transient
from streamer.relay.staging.buffers import BufferPool
from streamer.retry import RetryPolicy
from streamer.s3.fallback import LeftToAiobotocore
from streamer.s3.http_source import HttpSource
from streamer.s3.signing.endpoints import BucketEndpoint
from streamer.s3.signing.requests import RequestBuilder
from streamer.s3.signing.sigv4 import GetSigner
from streamer.secrets import remember
from streamer.units import MIB

if TYPE_CHECKING:
    from typing import Any

    from streamer.s3.http.tls import TlsContext
    from streamer.s3.ranges import Body, Phase, RangeRequest, RangeSource, RequestReport

ONCE = RetryPolicy(give_up_after=0)
"""Policy of a request that is not retried."""
KEPT = 4 * MIB
"""Bytes of free buffers that the process keeps beside reserved ones, for the next span."""
COLLECT_AFTER = 50_000
"""Allocations between two garbage collections; requests leave no reference cycles."""


class Keys(NamedTuple):
    """Credentials, as the parent sent them last."""

    access_key: str
    secret_key: str
    token: str | None


class SentKeys:
    """The credentials that the parent sends; only the parent renews them."""

    def __init__(self) -> None:
        self.keys: Keys | None = None

    def frozen(self) -> Keys | None:
        """Return the last keys."""
        return self.keys

    def refused(self, sent_at: float) -> bool:
        """Return False: to repeat the request here cannot help."""
        del sent_at
        return False


class SentEndpoints(RequestBuilder):
    """Builds requests for the endpoints that the parent has sent."""

    def __init__(
        self, keys: SentKeys | None, *, anonymous: bool, headers: dict[str, str], sends_if_match: bool
    ) -> None:
        super().__init__(keys, anonymous=anonymous, headers=headers, sends_if_match=sends_if_match)
        self.endpoints: dict[str, BucketEndpoint] = {}

    async def endpoint(self, bucket: str) -> BucketEndpoint:
        """Return the bucket's endpoint, which the parent sends before the first span."""
        return self.endpoints[bucket]


class _Avoiding:
    """A `RangeSource` whose requests avoid an address, for a second request (hedge)."""

    name = "http"
    span_size = 0

    def __init__(self, source: RangeSource, avoid: str) -> None:
        self._source = source
        self._avoid = avoid

    async def open(self, request: RangeRequest) -> Body:
        request.avoid = self._avoid
        return await self._source.open(request)


class EngineProcess:
    """Serves one parent."""

    def __init__(self, sock: socket.socket, tasks: asyncio.TaskGroup, tls: TlsContext | None) -> None:
        self.ended = asyncio.Event()
        """Set when the parent has ended, or a message could not be carried out."""
        self.failure: Exception | None = None
        """Why a message could not be carried out."""
        self._tasks = tasks
        self._tls = tls
        self._pool = BufferPool(KEPT)
        self._spans: dict[int, tuple[ServedSpan, asyncio.Task[SourceError | None]]] = {}
        self._keys = SentKeys()
        self._endpoints: dict[str, BucketEndpoint] = {}
        self._source: HttpSource | None = None
        self._policy = RetryPolicy()
        self._link = Link(sock, self._on_message, self.ended.set)

    def close(self) -> None:
        """End all spans."""
        for _, task in self._spans.values():
            task.cancel()
        self._link.close()
        if self._source is not None:
            self._source.close()

    def _on_message(self, message: Message, descriptors: list[int]) -> None:
        try:
            self._carry_out(message, descriptors)
        except Exception as error:  # noqa: BLE001 - ends the process, which the parent replaces
            self.failure = error
            self.ended.set()

    def _carry_out(self, message: Message, descriptors: list[int]) -> None:
        what, *rest = message
        match what:
            case "open":
                self._open(*rest)
            case "pipe":
                self._attach(rest[0], rest[1], descriptors)
            case "close":
                if (found := self._spans.get(rest[0])) is not None:
                    found[1].cancel()
            case "keys":
                self._keys.keys = Keys(*rest)
                remember(*rest)  # so that no error quotes them
            case "endpoint":
                bucket, host, port, tls, authority, prefix, region = rest
                endpoint = BucketEndpoint(host, port, tls, authority, prefix, GetSigner(region))
                self._endpoints[bucket] = endpoint
            case "ping":
                self._link.send(("pong",))
            case "settings":
                self._set_up(rest[0])

    def _set_up(self, settings: dict[str, Any]) -> None:
        signer = SentEndpoints(
            None if settings["anonymous"] else self._keys,
            anonymous=settings["anonymous"],
            headers=settings["headers"],
            sends_if_match=settings["sends_if_match"],
        )
        self._endpoints = signer.endpoints
        remember(*(value for name, value in settings["headers"].items() if name.endswith("customer-key")))
        self._policy = RetryPolicy(**settings["retry"])
        self._source = HttpSource(
            signer,
            None,
            tls=self._tls,
            stall_timeout=settings["stall_timeout"],
        )
        gc.collect()
        gc.freeze()
        gc.set_threshold(COLLECT_AFTER)
        self._link.send(("ready",))

    def _open(
        self,
        number: int,
        requests: int,
        avoid: str | None,
        once: bool,  # noqa: FBT001 - the fields of a message, in its order
        parts: list[Any],
    ) -> None:
        if self._source is None:
            raise RuntimeError("a span before the settings")
        span = ServedSpan(
            unpack_parts(parts),
            self._source if avoid is None else _Avoiding(self._source, avoid),
            self._pool,
            policy=ONCE if once else self._policy,
            requests=requests,
            observer=_Observer(self._link, number),
        )
        task = self._tasks.create_task(self._serve(span, once=once))
        task.add_done_callback(partial(self._ended, number, span))  # also if it is cancelled before it begins
        self._spans[number] = span, task

    def _attach(self, number: int, ahead: bool, descriptors: list[int]) -> None:  # noqa: FBT001
        found = self._spans.get(number)
        if found is None or not descriptors:
            for fd in descriptors:
                os.close(fd)
            if found is not None:
                found[1].cancel()
            return
        found[0].attach(descriptors[0], ahead=ahead)

    async def _serve(self, span: ServedSpan, *, once: bool) -> SourceError | None:
        """Run a span; return the error for the parent, if there is one."""
        try:
            await span.run()
        except SourceError as failure:
            cause = failure.__cause__
            # The parent renews credentials, and decides what follows a request that is not retried here.
            left = isinstance(cause, Expired) or (once and isinstance(failure, GaveUp))
            return cause if left and isinstance(cause, SourceError) else failure
        except ReaderGone:
            pass
        except OSError as failure:  # no descriptor is left in this process
            return Transient(f"an engine process failed: {failure.strerror or failure}")
        except Exception as failure:  # noqa: BLE001 - one span's error must not end the others
            return BadAnswer(f"an engine process failed: {type(failure).__name__}: {failure}")
        return None

    def _ended(self, number: int, span: ServedSpan, task: asyncio.Task[SourceError | None]) -> None:
        """Tell the parent how a span has ended."""
        del self._spans[number]
        span.close()
        error = None if task.cancelled() else task.result()
        report = span.report()
        if isinstance(error, LeftToAiobotocore):
            report.requests.pop(error.kind, None)  # an earlier report may have it
            report.errors.clear()
        packed = None if error is None else pack_error(error)
        self._link.send(("ended", number, span.written, packed, pack_report(report)))


class _Observer:
    """The `Observer` that reports a span to the parent."""

    def __init__(self, link: Link, number: int) -> None:
        self._link = link
        self._number = number

    def opened(self, peer: str | None) -> None:
        self._link.send(("opened", self._number, peer))

    def phase(self, phase: Phase, report: RequestReport | None) -> None:
        self._link.send(("phase", self._number, phase, report and pack_report(report)))


async def serve(sock: socket.socket, tls: TlsContext | None) -> None:
    """Serve the parent at the other end of `sock` until it ends."""
    async with asyncio.TaskGroup() as tasks:
        engine = EngineProcess(sock, tasks, tls)
        try:
            await engine.ended.wait()
        finally:
            engine.close()
    if engine.failure is not None:
        raise engine.failure


def run(sock: socket.socket, tls: TlsContext | None) -> None:
    """Serve the parent at the other end of `sock`, in this process. `tls`: None for plain HTTP."""
    uvloop.run(serve(sock, tls))
