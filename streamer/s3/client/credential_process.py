"""Runs the program of `credential_process` within limits of time and memory.

aiobotocore waits for the program's end and keeps all of its output. When a renewal is too late, aiobotocore
leaves the program behind, and the next attempt starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from aiobotocore.credentials import AioProcessProvider

MOST_OUTPUT = 1024 * 1024
"""Most bytes that a credential process may write to either of its outputs."""


class CredentialProcess:
    """A started program; it has the two names of asyncio's process that aiobotocore uses."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def __repr__(self) -> str:
        return f"<CredentialProcess {self._process.pid}>"

    @property
    def returncode(self) -> int | None:
        """Exit code; None while the program runs."""
        return self._process.returncode

    async def communicate(self) -> tuple[bytes, bytes]:
        """Return both outputs when the program has ended. Kill it if this is cancelled or fails."""
        outputs = (self._process.stdout, self._process.stderr)
        try:
            written = [asyncio.ensure_future(_read(each)) for each in outputs if each is not None]
            try:
                output, errors = await asyncio.gather(*written)
            finally:
                for each in written:
                    each.cancel()
            await self._process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            # Closes the pipes too: a child of the program may have kept them open.
            self._process._transport.close()  # type: ignore[attr-defined] # noqa: SLF001
            raise
        return output, errors


async def _read(stream: asyncio.StreamReader) -> bytes:
    """Read a stream to its end. Raises ValueError if it is too long."""
    data = bytearray()
    while piece := await stream.read(64 * 1024):
        data += piece
        if len(data) > MOST_OUTPUT:
            raise ValueError(f"the program wrote more than {MOST_OUTPUT} bytes")
    return bytes(data)


async def _start(*command: str, **options: Any) -> CredentialProcess:
    return CredentialProcess(await asyncio.create_subprocess_exec(*command, **options))


def limit_credential_processes() -> None:
    """Make every provider that this process creates from now on start programs within these limits."""
    AioProcessProvider.__init__.__kwdefaults__["popen"] = _start
