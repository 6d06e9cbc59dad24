"""Builds the bytes of requests: ranged GETs, HEADs and LISTs.

`endpoints` computes the endpoint of a bucket where the settings are all known. Else, and after S3 has named
another region, botocore resolves it (virtual host or path, custom endpoint, region), by a presigned URL that
is never used. For each request the session returns frozen credentials, which botocore refreshes at that
point, and `sigv4` signs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from streamer import __version__
from streamer.errors import ErrorContext
from streamer.plan import ObjectRef, is_modified
from streamer.s3.client.faults import REGION, map_errors, without_credentials
from streamer.s3.signing.endpoints import BucketEndpoint, endpoint_of, signing_region

if TYPE_CHECKING:
    from streamer.s3.client.endpoint import Keys, RequestOptions
    from streamer.s3.client.session import Clients, S3Client

CHECKSUM_MODE = {"x-amz-checksum-mode": "ENABLED"}
_UNRESERVED = re.compile(r"[A-Za-z0-9_.~/-]*").fullmatch
"""Matches keys that need no quoting, as nearly all are: three times as fast as `quote`."""


def _use_regional_endpoint(context: dict[str, Any], **_: Any) -> None:
    """Make presigned URLs name the regional endpoint of botocore's own requests, not AWS's global one."""
    context.pop("use_global_endpoint", None)


class RangeSigner:
    """Builds and signs the requests of one session; does not sign if `anonymous`.

    botocore resolves the endpoints that `endpoint_of` does not.
    """

    def __init__(
        self, client: S3Client, credentials: Any, *, anonymous: bool, reading: RequestOptions
    ) -> None:
        """`credentials`: the session's, or None if anonymous."""
        self.credentials = credentials
        self.sends_if_match = client.sends_if_match
        self.ahead = 0.0
        """Seconds by which this machine's clock is ahead of the endpoint's; 0 until an error has shown it."""
        self._anonymous = anonymous
        self._headers = reading.headers()
        self._list_headers = reading.list_headers()
        self._client = client
        self._regions: dict[str, str] = {}
        """By bucket, the region of its endpoint."""
        self._endpoints: dict[str, BucketEndpoint] = {}
        self._moved: set[str] = set()
        """Buckets that are in another region than the client's, by S3's word."""
        self._default_region: str | None = None
        """The region of aiobotocore's client."""
        client.when_open(self._watch)

    @classmethod
    def of(cls, client: S3Client, clients: Clients) -> Self:
        """Return the signer of `client`, one of `clients`."""
        return cls(client, clients.credentials, anonymous=clients.anonymous, reading=clients.reading)

    async def endpoint(self, bucket: str) -> BucketEndpoint:
        """Return the bucket's endpoint. Raises SourceError for a bucket name that botocore refuses."""
        endpoint = self._endpoints.get(bucket)
        if endpoint is None:
            settings, computed = self._client.settings, None
            if settings is not None and bucket not in self._moved:
                computed = endpoint_of(settings, bucket)
            if settings is not None and computed is not None:
                endpoint = computed
                self._regions[bucket] = signing_region(settings.region)
            else:
                endpoint = await self._resolved_endpoint(bucket)
            self._endpoints[bucket] = endpoint
        return endpoint

    async def _resolved_endpoint(self, bucket: str) -> BucketEndpoint:
        """Return the endpoint that botocore resolves."""
        with map_errors(ErrorContext(bucket)):
            client = await self._client.opened()
            url = await client.generate_presigned_url(
                "get_object", Params={"Bucket": bucket, "Key": "k"}, ExpiresIn=60
            )
        region = self._regions.get(bucket) or signing_region(self._default_region)
        return BucketEndpoint.of_url(url.partition("?")[0].removesuffix("k"), region)

    def _watch(self, client: Any) -> None:
        """Follow the regions that `client`, aiobotocore's, learns."""
        self._default_region = client.meta.region_name
        events = client.meta.events
        events.register("provide-client-params.s3.GetObject", _use_regional_endpoint)
        events.register("before-endpoint-resolution.s3", self._before_resolution)

    def _before_resolution(self, builtins: dict[str, Any], params: Any, **_: Any) -> None:
        """Note the region for which botocore is about to resolve an endpoint; S3 may have named another."""
        if not REGION.fullmatch(builtins.get("AWS::Region") or ""):
            builtins["AWS::Region"] = self._default_region
        bucket, region = params.get("Bucket", ""), signing_region(builtins["AWS::Region"])
        if self._regions.get(bucket, region) != region:
            self._endpoints.pop(bucket, None)
            self._moved.add(bucket)
        self._regions[bucket] = region

    def ranged_get(
        self,
        keys: Keys | None,
        endpoint: BucketEndpoint,
        ref: ObjectRef,
        first: int,
        end: int,
        *,
        checksum: bool = False,
    ) -> bytes:
        """Build the GET of bytes `first` to `end` of the listed version. `keys`: what `keys` has returned.

        `checksum`: these are the whole object; ask for its checksum. A response to a range may have another.
        """
        sends_if_match = self.sends_if_match and not is_modified(ref.etag)
        condition = {"If-Match": f'"{ref.etag}"'} if sends_if_match else {}
        wanted = CHECKSUM_MODE if checksum else {"Range": f"bytes={first}-{end - 1}"}
        headers = {**wanted, **condition, **self._headers}
        path, query = _object_target(endpoint, ref.key, ref.version)
        return self._build("GET", endpoint, path, query, headers, keys=keys)

    async def get(self, endpoint: BucketEndpoint, bucket: str, key: str, headers: Mapping[str, str]) -> bytes:
        """Build the GET of the object with these further headers. Raises Denied."""
        path, query = _object_target(endpoint, key, None)
        merged = {**headers, **self._headers}
        return await self._request("GET", endpoint, path, query, merged, named=(bucket, key))

    async def head(self, endpoint: BucketEndpoint, bucket: str, key: str, *, version: str | None) -> bytes:
        """Build the HEAD of the object, or of that version. Raises Denied."""
        path, query = _object_target(endpoint, key, version)
        return await self._request("HEAD", endpoint, path, query, self._headers, named=(bucket, key))

    async def list_page(self, endpoint: BucketEndpoint, bucket: str, parameters: Mapping[str, str]) -> bytes:
        """Build the ListObjectsV2 of one page. `parameters`: its query's, not encoded. Raises Denied."""
        path = endpoint.prefix.removesuffix("/") or "/"
        pairs = sorted({**parameters, "list-type": "2"}.items())
        query = "&".join(f"{name}={quote(value, safe='~')}" for name, value in pairs)
        prefix = parameters.get("prefix", "")
        return await self._request("GET", endpoint, path, query, self._list_headers, named=(bucket, prefix))

    async def keys(self, ref: ObjectRef) -> Keys | None:
        """Return the credentials for a request of `ref` now; None if anonymous. Raises Denied."""
        return await self._keys(ref.bucket, ref.key)

    async def _keys(self, bucket: str, key: str) -> Keys | None:
        """Return the credentials of `keys`. `bucket`, `key`: for errors."""
        if self._anonymous:
            return None
        frozen = None if self.credentials is None else self.credentials.frozen()
        found: Keys = frozen or await self._frozen_credentials(bucket, key)
        return found

    async def _frozen_credentials(self, bucket: str, key: str) -> Any:
        if self.credentials is not None:
            try:
                return await self.credentials.get_frozen_credentials()
            except Exception:  # map_errors only after a failure, because a context manager costs time
                with map_errors(ErrorContext(bucket, key)):
                    raise
        raise without_credentials("Unable to locate credentials", ErrorContext(bucket, key))

    async def _request(
        self,
        method: str,
        endpoint: BucketEndpoint,
        path: str,
        query: str,
        headers: Mapping[str, str],
        *,
        named: tuple[str, str],
    ) -> bytes:
        """Sign and build a request. `named`: bucket and key, for errors."""
        keys = await self._keys(*named)
        return self._build(method, endpoint, path, query, headers, keys=keys)

    def _build(
        self,
        method: str,
        endpoint: BucketEndpoint,
        path: str,
        query: str,
        headers: Mapping[str, str],
        *,
        keys: Keys | None,
    ) -> bytes:
        if keys is not None:
            now = time.time() - self.ahead if self.ahead else None
            headers = endpoint.signer.sign(
                endpoint.authority, path, query, headers, keys, method=method, now=now
            )
        target = f"{path}?{query}" if query else path
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        return (
            f"{method} {target} HTTP/1.1\r\nHost: {endpoint.authority}\r\n"
            f"User-Agent: penstock/{__version__}\r\nAccept-Encoding: identity\r\n{lines}\r\n"
        ).encode("ascii")


def _object_target(endpoint: BucketEndpoint, key: str, version: str | None) -> tuple[str, str]:
    """Return path and query of an object's version."""
    path = endpoint.prefix + (key if _UNRESERVED(key) else quote(key, safe="/~"))
    return path, f"versionId={quote(version, safe='~')}" if version else ""
