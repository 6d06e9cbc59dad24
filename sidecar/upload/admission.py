"""The limit of bytes per second of all uploads of a process (`Penstock.Upload.Bandwidth`).

A part waits for its turn after it has been read, and is then sent at full speed. So the limit holds on
average: at 10 MB/s, 8 MiB are sent every 0.84 s. What is sent again after an error is not counted.
"""

from __future__ import annotations

import asyncio
import time

from streamer.schedule.bandwidth import Bandwidth


class Admission:
    """Admits parts, in the order in which they ask."""

    def __init__(self, limit: int | None = None) -> None:
        """`limit`: bytes per second; None: no limit."""
        self._bandwidth = Bandwidth(limit)
        self._turn = asyncio.Lock()
        self.sent = 0
        """Bytes that S3 has accepted; those of a file that was begun again count again."""

    def note_sent(self, count: int) -> None:
        """Count accepted bytes; see `NewObject.on_sent`."""
        self.sent += count

    async def admit(self, count: int) -> None:
        """Wait until `count` more bytes may be sent; see `NewObject.admit`."""
        async with self._turn:
            await asyncio.sleep(self._bandwidth.wait(time.monotonic()))
            self._bandwidth.sent(count, time.monotonic())
