"""Entries, the units of shuffling and sharding, in compact form.

An entry is one object, or one line of an augmented manifest: a sequence of objects and literals. A job may
have millions of entries, so they are stored in columns, and an `ObjectRef` is created on access:

    plain entry: one object of the first bucket    key │ bytes in the stream │ MD5 of its ETag, parts, padding
    any other entry                                items, each with a header │ bytes in the stream

A plain entry takes at most `BYTES_EACH` bytes besides its key. Nearly all objects have less than 4 GiB, so a
column of numbers has 4 bytes each until a larger one comes. The ETag of a plain entry is 32 hexadecimal
digits, as S3 makes it for an object that was uploaded in one part, or these digits and the number of parts.
Nearly all objects have such an ETag. The objects of a listing's page are added in bulk.

`Entries` counts the bytes of each entry in the stream, record framing included (contract §5.1), so that
totals and shards need no decoding. An item that is too large for a record is refused when it is added. An
object that is inflated on delivery counts with its compressed length.
"""

from __future__ import annotations

import re
import struct
from array import array
from itertools import accumulate, pairwise, repeat
from typing import TYPE_CHECKING, NamedTuple

from streamer.errors import ConfigError
from streamer.formats.recordio import MAX_PAYLOAD
from streamer.plan.parts import ObjectRef

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

