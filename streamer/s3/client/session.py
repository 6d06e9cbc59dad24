"""One aiobotocore session per process, and two S3 clients from it.

botocore's own chain (environment, files, container, instance, web identity) resolves endpoint, region,
profile and credentials once, and refreshes the credentials. One client is for control requests (LIST, HEAD),
which are small and rare, and which botocore retries in its standard mode. The other is for GETs of parts,
which the relay retries, because a retry must resume inside a body; botocore's shared retry quota (100 retries
for the whole process) would also fail many ranges at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
from base64 import b64encode
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import md5
from ipaddress import IPv6Address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from botocore.exceptions import ClientError
from botocore.loaders import Loader, create_loader
from botocore.utils import parse_timestamp

from streamer import __version__
from streamer.errors import ConfigError, ErrorContext, SourceError, Transient
from streamer.retry import note_failure
from streamer.s3.client.bounded import BoundedSession
from streamer.s3.client.credentials import FixedProvider, RenewableCredentials
from streamer.s3.client.faults import map_errors, mapped
from streamer.s3.client.metadata import refuse_redirects
from streamer.s3.client.xml_parser import StrictParserFactory
from streamer.secrets import quoted, remember, remember_environment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


CONTROL_ATTEMPTS = 5
CONNECT_TIMEOUT = 10
STALL_TIMEOUT = 30.0
"""Seconds without a byte before a connection counts as dead. S3's first byte takes well under 1 s."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options that every LIST, HEAD and GET carries."""

    requester_pays: bool = False
    sse_customer_key: bytes | None = field(default=None, repr=False)
    """The 32-byte key that the objects were encrypted with (SSE-C)."""

    def add_to(self, client: Any) -> None:
        """Add these options to every LIST, HEAD and GET of `client`, aiobotocore's."""
        to_list: dict[str, Any] = {"RequestPayer": "requester"} if self.requester_pays else {}
        to_read = dict(to_list)
        if self.sse_customer_key is not None:
            to_read |= {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": self.sse_customer_key}
        for operation, extra in (("ListObjectsV2", to_list), ("GetObject", to_read), ("HeadObject", to_read)):

            def add(params: dict[str, Any], extra: dict[str, Any] = extra, **_: Any) -> dict[str, Any]:
                return params | extra

            client.meta.events.register(f"provide-client-params.s3.{operation}", add)

    def list_headers(self) -> dict[str, str]:
        """Return these options as headers of a LIST."""
        return {"x-amz-request-payer": "requester"} if self.requester_pays else {}

    def headers(self) -> dict[str, str]:
        """Return these options as headers of a GET or HEAD."""
        headers = self.list_headers()
        if self.sse_customer_key is not None:
            key = self.sse_customer_key
            prefix = "x-amz-server-side-encryption-customer-"
            headers[f"{prefix}algorithm"] = "AES256"
            headers[f"{prefix}key"] = b64encode(key).decode()
            headers[f"{prefix}key-MD5"] = b64encode(md5(key, usedforsecurity=False).digest()).decode()
        return headers


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of S3 and the identity to use there. botocore's own chain resolves unset fields."""

    url: str | None = None
    region: str | None = None
    profile: str | None = None
    path_style: bool = False
    anonymous: bool = False
    ca_bundle: str | None = None
    reading: RequestOptions = field(default_factory=RequestOptions)


@dataclass(frozen=True, slots=True)
class Clients:
    """The process's two S3 clients (aiobotocore's are untyped)."""

    control: Any
    data: Any
    credentials: Any
    """The session's `RenewableCredentials`; None for anonymous access, or if there are none."""
    anonymous: bool
    reading: RequestOptions
    ca_bundle: str | None
    """PEM file of certificates to trust, from configuration or environment; None for botocore's own."""
    stall_timeout: float
    """Seconds without a byte before a connection counts as dead."""
    request_counts: Counter[str] = field(default_factory=Counter)
    """Number of requests other than GETs of parts, including retries, by S3's name of the operation."""

    @property
    def over_tls(self) -> bool:
        """Whether the endpoint is one with TLS."""
        url: str = self.data.meta.endpoint_url
        return url.startswith("https://")


def _timestamp(value: Any) -> datetime:
    """Parse a timestamp as botocore does, but in a tenth of its time for S3's own form.

    Every listed object has one, and botocore's parser took three quarters of a listing's CPU time.
    """
    try:
        timestamp = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        timestamp = None
    if timestamp is None or timestamp.tzinfo is None:
        parsed: datetime = parse_timestamp(value)
        return parsed
    return timestamp


@functools.cache
def _models(data_path: str | None) -> Loader:
    """Return botocore's loader of service models, cached because loading takes 0.1 s for each client."""
    return create_loader(data_path)


@contextlib.asynccontextmanager
async def open_clients(
    endpoint: Endpoint, *, connections: int, stall_timeout: float = STALL_TIMEOUT
) -> AsyncIterator[Clients]:
    """Open both clients; close them at the end of the block.

    `connections` bounds the data client's pool: the sum of all channels' requests in flight.
    `stall_timeout`: seconds without a byte before a connection counts as dead.
    Raises ConfigError for an unknown profile, a missing region or an unreadable CA bundle, Denied for
    broken credentials files.
    """
    from aiobotocore.config import AioConfig
    from botocore import UNSIGNED

    remember_environment()
    if (key := endpoint.reading.sse_customer_key) is not None:
        remember(key, md5(key, usedforsecurity=False).digest())
    if endpoint.ca_bundle and not os.access(endpoint.ca_bundle, os.R_OK):
        raise ConfigError(f"cannot read {endpoint.ca_bundle}; Endpoint.CaBundle must name a PEM file")
    common: dict[str, Any] = {
        "connect_timeout": min(CONNECT_TIMEOUT, stall_timeout),
        "read_timeout": stall_timeout,
        "user_agent_extra": f"penstock/{__version__}",
        "s3": {"addressing_style": "path" if endpoint.path_style else "auto"},
        # Some compatible servers send a whole object's checksum with a range; botocore would compare it
        # and refuse every part. Length, ETag and Content-Range of ranges are checked instead.
        "response_checksum_validation": "when_required",
        # S3 has many addresses; a short DNS cache makes requests use all of them.
        "connector_args": {"ttl_dns_cache": 10},
        "http_session_cls": BoundedSession,
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
        with map_errors(ErrorContext()), _map_endpoint_errors():
            session = _session(endpoint.profile)
            session.register_component("data_loader", _models(session.get_config_variable("data_path")))
            credentials = (
                None if endpoint.anonymous else await _renewable(session, endpoint.profile, stall_timeout)
            )
            parsers = StrictParserFactory()
            parsers.set_parser_defaults(timestamp_parser=_timestamp)
            session.register_component("response_parser_factory", parsers)
            clients = Clients(
                await stack.enter_async_context(session.create_client("s3", config=control, **options)),
                await stack.enter_async_context(session.create_client("s3", config=data, **options)),
                credentials=credentials,
                anonymous=endpoint.anonymous,
                reading=endpoint.reading,
                ca_bundle=endpoint.ca_bundle or session.get_config_variable("ca_bundle"),
                stall_timeout=stall_timeout,
            )
            check_endpoint(clients.data.meta.endpoint_url)
        endpoint.reading.add_to(clients.control)
        endpoint.reading.add_to(clients.data)

        def count(event_name: str, **_: Any) -> None:
            clients.request_counts[event_name.rpartition(".")[2]] += 1

        clients.control.meta.events.register("before-send.s3", count)
        clients.control.meta.events.register("response-received.s3", _note_failure)
        yield clients


def _note_failure(
    exception: BaseException | None, parsed_response: Any, context: Any, event_name: str, **_: Any
) -> None:
    """Note the error of a failed request, because botocore repeats it and raises only the last error."""
    if exception is None and parsed_response and parsed_response.get("Error"):
        exception = ClientError(parsed_response, event_name.rpartition(".")[2])
    if exception is not None:
        params = context.get("s3_redirect", {}).get("params", {})
        error = mapped(exception, ErrorContext(params.get("Bucket"), params.get("Key")))
        if isinstance(error, SourceError):
            note_failure(error)


def check_endpoint(url: str) -> None:
    """Raise ValueError for a URL without a valid host or port. The text does not contain the URL."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if ":" in host:
        IPv6Address(host.partition("%")[0])
    elif not re.fullmatch(r"(?=.{1,253}\.?$)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?", host):
        raise ValueError(
            "the host must be an IP address or a host name in ASCII letters, digits, '.' and '-'"
        )
    if not parts.netloc.isascii() or parts.port == 0 or parts.netloc.endswith(":"):
        raise ValueError("the port must be a number from 1 to 65535")


@contextlib.contextmanager
def _map_endpoint_errors() -> Iterator[None]:
    """Map the ValueError that botocore raises for an endpoint or a region. Raises ConfigError."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(
            f"the endpoint is invalid ({quoted(str(error))}); correct Penstock.Endpoint.Url and Region, or "
            "AWS_ENDPOINT_URL"
        ) from error


def _session(profile: str | None) -> Any:
    """Return a session whose clients, including those for STS, follow no redirect and limit responses.

    Its requests to metadata services follow no redirect either.
    """
    from aiobotocore.config import AioConfig
    from aiobotocore.session import AioSession

    refuse_redirects()
    session = AioSession(profile=profile)
    session.set_default_client_config(AioConfig(http_session_cls=BoundedSession))
    return session


async def _renewable(session: Any, profile: str | None, limit: float) -> RenewableCredentials | None:
    """Return renewable credentials and give them to the session's clients; None if the session has none."""

    async def load() -> Any:
        return await _session(profile).get_credentials()

    # `session.get_credentials` would cache the credentials and give those to the clients.
    try:
        async with asyncio.timeout(limit):
            credentials = await session.get_component("credential_provider").load_credentials()
    except TimeoutError as error:
        raise Transient(
            f"the credentials' source did not respond in {limit:g} s; check that it is running"
        ) from error
    if credentials is None:
        return None
    lasting = RenewableCredentials(credentials, load, limit=limit)
    session.register_component("credential_provider", FixedProvider(lasting))
    return lasting


def certificate_file(ca_bundle: str | None) -> str:
    """Return the file of certificates to trust: the bundle given, or botocore's own."""
    from botocore.httpsession import get_cert_path

    path: str = ca_bundle or get_cert_path(verify=True)
    return path
