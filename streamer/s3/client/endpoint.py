"""Options and settings of the S3 clients: address, identity, and what every request carries.

botocore resolves region, endpoint and credentials from many sources, and takes half a second to import and to
open a client. Most jobs have two sources only: their options and a few environment variables.
`settings_of` returns the settings if these two are all, and None in any other case: a profile, an AWS
file, credentials of a role or a metadata service, a variable that this module does not know.

Order of the sources: `botocore/configprovider.py`, and `EnvProvider` in `botocore/credentials.py`.
`tests/unit/test_endpoints.py` compares both ways.
"""

from __future__ import annotations

import os
import re
import stat
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import md5
from ipaddress import IPv6Address
from typing import Literal
from urllib.parse import urlsplit

from streamer.errors import ConfigError, Denied

IfMatch = Literal["send", "omit"]
"""Whether a GET for a part names the listed ETag in If-Match. The ETag of its response is compared anyway."""

STALL_TIMEOUT = 30.0
"""Seconds without a byte before a connection counts as dead. S3's first byte takes well under 1 s."""


_APPLIED = {
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN",
    "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE", "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE",
}  # fmt: skip
"""Variables that this module applies as botocore does."""
_WITHOUT_EFFECT = {
    # botocore does not read them.
    "AWS_REGION", "AWS_DEFAULT_OUTPUT", "AWS_PAGER", "AWS_SDK_LOAD_CONFIG",
    # Sources of credentials that come after the environment's keys.
    "AWS_ROLE_ARN", "AWS_ROLE_SESSION_NAME", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_STS_REGIONAL_ENDPOINTS",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_EC2_METADATA_DISABLED",
    # A part of the User-Agent header.
    "AWS_EXECUTION_ENV",
}  # fmt: skip
"""Variables that change no request if the environment has keys, or if requests are not signed."""
_AWS_REGION = re.compile(r"(?:us|eu|ap|sa|ca|me|af|il|mx)-[a-z]{1,20}-[0-9]{1,2}")
"""Regions of the partition `aws`; those of other partitions have other forms (`us-gov-west-1`)."""
_REGION = re.compile(r"(?!.*fips)(?=.*[a-z])[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
"""Regions that a compatible server may have; those with `fips` change the endpoint."""
_LABEL = r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)"
_URL = re.compile(
    rf"https?://(?!s3-accelerate\.)(?=[^/:]{{1,253}}(?:[/:]|$)){_LABEL}(?:\.{_LABEL})*(?::([1-9][0-9]{{0,4}}))?"
    r"(?:/[A-Za-z0-9_-]{1,99}){0,9}/?"
)
"""URLs that botocore accepts and does not normalize."""
SHORT_BUCKET = re.compile(r"[a-z0-9]{1,2}").fullmatch
"""Matches bucket names that AWS does not have, and other servers may."""
is_address = re.compile(r"[0-9.]+|.*:.*").fullmatch
"""Matches hosts that are IP addresses, before which no bucket can stand."""


_KEYS = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"}
_CHECKED = _APPLIED | {
    "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
}  # fmt: skip
"""Variables whose values have neither quotes nor spaces around them."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options that every LIST, HEAD and GET carries."""

    requester_pays: bool = False
    sse_customer_key: bytes | None = field(default=None, repr=False)
    """The 32-byte key that the objects were encrypted with (SSE-C)."""

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
    """Address of S3 and the identity to use there. Unset fields come from environment and AWS's files."""

    url: str | None = None
    region: str | None = None
    profile: str | None = None
    path_style: bool | None = None
    """Whether the bucket is in the path, or in the host name. None: as AWS's files say (`addressing_style`),
    or else in the host name at AWS, and in the path at any other URL."""
    anonymous: bool = False
    ca_bundle: str | None = None
    if_match: IfMatch = "send"
    reading: RequestOptions = field(default_factory=RequestOptions)
    on_profile: Callable[[Mapping[str, str]], None] = field(default=lambda _: None, compare=False)
    """Called with the profile's names of settings, by their keys in the job file."""


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


def check_variables(endpoint: Endpoint, environment: Mapping[str, str]) -> None:
    """Raise ConfigError for a variable with quotes or spaces around its value, unless an option overrides it;
    Denied for a key.

    `docker --env-file` keeps quotes, and a file from Windows has carriage returns.
    """
    overridden = {"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"} if endpoint.url else set[str]()
    if endpoint.region:
        overridden.add("AWS_DEFAULT_REGION")
    for name in sorted(_CHECKED & environment.keys() - overridden):
        value, error = environment[name], Denied if name in _KEYS else ConfigError
        if value != value.strip():
            raise error(f"{name} begins or ends with a space or a line end; set it without")
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            raise error(
                f"{name} has quotes ({value[0]}) around its value, which docker --env-file keeps; set it "
                "without"
            )


