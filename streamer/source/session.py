"""One aiobotocore session per process, and two S3 clients from it.

Endpoint, region, profile and credentials are resolved by botocore's own chain (environment, files,
container, instance, web identity), once, and refreshed by it. The clients differ in who retries:
control calls (list, head) are small and rare, so botocore's standard mode repeats them; part GETs
must resume inside a body, and botocore's shared retry quota would starve many ranges at once
(100 retries for the whole process, then failure), so that client never repeats by itself.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from botocore.utils import parse_timestamp

from streamer import __version__
from streamer.errors import ConfigError, Where
from streamer.source.faults import map_errors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CONTROL_ATTEMPTS = 5
CONNECT_TIMEOUT = 10
READ_TIMEOUT = 30
"""Seconds without a byte before a connection counts as dead; S3's own first byte takes well under 1 s."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where S3 is, and who we are there. Unset fields are left to botocore's own chain."""

    url: str | None = None
    region: str | None = None
    profile: str | None = None
    path_style: bool = False
    anonymous: bool = False
    ca_bundle: str | None = None


@dataclass(frozen=True, slots=True)
class Clients:
    """The process's two S3 clients (aiobotocore's are untyped)."""

    control: Any
    data: Any
    credentials: Any
    """The session's credentials, which refresh themselves; None if anonymous or absent."""
    anonymous: bool


def _timestamp(value: Any) -> datetime:
    """As botocore reads timestamps, but a tenth of its time for S3's own form.

    Every listed object has one, and botocore's way took three quarters of a listing's CPU time.
    """
    try:
        found = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        found = None
    if found is None or found.tzinfo is None:
        other: datetime = parse_timestamp(value)
        return other
    return found


@contextlib.asynccontextmanager
async def open_clients(endpoint: Endpoint, *, connections: int) -> AsyncIterator[Clients]:
    """Both clients, closed at the end.

    `connections` bounds the data client's pool: the sum of what all channels may have in flight.
    Raises ConfigError for an unknown profile, a missing region or an unreadable CA bundle, Denied for
    broken credentials files.
    """
    from aiobotocore.config import AioConfig
    from aiobotocore.session import AioSession
    from botocore import UNSIGNED

    if endpoint.ca_bundle and not os.access(endpoint.ca_bundle, os.R_OK):
        raise ConfigError(f"cannot read {endpoint.ca_bundle}; Endpoint.CaBundle must name a PEM file")
    common: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT,
        "read_timeout": READ_TIMEOUT,
        "user_agent_extra": f"penstock/{__version__}",
        "s3": {"addressing_style": "path" if endpoint.path_style else "auto"},
        # Some compatible servers send a whole object's checksum with a range, and botocore would then
        # refuse every part; ranges are checked by length, ETag and Content-Range instead.
        "response_checksum_validation": "when_required",
        # S3 answers from many addresses; look them up again often and use them all.
        "connector_args": {"ttl_dns_cache": 10},
    }
    if endpoint.anonymous:
        common["signature_version"] = UNSIGNED
    control = AioConfig(
        retries={"mode": "standard", "total_max_attempts": CONTROL_ATTEMPTS},
        max_pool_connections=64,  # the HEADs of a manifest
        **common,
    )
    data = AioConfig(
        retries={"mode": "standard", "total_max_attempts": 1},
        max_pool_connections=connections + 4,
        **common,
    )
    options: dict[str, Any] = {
        "endpoint_url": endpoint.url,
        "region_name": endpoint.region,
        "verify": endpoint.ca_bundle,
    }
    async with contextlib.AsyncExitStack() as stack:
        with map_errors(Where()):
            session = AioSession(profile=endpoint.profile)
            parsers = session.get_component("response_parser_factory")
            parsers.set_parser_defaults(timestamp_parser=_timestamp)
            clients = Clients(
                await stack.enter_async_context(session.create_client("s3", config=control, **options)),
                await stack.enter_async_context(session.create_client("s3", config=data, **options)),
                credentials=None if endpoint.anonymous else await session.get_credentials(),
                anonymous=endpoint.anonymous,
            )
        yield clients
