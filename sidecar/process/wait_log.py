"""Logs that storage does not respond, and that a command or a channel waits for it."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from sidecar.process.logs import log

if TYPE_CHECKING:
    from streamer.errors import SourceError

LOGGED_EVERY = 60.0
"""Least seconds between two log lines with the same cause."""
MOST_CAUSES = 16
"""Most causes between two such lines; errors of other causes are not logged meanwhile."""
_VARYING = re.compile(
    r"; no answer came in the .*? that were left|[0-9a-f]*[0-9][0-9a-f]*|\(request id .*?\)|: s3://.*"
)
"""What differs between errors of one cause: the last wait, numbers, addresses, request ids, objects."""


class WaitLog:
    """The log lines of one wait or several: each cause at once, and again every `LOGGED_EVERY` seconds."""

    def __init__(self, *, give_up_after: float, **fields: str) -> None:
        """`give_up_after`: seconds without progress after which the wait ends. `fields`: of every line."""
        self._fields = {**fields, "retried_for": give_up_after}
        self._logged: dict[str, float] = {}
        """Time of the last line, by cause."""

    def waiting(self, error: SourceError) -> None:
        """Note that storage is unavailable."""
        self.failed(str(error))

    def failed(self, text: str) -> None:
        """Note an error of storage."""
        cause, now = _VARYING.sub("", text), time.monotonic()
        self._logged = {each: at for each, at in self._logged.items() if now - at < LOGGED_EVERY}
        if cause not in self._logged and len(self._logged) < MOST_CAUSES:
            self._logged[cause] = now
            log.warning("waiting for storage", **self._fields, error=text)
