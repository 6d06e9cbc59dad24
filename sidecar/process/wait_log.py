"""Logs that a command waits for storage, which is unavailable."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sidecar.process.logs import log

if TYPE_CHECKING:
    from streamer.errors import SourceError

LOGGED_EVERY = 10.0
"""Least seconds between two log lines."""


class WaitLog:
    """The log lines of one wait or several: at most one every `LOGGED_EVERY` seconds."""

    def __init__(self, **fields: str) -> None:
        """`fields`: those of every line beside the error."""
        self._fields = fields
        self._logged = float("-inf")

    def waiting(self, error: SourceError) -> None:
        """Note that storage is unavailable."""
        now = time.monotonic()
        if now - self._logged >= LOGGED_EVERY:
            self._logged = now
            log.warning("waiting for storage", **self._fields, error=str(error))
