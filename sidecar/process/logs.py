"""Logs: one structlog event per line on standard error, JSON unless a person is watching.

Foreign loggers (botocore, aiohttp, asyncio) and Python's warnings go through the same formatter, so that
every line parses. Nothing is logged per part above debug. Credentials are never passed to a log call in the
first place, and every finished line is looked through for secrets all the same (`streamer.secrets`), for
tracebacks and other people's messages are in them. An object's key may hold line ends and terminal codes:
JSON escapes them, and for people they are made visible.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from streamer.secrets import escape_control, redact

log: Any = structlog.get_logger("penstock")


def configure(*, level: str = "info", json_lines: bool | None = None) -> None:
    """Set up logging for the process; `json_lines` defaults to whether standard error is no terminal."""
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
            _on_one_line,
            # Not the default, which shows the local variables of every frame where `rich` is installed.
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
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
    # Our own level is the user's; a library's chatter below warning helps nobody (and botocore's debug
    # output prints request headers).
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


def _on_one_line(_: Any, __: str, event: dict[str, Any]) -> dict[str, Any]:
    """What is text, with control characters made visible; but for tracebacks, whose lines are ours."""
    return {
        name: escape_control(value)
        if isinstance(value, str) and name not in ("exception", "stack")
        else value
        for name, value in event.items()
    }


def _redacted(_: Any, __: str, line: Any) -> str:
    return redact(line)
