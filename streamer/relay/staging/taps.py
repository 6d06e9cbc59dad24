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
    from streamer.s3.checksums import Outcome, Stored, StoredChecksums
    from streamer.s3.ranges import OnWhole


class Tap:
    """Sees the bytes of one stream's objects. Its methods are called on the event loop."""

    on_whole: OnWhole | None = None
    """See `RangeRequest`."""

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

    def __init__(self, stored: StoredChecksums, note: Callable[[ObjectRef, Outcome], None]) -> None:
        """`note`: called with the outcome of every object. Raises ConfigError as `kinds`."""
        from streamer.s3.checksums import kinds  # it takes asyncio, which scanning an index does without

        self._stored = stored
        self.on_whole = stored.note
        self._kinds = kinds()
        self._note = note
        self._object: ObjectRef | None = None
        """The object whose bytes up to `_at` have the checksum `_value`."""
        self._range: Segment | None = None
        self._at = 0
        """Offset in the object of the next byte of `_range`."""
        self._value = 0
        self._ended: list[tuple[ObjectRef, Stored | None, int]] = []
        """Objects whose last byte was seen, with both checksums; None: they cannot be compared."""

    async def before(self, part: Part, attempt: int) -> None:
        for item in part.items:
            if not isinstance(item, bytes) and not item.whole:
                await self._stored.of(item.object, attempt=attempt)

    def see(self, each: Segment, data: memoryview) -> None:
        ref = each.object
        if each is not self._range:
            if each.start == 0:
                self._object, self._value = ref, 0
            elif self._object != ref or self._at != each.start:
                self._object = None  # the stream was resumed inside this object
            self._range, self._at = each, each.start
        stored = None if self._object is None else self._stored.cached(ref)
        if stored is not None:
            self._value = self._kinds[stored.algorithm](data, self._value)
        self._at += len(data)
        if self._at == ref.size:
            self._ended.append((ref, stored, self._value))

    def delivered(self, _: Part) -> None:
        ended, self._ended = self._ended, []
        for ref, stored, value in ended:
            if stored is None:
                self._note(ref, "unverifiable")
            elif value == stored.value:
                self._note(ref, "verified")
            else:
                self._note(ref, "mismatch")
                algorithm, digits = stored.algorithm, 16 if stored.algorithm == "CRC64NVME" else 8
                raise Mismatch(
                    f"the object's bytes do not match its stored checksum: their {algorithm} is "
                    f"{value:0{digits}x}, and S3 stores {stored.value:0{digits}x}",
                    ErrorContext(ref.bucket, ref.key),
                )
