"""The rules of the S3 endpoint, which a job file and the options of `penstock cat` share.

This module does without pydantic, which with the models of a job file takes half of the CPU time of a small
`penstock cat`.
"""

from __future__ import annotations

import base64
import contextlib
import re
from typing import TYPE_CHECKING, Any

from sidecar.process.wording import settings_of_profile
from streamer.errors import ConfigError
from streamer.file_reads import read_file
from streamer.s3.client.endpoint import Endpoint, RequestOptions, check_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

BARE_URL = r"^https?://[^/\s@?#]+(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*/?$"
REGION = r"^[A-Za-z0-9][A-Za-z0-9-]{0,62}$"
REGION_ADVICE = "use lower-case letters, digits and '-', such as eu-central-1"
CUSTOMER_KEY_BYTES = 32


def check_url(value: str) -> str:
    """Refuse a URL with more than scheme, host and path. The error omits it: it may contain a password."""
    if not re.fullmatch(BARE_URL, value):
        raise ValueError(
            "must be http:// or https://, a host and at most a path, without a query or credentials in it; "
            "credentials come from the environment"
        )
    check_endpoint(value)
    return value


def check_together(values: Mapping[str, Any], name: Callable[[str], str]) -> None:
    """Raise ValueError for settings that contradict each other. `name`: returns what the user calls one."""
    if values["anonymous"] and values.get("profile"):
        raise ValueError(f"{name('anonymous')} and {name('profile')} contradict each other; remove one")
    if values["ca_bundle"] and (values["url"] or "").startswith("http://"):
        raise ValueError(
            f"{name('ca_bundle')} has no meaning for an http:// {name('url')}; remove it or use https://"
        )
    if values["anonymous"] and values["requester_pays"]:
        raise ValueError(
            f"{name('anonymous')} and {name('requester_pays')} contradict each other; remove one"
        )


def resolved(values: Mapping[str, Any]) -> Endpoint:
    """Return the endpoint of checked values, with the SSE-C key read from its file. Raises ConfigError."""
    path = values["sse_customer_key_file"]
    reading = RequestOptions(values["requester_pays"], read_customer_key(path) if path else None)
    rest = {name: values[name] for name in values.keys() - {"requester_pays", "sse_customer_key_file"}}
    return Endpoint(**rest, reading=reading, on_profile=settings_of_profile)


def endpoint_of_options(options: Mapping[str, Any]) -> Endpoint:
    """Return the endpoint of command-line options. Raises ConfigError."""
    values = {"if_match": "send", "sse_customer_key_file": None, **options}
    values["url"] = values.pop("endpoint_url")
    try:
        _check_options(values)
        check_together(values, _option)
    except ValueError as error:
        raise ConfigError(f"endpoint options: {error}") from None
    return resolved(values)


def _check_options(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if value == "":
            raise ValueError(f"{_option(name)} must not be empty")
    if (url := values["url"]) is not None:
        try:
            check_url(url)
        except ValueError as error:
            raise ValueError(f"{_option('url')} {error}") from None
    if (region := values["region"]) is not None and not re.fullmatch(REGION, region):
        raise ValueError(f"{_option('region')} {region!r} is not allowed; {REGION_ADVICE}")


def _option(name: str) -> str:
    return "--endpoint-url" if name == "url" else "--" + name.replace("_", "-")


def read_customer_key(path: str) -> bytes:
    """Read the SSE-C key in a file. Raises ConfigError, whose text does not contain the key."""
    try:
        key = read_file(path, 128)
    except OSError as error:
        raise ConfigError(f"cannot read the SSE-C key in {path}: {error.strerror}") from error
    if len(key) == CUSTOMER_KEY_BYTES:
        return key
    with contextlib.suppress(ValueError):
        if len(decoded := base64.b64decode(key.strip(), validate=True)) == CUSTOMER_KEY_BYTES:
            return decoded
    raise ConfigError(f"{path} must hold an SSE-C key: {CUSTOMER_KEY_BYTES} bytes, raw or in base64")
