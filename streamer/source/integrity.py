"""Whole objects against the checksums that S3 keeps of them.

    fetch of a part ─ HEAD of its object, once ─▶ which CRC is stored, and its value
    bytes arrive ─ PartSum, while the processor's cache has them
    delivery ─ Proof: the parts' sums combined, in stream order; compared behind the object's last byte

S3 keeps a CRC of the whole object (type FULL_OBJECT) of everything that was uploaded since the end of 2024,
unless the uploader wanted another kind: sums of a multipart upload's parts (COMPOSITE) say nothing that can
be compared without them, and SHAs cannot be combined. Such objects count as unverifiable.

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
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from streamer.errors import BadAnswer, ConfigError, Denied, Expired, Mismatch, Skewed, SourceChanged, Where
from streamer.plan.segments import bare_etag
from streamer.source.credentials import LastingCredentials, renewing
from streamer.source.faults import map_errors, of_listed
from streamer.source.ranges import check_version

if TYPE_CHECKING:
    from streamer.plan import ObjectRef, Part
    from streamer.source.ranges import RangeSource, Receiver

Algorithm = Literal["CRC64NVME", "CRC32C", "CRC32"]
Outcome = Literal["verified", "unverifiable", "mismatch"]
OUTCOMES: tuple[Outcome, ...] = ("verified", "unverifiable", "mismatch")

REMEMBERED = 65_536
"""Objects whose stored sums are kept, of all channels, so that later epochs need not ask again."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How one CRC is computed: of more bytes, and of two pieces whose own sums are known."""

    update: Callable[[Any, int], int]
    combine: Callable[[int, int, int], int]


def kinds() -> Mapping[Algorithm, Kind]:
    """Every CRC that S3 stores. Raises ConfigError if awscrt, which computes them, is not there."""
    try:
        from awscrt import checksums as crt

        return {
            "CRC64NVME": Kind(crt.crc64nvme, crt.combine_crc64nvme),
            "CRC32C": Kind(crt.crc32c, crt.combine_crc32c),
            "CRC32": Kind(crt.crc32, crt.combine_crc32),
        }
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "Integrity: checksum needs awscrt 0.38 or newer: pip install 'awscrt>=0.38', or remove the key"
        ) from error


@dataclass(frozen=True, slots=True)
class Stored:
    """The sum that S3 keeps of a whole object."""

    algorithm: Algorithm
    value: int


class PartSum:
    """The running sum of one part's body."""

    def __init__(self, stored: Stored, kind: Kind) -> None:
        self.stored = stored
        self.kind = kind
        self.value = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """`data` are the next bytes."""
        self.value = self.kind.update(data, self.value)


class Summing(Protocol):
    """A receiver that keeps a sum of what it receives."""

    part_sum: PartSum | None


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


class Sums:
    """What S3 has stored, asked for once an object."""

    def __init__(self, client: Any, credentials: LastingCredentials | None) -> None:
        """`client`: aiobotocore's for control calls, not owned; `credentials`: its own.

        Raises ConfigError without awscrt.
        """
        self._credentials = credentials
        self.kinds = kinds()
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

    async def _ask(self, ref: ObjectRef, attempt: int) -> Stored | None:
        where = Where(ref.bucket, ref.key, attempt=attempt)
        version = {"VersionId": ref.version} if ref.version else {}
        with renewing(self._credentials), of_listed():
            try:
                with map_errors(where):
                    answer = await self._client.head_object(
                        Bucket=ref.bucket, Key=ref.key, ChecksumMode="ENABLED", **version
                    )
            except (Expired, Skewed):
                raise
            except (Denied, BadAnswer) as error:
                # An answer to HEAD has no body, so S3 cannot say that a token has expired: 400, or 403.
                raise Expired(error.message, error.where) from error
        check_version(ref.version, answer.get("VersionId"), where)
        if bare_etag(answer.get("ETag", "")) != ref.etag:
            raise SourceChanged(
                f"the object was replaced after it was listed (ETag {ref.etag} then, "
                f"{answer.get('ETag')} now)",
                where,
            )
        return stored_sum(answer)


class CheckedSource:
    """A `RangeSource` that lets its receivers, which must be `Summing`, sum what another one fetches."""

    def __init__(self, source: RangeSource, sums: Sums) -> None:
        self._source = source
        self._sums = sums

    @property
    def name(self) -> str:
        return self._source.name

    async def fetch(self, into: Receiver, *, attempt: int) -> None:
        receiver = cast("Summing", into)
        if receiver.part_sum is None:
            stored = await self._sums.of(into.part.object, attempt=attempt)
            if stored is not None and receiver.part_sum is None:  # a second request may have been quicker
                receiver.part_sum = PartSum(stored, self._sums.kinds[stored.algorithm])
        await self._source.fetch(into, attempt=attempt)


class Proof:
    """The sum of the object that is being delivered, one channel's.

    An object whose first bytes an earlier sidecar delivered cannot be compared.
    """

    def __init__(self, note: Callable[[ObjectRef, Outcome], None]) -> None:
        """`note` is told how every object has ended."""
        self._note = note
        self._value = 0
        self._summed: tuple[ObjectRef, int] | None = None
        """An object and the bytes of it, from its first on, that the value is of."""

    def add(self, part: Part, found: PartSum | None) -> None:
        """The next part of the stream is delivered. Raises Mismatch behind an object's last."""
        ref = part.object
        if found is not None and part.start == 0:
            self._value = found.value
            self._summed = ref, part.body
        elif found is not None and self._summed == (ref, part.start):
            self._value = found.kind.combine(self._value, found.value, part.body)
            self._summed = ref, part.start + part.body
        else:
            self._summed = None  # S3 keeps none, or the stream was continued within this object
        if not part.ends_object:
            return
        if found is None or self._summed is None:
            self._note(ref, "unverifiable")
        elif self._value == found.stored.value:
            self._note(ref, "verified")
        else:
            self._note(ref, "mismatch")
            algorithm, digits = found.stored.algorithm, 16 if found.stored.algorithm == "CRC64NVME" else 8
            raise Mismatch(
                f"the object's bytes are not those that were stored: their {algorithm} is "
                f"{self._value:0{digits}x}, and S3 keeps {found.stored.value:0{digits}x}",
                Where(ref.bucket, ref.key),
            )
