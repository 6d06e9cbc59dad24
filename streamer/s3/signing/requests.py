"""The heads of requests as bytes: of a ranged GET, and of a HEAD.

Where a bucket is (virtual host or path, custom endpoint, region) is asked of botocore once per bucket,
through a presigned URL that is never used, and again once S3 has named another region to botocore.
Credentials come frozen from the session before each request,
which is where botocore refreshes them; `sigv4` signs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from botocore.exceptions import NoCredentialsError

from streamer import __version__
from streamer.errors import ErrorContext
from streamer.plan import Part
from streamer.s3.client.faults import map_errors
from streamer.s3.client.redirects import REGION
from streamer.s3.client.session import RequestOptions
from streamer.s3.signing.sigv4 import GetSigner


def _for_its_region(context: dict[str, Any], **_: Any) -> None:
    """Have presigned URLs name the endpoint that botocore's own requests go to, not AWS's global one."""
    context.pop("use_global_endpoint", None)


def _region(name: str | None) -> str:
    """The region that a signature is for, where the client's is of this name."""
    return "us-east-1" if name in (None, "aws-global") else name


@dataclass(frozen=True, slots=True)
class BucketEndpoint:
    """Where a bucket's objects are."""

    host: str
    port: int
    tls: bool
    authority: str
    """The Host header: host, and the port unless it is the scheme's."""
    prefix: str
    """The path before a key: `/`, or `/bucket/` in path style."""
    signer: GetSigner
    """Signs for its region."""


class RangeSigner:
    """Writes request heads for one session; `anonymous` leaves them unsigned."""

    def __init__(self, client: Any, credentials: Any, *, anonymous: bool, reading: RequestOptions) -> None:
        """`client`: aiobotocore's S3 client. `credentials`: the session's, or None if anonymous."""
        self._client = client
        self.credentials = credentials
        self._anonymous = anonymous
        self._headers = reading.headers()
        self._regions: dict[str, str] = {}
        """By bucket, as far as botocore has resolved an endpoint for it."""
        self._endpoints: dict[str, BucketEndpoint] = {}
        events = client.meta.events
        events.register("provide-client-params.s3.GetObject", _for_its_region)
        events.register("before-endpoint-resolution.s3", self._resolving)
        self.ahead = 0.0
        """Seconds by which this machine's clock is ahead of the endpoint's, as far as that has shown."""

    async def endpoint(self, bucket: str) -> BucketEndpoint:
        """Where the bucket is. Raises SourceError for a bucket name that botocore refuses."""
        found = self._endpoints.get(bucket)
        if found is None:
            with map_errors(ErrorContext(bucket)):
                url = await self._client.generate_presigned_url(
                    "get_object", Params={"Bucket": bucket, "Key": "k"}, ExpiresIn=60
                )
            parts = urlsplit(url)
            region = self._regions.get(bucket) or _region(self._client.meta.region_name)
            tls = parts.scheme == "https"
            usual = 443 if tls else 80
            host, port = parts.hostname or "", parts.port or usual
            authority = host if port == usual else f"{host}:{port}"
            prefix = parts.path.removesuffix("k")
            found = self._endpoints[bucket] = BucketEndpoint(
                host, port, tls, authority, prefix, GetSigner(region)
            )
        return found

    def _resolving(self, builtins: dict[str, Any], params: Any, **_: Any) -> None:
        """Botocore's event before it resolves an endpoint, perhaps for a region that S3 has named."""
        if not REGION.fullmatch(builtins.get("AWS::Region") or ""):
            builtins["AWS::Region"] = self._client.meta.region_name
        bucket, region = params.get("Bucket", ""), _region(builtins["AWS::Region"])
        if self._regions.get(bucket, region) != region:
            self._endpoints.pop(bucket, None)
        self._regions[bucket] = region

    async def head(self, endpoint: BucketEndpoint, part: Part, first: int) -> bytes:
        """The request for bytes `first` to `part.end` of the listed version. Raises Denied."""
        ref = part.object
        headers = {"Range": f"bytes={first}-{part.end - 1}", "If-Match": f'"{ref.etag}"', **self._headers}
        return await self._request("GET", endpoint, ref.bucket, ref.key, headers, version=ref.version)

    async def inquiry(self, endpoint: BucketEndpoint, bucket: str, key: str, *, version: str | None) -> bytes:
        """The request for size and ETag of the object, or of that version. Raises Denied."""
        return await self._request("HEAD", endpoint, bucket, key, self._headers, version=version)

    async def _frozen_credentials(self, bucket: str, key: str) -> Any:
        if self.credentials is not None:
            try:
                return await self.credentials.get_frozen_credentials()
            except Exception:  # mapped here and not around it: that costs every request a context manager
                with map_errors(ErrorContext(bucket, key)):
                    raise
        with map_errors(ErrorContext(bucket, key)):
            raise NoCredentialsError

    async def _request(
        self,
        method: str,
        endpoint: BucketEndpoint,
        bucket: str,
        key: str,
        headers: dict[str, str],
        *,
        version: str | None,
    ) -> bytes:
        path = endpoint.prefix + quote(key, safe="/~")
        query = f"versionId={quote(version, safe='~')}" if version else ""
        if not self._anonymous:
            frozen = await self._frozen_credentials(bucket, key)
            now = time.time() - self.ahead if self.ahead else None
            headers = endpoint.signer.sign(
                endpoint.authority, path, query, headers, frozen, method=method, now=now
            )
        target = f"{path}?{query}" if query else path
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        return (
            f"{method} {target} HTTP/1.1\r\nHost: {endpoint.authority}\r\n"
            f"User-Agent: penstock/{__version__}\r\n{lines}\r\n"
        ).encode("ascii")
