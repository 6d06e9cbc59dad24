"""Readiness check of a running sidecar (`penstock probe`).

The module imports little, because health checks run it every few seconds.
"""

from __future__ import annotations

import contextlib
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from streamer.errors import ConfigError
from streamer.escaping import escape_control

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WITHIN = 5
"""Seconds in which the sidecar must respond, and at most between two events."""
MOST_REASON = 4096
"""Bytes of a reason that are read."""


@contextlib.contextmanager
def response(
    url: str,
    path: str,
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "GET",
    body: bytes | None = None,
) -> Iterator[HTTPResponse]:
    """Send one request to the admin server at `url`, and yield the response.

    No proxy is used and no redirect is followed, so that the token reaches the sidecar only. Raises
    ConfigError for a URL that is not http://, and OSError, ValueError or HTTPException without a response.
    """
    address = urlsplit(url)
    if address.scheme != "http":
        raise ConfigError(f"{url!r} is not an http:// URL")
    with contextlib.closing(HTTPConnection(address.netloc, timeout=WITHIN)) as connection:
        target = address.path.rstrip("/") + path + (address.query and f"?{address.query}")
        connection.request(method, target, body, {"Connection": "close", **(headers or {})})
        with connection.getresponse() as received:
            yield received


def why_not_ready(url: str) -> str:
    """Return why the sidecar with the admin server `url` is not ready; empty if it is.

    A sidecar is ready while it offers every FIFO and no channel has failed. Raises ConfigError.
    """
    try:
        status, text = _get(url, "/readyz")
        if (status, text) == (200, "ready\n"):
            return ""
        if status == 503 and _get(url, "/livez") == (200, "alive\n"):
            return escape_control(text.strip())
    except (OSError, ValueError, HTTPException) as error:
        return f"no sidecar answers at {url} ({error}); is it running, and --url right?"
    return f"another program answers at {url}; give the sidecar's address by --url"


def _get(url: str, path: str) -> tuple[int, str]:
    """Return status and text of a response. Raises what `response` raises."""
    with response(url, path) as received:
        return received.status, received.read(MOST_REASON).decode("utf-8", "replace")
