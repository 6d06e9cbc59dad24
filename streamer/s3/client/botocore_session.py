"""Opens botocore's session and aiobotocore's S3 clients.

botocore's own chain (environment, files, container, instance, web identity) resolves endpoint, region,
profile and credentials once, and refreshes the credentials. One client is for control requests (LIST, HEAD),
which are small and rare, and which botocore retries in its standard mode. The other is for GETs of parts,
which the relay retries, because a retry must resume inside a body; botocore's shared retry quota (100 retries
for the whole process) would also fail many ranges at once.

Importing this module takes 0.35 s, so `session` imports it where a client is needed.
"""

from __future__ import annotations

import contextlib
import os
from datetime import datetime
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from aiobotocore.config import AioConfig
from aiobotocore.parsers import AioResponseParserFactory, AioRestXMLParser
from aiobotocore.session import AioSession
from botocore import UNSIGNED
from botocore.exceptions import ClientError
from botocore.loaders import Loader, create_loader
from botocore.parsers import ResponseParserError
from botocore.utils import parse_timestamp

from streamer import __version__
from streamer.errors import ConfigError, ErrorContext, Expired, SourceError
from streamer.retry import note_failure, retry_while_unavailable
from streamer.s3.client.aws_files import AwsFiles, legacy_files, token_files
from streamer.s3.client.bounded import BoundedSession, limit_credential_processes
from streamer.s3.client.credential_sources import first_credentials, prompt_no_terminal
from streamer.s3.client.credentials import FixedProvider, RenewableCredentials
from streamer.s3.client.endpoint import (
    SHORT_BUCKET,
    Endpoint,
    RequestOptions,
    check_endpoint,
    configuration_files,
    is_address,
    is_aws,
)
from streamer.s3.client.faults import map_errors, mapped
from streamer.s3.client.redirects import refuse_redirects
from streamer.secrets import quoted

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from streamer.retry import RetryPolicy
    from streamer.s3.client.endpoint import Keys

CONTROL_ATTEMPTS = 5
CONNECT_TIMEOUT = 10
_EMPTY_IS_UNSET: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "profile": (None, ("AWS_DEFAULT_PROFILE", "AWS_PROFILE")),
    "region": ("region", ("AWS_DEFAULT_REGION",)),
    "ca_bundle": ("ca_bundle", ("AWS_CA_BUNDLE",)),
}
"""By botocore's name of a setting: the key in files, and the variables, which charts and compose files set to
the empty string. botocore would take that for the value."""


def timestamp(value: Any) -> datetime:
    """Parse a timestamp as botocore does, but in a tenth of its time for S3's own form.

    Every listed object has one, and botocore's parser took three quarters of a listing's CPU time.
    """
    try:
        time = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        time = None
    if time is None or time.tzinfo is None:
        parsed: datetime = parse_timestamp(value)
        return parsed
    return time


class _StrictParser(AioRestXMLParser):  # type: ignore[misc]
    """Parser of S3's responses that refuses repeated elements.

    botocore misreads an element that comes twice where S3 sends it once. Two `<IsTruncated>` become "false",
    and the first page of a listing looks like all of it.
    """

    def _parse_shape(self, shape: Any, node: Any) -> Any:
        if isinstance(node, list) and shape.type_name not in ("list", "map"):
            name = self._node_tag(node[0])
            raise ResponseParserError(f"<{name}> comes {len(node)} times where S3 sends it once")
        return super()._parse_shape(shape, node)


class _ParserFactory(AioResponseParserFactory):  # type: ignore[misc]
    """Makes aiobotocore's parsers, and the strict one for S3's protocol."""

    def create_parser(self, protocol_name: str) -> Any:
        if protocol_name == "rest-xml":
            return _StrictParser(**self._defaults)
        return super().create_parser(protocol_name)


@cache
def _models(data_path: str | None) -> Loader:
    """Return botocore's loader of service models, cached because loading takes 0.1 s for each client."""
    return create_loader(data_path)


