"""Spool of one wrapped object: its content, until its length is known and its record can be delivered."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from streamer.plan import frame
from streamer.relay.deliver.inflation import LITTLE_PIECE, PIECE
from streamer.relay.deliver.object_errors import no_space
from streamer.units import MIB

if TYPE_CHECKING:
    from streamer.aio import WorkerThread
    from streamer.plan import ObjectRef
    from streamer.relay.deliver.stream_writer import StreamWriter

SPOOL_MEMORY = 8 * MIB
"""Bytes of a wrapped object that are kept in memory; a longer object is spooled to a file."""


class Spool:
    """Content of the object `ref`; its owner closes it once. `thread`: reads the file."""

    def __init__(self, ref: ObjectRef, thread: WorkerThread) -> None:
        self._ref = ref
        self._thread = thread
        self._file = tempfile.SpooledTemporaryFile(SPOOL_MEMORY)  # noqa: SIM115 - closed by `close`
        self._size = 0

    def __repr__(self) -> str:
        return f"<Spool of {self._ref.key}, {self._size} bytes>"

    @property
    def in_memory(self) -> bool:
        """Whether a further little piece is not written to a file."""
        return self._size + LITTLE_PIECE <= SPOOL_MEMORY

    def add(self, pieces: list[bytes]) -> None:
        """Add content, in any thread. Raises SinkError if there is no space."""
        try:
            self._file.writelines(pieces)
        except OSError as error:
            raise no_space(self._ref, error) from error
        self._size += sum(map(len, pieces))

    async def deliver(self, writer: StreamWriter) -> None:
        """Write the content as one record. Raises ReaderGone."""
        header, padding = frame(self._size)
        if self._size <= LITTLE_PIECE:
            self._file.seek(0)
            await writer.write([header, self._file.read(), padding])
            return
        await writer.write([header])
        await self._thread.run(self._file.seek, 0)
        while content := await self._thread.run(self._file.read, PIECE):
            await writer.write([content])
        await writer.write([padding])

    def close(self) -> None:
        """Drop the content."""
        self._file.close()
