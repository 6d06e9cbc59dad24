"""The process's S3 clients: settings and credentials for our own HTTP client, and aiobotocore's two clients.

    options, environment ─ settings_of ─┬─ Settings: no botocore ──────────────────┬─▶ Clients
                                        └─ None: BotocoreSession resolves them ────┘
    Clients.control, Clients.data: S3Client ─ its first request ─▶ BotocoreSession opens aiobotocore's client

Our own client (`streamer.s3.http`) sends nearly all requests. aiobotocore sends those that it does not
support, so its clients are opened by their first request, once. botocore is imported, and its models are
loaded, in a thread, because streams may be running then.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import md5
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from streamer.errors import ConfigError, ErrorContext
from streamer.file_reads import outside, read_here
from streamer.retry import RetryPolicy
from streamer.s3.client.aws_files import AwsFiles
from streamer.s3.client.credentials import RenewableCredentials, renewing
from streamer.s3.client.endpoint import (
    STALL_TIMEOUT,
    Endpoint,
    Keys,
    RequestOptions,
    Settings,
    ca_bundle_of,
    check_variables,
    configuration_files,
    settings_of,
)
from streamer.s3.client.faults import map_errors
from streamer.s3.client.versions import moved_botocore
from streamer.secrets import remember, remember_environment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from streamer.errors import SourceError
    from streamer.s3.client.botocore_session import BotocoreSession


class S3Client:
    """aiobotocore's client, opened by its first request and closed by `open_clients`."""

    def __init__(
        self,
        open_client: Callable[[], Awaitable[Any]],
        settings: Settings | None,
        *,
        stall_timeout: float,
        sends_if_match: bool = True,
    ) -> None:
        """`settings`: those that the client will have; None if only botocore knows them."""
        self.settings = settings
        self.sends_if_match = sends_if_match
        """Whether a GET for the rest of an object names the ETag in If-Match; some servers refuse that."""
        self.stall_timeout = stall_timeout
        """Seconds without a byte before a connection counts as dead."""
        self.credentials: RenewableCredentials | None = None
        """None for anonymous access, if there are none, and until they are known."""
        self._open_client = open_client
        self._client: Any = None
        self._opening = asyncio.Lock()
        self._on_open: list[Callable[[Any], None]] = []

    def when_open(self, call: Callable[[Any], None]) -> None:
        """Call `call` with aiobotocore's client: now if it is open, or else when it has been opened."""
        if self._client is None:
            self._on_open.append(call)
        else:
            call(self._client)

    async def opened(self) -> Any:
        """Return aiobotocore's client; open it if it is not."""
        if self._client is None:
            async with self._opening:
                if self._client is None:
                    client = await self._open_client()
                    for call in self._on_open:
                        call(client)
                    self._client = client
        return self._client

    def if_match(self, etag: str) -> dict[str, str]:
        """Return the header that demands this ETag, quotes included, unless it is omitted."""
        return {"If-Match": etag} if self.sends_if_match else {}

    async def send(self, operation: str, context: ErrorContext, **parameters: Any) -> Any:
        """Send a request; return botocore's response. `operation`: a method of its client (`get_object`).

        Raises SourceError.
        """
        with renewing(self.credentials), map_errors(context):
            response = await getattr(await self.opened(), operation)(**parameters)
        if self.credentials is not None:
            self.credentials.note_accepted()
        return response


@dataclass(frozen=True, slots=True)
class Clients:
    """The process's two S3 clients, and what our own client needs."""

    control: S3Client
    """For LIST and HEAD, which botocore repeats."""
    data: S3Client
    """For GETs of parts, which the relay repeats."""
    endpoint_url: str
    """The endpoint of requests that name no bucket."""
    signature: str
    """How requests are signed: botocore's name of a signature version, or `none`."""
    credentials: RenewableCredentials | None
    """None for anonymous access, or if there are none."""
    anonymous: bool
    reading: RequestOptions
    ca_bundle: str | None
    """PEM file of certificates to trust, from configuration or environment; None for botocore's own."""
    stall_timeout: float
    """Seconds without a byte before a connection counts as dead."""
    by_aiobotocore: bool = False
    """Whether aiobotocore sends all requests, because it is asked for."""
    passed: set[str] = field(default_factory=set)
    """See `barriers`."""
    request_counts: Counter[str] = field(default_factory=Counter)
    """Number of requests other than GETs of parts, including retries, by S3's name of the operation."""

    @property
    def over_tls(self) -> bool:
        """Whether the endpoint is one with TLS."""
        return self.endpoint_url.startswith("https://")


