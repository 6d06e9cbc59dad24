"""Logs: one event per line on standard error, as JSON unless standard error is a terminal.

Other loggers (botocore, aiohttp, asyncio) and Python's warnings use the same formatter, so that every line
parses. Events of single parts have the level debug. No log call passes credentials, but lines contain
tracebacks and texts of other libraries, so `streamer.secrets` redacts every finished line. Line ends and
terminal codes in an object's key are escaped, by JSON or by `escape_control`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import traceback
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

from sidecar.process.streams import take_dropped
from sidecar.process.wording import spelled
from streamer.escaping import escape_control
from streamer.secrets import redact

if TYPE_CHECKING:
    from streamer.errors import SourceError

_AMBIGUOUS = re.compile(r"[\s='\"]")
"""Characters of a text that a terminal shows in quotes."""
_DIM, _BOLD, _RED, _GREEN, _YELLOW, _MAGENTA, _CYAN = ("2", "1", "31;1", "32;1", "33;1", "35", "36")
_COLORS = {"debug": _GREEN, "info": _GREEN, "warning": _YELLOW, "error": _RED, "critical": _RED}
"""Colours of the levels, as parameters of ECMA-48's SGR."""
LOGGED_EVERY = 60.0
"""Least seconds between two log lines with the same cause."""
MOST_CAUSES = 16
"""Most causes between two such lines; errors of other causes are not logged meanwhile."""
_VARYING = re.compile(
    r"; no answer came in the .*? that were left|[0-9a-f]*[0-9][0-9a-f]*|\(request id .*?\)|: s3://.*"
)
"""What differs between errors of one cause: the last wait, numbers, addresses, request ids, objects."""