class BotocoreSession:
    """The process's session, its credentials and clients."""

    def __init__(
        self, endpoint: Endpoint, *, connections: int, stall_timeout: float, passed: set[str]
    ) -> None:
        """`connections`: see `session.open_clients`. `passed`: see `barriers`."""
        self.credentials: RenewableCredentials | None = None
        """None for anonymous access, and if there are none."""
        self._endpoint = endpoint
        self._connections = connections
        self._stall_timeout = stall_timeout
        self._http_session = partial(BoundedSession, passed=passed)
        session = self._session = _session(endpoint.profile, self._http_session)
        profile, settings = session.get_config_variable("profile"), session.get_scoped_config()
        names = {"Endpoint.Url": "endpoint_url", "Endpoint.CaBundle": "ca_bundle"}
        found = settings | ({"endpoint_url": ""} if "services" in settings else {})
        of = f"of profile {profile or 'default'}"
        endpoint.on_profile({key: f"{name} {of}" for key, name in names.items() if name in found})
        session.register_component("data_loader", _models(session.get_config_variable("data_path")))
        parsers = _ParserFactory()
        parsers.set_parser_defaults(timestamp_parser=timestamp)
        session.register_component("response_parser_factory", parsers)

        # Into the loader's cache, so that `client` reads no file.
        loader = session.get_component("data_loader")
        for name in ("endpoints", "partitions", "sdk-default-configuration", "_retry"):
            loader.load_data_with_path(name)
        for name in ("service-2", "endpoint-rule-set-1"):
            loader.load_service_model("s3", name, api_version=None)

    @property
    def ca_bundle(self) -> str | None:
        """The PEM file of certificates to trust; None for botocore's own."""
        file: str | None = self._endpoint.ca_bundle or self._session.get_config_variable("ca_bundle")
        return file

    def use(self, keys: Keys) -> None:
        """Sign with these keys."""
        self._session.set_credentials(keys.access_key, keys.secret_key, keys.token)

    async def resolve_credentials(
        self,
        policy: RetryPolicy,
        on_wait: Callable[[SourceError], None] | None,
        ask: Callable[[str], Awaitable[str]] | None,
    ) -> None:
        """Resolve the credentials by botocore's chain; wait for a source that may have some later.

        `on_wait`, `ask`: see `open_clients`. Raises ConfigError, SourceError.
        """
        if self._endpoint.anonymous:
            return
        session, limit = self._session, self._stall_timeout
        files = AwsFiles(
            configuration_files(os.environ) | legacy_files(os.environ),
            token_files(session, os.environ),
            seconds=limit,
        )

        async def resolve(_: Callable[[], None]) -> Any:
            with _mapped_errors():
                await files.check()
                return await first_credentials(
                    session.get_component("credential_provider").providers,
                    limit,
                    session.get_config_variable("profile"),
                    ask,
                )

        # `session.get_credentials` would cache the credentials and give those to the clients.
        credentials = await retry_while_unavailable(resolve, policy, on_wait=on_wait, what="credentials")
        if credentials is None:
            return

        async def load() -> Any:
            return await _session(self._endpoint.profile, self._http_session).get_credentials()

        self.credentials = RenewableCredentials(credentials, load, limit=limit, check=files.check)
        session.register_component("credential_provider", FixedProvider(self.credentials))

    @contextlib.asynccontextmanager
    async def client(self, *, control: bool, counts: Counter[str]) -> AsyncIterator[Any]:
        """Open a client, for control requests or for GETs of parts; close it at the end of the block.

        `counts`: the counter of control requests. Raises ConfigError for an invalid endpoint.
        """
        endpoint = self._endpoint
        config: dict[str, Any] = {
            "connect_timeout": min(CONNECT_TIMEOUT, self._stall_timeout),
            "read_timeout": self._stall_timeout,
            "user_agent_extra": f"penstock/{__version__}",
            # Some compatible servers send a whole object's checksum with a range; botocore would compare it
            # and refuse every part. Length, ETag and Content-Range of ranges are checked instead.
            "response_checksum_validation": "when_required",
            # Many compatible servers refuse a body with a trailer. Bodies are signed, which has their hash.
            "request_checksum_calculation": "when_required",
            # S3 has many addresses; a short DNS cache makes requests use all of them.
            "connector_args": {"ttl_dns_cache": 10},
            "http_session_cls": self._http_session,
            "retries": {"mode": "standard", "total_max_attempts": CONTROL_ATTEMPTS if control else 1},
            # 64: the HEADs of a manifest
            "max_pool_connections": 64 if control else self._connections + 4,
        }
        if endpoint.path_style is not None:
            config["s3"] = {"addressing_style": "path" if endpoint.path_style else "virtual"}
        if endpoint.anonymous:
            config["signature_version"] = UNSIGNED
        options = {"endpoint_url": endpoint.url, "region_name": endpoint.region, "verify": endpoint.ca_bundle}
        async with contextlib.AsyncExitStack() as stack:
            with _mapped_errors():
                client = await stack.enter_async_context(
                    self._session.create_client("s3", config=AioConfig(**config), **options)
                )
                check_endpoint(client.meta.endpoint_url)
            own, style = client.meta.endpoint_url, (client.meta.config.s3 or {}).get("addressing_style")
            if style == "virtual" and not is_aws(own):
                client.meta.events.register_first("before-sign.s3", partial(_into_host_name, urlsplit(own)))
            _add_options(client, endpoint.reading)
            if control:

                def count(event_name: str, **_: Any) -> None:
                    counts[event_name.rpartition(".")[2]] += 1

                client.meta.events.register("before-send.s3", count)
                client.meta.events.register("response-received.s3", _note_failure)
            yield client