def is_aws(url: str) -> bool:
    """Return whether the endpoint is one of AWS's own hosts."""
    host = urlsplit(url).hostname or ""
    return host.rstrip(".").endswith((".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu", ".api.aws"))


@dataclass(frozen=True, slots=True)
class Keys:
    """Credentials in environment variables, which do not change."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)
    method: str = "env"
    """botocore's name of the source."""

    async def get_frozen_credentials(self) -> Keys:
        """Return the keys, as botocore's credentials do."""
        return self


@dataclass(frozen=True, slots=True)
class Settings:
    """All that botocore would resolve."""

    url: str | None
    """The endpoint; None for AWS."""
    region: str | None
    path_style: bool | None
    """See `Endpoint`."""
    keys: Keys | None
    """None: requests are not signed."""
    ca_bundle: str | None
    """PEM file of certificates to trust; None for botocore's own."""

    @property
    def endpoint_url(self) -> str:
        """The endpoint of requests that name no bucket; that of us-east-1 has no region in its name."""
        region = "" if self.region in (None, "us-east-1") else f"{self.region}."
        return self.url or f"https://s3.{region}amazonaws.com"


def settings_of(endpoint: Endpoint, environment: Mapping[str, str]) -> Settings | None:
    """Return the settings of a client; None if botocore must resolve them.

    `endpoint`: options, which override the environment. Checks whether AWS's files exist, and reads none.
    """
    named = [name for name, value in environment.items() if value]
    if endpoint.profile is not None or any(map(_unknown, named)) or _has_files(environment):
        return None
    values = {name: environment[name] for name in _APPLIED.intersection(named)}
    keys = None if endpoint.anonymous else _keys(values)
    if keys is None and not endpoint.anonymous:
        return None
    url = endpoint.url or values.get("AWS_ENDPOINT_URL_S3") or values.get("AWS_ENDPOINT_URL") or None
    region = endpoint.region or values.get("AWS_DEFAULT_REGION")
    if url is None:
        usual = region is None or _AWS_REGION.fullmatch(region) is not None
    else:
        usual = _valid(url) and (region is None or _REGION.fullmatch(region) is not None)
    if not usual:
        return None
    ca_bundle = endpoint.ca_bundle or ca_bundle_of(environment)
    return Settings(url, region, endpoint.path_style, keys, ca_bundle)


def _valid(url: str) -> bool:
    """Return whether botocore accepts the URL and does not normalize it."""
    parts = _URL.fullmatch(url)
    return parts is not None and int(parts[1] or 1) < 2**16


def ca_bundle_of(environment: Mapping[str, str]) -> str | None:
    """Return the file of certificates that the environment names."""
    return environment.get("AWS_CA_BUNDLE") or environment.get("REQUESTS_CA_BUNDLE") or None


def _unknown(name: str) -> bool:
    """Return whether botocore may apply a variable that this module does not know."""
    if name in _APPLIED or name in _WITHOUT_EFFECT:
        return False
    return name.startswith(("AWS_", "BOTO"))


def _keys(values: Mapping[str, str]) -> Keys | None:
    access_key, secret_key = values.get("AWS_ACCESS_KEY_ID"), values.get("AWS_SECRET_ACCESS_KEY")
    if not access_key or not secret_key:
        return None
    token = values.get("AWS_SECURITY_TOKEN") or values.get("AWS_SESSION_TOKEN") or None
    return Keys(access_key, secret_key, token)


def _has_files(environment: Mapping[str, str]) -> bool:
    """Return whether AWS's configuration files or service models exist, or may exist."""
    paths = [*configuration_files(environment).values(), os.path.expanduser("~/.aws/models")]
    return any(map(_may_exist, paths))


def configuration_files(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the paths of the files of profiles, by the variable that may name them."""
    paths = {
        "AWS_CONFIG_FILE": environment.get("AWS_CONFIG_FILE", "~/.aws/config"),
        "AWS_SHARED_CREDENTIALS_FILE": environment.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
    }
    return {name: os.path.expanduser(os.path.expandvars(path)) for name, path in paths.items()}


def _may_exist(path: str) -> bool:
    try:
        status = os.stat(path)
        return status.st_size > 0 or stat.S_ISFIFO(status.st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
