"""Compares delivered objects with the checksums that S3 stores.

    before a part's GET   HEAD of its object, once: algorithm and value of the stored CRC
    delivery              ChecksumVerifier: CRC of the delivered bytes, compared after the object's last byte

S3 stores a CRC of the whole object (type FULL_OBJECT) for uploads since the end of 2024, unless the uploader
chose another kind. A checksum of a multipart upload's parts (COMPOSITE) cannot be compared without the parts,
and SHAs are slow, so objects with either count as unverifiable.

The checksum comes from a HEAD because the response to a ranged GET is ambiguous: S3 may send the checksum of
an upload's part, and compatible servers send that of the whole object. The result is cached.

After a mismatch the delivered bytes cannot be recalled, so the epoch fails and its trailer is `failed`.
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
    Mismatch,
    SourceChanged,
)
from streamer.plan.validators import described, is_modified, validator_of
from streamer.s3.client.credentials import RenewableCredentials, renewing
from streamer.s3.client.faults import map_errors, of_listed
from streamer.s3.client.final_answers import confirmed
from streamer.s3.ranges import check_version
from streamer.secrets import quoted

if TYPE_CHECKING:
    from streamer.plan import ObjectRef, Part, Segment

Algorithm = Literal["CRC64NVME", "CRC32C", "CRC32"]
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
    """Return the whole object's checksum in botocore's response to HEAD; None if it has no usable one."""
    if response.get("ChecksumType", "FULL_OBJECT") != "FULL_OBJECT":
        return None
    algorithms: tuple[Algorithm, ...] = ("CRC64NVME", "CRC32C", "CRC32")
    for algorithm in algorithms:
        encoded = response.get(f"Checksum{algorithm}")
        # Servers that send no checksum type end a composite checksum with a dash and the number of parts.
        if encoded and "-" not in encoded:
            try:
                return Stored(algorithm, int.from_bytes(base64.b64decode(encoded, validate=True), "big"))
            except binascii.Error:
                return None
    return None


class StoredChecksums:
    """Gets and caches the stored checksums of objects, by one HEAD per object."""

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
                self._cache[ref] = await confirmed(partial(self._head, ref, attempt))
                while len(self._cache) > CACHED_OBJECTS:
                    self._cache.popitem(last=False)
        self._locks.pop(ref, None)
        return self._cache[ref]

    def cached(self, ref: ObjectRef) -> Stored | None:
        """Return the checksum that `of` has cached, or None."""
        return self._cache.get(ref)

    async def _head(self, ref: ObjectRef, attempt: int) -> Stored | None:
        context = ErrorContext(ref.bucket, ref.key, attempt=attempt)
        version = {"VersionId": ref.version} if ref.version else {}
        with renewing(self._credentials), of_listed():
            try:
                with map_errors(context):
                    response = await self._client.head_object(
                        Bucket=ref.bucket, Key=ref.key, ChecksumMode="ENABLED", **version
                    )
            except (Expired, ClockSkew):
                raise
            except (Denied, BadAnswer) as error:
                # A response to HEAD has no body, so an expired token shows only as status 400 or 403.
                raise Expired(error.message, error.context) from error
        check_version(ref.version, response.get("VersionId"), context)
        etag = None if is_modified(ref.etag) else response.get("ETag")
        now = validator_of(etag, response["ResponseMetadata"]["HTTPHeaders"].get("last-modified"))
        if now != ref.etag:
            raise SourceChanged(
                f"the object was replaced after it was listed ({described(ref.etag)} then, "
                f"{quoted(now)} now)",
                context,
            )
        return stored_sum(response)


class ChecksumVerifier:
    """Compares the checksum of each object that one channel delivers with the stored checksum.

    An object whose first bytes an earlier sidecar delivered cannot be compared.
    """

    def __init__(self, stored: StoredChecksums, note: Callable[[ObjectRef, Outcome], None]) -> None:
        """`note`: called with the outcome of every object."""
        self._stored = stored
        self._kinds = kinds()
        self._note = note
        self._object: ObjectRef | None = None
        self._range: Segment | None = None
        self._summed = 0
        """Bytes from the object's start that `_value` covers."""
        self._value = 0

    async def before(self, part: Part, attempt: int) -> None:
        """Get the stored checksums of the part's objects, before it is requested. Raises SourceError."""
        for item in part.items:
            if not isinstance(item, bytes):
                await self._stored.of(item.object, attempt=attempt)

    def update(self, each: Segment, data: memoryview) -> None:
        """Add the next delivered bytes of the range."""
        if each is not self._range:
            self._range = each
            if each.start == 0:
                self._object, self._value, self._summed = each.object, 0, 0
            elif self._object != each.object or self._summed != each.start:
                self._object = None  # the stream was resumed inside this object
        stored = self._stored.cached(each.object)
        if self._object is not None and stored is not None:
            self._value = self._kinds[stored.algorithm](data, self._value)
            self._summed += len(data)

    def delivered(self, part: Part) -> None:
        """Compare the checksum of the object that ends in `part`, if one does. Raises Mismatch."""
        if not any(part.ends()):
            return
        ref = part.object
        stored = self._stored.cached(ref)
        if stored is None or self._object != ref or self._summed != ref.size:
            self._note(ref, "unverifiable")
        elif self._value == stored.value:
            self._note(ref, "verified")
        else:
            self._note(ref, "mismatch")
            algorithm, digits = stored.algorithm, 16 if stored.algorithm == "CRC64NVME" else 8
            raise Mismatch(
                f"the object's bytes do not match its stored checksum: their {algorithm} is "
                f"{self._value:0{digits}x}, and S3 stores {stored.value:0{digits}x}",
                ErrorContext(ref.bucket, ref.key),
            )
