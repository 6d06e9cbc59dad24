"""Options of the S3 clients: address, identity, and what every request carries."""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass, field
from hashlib import md5
from ipaddress import IPv6Address
from typing import Literal
from urllib.parse import urlsplit

IfMatch = Literal["send", "omit"]
"""Whether a GET for a part names the listed ETag in If-Match. The ETag of its response is compared anyway."""

STALL_TIMEOUT = 30.0
"""Seconds without a byte before a connection counts as dead. S3's first byte takes well under 1 s."""


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
    path_style: bool = False
    anonymous: bool = False
    ca_bundle: str | None = None
    if_match: IfMatch = "send"
    reading: RequestOptions = field(default_factory=RequestOptions)


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


def is_aws(url: str) -> bool:
    """Return whether the endpoint is one of AWS's own hosts."""
    host = urlsplit(url).hostname or ""
    return host.rstrip(".").endswith((".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu", ".api.aws"))