@contextlib.asynccontextmanager
async def open_clients(
    endpoint: Endpoint,
    *,
    connections: int,
    stall_timeout: float = STALL_TIMEOUT,
    by_aiobotocore: bool = False,
    give_up_after: float = 0.0,
    on_wait: Callable[[SourceError], None] | None = None,
    ask: Callable[[str], Awaitable[str]] | None = None,
) -> AsyncIterator[Clients]:
    """Resolve settings and credentials; close aiobotocore's clients at the end of the block.

    `connections` bounds the data client's pool: the sum of all channels' requests in flight.
    `stall_timeout`, `by_aiobotocore`: see `Clients`. `give_up_after`: seconds to wait for credentials
    that may come later; `on_wait` is called with the error of each failure.
    `ask`: returns what a person types at the terminal, for a source that wants a code of MFA; it also lets
    a `credential_process` use the terminal. None: no source may ask.
    Raises ConfigError for an unknown profile, a missing region or an unreadable CA bundle, SourceError for
    credentials that a configured source does not have.
    """
    remember_environment()
    check_variables(endpoint, os.environ)
    if (key := endpoint.reading.sse_customer_key) is not None:
        remember(key, md5(key, usedforsecurity=False).digest())
    bundle, named = endpoint.ca_bundle, "Endpoint.CaBundle"
    if not bundle:
        bundle, named = ca_bundle_of(os.environ), "AWS_CA_BUNDLE"
    await _check_certificates(bundle, named, stall_timeout)
    settings = settings_of(endpoint, os.environ)
    async with contextlib.AsyncExitStack() as stack:
        opener = _Opener(endpoint, settings, stack, connections=connections, stall_timeout=stall_timeout)
        sends = endpoint.if_match == "send"
        control = S3Client(
            partial(opener.client, control=True), settings, stall_timeout=stall_timeout, sends_if_match=sends
        )
        data = S3Client(
            partial(opener.client, control=False), settings, stall_timeout=stall_timeout, sends_if_match=sends
        )
        common: dict[str, Any] = {
            "anonymous": endpoint.anonymous,
            "reading": endpoint.reading,
            "stall_timeout": stall_timeout,
            "by_aiobotocore": by_aiobotocore,
            "passed": opener.passed,
            "request_counts": opener.request_counts,
        }
        if settings is not None:
            keys = None if settings.keys is None else _unchanging(settings.keys, stall_timeout)
            control.credentials = data.credentials = keys
            yield Clients(
                control,
                data,
                settings.endpoint_url,
                "none" if endpoint.anonymous else "s3v4",
                keys,
                ca_bundle=settings.ca_bundle,
                **common,
            )
            return
        session = await opener.session()
        await _check_certificates(session.ca_bundle, "ca_bundle of the profile", stall_timeout)
        await session.resolve_credentials(RetryPolicy(give_up_after=give_up_after), on_wait, ask)
        control.credentials = data.credentials = session.credentials
        await control.opened()
        client = await data.opened()
        version = client.meta.config.signature_version
        yield Clients(
            control,
            data,
            client.meta.endpoint_url,
            "none" if endpoint.anonymous else version,
            session.credentials,
            ca_bundle=session.ca_bundle or ca_bundle_of(os.environ),
            **common,
        )


async def _check_certificates(bundle: str | None, named: str, limit: float) -> None:
    """Read the file of certificates that the setting `named` has. Raises ConfigError.

    OpenSSL reads it in the event loop. Without TLS nothing does, so only that of the job file must exist.
    """
    try:
        if bundle:
            await outside(partial(read_here, bundle, again=True), seconds=limit)
    except OSError as error:
        if named == "Endpoint.CaBundle" or error.errno in (errno.ESPIPE, errno.ETIMEDOUT):
            raise ConfigError(
                f"cannot read {bundle}: {error.strerror}; {named} must name a PEM file"
            ) from error


def _unchanging(keys: Keys, limit: float) -> RenewableCredentials:
    async def load() -> Keys:
        return keys

    return RenewableCredentials(keys, load, limit=limit)


class _Opener:
    """Opens botocore's session and aiobotocore's clients when they are needed."""

    def __init__(
        self,
        endpoint: Endpoint,
        settings: Settings | None,
        stack: contextlib.AsyncExitStack,
        *,
        connections: int,
        stall_timeout: float,
    ) -> None:
        """`stack`: owns the clients."""
        self.request_counts: Counter[str] = Counter()
        self.passed: set[str] = set()
        self._endpoint = endpoint
        self._settings = settings
        self._stack = stack
        self._connections = connections
        self._stall_timeout = stall_timeout
        self._opening = asyncio.Lock()
        self._session: BotocoreSession | None = None

    async def session(self) -> BotocoreSession:
        """Return botocore's session with its credentials."""
        async with self._opening:
            if self._session is None:
                files = AwsFiles(configuration_files(os.environ), {}, seconds=self._stall_timeout)
                await files.check()
                try:
                    session = await asyncio.to_thread(self._load)
                except (ImportError, AttributeError, TypeError) as error:
                    if moved := moved_botocore():
                        raise ConfigError(moved) from error
                    raise
                if self._settings is not None and self._settings.keys is not None:
                    session.use(self._settings.keys)
                self._session = session
        return self._session

    def _load(self) -> BotocoreSession:
        from streamer.s3.client.botocore_session import open_session

        return open_session(
            self._endpoint,
            connections=self._connections,
            stall_timeout=self._stall_timeout,
            passed=self.passed,
        )

    async def client(self, *, control: bool) -> Any:
        """Open the client for control requests, or the one for GETs of parts."""
        session = await self.session()
        return await self._stack.enter_async_context(
            session.client(control=control, counts=self.request_counts)
        )


def certificate_file(ca_bundle: str | None) -> str:
    """Return the file of certificates to trust: the bundle given, or botocore's own."""
    if ca_bundle:
        return ca_bundle
    try:
        from certifi import where
    except ImportError:  # botocore then trusts a file of its own
        package = find_spec("botocore")
        places = package.submodule_search_locations if package else None
        return os.path.join(places[0] if places else "", "cacert.pem")
    path: str = where()
    return path
