"""Entries, the units of shuffling and sharding, in compact form.

An entry is one object, or one line of an augmented manifest: a sequence of objects and literals. A job may
have millions of entries, so they are stored in one blob of bytes, indexed by an array of offsets, and an
`ObjectRef` is created on access. An entry of one object takes 32 bytes plus its key and ETag.

`Entries` counts the bytes of each entry in the stream, record framing included (contract §5.1), so that
totals and shards need no decoding. An item that is too large for a record is refused when it is added. An
object that is inflated on delivery counts with its compressed length.
"""

from __future__ import annotations

import struct
from array import array
from typing import TYPE_CHECKING

from streamer.errors import ConfigError
from streamer.formats.recordio import MAX_PAYLOAD
from streamer.plan.segments import ObjectRef

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_ITEM_HEADER = struct.Struct("<HHHHQ")
"""Number of the bucket (0: a literal); bytes of key, ETag and version; size of object or literal."""


def framed(size: int) -> int:
    """Return the size of a RecordIO record with a payload of `size` bytes (contract §5.1)."""
    return 8 + size + (-size % 4)


class Entries:
    """An ordered collection of entries. Once a plan has it, only the plan's `Growth` may extend it."""

    def __init__(self, *, wrap: bool = False, inflate: bool = False, objects_each: int = 1) -> None:
        """`wrap`: each item becomes one RecordIO record. `objects_each`: objects in every entry.

        `inflate`: objects are compressed; delivery inflates them and makes their records.
        """
        self.wrap = wrap
        self.inflate = inflate
        self.objects_each = objects_each
        self.sizes = array("Q")
        """Bytes of each entry in the stream; compressed objects count with their compressed length."""
        self.total = 0
        """Bytes of all entries."""
        self._blob = bytearray()
        self._offsets = array("Q", (0,))
        self._buckets: list[str] = []
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.sizes)

    def __repr__(self) -> str:
        return f"<Entries {len(self)}, {self.total} bytes>"

    def add(self, *items: ObjectRef | bytes) -> None:
        """Append an entry of these objects and literals. Raises ConfigError if one cannot be wrapped."""
        blob, total = self._blob, 0
        for item in items:
            if isinstance(item, ObjectRef):
                size = item.size
                key, etag, version = item.key.encode(), item.etag.encode(), (item.version or "").encode()
                try:
                    blob += _ITEM_HEADER.pack(
                        self._number(item.bucket), len(key), len(etag), len(version), size
                    )
                except struct.error as error:
                    raise ConfigError(
                        f"s3://{item.bucket}/{item.key[:80]}… is refused: S3 has no object with such a key, "
                        f"ETag, version id or size ({len(key)}, {len(etag)}, {len(version)}, {size} bytes)"
                    ) from error
                blob += key
                blob += etag
                blob += version
            else:
                size = len(item)
                blob += _ITEM_HEADER.pack(0, 0, 0, 0, size)
                blob += item
            if self.framed_here(item):
                if size > MAX_PAYLOAD:
                    raise ConfigError(_too_long(item, size))
                size = framed(size)
            total += size
        if total >> 64:
            raise ConfigError("an entry of over 2^64 bytes is refused: S3 has no object with such a size")
        self._offsets.append(len(blob))
        self.sizes.append(total)
        self.total += total

    def framed_here(self, item: ObjectRef | bytes) -> bool:
        """Return whether the plan makes the item's record, because its length is known before delivery."""
        return self.wrap and not (self.inflate and isinstance(item, ObjectRef) and item.size)

    @property
    def buckets(self) -> set[str]:
        """Names of all buckets with an object of these entries."""
        return set(self._buckets)

    def _number(self, bucket: str) -> int:
        number = self._numbers.get(bucket)
        if number is None:
            self._buckets.append(bucket)
            number = self._numbers[bucket] = len(self._buckets)
        return number

    def items(self, index: int) -> list[ObjectRef | bytes]:
        """Return the entry's objects and literals, in order."""
        blob, position, end = self._blob, self._offsets[index], self._offsets[index + 1]
        items: list[ObjectRef | bytes] = []
        while position < end:
            number, key_size, etag_size, version_size, size = _ITEM_HEADER.unpack_from(blob, position)
            position += _ITEM_HEADER.size
            if not number:
                items.append(bytes(blob[position : position + size]))
                position += size
                continue
            key_end = position + key_size
            etag_end = key_end + etag_size
            version_end = etag_end + version_size
            items.append(
                ObjectRef(
                    self._buckets[number - 1],
                    blob[position:key_end].decode(),
                    size,
                    blob[key_end:etag_end].decode(),
                    blob[etag_end:version_end].decode() or None,
                )
            )
            position = version_end
        return items

    def __iter__(self) -> Iterator[list[ObjectRef | bytes]]:
        return map(self.items, range(len(self)))

    def extend(self, other: Entries) -> None:
        """Append all entries of `other`, which has the same `wrap`, `inflate` and `objects_each`."""
        settings = (self.wrap, self.inflate, self.objects_each)
        if (other.wrap, other.inflate, other.objects_each) != settings:
            raise ValueError("entries of another make")
        if not self._buckets:
            self._buckets, self._numbers = list(other._buckets), dict(other._numbers)
        if self._buckets[: len(other._buckets)] != other._buckets:
            for items in other:
                self.add(*items)
            return
        base = len(self._blob)
        self._blob += other._blob
        self._offsets.extend([base + offset for offset in other._offsets[1:]])
        self.sizes.extend(other.sizes)
        self.total += other.total

    def _key(self, index: int) -> bytes:
        """Return the key of the entry's first object, as UTF-8."""
        position = self._offsets[index]
        key_size = _ITEM_HEADER.unpack_from(self._blob, position)[1]
        return bytes(self._blob[position + _ITEM_HEADER.size : position + _ITEM_HEADER.size + key_size])

    def key_twice(self) -> str | None:
        """Return the first key that two entries have, or None; the entries must be in key order."""
        last = None
        for key in map(self._key, range(len(self))):
            if key == last:
                return key.decode()
            last = key
        return None

    def in_key_order(self) -> Entries:
        """Return the entries in the UTF-8 byte order of their keys; `self` if they already are.

        S3 lists in that order, some compatible servers do not.
        """
        if all(self._key(i) <= self._key(i + 1) for i in range(len(self) - 1)):
            return self
        ordered = Entries(wrap=self.wrap, inflate=self.inflate, objects_each=self.objects_each)
        for index in sorted(range(len(self)), key=self._key):
            ordered.add(*self.items(index))
        return ordered


def listed(objects: Iterable[ObjectRef], *, wrap: bool = False, inflate: bool = False) -> Entries:
    """Return the objects of a listing as entries in plan order, without zero-byte "folder" markers.

    Consoles and mount tools create empty objects whose key ends in `/`; they hold no data, and under
    record wrapping they would become empty records (contract §3.1).
    """
    entries = Entries(wrap=wrap, inflate=inflate)
    for ref in objects:
        if not is_folder_marker(ref):
            entries.add(ref)
    return entries.in_key_order()


def is_folder_marker(ref: ObjectRef) -> bool:
    """Return whether the object is an empty folder marker."""
    return ref.size == 0 and ref.key.endswith("/")


def _too_long(item: ObjectRef | bytes, size: int) -> str:
    what = f"s3://{item.bucket}/{item.key}" if isinstance(item, ObjectRef) else "an attribute"
    return (
        f"{what} has {size} bytes, and a RecordIO record that every reader understands holds at most "
        f"{MAX_PAYLOAD}; split it, or set RecordWrapperType: None"
    )
