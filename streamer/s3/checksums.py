"""Whole objects against the checksums that S3 keeps of them.

    request for a part ─ HEAD of its object before, once ─▶ which CRC is stored, and its value
    delivery ─ ChecksumVerifier: the sum of the bytes as they leave, compared after the object's last byte

S3 keeps a CRC of the whole object (type FULL_OBJECT) of everything that was uploaded since the end of 2024,
unless the uploader wanted another kind: a sum of a multipart upload's parts (COMPOSITE) cannot be compared
without them, and SHAs are slow. Such objects count as unverifiable.

Why HEAD and not the answers to the GETs: of a range, S3 may send the sum of a part of the upload, and
compatible servers that of the whole object; HEAD is unmistakable, and what it says is remembered.

A wrong sum cannot call back what was delivered: it fails the epoch, which then has no proof.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from streamer.plan.segments import bare_etag
from streamer.s3.client.credentials import RenewableCredentials, renewing
from streamer.s3.client.faults import map_errors, of_listed
from streamer.s3.ranges import check_version

if TYPE_CHECKING:
    from streamer.plan import ObjectRef, Part
    from streamer.s3.ranges import Body, RangeRequest, RangeSource

Algorithm = Literal["CRC64NVME", "CRC32C", "CRC32"]
Outcome = Literal["verified", "unverifiable", "mismatch"]
OUTCOMES: tuple[Outcome, ...] = ("verified", "unverifiable", "mismatch")

REMEMBERED = 65_536
"""Objects whose stored sums are kept, of all channels, so that later epochs need not ask again."""


Update = Callable[[memoryview, int], int]
"""The CRC of bytes and of those before them, whose CRC is given."""


def kinds() -> Mapping[Algorithm, Update]:
    """Every CRC that S3 stores. Raises ConfigError if awscrt, which computes them, is not there."""
    try:
        from awscrt import checksums as crt

        found: dict[Algorithm, Update] = {
            "CRC64NVME": crt.crc64nvme,
            "CRC32C": crt.crc32c,
            "CRC32": crt.crc32,
        }
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "Integrity: checksum needs awscrt 0.38 or newer: pip install 'awscrt>=0.38', or remove the key"
        ) from error
    return found


@dataclass(frozen=True, slots=True)
class Stored:
    """The sum that S3 keeps of a whole object."""

    algorithm: Algorithm
    value: int


def stored_sum(answer: Mapping[str, Any]) -> Stored | None:
    """The whole object's sum in botocore's answer to HEAD; None if there is none of a kind to compare."""
    if answer.get("ChecksumType", "FULL_OBJECT") != "FULL_OBJECT":
        return None
    algorithms: tuple[Algorithm, ...] = ("CRC64NVME", "CRC32C", "CRC32")
    for algorithm in algorithms:
        said = answer.get(f"Checksum{algorithm}")
        # Servers that do not know of types mark composite ones by the number of parts behind a dash.
        if said and "-" not in said:
            try:
                return Stored(algorithm, int.from_bytes(base64.b64decode(said, validate=True), "big"))
            except binascii.Error:
                return None
    return None


class StoredChecksums:
    """What S3 has stored, asked for once an object."""

    def __init__(self, client: Any, credentials: RenewableCredentials | None) -> None:
        """`client`: aiobotocore's for control calls, not owned; `credentials`: its own."""
        self._credentials = credentials
        self._client = client
        self._known: OrderedDict[ObjectRef, Stored | None] = OrderedDict()
        self._asking: dict[ObjectRef, asyncio.Lock] = {}

    async def of(self, ref: ObjectRef, *, attempt: int) -> Stored | None:
        """The sum of this version of the object, if there is one. Raises SourceError."""
        if ref in self._known:
            self._known.move_to_end(ref)
            return self._known[ref]
        async with self._asking.setdefault(ref, asyncio.Lock()):
            if ref not in self._known:
                self._known[ref] = await self._ask(ref, attempt)
                while len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)
        self._asking.pop(ref, None)
        return self._known[ref]

    def known(self, ref: ObjectRef) -> Stored | None:
        """The sum that `of` has found, if there is one."""
        return self._known.get(ref)

    async def _ask(self, ref: ObjectRef, attempt: int) -> Stored | None:
        context = ErrorContext(ref.bucket, ref.key, attempt=attempt)
        version = {"VersionId": ref.version} if ref.version else {}
        with renewing(self._credentials), of_listed():
            try:
                with map_errors(context):
                    answer = await self._client.head_object(
                        Bucket=ref.bucket, Key=ref.key, ChecksumMode="ENABLED", **version
                    )
            except (Expired, ClockSkew):
                raise
            except (Denied, BadAnswer) as error:
                # An answer to HEAD has no body, so S3 cannot say that a token has expired: 400, or 403.
                raise Expired(error.message, error.context) from error
        check_version(ref.version, answer.get("VersionId"), context)
        if bare_etag(answer.get("ETag", "")) != ref.etag:
            raise SourceChanged(
                f"the object was replaced after it was listed (ETag {ref.etag} then, "
                f"{answer.get('ETag')} now)",
                context,
            )
        return stored_sum(answer)


class ChecksummingSource:
    """A `RangeSource` that knows the stored sum of an object before it opens a body of it."""

    def __init__(self, source: RangeSource, sums: StoredChecksums) -> None:
        self._source = source
        self._sums = sums

    @property
    def name(self) -> str:
        return self._source.name

    async def open(self, request: RangeRequest) -> Body:
        """As `RangeSource.open`."""
        await self._sums.of(request.part.object, attempt=request.attempt)
        return await self._source.open(request)


class ChecksumVerifier:
    """The sum of the object that is being delivered, one channel's.

    An object whose first bytes an earlier sidecar delivered cannot be compared.
    """

    def __init__(
        self, stored: Callable[[ObjectRef], Stored | None], note: Callable[[ObjectRef, Outcome], None]
    ) -> None:
        """`stored`: the sum that S3 keeps of an object. `note` gets the outcome of every object."""
        self._stored = stored
        self._kinds = kinds()
        self._note = note
        self._object: ObjectRef | None = None
        self._part: Part | None = None
        self._summed = 0
        """Bytes of the object, from its first on, that the value is of."""
        self._value = 0

    def update(self, part: Part, data: memoryview) -> None:
        """The next bytes of the part are delivered."""
        if part is not self._part:
            self._part = part
            if part.start == 0:
                self._object, self._value, self._summed = part.object, 0, 0
            elif self._object != part.object or self._summed != part.start:
                self._object = None  # the stream was continued within this object
        stored = self._stored(part.object)
        if self._object is not None and stored is not None:
            self._value = self._kinds[stored.algorithm](data, self._value)
            self._summed += len(data)

    def delivered(self, part: Part) -> None:
        """All of the part is delivered. Raises Mismatch after an object's last part."""
        if not part.ends_object:
            return
        ref, stored = part.object, self._stored(part.object)
        if stored is None or self._object != ref or self._summed != ref.size:
            self._note(ref, "unverifiable")
        elif self._value == stored.value:
            self._note(ref, "verified")
        else:
            self._note(ref, "mismatch")
            algorithm, digits = stored.algorithm, 16 if stored.algorithm == "CRC64NVME" else 8
            raise Mismatch(
                f"the object's bytes are not those that were stored: their {algorithm} is "
                f"{self._value:0{digits}x}, and S3 keeps {stored.value:0{digits}x}",
                ErrorContext(ref.bucket, ref.key),
            )
