"""Rows of a manifest in compact form, while sizes and ETags of their objects are being found.

A manifest may have millions of rows that wait. So a block of rows has one blob of names and one of ETags, and
takes `PER_ITEM` bytes for each item besides its name. Items (objects and literals) are numbered by block.

    add ─▶ unknown ─ found in a listing ────────────▶ known ─▶ entries, in the order of the rows
              └─ leave_to_head ─▶ due ─ next_head ─▶ sent ─┘

Pure and synchronous.
"""

from __future__ import annotations

from array import array
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, NamedTuple

from streamer.plan import ObjectRef, parse_object_uri

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from streamer.plan import Entries

ITEMS = 7_950
"""Most items of a block. Eight pages of a listing have all its keys if few keys between them are unwanted."""
TEXT = 16 * 1024 * 1024
"""Bytes of names and literals after which a block is full."""
PER_ITEM = 53
"""Bytes of memory for an item besides its name, until its row is an entry."""
SCHEME = "s3://"
VERSION = "?versionId="

_UNKNOWN, _DUE, _SENT, _KNOWN = range(4)
"""States of an item. A HEAD is due or sent; a literal is always known."""


class WantedObject(NamedTuple):
    """An object that a row names."""

    bucket: str
    key: str
    version: str | None


class RowBlock:
    """Successive rows, each with the same number of items."""

    def __init__(self, first_row: int, pattern: Sequence[bool]) -> None:
        """`first_row`: number of the first row, from 0. `pattern`: which items of a row are objects."""
        self.first_row = first_row
        self.taken = 0
        """Number of rows that are entries."""
        self.heads_due = 0
        """Number of objects whose HEADs are due."""
        self._pattern = pattern
        self._added: list[bytes] = []
        self._text = b""
        """All that was added, once the block is closed."""
        self._ends = array("I", (0,))
        """By item, the start in `_text` of its name, `BUCKET/KEY`, or of its literal; and the last end."""
        self._versions: dict[int, str] = {}
        self._states = bytearray()
        self._sizes = array("Q")
        self._etags = bytearray()
        self._etag_at = array("I")
        """By item, the start of its object's ETag in `_etags`."""
        self._etag_bytes = array("H")

    def __repr__(self) -> str:
        return f"<RowBlock {self.rows} rows from {self.first_row}>"

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self._states) // len(self._pattern)

    @property
    def objects(self) -> int:
        """Number of objects."""
        return self.rows * sum(self._pattern)

    @property
    def full(self) -> bool:
        """Whether the next row belongs into the next block."""
        return len(self._states) + len(self._pattern) > ITEMS or self._ends[-1] >= TEXT

    @property
    def memory(self) -> int:
        """Bytes of memory until the rows are entries."""
        return self._ends[-1] + PER_ITEM * len(self._states)

    def add(self, items: list[bytes | str]) -> list[bytes | str]:
        """Append the items of whole rows, as far as there is room; return the items that are left.

        Literals are bytes, objects are valid URIs.
        """
        room = max(ITEMS - len(self._states), len(self._pattern))
        count = min(len(items), room - room % len(self._pattern))
        names = [self._encoded(item, number) for number, item in enumerate(items[:count], len(self._states))]
        ends = accumulate(map(len, names), initial=self._ends.pop())
        self._ends.extend(ends)
        self._added.extend(names)
        states = bytes(_UNKNOWN if is_object else _KNOWN for is_object in self._pattern)
        self._states += states * (count // len(self._pattern))
        return items[count:]

    def _encoded(self, item: bytes | str, number: int) -> bytes:
        """Return a literal, or the name of an object, whose version is kept."""
        if isinstance(item, bytes):
            return item
        if VERSION in item:
            (bucket, key), version = parse_object_uri(item)
            if version is not None:
                self._versions[number] = version
                return f"{bucket}/{key}".encode()
        return item[len(SCHEME) :].encode()

    def close(self) -> array[int]:
        """Take no further rows. Return the items that a listing may name, sorted by name.

        A listing has current versions alone, so objects with a version are left to HEADs.
        """
        count = len(self._states)
        self._text, self._added = b"".join(self._added), []
        self._sizes, self._etag_at = array("Q", bytes(8 * count)), array("I", bytes(4 * count))
        self._etag_bytes = array("H", bytes(2 * count))
        self.leave_to_head(self._versions)
        unknown = [item for item, state in enumerate(self._states) if state == _UNKNOWN]
        names = dict(zip(unknown, self.names(unknown), strict=True))
        return array("H", sorted(unknown, key=names.__getitem__))

    def names(self, items: Iterable[int]) -> list[bytes]:
        """Return `BUCKET/KEY` of these objects."""
        text, ends = self._text, self._ends
        return [text[ends[item] : ends[item + 1]] for item in items]

    def name(self, item: int) -> bytes:
        """Return `BUCKET/KEY` of an object."""
        return self._text[self._ends[item] : self._ends[item + 1]]

    def leave_to_head(self, items: Iterable[int]) -> None:
        """Note that these objects need HEADs."""
        for item in items:
            self._states[item] = _DUE
            self.heads_due += 1

    def next_head(self) -> int | None:
        """Return the first object whose HEAD is due, and note the HEAD as sent; None if no HEAD is due."""
        if not self.heads_due:
            return None
        item = self._states.index(_DUE)
        self._states[item] = _SENT
        self.heads_due -= 1
        return item

    def wanted(self, item: int) -> WantedObject:
        """Return bucket, key and version of an object."""
        bucket, _, key = self.name(item).decode().partition("/")
        return WantedObject(bucket, key, self._versions.get(item))

    def answer(self, item: int, size: int, etag: bytes) -> None:
        """Note size and ETag of an object."""
        self._sizes[item] = size
        self._etag_at[item] = len(self._etags)
        self._etag_bytes[item] = len(etag)
        self._etags += etag
        self._states[item] = _KNOWN

    def row_of(self, item: int) -> int:
        """Return the number of the item's row in the manifest."""
        return self.first_row + item // len(self._pattern)

    def ready(self, most: int) -> int:
        """Return the number of next rows of which all objects are known, at most `most`."""
        width = len(self._pattern)
        states = self._states[self.taken * width : (self.taken + most) * width]
        return (len(states) - len(states.lstrip(bytes((_KNOWN,))))) // width

    def take(self, entries: Entries, count: int) -> None:
        """Move the next `count` rows, which are `ready`, into `entries`.

        Raises ConfigError if an object cannot be wrapped; `taken` is then the number of rows before its row.
        """
        before, width = len(entries), len(self._pattern)
        try:
            if width == 1 and self._pattern[0] and not self._versions:
                self._take_objects(entries, range(self.taken, self.taken + count))
                return
            for first in range(self.taken * width, (self.taken + count) * width, width):
                entries.add(*map(self._item, range(first, first + width)))
        finally:
            self.taken += len(entries) - before

    def _take_objects(self, entries: Entries, items: range) -> None:
        """Add an entry of one object for each of these items."""
        names, etags = self.names(items), self._etags
        for bucket, group in groupby(names, key=_bucket):
            skip = len(bucket) + 1
            keys = [name[skip:] for name in group]
            span, items = items[: len(keys)], items[len(keys) :]
            entries.add_objects(
                bucket.decode(),
                keys,
                self._sizes[span.start : span.stop].tolist(),
                [
                    bytes(etags[start : start + length])
                    for start, length in zip(
                        self._etag_at[span.start : span.stop],
                        self._etag_bytes[span.start : span.stop],
                        strict=True,
                    )
                ],
            )

    def _item(self, item: int) -> ObjectRef | bytes:
        if not self._pattern[item % len(self._pattern)]:
            return self.name(item)
        bucket, key, version = self.wanted(item)
        start = self._etag_at[item]
        etag = self._etags[start : start + self._etag_bytes[item]].decode()
        return ObjectRef(bucket, key, self._sizes[item], etag, version)


def _bucket(name: bytes) -> bytes:
    return name[: name.index(b"/")]
