"""Warns of objects that are probably no data: marks of writers, checksums, indexes, hidden files.

`penstock run`, `plan`, `cat` and `doctor` warn of them; `streamer.plan.strays` recognises them.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

from sidecar.process.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.plan.strays import Strays


def warn_of_strays(strays: Strays | None, *, advice: Callable[[Strays], str], **fields: str) -> None:
    """Log the objects, with `advice`. `fields`: further fields of the event."""
    if strays is not None and strays.keys:
        log.warning("objects that may not be data", **fields, keys=strays.keys, do=advice(strays))


def option_advice(strays: Strays) -> str:
    """Return which options leave the objects out, or declare them data."""
    options = " ".join(f"--exclude {shlex.quote(glob)}" for glob in strays.globs)
    return f"add {options} to leave them out, or --include '**' if they are data"


def channel_advice(strays: Strays) -> str:
    """Return which setting of the channel leaves the objects out, or declares them data."""
    return (
        f"add Penstock: {{Exclude: {json.dumps(strays.globs)}}} to the channel to leave them out, or "
        'Include: ["**"] if they are data'
    )
