"""Logs: one structlog event per line on standard error, as JSON unless standard error is a terminal.

Other loggers (botocore, aiohttp, asyncio) and Python's warnings use the same formatter, so that every line
parses. Events of single parts have the level debug. No log call passes credentials, but lines contain
tracebacks and texts of other libraries, so `streamer.secrets` redacts every finished line. Line ends and
terminal codes in an object's key are escaped, by JSON or by `escape_control`.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import structlog

from streamer.secrets import escape_control, redact

log: Any = structlog.get_logger("penstock")


def configure(*, level: str = "info", json_lines: bool | None = None) -> None:
    """Set up logging for the process. `json_lines`: None for JSON unless standard error is a terminal."""
    if json_lines is None:
        json_lines = not sys.stderr.isatty()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderers: list[Any] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if json_lines
        else [
            _escaped,
            # If `rich` is installed, the default formatter prints the local variables of every frame.
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty() and not os.environ.get("NO_COLOR"),
                exception_formatter=structlog.dev.plain_traceback,
            ),
        ]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers, _redacted],
        )
    )
    logging.captureWarnings(capture=True)
    root = logging.getLogger()
    root.handlers = [handler]
    # The user's level applies to Penstock's own events. Other libraries log from warning on, because the
    # debug output of botocore contains request headers.
    root.setLevel(logging.WARNING)
    logging.getLogger("penstock").setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def _escaped(_: Any, __: str, event: dict[str, Any]) -> dict[str, Any]:
    """Return an event with the control characters of its texts escaped, except in tracebacks."""
    return {
        name: escape_control(value)
        if isinstance(value, str) and name not in ("exception", "stack")
        else value
        for name, value in event.items()
    }


def _redacted(_: Any, __: str, line: Any) -> str:
    return redact(line)
