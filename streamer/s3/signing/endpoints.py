"""The endpoint of a bucket: the host, and the path before a key.

`endpoint_of` applies the two of AWS's endpoint rules that most settings need: virtual host or path. For other
settings botocore applies all rules (`requests`).
`tests/unit/test_endpoints.py` compares both.

Source: `data/s3/2006-03-01/endpoint-rule-set-1.json.gz` of botocore.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from streamer.s3.client.endpoint import is_address, is_aws
from streamer.s3.signing.sigv4 import GetSigner

if TYPE_CHECKING:
    from streamer.s3.client.endpoint import Settings

_BUCKET = re.compile(r"(?!\.\.?\Z)[A-Za-z0-9._-]{1,255}").fullmatch
"""Matches names that botocore accepts, access points and others aside."""
_HOST_LABEL = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)").fullmatch
_OTHER_KINDS = re.compile(r"--[a-z0-9-]+-s3$|-s3alias$").search
"""Finds the names of directory buckets and of aliases of access points, which have rules of their own."""


@dataclass(frozen=True, slots=True)
class BucketEndpoint:
    """The endpoint of a bucket, and the signer for its region."""

    host: str
    port: int
    tls: bool
    authority: str
    """The Host header: host, and the port unless it is the scheme's default."""
    prefix: str
    """The path before a key: `/`, or `/bucket/` in path style."""
    signer: GetSigner

    @classmethod
    def of_url(cls, url: str, region: str) -> BucketEndpoint:
        """Return the endpoint of the objects whose URLs begin with `url`, which ends with a slash."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        default_port = 443 if tls else 80
        host, port = parts.hostname or "", parts.port or default_port
        name = f"[{host}]" if ":" in host else host
        authority = name if port == default_port else f"{name}:{port}"
        return cls(host, port, tls, authority, parts.path, GetSigner(region))


def signing_region(name: str | None) -> str:
    """Return the region to sign for. `name`: the client's region."""
    return "us-east-1" if name in (None, "aws-global") else name


def endpoint_of(settings: Settings, bucket: str) -> BucketEndpoint | None:
    """Return the bucket's endpoint; None if botocore must resolve it, or refuse the name."""
    if not _BUCKET(bucket) or _OTHER_KINDS(bucket):
        return None
    scheme, _, rest = settings.endpoint_url.partition("://")
    authority, _, path = rest.partition("/")
    path += "" if path.endswith("/") or not path else "/"
    in_path = settings.path_style is not False if settings.url else settings.path_style
    if settings.url and not in_path and ("." in bucket or is_address(authority.partition(":")[0])):
        return None  # dots without TLS, and addresses, have rules of their own
    # A certificate covers one label before the endpoint, so a name with dots is in the path too.
    if in_path or not _HOST_LABEL(bucket) or (len(bucket) < 3 and is_aws(settings.endpoint_url)):
        url = f"{scheme}://{authority}/{path}{bucket}/"
    else:
        url = f"{scheme}://{bucket}.{authority}/{path}"
    return BucketEndpoint.of_url(url, signing_region(settings.region))
