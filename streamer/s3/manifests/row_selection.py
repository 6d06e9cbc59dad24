"""Selects rows of a manifest before their objects are looked for, so that other objects cost no request.

    scanner ─ rows ─ globs (`ManifestFile`) ─ limit by objects: the first rows, or a sample ─ blocks of rows

A limit of bytes needs the sizes of the objects; `Manifest.runs` applies it to what the finder has found.

A sample of rows is known when the manifest has ended. Until then it is kept in the compact form of entries.
Objects of a `ManifestFile` draw by bucket and key, lines of an augmented manifest by their number.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from streamer.plan import Entries, ObjectRef, parse_object_uri
from streamer.plan.selection import Selector

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streamer.plan.selection import KeyFilter, Selection

    Items = list[bytes | str]
    """Items of whole rows: literals as bytes, objects as valid URIs."""


class RowSelection:
    """The rows of one manifest that are selected. Pure and synchronous."""

    def __init__(self, selection: Selection, *, width: int, augmented: bool) -> None:
        """`width`: items of a row."""
        self.full = False
        """Whether no further row can be selected."""
        self.keys: KeyFilter | None = None
        """The globs, once the first row has come; None without globs."""
        self._selection = selection
        self._width = width
        limit = selection.limit
        self._most = None if limit is None or limit.seed is not None else limit.objects
        """Rows to take; None: no limit of the first rows."""
        sample = limit is not None and limit.objects is not None and limit.seed is not None
        self._sample = Selector(limit, Entries, by_number=augmented) if sample else None
        self._rows = 0
        """Rows read."""
        self._numbers = array("Q")
        """By selected row, its number in the manifest."""

    def number(self, row: int) -> int:
        """Return the number in the manifest, from 0, of a selected row."""
        return self._numbers[row]

    def take(self, items: Items, prefix: str) -> Items:
        """Return the items of the next rows that are selected; a sample has none until `finish`.

        `prefix`: key prefix of the manifest, below which globs see the keys.
        """
        width, numbers = self._width, range(self._rows, self._rows + len(items) // self._width)
        self._rows = numbers.stop
        kept: Sequence[int] = numbers
        if self._selection.by_key:
            if self.keys is None:
                self.keys = self._selection.keys(prefix)
            selected = [self.keys(_key(item)) for item in items]
            items = [item for item, keep in zip(items, selected, strict=True) if keep]
            kept = [number for number, keep in zip(numbers, selected, strict=True) if keep]
        if self._sample is not None:
            self._sample.take(self._drawn(items, kept))
            return []
        if self._most is not None:
            left = self._most - len(self._numbers)
            items, kept = items[: left * width], kept[:left]
        self._numbers.extend(kept)
        self.full = len(self._numbers) == self._most
        return items

    def finish(self) -> Items:
        """Return the items of a sample's rows, in the manifest's order; without a sample none."""
        items: Items = []
        if self._sample is not None:
            for *row, number in self._sample.finish():
                if isinstance(number, bytes):
                    self._numbers.append(int(number))
                items += [_uri(item) if isinstance(item, ObjectRef) else item for item in row]
        return items

    def _drawn(self, items: Items, numbers: Sequence[int]) -> Entries:
        """Return an entry for each row, which ends with the row's number as text."""
        entries = Entries()
        for index, number in enumerate(numbers):
            row = items[index * self._width : (index + 1) * self._width]
            entries.add(*[_ref(item) if isinstance(item, str) else item for item in row], b"%d" % number)
        return entries


def _key(item: bytes | str) -> str:
    """Return the key of an object's URI."""
    return parse_object_uri(str(item))[0].key


def _ref(uri: str) -> ObjectRef:
    (bucket, key), version = parse_object_uri(uri)
    return ObjectRef(bucket, key, 0, "", version)


def _uri(ref: ObjectRef) -> str:
    return f"s3://{ref.bucket}/{ref.key}" + (f"?versionId={ref.version}" if ref.version else "")
