"""Asking a running sidecar whether it is ready.

It imports little, since health checks run it every few seconds.
"""

from __future__ import annotations

from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from streamer.errors import ConfigError

WITHIN = 5
"""Seconds for the answer."""


def ready(url: str) -> bool:
    """Whether the sidecar whose admin server is at `url` offers its FIFOs and none has failed."""
    if urlsplit(url).scheme != "http":
        raise ConfigError(f"{url!r} is not an http:// URL")
    try:
        with urlopen(url.rstrip("/") + "/readyz", timeout=WITHIN) as answer:  # noqa: S310 - checked above
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False
