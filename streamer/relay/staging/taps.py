"""Taps: they see the bytes of objects on the way from stage to FIFO, without a copy.

`ChecksumTap` compares objects with the checksums that S3 stores (`streamer.s3.checksums`). After a mismatch
the delivered bytes cannot be recalled, so the epoch fails and its trailer is `failed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamer.errors import ErrorContext, Mismatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.plan import ObjectRef, Part, Segment
    from streamer.s3.checksums import Outcome, StoredChecksums


class Tap:
    """Sees the bytes of one stream's objects. Its methods are called on the event loop."""

    each_alone = False
    """Whether no part may have ranges of two objects."""

    def wants(self, ref: ObjectRef) -> bool:  # noqa: ARG002 - every object
        """Return whether the bytes of this object are to be seen."""
        return True

    async def before(self, part: Part, attempt: int) -> None:
        """Prepare for the bytes of a part, before each of its requests. Raises SourceError."""

    def see(self, each: Segment, data: memoryview) -> None:
        """See the next bytes of a range, at once; the memory is valid during the call."""

    def delivered(self, part: Part) -> None:
        """Judge the objects that end in a part, after its last byte was delivered and counted.

        Raises SourceError: only here, so that the trailer counts every byte.
        """


class ChecksumTap(Tap):
    """Compares the checksum of each object that one channel delivers with the stored checksum.

    An object whose first bytes an earlier sidecar delivered cannot be compared.
    """

    each_alone = True

    def __init__(self, stored: StoredChecksums, note: Callable[[ObjectRef, Outcome], None]) -> None:
        """`note`: called with the outcome of every object. Raises ConfigError as `kinds`."""
        from streamer.s3.checksums import kinds  # it takes asyncio, which scanning an index does without

        self._stored = stored
        self._kinds = kinds()
        self._note = note
        self._object: ObjectRef | None = None
        self._range: Segment | None = None
        self._summed = 0
        """Bytes from the object's start that `_value` covers."""
        self._value = 0

    async def before(self, part: Part, attempt: int) -> None:
        for item in part.items:
            if not isinstance(item, bytes):
                await self._stored.of(item.object, attempt=attempt)

    def see(self, each: Segment, data: memoryview) -> None:
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