BYTES_EACH = 8 + 4 + 16 + 2
"""Most bytes of memory of a plain entry besides its key: size, offset of the key, MD5, form."""
_ITEM_HEADER = struct.Struct("<HHHHQ")
"""Number of the bucket (0: a literal); bytes of key, ETag and version; size of object or literal."""
_MD5_ETAG = re.compile(rb"([0-9a-f]{32})(?:-([1-9][0-9]{0,3}|10000))?").fullmatch
"""ETag of a plain entry: an MD5, and for an object that was uploaded in parts their number."""
_MD5_DIGITS = 32
_HEX_DIGITS = b"0123456789abcdef"
_ITEMS = 0xFFFF
"""Form of an entry that is not plain. The form of a plain one is 4 * parts + bytes of padding."""
_LONGEST_KEY = 0xFFFF


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
        self.sizes = array("I")
        """Bytes of each entry in the stream; compressed objects count with their compressed length."""
        self.total = 0
        """Bytes of all entries."""
        self._framed = wrap and not inflate
        """Whether the plan makes the record of every object."""
        self._names = bytearray()
        """Keys of plain entries; items of all others."""
        self._offsets = array("I", (0,))
        """Start of each entry in `_names`, and the end of the last one."""
        self._md5s = bytearray()
        """16 bytes of each entry; zeros if it is not plain."""
        self._forms = array("H")
        """Form of each entry; empty while all are 0."""
        self._buckets: list[str] = []
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.sizes)

    def __repr__(self) -> str:
        return f"<Entries {len(self)}, {self.total} bytes>"

    @property
    def memory(self) -> int:
        """Bytes of memory that the entries take, at most."""
        return len(self._names) + BYTES_EACH * len(self)

    def pack(self) -> None:
        """Free the memory that was allocated for further entries."""
        self._names, self._md5s = bytearray(self._names), bytearray(self._md5s)

    def add(self, *items: ObjectRef | bytes) -> None:
        """Append an entry of these objects and literals. Raises ConfigError if one cannot be wrapped."""
        if len(items) == 1 and isinstance(ref := items[0], ObjectRef) and self._add_plain(ref):
            return
        names, total = bytearray(), 0
        for item in items:
            if isinstance(item, ObjectRef):
                size = item.size
                key, etag, version = item.key.encode(), item.etag.encode(), (item.version or "").encode()
                try:
                    names += _ITEM_HEADER.pack(
                        self._number(item.bucket), len(key), len(etag), len(version), size
                    )
                except struct.error as error:
                    raise ConfigError(
                        f"s3://{item.bucket}/{item.key[:80]}… is refused: S3 has no object with such a key, "
                        f"ETag, version id or size ({len(key)}, {len(etag)}, {len(version)}, {size} bytes)"
                    ) from error
                names += key
                names += etag
                names += version
            else:
                size = len(item)
                names += _ITEM_HEADER.pack(0, 0, 0, 0, size)
                names += item
            if self.framed_here(item):
                if size > MAX_PAYLOAD:
                    raise ConfigError(_too_long(item, size))
                size = framed(size)
            total += size
        if total >> 64:
            raise ConfigError("an entry of over 2^64 bytes is refused: S3 has no object with such a size")
        self._names += names
        self._offsets = _extended(self._offsets, [len(self._names)])
        self._md5s += bytes(16)
        self._add_forms([_ITEMS])
        self.sizes = _extended(self.sizes, [total])
        self.total += total

    def _add_plain(self, ref: ObjectRef) -> bool:
        """Append the object if its entry can be plain; return whether it was."""
        return not ref.version and self._add_plain_objects(
            ref.bucket, [ref.key.encode()], [ref.size], [ref.etag.encode()]
        )

    def add_objects(
        self, bucket: str, keys: Sequence[bytes], sizes: Sequence[int], etags: Sequence[bytes]
    ) -> None:
        """Append one entry for each object, as `add` does. `keys`: in UTF-8. `etags`: bare."""
        if self._add_plain_objects(bucket, keys, sizes, etags):
            return
        for key, size, etag in zip(keys, sizes, etags, strict=True):
            self.add(ObjectRef(bucket, key.decode(), size, etag.decode()))

    def _add_plain_objects(
        self, bucket: str, keys: Sequence[bytes], sizes: Sequence[int], etags: Sequence[bytes]
    ) -> bool:
        """Append the objects if all of their entries can be plain; return whether they were."""
        if not keys:
            return True
        largest = MAX_PAYLOAD if self._framed else (1 << 60)
        if (
            max(map(len, keys)) > _LONGEST_KEY
            or not 0 <= min(sizes) <= max(sizes) <= largest
            or (self.wrap and self.inflate and 0 in sizes)  # only the records of empty objects are made here
            or (found := _md5s_of(etags)) is None
            or self._number(bucket) != 1
        ):
            return False
        md5s, forms = found
        if self._framed:
            forms = [form + (-size % 4) for form, size in zip(forms, sizes, strict=True)]
            sizes = [framed(size) for size in sizes]
        start = len(self._names)
        self._names += b"".join(keys)
        self._offsets = _extended(self._offsets, list(accumulate(map(len, keys), initial=start))[1:])
        self._md5s += md5s
        self._add_forms(forms)
        self.sizes = _extended(self.sizes, sizes)
        self.total += sum(sizes)
        return True

    def _add_forms(self, forms: Iterable[int]) -> None:
        """Append the forms of entries whose sizes are not appended yet."""
        forms = array("H", forms)
        if any(forms) and not self._forms:
            self._forms = array("H", bytes(2 * len(self)))
        if any(forms) or self._forms:
            self._forms.extend(forms)

    def empty_objects(self) -> dict[int, ObjectRef]:
        """Return the entries of one object each that is empty, by index."""
        size = framed(0) if self.wrap else 0
        if size not in self.sizes:
            return {}
        firsts = {index: self.items(index)[0] for index, each in enumerate(self.sizes) if each == size}
        return {index: ref for index, ref in firsts.items() if isinstance(ref, ObjectRef) and not ref.size}

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
        names, position, end = self._names, self._offsets[index], self._offsets[index + 1]
        form = self._forms[index] if self._forms else 0
        if form != _ITEMS:
            etag = self._md5s[16 * index : 16 * index + 16].hex()
            return [
                ObjectRef(
                    self._buckets[0],
                    names[position:end].decode(),
                    self.sizes[index] - (8 + form % 4 if self._framed else 0),
                    f"{etag}-{form // 4}" if form > 3 else etag,
                )
            ]
        items: list[ObjectRef | bytes] = []
        while position < end:
            number, key_size, etag_size, version_size, size = _ITEM_HEADER.unpack_from(names, position)
            position += _ITEM_HEADER.size
            if not number:
                items.append(bytes(names[position : position + size]))
                position += size
                continue
            key_end = position + key_size
            etag_end = key_end + etag_size
            version_end = etag_end + version_size
            items.append(
                ObjectRef(
                    self._buckets[number - 1],
                    names[position:key_end].decode(),
                    size,
                    names[key_end:etag_end].decode(),
                    names[etag_end:version_end].decode() or None,
                )
            )
            position = version_end
        return items

    @property
    def plain(self) -> bool:
        """Whether each entry is one whole object without a frame, so that its size is that of its segment."""
        return not self.wrap and (not self._forms or max(self._forms) != _ITEMS)

    def columns(self, start: int, stop: int) -> Columns | None:
        """Return the objects of entries `start` to `stop` in columns; None if one entry is not plain."""
        if start >= stop:
            return None
        forms = self._forms[start:stop] or array("H", bytes(2 * (stop - start)))
        if max(forms) == _ITEMS:
            return None
        offsets = self._offsets[start : stop + 1]
        base = offsets[0]
        names = bytes(self._names[base : offsets[-1]])
        keys = [names[i - base : j - base] for i, j in pairwise(offsets)]
        digits = self._md5s[16 * start : 16 * stop].hex()
        etags = [digits[i : i + _MD5_DIGITS] for i in range(0, len(digits), _MD5_DIGITS)]
        sizes: Sequence[int] = self.sizes[start:stop]
        if self._framed:
            sizes = [size - 8 - form % 4 for size, form in zip(sizes, forms, strict=True)]
        if max(forms) > 3:
            etags = [
                f"{etag}-{form // 4}" if form > 3 else etag for etag, form in zip(etags, forms, strict=True)
            ]
        return Columns(self._buckets[0], keys, sizes, etags)

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
        self._names += other._names
        base = self._offsets[-1]
        self._offsets = _extended(self._offsets, [base + offset for offset in other._offsets[1:]])
        self._md5s += other._md5s
        self._add_forms(other._forms or repeat(0, len(other)))
        self.sizes = _extended(self.sizes, other.sizes)
        self.total += other.total

    def _key(self, index: int) -> bytes:
        """Return the key of the entry's first object, as UTF-8."""
        position, end = self._offsets[index], self._offsets[index + 1]
        if self._forms and self._forms[index] == _ITEMS:
            key_size = _ITEM_HEADER.unpack_from(self._names, position)[1]
            position += _ITEM_HEADER.size
            end = position + key_size
        return bytes(self._names[position:end])

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
        if all(before <= after for before, after in pairwise(map(self._key, range(len(self))))):
            return self
        ordered = Entries(wrap=self.wrap, inflate=self.inflate, objects_each=self.objects_each)
        for index in sorted(range(len(self)), key=self._key):
            ordered.add(*self.items(index))
        return ordered


