"""A running sidecar as its admin port shows it: what `penstock top` reads and `penstock set` changes."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request

from pydantic import ByteSize, TypeAdapter, ValidationError

from sidecar.admin.probe import direct
from streamer.errors import ConfigError, SinkError
from streamer.secrets import escape_control

if TYPE_CHECKING:
    from collections.abc import Iterator

WITHIN = 5
"""Seconds for an answer, and between two events."""
_LIFTED = ("none", "auto")


def events(url: str, token: str | None = None) -> Iterator[dict[str, Any]]:
    """The documents of `/events`, until the sidecar ends; `token` where all needs it.

    What is text in them has its control characters made visible, for it goes to a terminal. Raises SinkError
    if no sidecar answers, ConfigError for a refusal.
    """
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with _answered(url, Request(_checked(url) + "/events", headers=headers)) as answer:  # noqa: S310 - checked
        for line in answer:
            if line.startswith(b"data: "):
                yield _visible(json.loads(line.removeprefix(b"data: ")))


def _visible(value: Any) -> Any:
    if isinstance(value, str):
        return escape_control(value)
    if isinstance(value, list):
        return [_visible(each) for each in value]
    return {name: _visible(each) for name, each in value.items()} if isinstance(value, dict) else value


def change(url: str, document: dict[str, Any], token: str) -> dict[str, Any]:
    """Change limits; return those that then hold. Raises ConfigError for a refusal, SinkError for silence."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    body = json.dumps(document).encode()
    request = Request(_checked(url) + "/limits", body, headers, method="PATCH")  # noqa: S310 - checked
    with _answered(url, request) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def parse_limits(words: tuple[str, ...]) -> dict[str, Any]:
    """`bandwidth=200MB`, `train.bandwidth=none`, ... as a document. Raises ConfigError."""
    document: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        channel, _, limit = name.rpartition(".")
        if not equals or limit not in ("bandwidth", "requests_in_flight", "memory_budget"):
            raise ConfigError(
                f"{word!r}: write bandwidth=200MB, train.bandwidth=50MB, requests_in_flight=32 or "
                "memory_budget=1GiB; none or auto lifts a limit"
            )
        if channel and limit != "bandwidth":
            raise ConfigError(f"{word!r}: a channel has a bandwidth alone; {limit} is of the process")
        found = _value(word, limit, value)
        if channel:
            document.setdefault("channel_bandwidth", {})[channel] = found
        else:
            document[limit] = found
    return document


def _value(word: str, limit: str, value: str) -> int | None:
    if value in _LIFTED:
        return None
    try:
        if limit == "requests_in_flight":
            return int(value)
        return int(TypeAdapter(ByteSize).validate_python(value.removesuffix("/s")))
    except (ValidationError, ValueError):
        raise ConfigError(
            f"{word!r}: {value!r} is no {'number' if limit == 'requests_in_flight' else 'size'}"
        ) from None


def _checked(url: str) -> str:
    if urlsplit(url).scheme != "http":
        raise ConfigError(f"{url!r} is not an http:// URL")
    return url.rstrip("/")


@contextlib.contextmanager
def _answered(url: str, request: Request) -> Iterator[Any]:
    try:
        with direct.open(request, timeout=WITHIN) as answer:
            yield answer
    except HTTPError as error:
        with error:
            text = error.read(4096).decode("utf-8", "replace")
        with contextlib.suppress(ValueError, KeyError, TypeError):
            text = json.loads(text)["error"]
        raise ConfigError(f"{url} refuses: {text}") from error
    except (URLError, OSError, ValueError) as error:
        said = error.reason if isinstance(error, URLError) else error
        raise SinkError(f"no sidecar answers at {url} ({said}); is it running, and --url right?") from error
