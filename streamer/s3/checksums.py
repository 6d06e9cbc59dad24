"""Checksums that S3 stores of objects, to compare with delivered bytes (`streamer.relay.staging.taps`).

    response header   of the GET of a whole object, else of a HEAD: algorithm and value of the stored CRC
    delivery          CRC of the delivered bytes, compared after the object's last byte

S3 stores a CRC of the whole object (type FULL_OBJECT) for uploads since the end of 2024, unless the uploader
chose another kind. A checksum of a multipart upload's parts (COMPOSITE) cannot be compared without the parts,
and SHAs are slow, so objects with either count as unverifiable.

The response to a ranged GET is ambiguous: S3 may send the checksum of an upload's part, and compatible
servers send that of the whole object. So the GET of a whole object names no range, and an object of several
GETs costs a HEAD before them. The result is cached.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from streamer.errors import (
    BadAnswer,
    ClockSkew,
    ConfigError,
    Denied,
    ErrorContext,
    Expired,
    SourceChanged,
)
from streamer.plan.validators import described, is_modified, validator_of
from streamer.s3.client.credentials import RenewableCredentials, renewing
from streamer.s3.client.faults import of_listed
from streamer.s3.client.final_answers import confirmed
from streamer.s3.ranges import check_version
from streamer.secrets import quoted

if TYPE_CHECKING:
    from streamer.plan import ObjectRef

Algorithm = Literal["CRC64NVME", "CRC32C", "CRC32"]
_ALGORITHMS: tuple[Algorithm, ...] = ("CRC64NVME", "CRC32C", "CRC32")
Outcome = Literal["verified", "unverifiable", "mismatch"]
OUTCOMES: tuple[Outcome, ...] = ("verified", "unverifiable", "mismatch")

CACHED_OBJECTS = 65_536
"""Number of objects whose stored checksums are cached, so that later epochs send no HEAD."""


Update = Callable[[memoryview, int], int]
"""Function (further bytes, CRC of the bytes before them) that returns the CRC of both."""


def kinds() -> Mapping[Algorithm, Update]:
    """Return the functions of the CRCs that S3 stores. Raises ConfigError if awscrt is missing or too old."""
    try:
        from awscrt import checksums as crt

        functions: dict[Algorithm, Update] = {
            "CRC64NVME": crt.crc64nvme,
            "CRC32C": crt.crc32c,
            "CRC32": crt.crc32,
        }
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "Integrity: checksum needs awscrt 0.38 or newer: pip install 'awscrt>=0.38', or remove the key"
        ) from error
    return functions


@dataclass(frozen=True, slots=True)
class Stored:
    """The checksum that S3 stores for a whole object."""

    algorithm: Algorithm
    value: int


def stored_sum(response: Mapping[str, Any]) -> Stored | None:
    """Return the whole object's checksum in botocore's response; None if it has no usable one."""
    if (response.get("ChecksumType") or "FULL_OBJECT") != "FULL_OBJECT":
        return None
    for algorithm in _ALGORITHMS:
        encoded = response.get(f"Checksum{algorithm}")
        # Servers that send no checksum type end a composite checksum with a dash and the number of parts.
        if encoded and "-" not in encoded:
            try:
                return Stored(algorithm, int.from_bytes(base64.b64decode(encoded, validate=True), "big"))
            except binascii.Error:
                return None
    return None


class StoredChecksums:
    """Gets and caches the stored checksums of objects, by at most one HEAD per object."""

    def __init__(self, client: Any, credentials: RenewableCredentials | None) -> None:
        """`client`: aiobotocore's client for control requests, not owned. `credentials`: the client's."""
        self._credentials = credentials
        self._client = client
        self._cache: OrderedDict[ObjectRef, Stored | None] = OrderedDict()
        self._locks: dict[ObjectRef, asyncio.Lock] = {}

    async def of(self, ref: ObjectRef, *, attempt: int) -> Stored | None:
        """Return the stored checksum of this version of the object, or None. Raises SourceError."""
        if ref in self._cache:
            self._cache.move_to_end(ref)
            return self._cache[ref]
        async with self._locks.setdefault(ref, asyncio.Lock()):
            if ref not in self._cache:
                self.note(ref, await confirmed(partial(self._head, ref, attempt)))
        self._locks.pop(ref, None)
        return self._cache[ref]

    def note(self, ref: ObjectRef, fields: Mapping[str, str]) -> None:
        """Cache the checksum in the header of a response to a HEAD of this version, or to a whole GET."""
        names = ("Type", *_ALGORITHMS)
        found = {f"Checksum{name}": fields.get(f"x-amz-checksum-{name.lower()}") for name in names}
        self._cache[ref] = stored_sum(found)
        while len(self._cache) > CACHED_OBJECTS:
            self._cache.popitem(last=False)

    def cached(self, ref: ObjectRef) -> Stored | None:
        """Return the checksum that `of` has cached, or None."""
        return self._cache.get(ref)

    async def _head(self, ref: ObjectRef, attempt: int) -> Mapping[str, str]:
        context = ErrorContext(ref.bucket, ref.key, attempt=attempt)
        version = {"VersionId": ref.version} if ref.version else {}
        with renewing(self._credentials), of_listed():
            try:
                response = await self._client.send(
                    "head_object", context, Bucket=ref.bucket, Key=ref.key, ChecksumMode="ENABLED", **version
                )
            except (Expired, ClockSkew):
                raise
            except (Denied, BadAnswer) as error:
                # A response to HEAD has no body, so an expired token shows only as status 400 or 403.
                raise Expired(error.message, error.context) from error
        check_version(ref.version, response.get("VersionId"), context)
        fields: Mapping[str, str] = response["ResponseMetadata"]["HTTPHeaders"]
        etag = None if is_modified(ref.etag) else response.get("ETag")
        now = validator_of(etag, fields.get("last-modified"))
        if now != ref.etag:
            raise SourceChanged(
                f"the object was replaced after it was listed ({described(ref.etag)} then, "
                f"{quoted(now)} now)",
                context,
            )
        return fields