def _extended(column: array[int], numbers: Sequence[int]) -> array[int]:
    """Append numbers to a column of 4 bytes each; return it, or one of 8 bytes if a number needs them."""
    if column.typecode == "I" and max(numbers, default=0) >> 32:
        column = array("Q", column)
    column.extend(array(column.typecode, numbers))
    return column


class Columns(NamedTuple):
    """Objects of one bucket in columns."""

    bucket: str
    keys: list[bytes]
    """In UTF-8."""
    sizes: Sequence[int]
    etags: list[str]


def _md5s_of(etags: Sequence[bytes]) -> tuple[bytes, list[int]] | None:
    """Return the MD5s of the ETags, and the forms of their entries without padding.

    None if one of the ETags has another form.
    """
    joined = b"".join(etags)
    if len(joined) == _MD5_DIGITS * len(etags) and set(map(len, etags)) == {_MD5_DIGITS}:
        plain = not joined.translate(None, _HEX_DIGITS)
        return (bytes.fromhex(joined.decode()), [0] * len(etags)) if plain else None
    matches = [match for etag in etags if (match := _MD5_ETAG(etag)) is not None]
    if len(matches) < len(etags):
        return None
    digits = b"".join([match[1] for match in matches])
    return bytes.fromhex(digits.decode()), [4 * int(match[2] or 0) for match in matches]


def _too_long(item: ObjectRef | bytes, size: int) -> str:
    what = f"s3://{item.bucket}/{item.key}" if isinstance(item, ObjectRef) else "an attribute"
    return (
        f"{what} has {size} bytes, and a RecordIO record that every reader understands holds at most "
        f"{MAX_PAYLOAD}; split it, or set RecordWrapperType: None"
    )