def open_session(
    endpoint: Endpoint, *, connections: int, stall_timeout: float, passed: set[str]
) -> BotocoreSession:
    """Open a session, which reads files. Raises ConfigError for an unknown profile."""
    with _mapped_errors():
        return BotocoreSession(endpoint, connections=connections, stall_timeout=stall_timeout, passed=passed)


def _into_host_name(own: SplitResult, request: Any, **_: Any) -> None:
    """Put a bucket of one or two characters into the host name; botocore leaves it in the path.

    `own`: the endpoint's URL.
    """
    parts, above = urlsplit(request.url), own.path.rstrip("/") + "/"
    bucket, _, key = parts.path.removeprefix(above).partition("/")
    if parts.netloc == own.netloc and SHORT_BUCKET(bucket) and not is_address(own.hostname or ""):
        request.url = parts._replace(netloc=f"{bucket}.{own.netloc}", path=above + key).geturl()


def _add_options(client: Any, options: RequestOptions) -> None:
    """Add the options to every LIST, HEAD, GET and PUT of `client`, aiobotocore's."""
    to_list: dict[str, Any] = {"RequestPayer": "requester"} if options.requester_pays else {}
    to_read = dict(to_list)
    if options.sse_customer_key is not None:
        to_read |= {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": options.sse_customer_key}
    of_bodies = ("GetObject", "HeadObject", "PutObject", "CreateMultipartUpload", "UploadPart")
    options_of = dict.fromkeys(("ListObjectsV2", "AbortMultipartUpload"), to_list)
    options_of |= dict.fromkeys((*of_bodies, "CompleteMultipartUpload"), to_read)
    for operation, extra in options_of.items():

        def add(params: dict[str, Any], extra: dict[str, Any] = extra, **_: Any) -> dict[str, Any]:
            return params | extra

        client.meta.events.register(f"provide-client-params.s3.{operation}", add)
    # Their checksums protect the bodies of these; a SHA-256 costs as much CPU time as all else (1.4 GB/s).
    unsigned = client.meta.config.merge(
        AioConfig(s3={**(client.meta.config.s3 or {}), "payload_signing_enabled": False})
    )

    def leave_unsigned(request: Any, **_: Any) -> None:
        request.context["client_config"] = unsigned

    for operation in ("PutObject", "UploadPart"):
        client.meta.events.register(f"before-sign.s3.{operation}", leave_unsigned)


def _note_failure(
    exception: BaseException | None, parsed_response: Any, context: Any, event_name: str, **_: Any
) -> None:
    """Note the error of a failed request, because botocore repeats it and raises only the last error."""
    if exception is None and parsed_response and parsed_response.get("Error"):
        exception = ClientError(parsed_response, event_name.rpartition(".")[2])
    if exception is not None:
        params = context.get("s3_redirect", {}).get("params", {})
        error: BaseException = exception
        if not isinstance(error, SourceError):
            error = mapped(error, ErrorContext(params.get("Bucket"), params.get("Key")))
        if isinstance(error, SourceError) and not isinstance(error, Expired):
            note_failure(error)


@contextlib.contextmanager
def _mapped_errors() -> Iterator[None]:
    """Map botocore's errors, and the ValueError that it raises for an endpoint or a region."""
    with map_errors(ErrorContext()):
        try:
            yield
        except ValueError as error:
            raise ConfigError(
                f"the endpoint is invalid ({quoted(str(error))}); correct Penstock.Endpoint.Url and "
                "Penstock.Endpoint.Region"
            ) from error


def _session(profile: str | None, http_session: Callable[..., BoundedSession]) -> Any:
    """Return a session whose clients, including those for STS, follow no redirect and limit responses.

    Its requests to metadata services follow no redirect either.
    """
    refuse_redirects()
    limit_credential_processes()
    prompt_no_terminal()
    variables = {
        name: (key, [each for each in names if os.environ.get(each)] or None, None, None)
        for name, (key, names) in _EMPTY_IS_UNSET.items()
    }
    session = AioSession(session_vars=variables, profile=profile)
    session.set_default_client_config(AioConfig(http_session_cls=http_session))
    return session
