"""The uploader, as the sidecar sees it: starts the process, starts it again if it dies, and asks it to end.

    open_uploader ─ spec ─▶ process ─ ready ─▶ the block restores checkpoints ─ begin ─▶ `run` as a task
    end ─ {"do": "end"} ─▶ process ─ ended ─▶ `Ended`

The sidecar waits for the process in `open_uploader` and in `end` alone. A process that dies, of the memory
limit for example, is started again, with a wait that grows; what it was to do at the trainer's end is asked
again. It may die `MOST_DEATHS` times there, since it would take the trainer's exit code hostage.

After a trainer that has failed, `penstock run` needs another process: Kubernetes may start the container of
the trainer again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sidecar.observe.uploads import UploadFigures
from sidecar.process.logs import log
from sidecar.upload.spec import error_of, line, packed
from streamer.aio import time_limit
from streamer.errors import PenstockError, SinkError
from streamer.retry import RetryPolicy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sidecar.upload.spec import UploadSpec

MOST_DEATHS = 3
GRACE = 10.0
"""Seconds for the process to abort what it uploads, at the sidecar's end."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What has become of the files at the trainer's end."""

    left: dict[str, str]
    """What is not in S3 at its key, and why."""
    uploaded: frozenset[str]
    """Directories of the base that are wholly in S3, or empty."""


class Uploader:
    """The process. `open_uploader` makes it; `run` must run while the trainer does."""

    def __init__(self, spec: UploadSpec, *, renews: bool) -> None:
        """`renews`: whether another trainer may come after one that has failed."""
        self._renews = renews
        self.figures = UploadFigures()
        self._spec = spec
        self._ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._serves = False
        """Whether the process has got `begin`."""
        self._over = asyncio.Event()
        """Set when the last trainer has ended, and the uploads after it."""
        self._code = 0
        self._question = b""
        """What the process is asked at the trainer's end, whose exit code this is; empty before that."""
        self._process: asyncio.subprocess.Process | None = None
        self._waits = RetryPolicy(give_up_after=float("inf"), first_wait=1.0, longest_wait=60.0)

    async def start(self) -> None:
        """Start the process and wait until it is ready. Raises PenstockError if it cannot upload."""
        ours, its = socket.socketpair()
        with its:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "sidecar.upload", str(its.fileno())),
                    pass_fds=(its.fileno(),),
                    start_new_session=True,  # Ctrl-C is for the sidecar, which then ends it
                )
            except OSError as error:
                ours.close()
                raise SinkError(
                    f"cannot start the uploader: {os.strerror(error.errno or 0)}; raise the limits of "
                    "processes and memory"
                ) from error
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(packed(self._spec))
        message = await self._receive()
        if message is None:
            raise SinkError(f"the uploader {await self._reap()} before it was ready; see the log")
        if message["did"] == "failed":
            await self._reap()
            raise error_of(message)

    async def _receive(self) -> dict[str, Any] | None:
        """Return the next message; None if the process has ended."""
        with contextlib.suppress(ConnectionError):
            if text := await self._reader.readline():
                message: dict[str, Any] = json.loads(text)
                return message
        return None

    def begin(self) -> None:
        """Have checkpoints uploaded from now on, and what `end` has asked for."""
        self._writer.write(line(do="begin") + self._question)
        self._serves = True

    async def run(self) -> None:
        """Follow the process, and start it again when it has ended, until no other trainer may come."""
        deaths = 0
        while not self._over.is_set():
            why = await self._follow()
            deaths = deaths + 1 if why else 0
            while not (self._serves or self._over.is_set()):
                if why:
                    log.error("the uploader has died; it is started again", error=why)
                    await asyncio.sleep(self._waits.wait(deaths, None))
                if self._question and deaths >= MOST_DEATHS:
                    self._note_end(Ended({"all": f"the uploader died {deaths} times: {why}"}, frozenset()))
                    if self._over.is_set():
                        return
                try:
                    await self.start()
                    self.begin()
                except PenstockError as error:
                    deaths, why = deaths + 1, str(error)

    async def _follow(self) -> str:
        """Take the messages until the process has ended; return why it has died, "" if it has not."""
        why = ""
        while (message := await self._receive()) is not None and message["did"] == "figures":
            message.pop("did")
            self.figures = UploadFigures(**message)
        if message is not None and message["did"] == "failed":
            why = str(error_of(message))
        elif message is not None:
            self._note_end(Ended(dict(message["left"]), frozenset(message["uploaded"])))
        ended = await self._reap()
        return why or ("" if message is not None else f"it {ended}")

    def _note_end(self, ended: Ended) -> None:
        self.figures = replace(self.figures, output="incomplete" if ended.left else "complete")
        if not (self._code and self._renews):
            self._over.set()
        self._ended.set_result(ended)
        self._ended, self._question = asyncio.get_running_loop().create_future(), b""

    async def end(self, code: int) -> Ended:
        """Have everything uploaded after the trainer's end; `code`: its exit code. Asks once."""
        if not self._question:
            self._code, self._question = code, line(do="end", code=code)
            if self._serves:
                self._writer.write(self._question)
        return await asyncio.shield(self._ended)

    async def close(self) -> None:
        """End the process, which aborts what it uploads."""
        self._ended.cancel()
        await self._reap()

    async def _reap(self) -> str:
        """Close the socket and wait for the end of the process; return how it ended."""
        if self._process is None:
            return "has not begun"
        process, self._process, self._serves = self._process, None, False
        self._writer.close()
        try:
            async with time_limit(GRACE):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        return f"ended with code {process.returncode}"


@contextlib.asynccontextmanager
async def open_uploader(spec: UploadSpec, *, renews: bool) -> AsyncIterator[Uploader]:
    """Start the uploader; end it after the block. Raises PenstockError if it cannot upload."""
    uploader = Uploader(spec, renews=renews)
    try:
        await uploader.start()
        yield uploader
    finally:
        await uploader.close()
