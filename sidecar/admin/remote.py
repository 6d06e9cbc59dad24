"""Client of the admin server of a running sidecar, for `penstock top` and `penstock set`."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

from sidecar.admin.probe import MOST_REASON, response
from sidecar.config.model import parse_size
from streamer.errors import ConfigError, SinkError
from streamer.escaping import escape_control
from streamer.units import decimal_bytes, human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from http.client import HTTPResponse

LIMITS = ("bandwidth", "requests_in_flight", "memory_budget")
_LIFTED = ("none", "auto")
"""Values that lift a limit."""


def events(url: str, token: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the documents of `/events` until the sidecar ends.

    `token`: for a sidecar under `Protect: all`. Control characters of texts are escaped, because the texts go
    to a terminal. Raises SinkError if no sidecar responds, ConfigError if it refuses.
    """
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


def change(url: str, document: dict[str, Any], token: str) -> dict[str, Any]:
    """Change limits; return the limits after the change.

    Raises SinkError if no sidecar responds, ConfigError if it refuses.
    """
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
    try:
        with response(url, path, headers, **request) as received:
            if 200 <= received.status < 300:
                yield received
                return
            text = received.read(MOST_REASON).decode("utf-8", "replace")
    except (OSError, ValueError, HTTPException) as error:
        raise SinkError(f"no sidecar answers at {url} ({error}); is it running, and --url right?") from error
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["error"]
    raise ConfigError(f"{url} refuses: {text}")
