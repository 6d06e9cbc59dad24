"""Client of the admin server of a running sidecar, for `penstock probe`, `top` and `set`.

The module imports little, because health checks run `probe` every few seconds.
"""

from __future__ import annotations

import contextlib
import re
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from streamer.errors import ConfigError, SinkError
from streamer.escaping import escape_control
from streamer.units import decimal_bytes, human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WITHIN = 5
"""Seconds in which the sidecar must respond, and at most between two events."""
MOST_REASON = 4096
"""Bytes of a reason that are read."""
LIMITS = ("bandwidth", "requests_in_flight", "memory_budget")
_LIFTED = ("none", "auto")
"""Values that lift a limit."""


@contextlib.contextmanager
def _response(
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
    """Return status and text of a response. Raises what `_response` raises."""
    with _response(url, path) as received:
        return received.status, received.read(MOST_REASON).decode("utf-8", "replace")


def events(url: str, token: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the documents of `/events` until the sidecar ends.

    `token`: for a sidecar under `Protect: all`. Control characters of texts are escaped, because the texts go
    to a terminal. Raises SinkError if no sidecar responds, ConfigError if it refuses.
    """
    import json

    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with _accepted(url, "/events", headers) as received:
        for line in received:
            if line.startswith(b"data: "):
                yield _escaped(json.loads(line.removeprefix(b"data: ")))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return escape_control(value)
    if isinstance(value, list):
        return [_escaped(each) for each in value]
    return {name: _escaped(each) for name, each in value.items()} if isinstance(value, dict) else value


def change_limits(url: str, document: dict[str, Any], token: str) -> dict[str, Any]:
    """Change limits; return the limits after the change.

    Raises SinkError if no sidecar responds, ConfigError if it refuses.
    """
    import json

    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    body = json.dumps(document).encode()
    with _accepted(url, "/limits", headers, method="PATCH", body=body) as received:
        after: dict[str, Any] = json.load(received)
    return after


def describe_limits(limits: dict[str, Any]) -> list[str]:
    """Return one line for each limit of a sidecar, as `penstock set` takes it."""
    adapts = "auto, now " if limits["requests_in_flight_adapt"] else ""
    rates = {"bandwidth": limits["bandwidth"]} | {
        f"{name}.bandwidth": rate for name, rate in limits["channel_bandwidth"].items()
    }
    return [
        *(
            f"{name:<20} {'none' if rate is None else decimal_bytes(rate) + '/s'}"
            for name, rate in rates.items()
        ),
        f"{'requests_in_flight':<20} {adapts}{limits['requests_in_flight']}",
        f"{'memory_budget':<20} {human_bytes(limits['memory_budget'])}",
    ]


def parse_limits(words: tuple[str, ...]) -> dict[str, Any]:
    """Return `bandwidth=200MB`, `train.bandwidth=none`, ... as a document. Raises ConfigError."""
    import difflib

    document: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        channel, _, limit = name.rpartition(".")
        if limit == "weights":
            raise ConfigError(f"{word!r}: weights change at the steps that Mix.Then of the job file names")
        if not equals or limit not in LIMITS:
            close = difflib.get_close_matches(limit, LIMITS, n=1)
            meant = f" did you mean {close[0]}?" if close and limit not in LIMITS else ""
            raise ConfigError(
                f"{word!r}:{meant} write bandwidth=200MB, train.bandwidth=50MB, requests_in_flight=32 or "
                "memory_budget=1GiB; none or auto lifts a limit"
            )
        if channel and limit != "bandwidth":
            raise ConfigError(f"{word!r}: a channel has a bandwidth alone; {limit} is of the process")
        number = _parse_value(word, limit, value)
        limits = document.setdefault("channel_bandwidth", {}) if channel else document
        if (channel or limit) in limits:
            raise ConfigError(f"{name} is given twice; give it once")
        limits[channel or limit] = number
    return document


def _parse_value(word: str, limit: str, value: str) -> int | None:
    from sidecar.config.model import parse_size

    if value in _LIFTED:
        return None
    if limit == "requests_in_flight":
        if re.fullmatch(r"[0-9]{1,9}", value) is None:
            raise ConfigError(f"{word!r}: {value!r} is no number")
        return int(value)
    try:
        return parse_size(value.removesuffix("/s"))
    except ValueError:
        raise ConfigError(f"{word!r}: {value!r} is no size, such as 200MB") from None


@contextlib.contextmanager
def _accepted(url: str, path: str, headers: dict[str, str], **request: Any) -> Iterator[HTTPResponse]:
    """Send a request and yield its response, if the status is 2xx.

    Raises SinkError if no sidecar responds, ConfigError if it refuses; both name `url`.
    """
    import json

    try:
        with _response(url, path, headers, **request) as received:
            if 200 <= received.status < 300:
                yield received
                return
            text = received.read(MOST_REASON).decode("utf-8", "replace")
    except (OSError, ValueError, HTTPException) as error:
        raise SinkError(f"no sidecar answers at {url} ({error}); is it running, and --url right?") from error
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["error"]
    raise ConfigError(f"{url} refuses: {text}")
