"""Asking a running sidecar whether it is ready.

It imports little, since health checks run it every few seconds.
"""

from __future__ import annotations

from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, build_opener

from streamer.errors import ConfigError

WITHIN = 5
"""Seconds for the answer."""


class _NoRedirect(HTTPRedirectHandler):
    """Makes an error of every redirect."""

    def redirect_request(self, *_: Any) -> None:
        """Follow none."""


direct = build_opener(ProxyHandler({}), _NoRedirect())
"""Asks a sidecar itself: a token goes neither to a proxy of the environment nor where a redirect leads."""


def ready(url: str) -> bool:
    """Whether the sidecar whose admin server is at `url` offers its FIFOs and none has failed."""
    if urlsplit(url).scheme != "http":
        raise ConfigError(f"{url!r} is not an http:// URL")
    try:
        with direct.open(url.rstrip("/") + "/readyz", timeout=WITHIN) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False
