"""One part or span in an engine process: fetches it and writes its bytes, in order, into a pipe.

    PartFetch (request, retry) ─▶ BufferStage ─▶ pipe ─▶ parent

The body of a large part stays in its socket until there is a pipe. Without TLS it is then spliced from the
socket into the pipe, so the engine reads no byte of it. With TLS it is read as the pipe takes it, while its
bytes are in the processor's cache; with `ahead` as it arrives, so that several engines decrypt the next parts
of one FIFO at the same time. A span (`streamer.s3.http_span`) is read as it arrives, to free its connections.

The parent has reserved memory for all bytes, and the pool of buffers may keep as much as is reserved for
bytes that are not written yet. An error that is final comes after the bytes before it: so the parent learns
of it at the exact byte.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Protocol

from streamer.aio import task_group
from streamer.errors import ReaderGone, SourceError
from streamer.linux import PIPE_SIZE
from streamer.plan import Span
from streamer.relay.fetch.part_fetch import PartFetch
from streamer.relay.staging.buffers import BufferPool, BufferStage, buffer_bytes
from streamer.relay.staging.stage import LEAST, TURN
from streamer.relay.statistics import ChannelCounters
from streamer.s3.ranges import RequestReport
from streamer.sink.outlet import PipeOutlet

if TYPE_CHECKING:
    from streamer.plan import Part
    from streamer.retry import RetryPolicy
    from streamer.s3.ranges import Phase, RangeSource


class Observer(Protocol):
    """Passes the progress of a span on to the parent."""

    def opened(self, peer: str | None) -> None:
        """Note that the first response header is right, and the address that it came from."""

    def phase(self, phase: Phase, report: RequestReport | None) -> None:
        """Note that the part to write next waits before a retry, with a report, or does so no longer."""


class ServedSpan:
    """Fetches `part` and writes it into the pipe given to `attach`."""

    def __init__(
        self,
        part: Part,
        source: RangeSource,
        pool: BufferPool,
        *,
        policy: RetryPolicy,
        requests: int,
        observer: Observer,
    ) -> None:
        """`requests`: as `RangeRequest.requests`."""
        self.written = 0
        """Bytes written into the pipe."""
        self._part = part
        self._pool = pool
        self._observer = observer
        self._reserved = 0
        """Bytes of `pool.limit` for this span."""
        self._counters = ChannelCounters()
        self._done: list[tuple[int, float, float]] = []
        self._throttled = 0
        self._changed = asyncio.Event()
        self._pipe: int | None = None
        self._unopened = True
        """Whether no response header has been checked."""
        self._waits = False
        """Whether the fetch waits before a retry."""
        self._stage = BufferStage(
            part,
            pool,
            on_change=self._changed.set,
            counters=self._counters,
            eager=isinstance(part, Span),
            splices=True,
            at_once=PIPE_SIZE,  # the parent is woken once for what fills the pipe
        )
        self._fetch = PartFetch(
            self._stage, source, policy=policy, counters=self._counters, quota=self, requests=requests
        )
        self._fetch.on_phase = self._note_phase

    def __repr__(self) -> str:
        return f"<ServedSpan {self.written}/{len(self._part)} bytes written, {self._fetch}>"

    def landed(self, now: float, *, received: int, first_byte: float, seconds: float) -> None:
        """As `RequestLog`."""
        del now
        self._done.append((received, first_byte, seconds))

    def throttled(self, now: float) -> None:
        """As `RequestLog`."""
        del now
        self._throttled += 1

    def attach(self, fd: int, *, ahead: bool) -> None:
        """Write into this pipe, which the span then owns. `ahead`: read all bytes as they arrive, for TLS.

        Called once.
        """
        self._pipe = fd
        self._changed.set()
        if ahead:
            self._stage.read_ahead()

    def _reserve(self, count: int) -> None:
        self._reserved += count
        self._pool.limit += count

    def close(self) -> None:
        """Close the pipe, if there is one. `run` must have ended."""
        if self._pipe is not None:
            os.close(self._pipe)

    def report(self) -> RequestReport:
        """Return what the span's requests have done since the last report."""
        counters = self._counters
        report = RequestReport(
            dict(counters.requests),
            dict(counters.retries),
            counters.resumes["part"],
            self._done,
            [(note.kind, note.text) for note in counters.notes],
            self._throttled,
        )
        for each in (counters.requests, counters.retries, counters.resumes, counters.notes):
            each.clear()
        counters.by_epoch.clear()
        self._done, self._throttled = [], 0
        return report

    async def run(self) -> None:
        """Fetch and write all bytes. Raises SourceError at the first missing byte, and ReaderGone."""
        self._reserve(buffer_bytes(self._part.body))
        try:
            async with task_group() as tasks:
                fetching = tasks.create_task(self._bring()) if self._part.body else None
                try:
                    await self._write_all()
                except BaseException:
                    if fetching is not None:
                        fetching.cancel()
                    raise
        finally:
            self._stage.discard()
            self._reserve(-self._reserved)
            self._pool.trim()

    async def _bring(self) -> None:
        try:
            await self._fetch.run()
        except SourceError as error:
            self._fetch.error = error
            if self._stage.ready:
                self._open(None)  # the parent must take the bytes before the missing one
        self._changed.set()

    def _note_phase(self, phase: Phase) -> None:
        if self._unopened and phase == "body":
            request = self._fetch.request
            self._open(request.peer if request else None)
            return
        if phase == "credentials":
            return  # only the parent renews them
        waits = phase in ("throttled", "retry")
        if waits or self._waits:
            self._observer.phase(phase, self.report() if waits else None)
        self._waits = waits

    def _open(self, peer: str | None) -> None:
        if self._unopened:
            self._unopened = False
            self._observer.opened(peer)

    async def _write_all(self) -> None:
        """Write all bytes. Raises SourceError at the first missing byte, and ReaderGone."""
        stage, fetch = self._stage, self._fetch
        if not self._part.body:
            self._open(None)
        while self._pipe is None:
            # Nothing is taken from a socket before: a stage that is awaited must be drained at once.
            if fetch.error is not None and not stage.ready:
                raise fetch.error
            await self._news()
        outlet = PipeOutlet(self._pipe, on_gone=self._changed.set)
        left = TURN
        try:
            while self.written < len(self._part):
                if outlet.reader_gone:
                    raise ReaderGone("the reader closed the pipe")
                if not stage.ready:
                    if fetch.error is not None:
                        raise fetch.error
                    stage.awaited = True
                    await self._news()
                    continue
                try:
                    count = outlet.push(stage)
                except BlockingIOError:
                    await outlet.writable()
                    continue
                self.written += count
                self._reserve(-min(count, self._reserved))
                left -= max(LEAST, count)
                if left <= 0:
                    left = TURN
                    await asyncio.sleep(0)
        finally:
            outlet.detach()

    async def _news(self) -> None:
        self._changed.clear()
        await self._changed.wait()