class EventLog:
    """Logs events: a name, and fields with the event's values."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, /, **fields: object) -> None:
        """Log an event of a single part."""
        self._logger.debug(event, extra={"fields": fields})

    def info(self, event: str, /, **fields: object) -> None:
        """Log an event of an orderly job."""
        self._logger.info(event, extra={"fields": fields})

    def warning(self, event: str, /, **fields: object) -> None:
        """Log an event that someone should look at."""
        self._logger.warning(event, extra={"fields": fields})

    def error(self, event: str, /, **fields: object) -> None:
        """Log a failure."""
        self._logger.error(event, extra={"fields": fields})

    def exception(self, event: str, /, **fields: object) -> None:
        """Log a failure with the traceback of the exception that is being handled."""
        self._logger.error(event, exc_info=True, extra={"fields": fields})  # noqa: LOG014 - by a handler


log = EventLog("penstock")


class WaitLog:
    """Logs that a command or a channel waits: each cause at once and every `LOGGED_EVERY` seconds."""

    def __init__(self, *, give_up_after: float, **fields: str) -> None:
        """`give_up_after`: seconds without progress after which the wait ends. `fields`: of every line."""
        self._fields = {**fields, "give_up_after": give_up_after}
        self._logged: dict[str, float] = {}
        """Time of the last line, by cause."""

    def waiting(self, error: SourceError) -> None:
        """Note that storage or credentials are unavailable, and why."""
        self.note(error.awaited, str(error))

    def note(self, awaited: str, text: str) -> None:
        """Note what is waited for, and why."""
        now = time.monotonic()
        cause = _VARYING.sub("", text)
        self._logged = {each: at for each, at in self._logged.items() if now - at < LOGGED_EVERY}
        if cause not in self._logged and len(self._logged) < MOST_CAUSES:
            self._logged[cause] = now
            if awaited == "credentials":
                log.warning("waiting for credentials", **self._fields, error=text)
            else:
                log.warning("waiting for storage", **self._fields, error=text)


def configure(*, level: str = "info", json_lines: bool | None = None) -> None:
    """Set up logging for the process. `json_lines`: None for JSON unless standard error is a terminal."""
    if json_lines is None:
        json_lines = not sys.stderr.isatty()
    handler = _Handler(sys.stderr)
    handler.setFormatter(
        _JsonLines() if json_lines else _Text(colors=sys.stderr.isatty() and not os.environ.get("NO_COLOR"))
    )
    logging.captureWarnings(capture=True)
    root = logging.getLogger()
    root.handlers = [handler]
    # The user's level applies to Penstock's own events. Other libraries log from warning on, because the
    # debug output of botocore contains request headers.
    root.setLevel(logging.WARNING)
    logging.getLogger("penstock").setLevel(level.upper())
    # Each attempt to renew credentials that fails; Penstock logs once what it waits for.
    logging.getLogger("aiobotocore.credentials").setLevel(logging.ERROR)


def settings() -> tuple[str, bool]:
    """Return the level of our events, and whether lines are JSON, for `configure` in another process."""
    level = logging.getLevelName(logging.getLogger("penstock").getEffectiveLevel()).lower()
    return level, any(isinstance(handler.formatter, _JsonLines) for handler in logging.getLogger().handlers)


def shows_text() -> bool:
    """Return whether events of an orderly job are written as text, for people."""
    texts = [isinstance(handler.formatter, _Text) for handler in logging.getLogger().handlers]
    return any(texts) and logging.getLogger("penstock").isEnabledFor(logging.INFO)


def configure_unless_done() -> None:
    """Set up logging if the command has not; `probe` and others log nothing but a bug."""
    if not logging.getLogger().handlers:
        configure()


class _Handler(logging.StreamHandler[TextIO]):
    """Writes lines, and reports how much was dropped because nobody read them (`sidecar.process.streams`)."""

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if dropped := take_dropped():
            log.warning(
                "a part of the log was dropped, because nobody read it or its disk was full", bytes=dropped
            )


class _JsonLines(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        document = _fields(record) | {
            "event": record.getMessage(),
            "level": record.levelname.lower(),
            "timestamp": _timestamp(record),
        }
        if trace := _traceback(self, record):
            document["exception"] = trace
        return redact(json.dumps(document, default=repr))


class _Text(logging.Formatter):
    """Formats a record as one line for people, and a traceback below it."""

    def __init__(self, *, colors: bool) -> None:
        super().__init__()
        self._colors = colors

    def format(self, record: logging.LogRecord) -> str:
        level, event = record.levelname.lower(), escape_control(record.getMessage())
        fields = " ".join(
            f"{self._styled(_CYAN, name)}={self._styled(_MAGENTA, _shown(value))}"
            for name, value in sorted(_fields(record).items())
        )
        shown_level = self._styled(_COLORS.get(level, _BOLD), f"{level:<9}")
        shown_event = self._styled(_BOLD, f"{event:<30}")
        line = f"{self._styled(_DIM, _timestamp(record))} [{shown_level}] {shown_event} {fields}".rstrip()
        trace = _traceback(self, record)
        return redact(f"{line}\n{trace}" if trace else line)

    def _styled(self, color: str, text: str) -> str:
        return f"\x1b[{color}m{text}\x1b[0m" if self._colors else text


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of an event; the logger's name for a record of another library."""
    fields: dict[str, Any] = getattr(record, "fields", {"logger": record.name})
    return fields | {
        name: spelled(fields[name]) for name in ("error", "do") if isinstance(fields.get(name), str)
    }


def _shown(value: object) -> str:
    text = escape_control(value) if isinstance(value, str) else repr(value)
    return repr(text) if isinstance(value, str) and _AMBIGUOUS.search(text) else text


def _timestamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")[:-6] + "Z"


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Return the traceback of a record's exception, of a warning its last line; empty if it has none."""
    if not record.exc_info or record.exc_info[0] is None:
        return ""
    if record.levelno < logging.ERROR:  # a library's, such as botocore's of a renewal; what it causes is told
        return "".join(traceback.format_exception_only(record.exc_info[1])).strip()
    return formatter.formatException(record.exc_info)
