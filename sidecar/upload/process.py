"""The uploader: a process of its own beside the relay, so that an upload takes no time of the relay's loop.

    spec ─ checks ─▶ ready ─ begin ─▶ `Checkpoints.run` ─ end ─▶ `Checkpoints.finish`, `Output.upload`
    ─▶ ended; at most once a second ─▶ figures

It has clients and credentials of its own. It blocks nobody: the sidecar waits for `ready` before it offers a
FIFO, and for `ended` after the trainer's end. Between `ready` and `begin` the sidecar restores checkpoints,
and notes them in the journal that this process then opens. It ends when its socket does, so it never outlives
the sidecar; what it was uploading then is aborted, and after a kill by the next uploader of the same volume
(`sidecar.upload.journal`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from sidecar.observe.uploads import UploadFigures
from sidecar.process.logs import WaitLog, configure
from sidecar.upload.admission import Admission
from sidecar.upload.checkpoints import Checkpoints
from sidecar.upload.journal import Journal, journal_of
from sidecar.upload.markers import PREFIX
from sidecar.upload.output import Output
from sidecar.upload.spec import CHECKPOINTS, UploadSpec, failed_line, figures_line, line, receive_spec
from sidecar.upload.store import Store
from streamer.aio import first_of
from streamer.directory import Directory
from streamer.errors import PenstockError
from streamer.plan import S3Uri
from streamer.s3.client.faults import first_error
from streamer.s3.client.session import open_clients

if TYPE_CHECKING:
    import socket

    from sidecar.upload.tree import LeftOut

FIGURES_EVERY = 1.0
"""Least seconds between snapshots."""


async def serve(sock: socket.socket) -> None:
    """Serve the sidecar at the other end of `sock` until that closes, or all is done."""
    reader, writer = await asyncio.open_connection(sock=sock)
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):  # the sidecar has ended
        try:
            spec = await receive_spec(reader)
            configure(level=spec.level, json_lines=spec.as_json)
            await _Uploader(spec, reader, writer).run()
        except PenstockError as error:
            writer.write(failed_line(error))
        except BaseExceptionGroup as errors:
            if not isinstance(first := first_error(errors), PenstockError):
                raise
            writer.write(failed_line(first))
        finally:
            writer.close()
            await writer.wait_closed()


class _Uploader:
    """The uploads of one host, and the sidecar at the other end."""

    def __init__(self, spec: UploadSpec, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._spec = spec
        self._reader = reader
        self._writer = writer
        self._output: Output | None = None
        self._checkpoints: Checkpoints | None = None
        self._admission = Admission(spec.bandwidth)
        self._failed: Counter[str] = Counter()
        self._ending = False
        """Whether the trainer has ended."""

    async def run(self) -> None:
        """Upload until all is in S3, or the sidecar ends. Raises PenstockError."""
        spec, on_wait = self._spec, WaitLog(give_up_after=self._spec.policy.give_up_after).waiting
        async with contextlib.AsyncExitStack() as stack:
            clients = await stack.enter_async_context(
                open_clients(
                    spec.endpoint,
                    connections=spec.parts,
                    stall_timeout=spec.stall_timeout,
                    give_up_after=spec.policy.give_up_after,
                    on_wait=on_wait,
                )
            )
            client, policy, requests = clients.control, spec.policy, asyncio.Semaphore(spec.parts)

            def store(uri: S3Uri, headers: dict[str, Any], directory: Directory) -> Store:
                journal = stack.enter_context(contextlib.closing(Journal(directory, journal_of(uri))))
                return Store(
                    uri, client, policy, on_wait, requests, headers, journal, self._admission, self._failed
                )

            if (target := spec.output) is not None:
                with Directory.at(spec.base) as base:
                    directory = stack.enter_context(base.enter("output"))  # as long as its journal
                to = store(target.folder, spec.metadata | target.encryption, directory)
                self._output = Output(spec.base, target, to)
                await self._output.check()
            if (checkpoints := spec.checkpoints) is not None:
                root = stack.enter_context(Directory.at(checkpoints.path))
                to = store(checkpoints.uri, spec.metadata, root)
                await to.abort_left()
                await to.prove(PREFIX, instead="Penstock.Checkpoints")  # the prefix may be empty
            await self._send(line(did="ready"))
            if await self._message() is None:
                return
            if checkpoints is not None:
                hosts = spec.hosts.index(spec.host), spec.hosts
                to = store(checkpoints.uri, spec.metadata, root)  # its journal has what was restored
                self._checkpoints = Checkpoints(root, to, hosts, marked=checkpoints.marked)
            await first_of(self._until_end(), self._watch(), self._report())

    async def _message(self) -> dict[str, Any] | None:
        """Return the sidecar's next message; None if it has ended."""
        text = await self._reader.readline()
        return json.loads(text) if text else None

    async def _until_end(self) -> None:
        if (message := await self._message()) is not None:
            await first_of(self._end(message["code"]), self._reader.read())

    async def _watch(self) -> None:
        if self._checkpoints is not None:
            await self._checkpoints.run()
        await asyncio.Event().wait()

    async def _end(self, code: int) -> None:
        self._ending = True
        left: list[LeftOut] = []
        uploaded: list[str] = []
        if self._checkpoints is not None:
            left += await self._checkpoints.finish()
            if not left:
                uploaded.append(CHECKPOINTS)
        if self._output is not None:
            left += await self._output.upload(code)
            uploaded += self._output.uploaded
        await self._send(figures_line(self._figures()))
        names = [(each.name, each.reason) for each in left]
        await self._send(line(did="ended", left=names, uploaded=uploaded))

    async def _report(self) -> None:
        """Send a snapshot whenever it has changed, at most every `FIGURES_EVERY` seconds, until cancelled."""
        sent: UploadFigures | None = None
        while True:
            await asyncio.sleep(FIGURES_EVERY)
            if (figures := self._figures()) != sent:
                await self._send(figures_line(figures))
                sent = figures

    def _figures(self) -> UploadFigures:
        output, checkpoints = self._output, self._checkpoints
        files = 0 if output is None else output.files
        files += 0 if checkpoints is None else checkpoints.uploaded_files
        return UploadFigures(
            bytes=self._admission.sent,
            files={"uploaded": files, **self._failed},
            waiting_files=0 if checkpoints is None else checkpoints.waiting_files,
            waiting_bytes=0 if checkpoints is None else checkpoints.waiting_bytes,
            newest=None if checkpoints is None else checkpoints.newest,
            last_seconds=0.0 if checkpoints is None else checkpoints.last_seconds,
            output="running" if self._ending else "waiting",
        )

    async def _send(self, text: bytes) -> None:
        self._writer.write(text)
        await self._writer.drain()
