"""Readiness check of a running sidecar (`penstock probe`).

The module imports little, because health checks run it every few seconds.
"""

from __future__ import annotations

from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, build_opener

from streamer.errors import ConfigError

WITHIN = 5
"""Seconds in which the sidecar must respond."""


class _NoRedirect(HTTPRedirectHandler):
    """Turns every redirect into an error."""

    def redirect_request(self, *_: Any) -> None:
        """Return None: urllib then raises HTTPError."""


direct = build_opener(ProxyHandler({}), _NoRedirect())
"""URL opener without proxies and redirects, so that the token reaches the sidecar only."""


def base_url(url: str) -> str:
    """Return the URL of an admin server without its last `/`. Raises ConfigError if it is not http://."""
    if urlsplit(url).scheme != "http":
        raise ConfigError(f"{url!r} is not an http:// URL")
    return url.rstrip("/")


def ready(url: str) -> bool:
    """Return whether the sidecar with the admin server `url` offers every FIFO and no channel has failed.

    Raises ConfigError.
    """
    endpoint = base_url(url) + "/readyz"
    try:
        with direct.open(endpoint, timeout=WITHIN) as response:
            return bool(response.status == 200)
    except (URLError, OSError):
        return False
