"""What a server says of an object, checked before a plan keeps it or a request repeats it.

An ETag goes into the `If-Match` header of later requests, so only printable ASCII may be in it. Lengths are
bounded: a plan keeps every key and ETag in memory, and `PlanMemory` bounds the sum of them for the whole
process. What is listed again, or comes to nothing, is released.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from streamer.errors import BadAnswer, ConfigError, ErrorContext
from streamer.plan import ObjectRef, bare_etag, is_etag
from streamer.units import human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

LONGEST_KEY = 4096
"""Bytes in UTF-8. S3 allows 1,024."""
LARGEST_OBJECT = 1 << 60
"""Bytes. S3 allows 50 TB."""
LONGEST_ETAG = 1024
PER_OBJECT = 32
"""Bytes that a plan takes for an object besides its key and ETag."""


def described_object(
    context: ErrorContext, key: str, *, size: object, etag: object, version: str | None = None
) -> ObjectRef:
    """The object that a listing or the response to a HEAD describes. Raises BadAnswer."""
    if not isinstance(size, int) or not 0 <= size <= LARGEST_OBJECT:
        raise BadAnswer(f"the endpoint gives an object the size {short(size)}", context)
    bare = bare_etag(etag) if isinstance(etag, str) else ""
    if len(bare) > LONGEST_ETAG or not is_etag(bare):
        raise BadAnswer(f"the endpoint gives {short(etag)} for an ETag", context)
    if len(key.encode(errors="surrogatepass")) > LONGEST_KEY:
        raise BadAnswer(f"the endpoint names a key of over {LONGEST_KEY} bytes: {short(key)}", context)
    return ObjectRef(context.bucket or "", key, size, bare, version)


def short(value: object) -> str:
    """What a server said, to stand within an error."""
    if isinstance(value, int) and abs(value) > LARGEST_OBJECT:
        return "of over 2^60 bytes" if value > 0 else "below zero"  # str() refuses 5,000 digits
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


class PlanMemory:
    """The memory that all plans of the process may take while they are made."""

    def __init__(self, limit: int = sys.maxsize) -> None:
        """`limit`: bytes."""
        self._limit = limit
        self._taken = 0
        self._objects = 0

    @property
    def objects(self) -> int:
        """Objects that are counted now."""
        return self._objects

    def claim(self) -> PlanClaim:
        """A part of this memory that can be released, for a listing or a manifest."""
        return PlanClaim(self)

    def count(self, objects: int, taken: int) -> None:
        """Count more objects and bytes, or fewer. Raises ConfigError when the plans are too large."""
        self._objects += objects
        self._taken += taken
        if taken > 0 and self._taken > self._limit:
            raise ConfigError(
                f"the plan has {self._objects} objects so far, and their names fill "
                f"{human_bytes(self._limit)}, half of the memory that this process may use; narrow S3Uri, or "
                "raise the container's memory limit"
            )


class PlanClaim:
    """What one listing, a folder of it, or a manifest has taken of the memory for plans.

    A context manager: releases everything if the block raises.
    """

    def __init__(self, outer: PlanMemory | PlanClaim) -> None:
        self._outer = outer
        self._taken = 0
        self._objects = 0

    def claim(self) -> PlanClaim:
        """A part of this claim."""
        return PlanClaim(self)

    def take(self, refs: Iterable[ObjectRef]) -> None:
        """Count more objects. Raises ConfigError when the plans are too large."""
        sizes = [PER_OBJECT + len(ref.key) + len(ref.etag) for ref in refs]
        self.count(len(sizes), sum(sizes))

    def count(self, objects: int, taken: int) -> None:
        """As of `PlanMemory`."""
        self._objects += objects
        self._taken += taken
        self._outer.count(objects, taken)

    def release(self) -> None:
        """Give back everything: what was counted is not part of a plan."""
        self.count(-self._objects, -self._taken)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.release()
