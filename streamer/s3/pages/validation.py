"""Checks a server's description of an object before a plan keeps it or a request repeats it.

An ETag becomes the `If-Match` header of later requests, so it must be printable ASCII. Lengths are bounded: a
plan keeps every key and ETag in memory, and `PlanMemory` bounds their sum for the whole process. A listing
that is repeated or fails releases its bytes.
"""

from __future__ import annotations

import sys
from itertools import repeat
from typing import TYPE_CHECKING

from streamer.errors import BadAnswer, ConfigError, ErrorContext, InvalidResponse
from streamer.plan import ObjectRef
from streamer.plan.entries import BYTES_EACH
from streamer.plan.validators import bare_etag, is_validator
from streamer.units import human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    from streamer.s3.pages.page_parser import Page

LONGEST_KEY = 4096
"""Most bytes of a key in UTF-8; S3 allows 1,024."""
LARGEST_OBJECT = 1 << 60
"""Most bytes of an object; S3 allows 50 TB."""
LONGEST_ETAG = 1024
_ETAG_BYTES = bytes({*range(0x21, 0x7F)} - {ord('"')})
"""The bytes that an ETag may have (`is_etag`)."""


def described_object(
    context: ErrorContext, key: str, *, size: object, etag: object, version: str | None = None
) -> ObjectRef:
    """Return the object that a listing or the response to a HEAD describes. Raises InvalidResponse."""
    if not isinstance(size, int) or not 0 <= size <= LARGEST_OBJECT:
        raise InvalidResponse(f"the endpoint sent an invalid object size: {short(size)}", context)
    bare = bare_etag(etag) if isinstance(etag, str) else ""
    if len(bare) > LONGEST_ETAG or not is_validator(bare):
        raise InvalidResponse(f"the endpoint sent an invalid ETag: {short(etag)}", context)
    if len(key.encode(errors="surrogatepass")) > LONGEST_KEY:
        raise InvalidResponse(f"the endpoint sent a key of over {LONGEST_KEY} bytes: {short(key)}", context)
    return ObjectRef(context.bucket or "", key, size, bare, version)


def check_page(page: Page, context: ErrorContext) -> None:
    """Raise InvalidResponse if a page has an object that no plan can have. `context`: bucket and prefix."""
    if not page.keys:
        return
    prefix = (context.key or "").encode()
    if (
        all(map(bytes.startswith, page.keys, repeat(prefix)))
        and max(map(len, page.keys)) <= LONGEST_KEY
        and 0 <= min(page.sizes) <= max(page.sizes) <= LARGEST_OBJECT
        and 0 < min(map(len, page.etags)) <= max(map(len, page.etags)) <= LONGEST_ETAG
        and not b"".join(page.etags).translate(None, _ETAG_BYTES)
    ):
        return
    for key, size, etag in zip(page.keys, page.sizes, page.etags, strict=True):
        name = key.decode()
        if not key.startswith(prefix):
            raise InvalidResponse(
                f"the listing names {short(name)}, which does not begin with the prefix; the server may "
                "encode the keys of its listings in a way of its own (EncodingType)",
                context,
            )
        described_object(ErrorContext(context.bucket, name), name, size=size, etag=etag.decode())


def named_twice(bucket: str, key: str) -> BadAnswer:
    """Return the error for a listing that has a key twice."""
    text = "the listing names the object twice"
    if "\ufffd" in key:
        text += "; U+FFFD stands for each byte that is not UTF-8, so these may be two keys; rename them"
    return BadAnswer(text, ErrorContext(bucket, key))


def short(value: object) -> str:
    """Return a server's value, shortened for an error text."""
    if isinstance(value, int) and abs(value) > LARGEST_OBJECT:
        return "over 2^60 bytes" if value > 0 else "below zero"  # str() refuses 5,000 digits
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


class PlanMemory:
    """Counts the memory that all plans of the process take while they are made, against a limit.

    It has no lock: the event loop alone counts.
    """

    def __init__(self, limit: int = sys.maxsize) -> None:
        """`limit`: bytes for all plans."""
        self._limit = limit
        self._bytes = 0
        self._objects = 0
        self._indexes: dict[str, int] = {}
        """Bytes of record indexes, by path."""

    @property
    def objects(self) -> int:
        """Number of objects counted so far."""
        return self._objects

    def claim(self) -> PlanClaim:
        """Return a claim on this memory for a listing or a manifest, which can release it."""
        return PlanClaim(self)

    def count(self, objects: int, size: int) -> None:
        """Add objects and bytes; negative numbers subtract. Raises ConfigError if the plans are too large."""
        self._objects += objects
        self._bytes += size
        if size > 0 and self._bytes > self._limit:
            indexes = (
                f" and {human_bytes(sum(self._indexes.values()))} of record indexes" if self._indexes else ""
            )
            raise ConfigError(
                f"the plan has {self._objects} objects so far, and their names{indexes} fill "
                f"{human_bytes(self._limit)}, half of the memory that this process may use; narrow S3Uri, or "
                "raise the container's memory limit"
            )

    def count_index(self, path: str, size: int) -> None:
        """Add a record index, in place of what it was before. `size`: bytes that it takes while it is read.

        Raises ConfigError if less memory is left.
        """
        self._bytes -= self._indexes.pop(path, 0)
        left = max(0, self._limit - self._bytes)
        if size > left:
            raise ConfigError(
                f"the record index {path} takes {human_bytes(size)} of memory while it is read, and plans "
                f"may use {human_bytes(left)} more, of {human_bytes(self._limit)}, half of the memory that "
                "this process may use; raise the container's memory limit, or narrow S3Uri and run "
                "`penstock index build` again, which leaves the rows of other objects out"
            )
        self._indexes[path] = size
        self._bytes += size

    def count_split(self, channel: str, size: int) -> None:
        """Add the blocks that a channel's Split takes. Raises ConfigError if less memory is left."""
        left = max(0, self._limit - self._bytes)
        if size > left:
            raise ConfigError(
                f"the blocks that Split: {{By: block}} takes of channel {channel!r} need {human_bytes(size)} "
                f"of memory, and plans may use {human_bytes(left)} more, of {human_bytes(self._limit)}, half "
                "of the memory that this process may use; raise the container's memory limit, narrow S3Uri, "
                "or use By: key"
            )
        self._bytes += size


class PlanClaim:
    """The part of the plans' memory that a listing, a folder of it, or a manifest has taken.

    A context manager that releases everything if the block raises.
    """

    def __init__(self, outer: PlanMemory | PlanClaim) -> None:
        self._outer = outer
        self._bytes = 0
        self._objects = 0

    def claim(self) -> PlanClaim:
        """Return a claim within this one."""
        return PlanClaim(self)

    def take(self, refs: Iterable[ObjectRef]) -> None:
        """Add objects. Raises ConfigError if the plans are too large."""
        sizes = [BYTES_EACH + len(ref.key) + len(ref.etag) for ref in refs]
        self.count(len(sizes), sum(sizes))

    def count(self, objects: int, size: int) -> None:
        """Add objects and bytes to this claim and to the memory that contains it."""
        self._objects += objects
        self._bytes += size
        self._outer.count(objects, size)

    def release(self) -> None:
        """Subtract everything that was counted here, because no plan will have it."""
        self.count(-self._objects, -self._bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.release()
