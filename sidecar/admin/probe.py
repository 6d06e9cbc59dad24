"""Readiness check of a running sidecar (`penstock probe`).

The module imports little, because health checks run it every few seconds.
"""

from __future__ import annotations

from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, build_opener

from streamer.errors import ConfigError
from streamer.secrets import escape_control

WITHIN = 5
"""Seconds in which the sidecar must respond."""
MOST_REASON = 4096
"""Bytes of a reason that are read."""


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


def why_not_ready(url: str) -> str:
    """Return why the sidecar with the admin server `url` is not ready; empty if it is.

    A sidecar is ready while it offers every FIFO and no channel has failed. Raises ConfigError.
    """
    base = base_url(url)
    try:
        status, text = _get(base + "/readyz")
        if (status, text) == (200, "ready\n"):
            return ""
        if status == 503 and _get(base + "/livez") == (200, "alive\n"):
            return escape_control(text.strip())
    except (OSError, ValueError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        return f"no sidecar answers at {url} ({reason}); is it running, and --url right?"
    return f"another program answers at {url}; give the sidecar's address by --url"


def _get(url: str) -> tuple[int, str]:
    """Return status and text of a response. Raises OSError, ValueError."""
    try:
        with direct.open(url, timeout=WITHIN) as response:
            return response.status, response.read(MOST_REASON).decode("utf-8", "replace")
    except HTTPError as error:
        with error:
            return error.code, error.read(MOST_REASON).decode("utf-8", "replace")
