"""One span in an engine process: fetches its parts and writes their bytes, in order, into a pipe.

    part ─ PartFetch (request, retry) ─▶ BufferStage ─┐
    part ─ PartFetch ─▶ BufferStage ──────────────────┴─ in order ─▶ pipe ─▶ parent

At most `requests` parts are fetched at once. The body of a large part stays in its socket until the span has
a pipe. Without TLS it is then spliced from the socket into the pipe, so the engine reads no byte of it. With
TLS it is read as the pipe takes it, while its bytes are in the processor's cache; with `ahead` as it arrives,
so that several engines decrypt the next parts of one FIFO at the same time. Small parts are read as they
arrive, to free their connections.

The parent has reserved memory for all of them, and the pool of buffers may keep as much as is reserved for
bytes that are not written yet. A part that fails for good ends the span, after the bytes before it: so the
parent learns of an error at the exact byte.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Protocol

from streamer.aio import task_group
from streamer.errors import ReaderGone, SourceError
from streamer.linux import PIPE_SIZE
from streamer.relay.fetch.part_fetch import PartFetch
from streamer.relay.staging.buffers import BufferPool, BufferStage, buffer_bytes
from streamer.relay.staging.stage import LEAST, TURN
from streamer.relay.statistics import ChannelCounters
from streamer.s3.ranges import RequestReport
from streamer.sink.outlet import PipeOutlet

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    """Fetches `parts` and writes them into the pipe given to `attach`."""

    def __init__(
        self,
        parts: Sequence[Part],
        source: RangeSource,
        pool: BufferPool,
        *,
        policy: RetryPolicy,
        requests: int,
        observer: Observer,
    ) -> None:
        self.written = 0
        """Bytes written into the pipe."""
        self._parts = parts
        self._source = source
        self._pool = pool
        self._policy = policy
        self._at_once = requests
        self._observer = observer
        self._reserved = 0
        """Bytes of `pool.limit` for this span."""
        self._counters = ChannelCounters()
        self._done: list[tuple[int, float, float]] = []
        self._throttled = 0
        self._ahead = False
        self._stages: list[BufferStage] = []
        """Stages of the parts that have begun, in order."""
        self._fetches: list[PartFetch] = []
        """Fetches of the same parts."""
        self._running = 0
        """Fetches that have not ended."""
        self._tasks: list[asyncio.Task[None]] = []
        """Tasks of all fetches."""
        self._changed = asyncio.Event()
        self._pipe: int | None = None
        self._unopened = True
        """Whether no response header has been checked."""
        self._waits = False
        """Whether the part to write next waits before a retry."""

    def __repr__(self) -> str:
        return f"<ServedSpan {len(self._fetches)}/{len(self._parts)} parts begun, {self.written} written>"

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
        self._ahead = ahead
        if ahead:
            for stage in self._stages:
                stage.read_ahead()

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
        self._done, self._throttled = [], 0
        return report

    async def run(self) -> None:
        """Fetch and write all parts. Raises SourceError at the first missing byte, and ReaderGone."""
        self._reserve(sum(buffer_bytes(part.body) for part in self._parts))
        try:
            async with task_group() as requests:
                self._begin_more(requests)
                try:
                    await self._write_all()
                except BaseException:
                    self._at_once = 0
                    for task in self._tasks:
                        task.cancel()
                    raise
        finally:
            for fetch in self._fetches:
                fetch.stage.discard()
            self._reserve(-self._reserved)
            self._pool.trim()

    def _begin_more(self, requests: asyncio.TaskGroup) -> None:
        """Begin further parts, as many as may be fetched at once."""
        while self._running < self._at_once and len(self._fetches) < len(self._parts):
            part = self._parts[len(self._fetches)]
            stage = BufferStage(
                part,
                self._pool,
                on_change=self._changed.set,
                counters=self._counters,
                eager=self._ahead,
                splices=True,
                at_once=PIPE_SIZE,  # the parent is woken once for what fills the pipe
            )
            fetch = PartFetch(stage, self._source, policy=self._policy, counters=self._counters, quota=self)
            self._stages.append(stage)
            self._fetches.append(fetch)
            if part.body:
                fetch.on_phase = None if self._tasks else self._note_phase
                self._running += 1
                self._tasks.append(requests.create_task(self._fetch(fetch, requests)))

    async def _fetch(self, fetch: PartFetch, requests: asyncio.TaskGroup) -> None:
        try:
            await fetch.run()
        except SourceError as error:
            fetch.error, self._at_once = error, 0  # no later part can be written
            if self._fetches[0].stage.ready:
                self._open(None)  # the parent must take the literals before the missing byte
        self._running -= 1
        self._begin_more(requests)
        self._changed.set()

    def _note_phase(self, phase: Phase) -> None:
        if self._unopened and phase == "body":
            request = next((fetch.request for fetch in self._fetches if fetch.request), None)
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
        if not any(part.body for part in self._parts):
            self._open(None)
        while self._pipe is None:
            # Nothing is taken from a socket before: a stage that is awaited must be drained at once.
            first = self._fetches[0]
            if first.error is not None and not first.stage.ready:
                raise first.error
            await self._news()
        outlet = PipeOutlet(self._pipe, on_gone=self._changed.set)
        try:
            for index, part in enumerate(self._parts):
                while index >= len(self._fetches):
                    await self._news()
                await self._write(part, self._fetches[index], outlet)
        finally:
            outlet.detach()

    async def _write(self, part: Part, fetch: PartFetch, outlet: PipeOutlet) -> None:
        """Write all bytes of a part. Raises SourceError at the first missing byte, and ReaderGone."""
        stage, left = fetch.stage, TURN
        count = 0
        while count < len(part):
            if outlet.reader_gone:
                raise ReaderGone("the reader closed the pipe")
            if not stage.ready:
                if fetch.error is not None:
                    raise fetch.error
                fetch.on_phase = self._note_phase
                stage.awaited = True
                await self._news()
                continue
            try:
                pushed = outlet.push(stage)
            except BlockingIOError:
                await outlet.writable()
                continue
            count += pushed
            self.written += pushed
            self._reserve(-pushed)
            left -= max(LEAST, pushed)
            if left <= 0:
                left = TURN
                await asyncio.sleep(0)
        stage.discard()
        self._reserve(count - buffer_bytes(part.body))

    async def _news(self) -> None:
        self._changed.clear()
        await self._changed.wait()
