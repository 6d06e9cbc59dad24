"""The offsets of a record index that stay in its file, and are read when a record is looked up.

    number ─▶ block of the file ─▶ page of 512 numbers ─▶ read, compared with its checksum ─▶ offset

An index of every record has 8 bytes a record. Here a page's CRC-32 is in memory, 4 bytes for 512 records, and
the last pages that were looked up are. The checksums are of the bytes that the block's own checksum has
proven. So a file that is changed after that is an error, and never a wrong offset.

Pure: `source` does the I/O.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol, overload

from streamer.formats.crc32 import crc32

NUMBER = 8
"""Bytes of a number."""
PAGE = 512
"""Numbers of a page; the last one of a block may have fewer."""
_PAGE_BYTES = PAGE * NUMBER
PIECE = PAGE * 256
"""Numbers that are read at once where many are: a MiB."""
MOST_PAGES = 256
"""Pages in memory, 1 MiB: the ranks of a host look up records in several places in turn, and a shared stream
looks up each block when it is requested and again when it is delivered."""


class IndexSource(Protocol):
    """The bytes of an index."""

    @property
    def size(self) -> int:
        """Number of bytes."""
        ...

    def read(self, position: int, count: int) -> bytes | memoryview:
        """Return `count` bytes from `position` on. Raises an error of its own if there are fewer."""
        ...

    def changed(self) -> Exception:
        """Return the error of bytes that are not those of before."""
        ...


def numbers_of(data: bytes | memoryview) -> array[int]:
    """Return the numbers that `data` holds."""
    numbers = array("Q", bytes(data))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


class StoredOffsets(Sequence[int]):
    """The offsets of all rows of an index, in the order of its file. Threads may share it."""

    def __init__(self, source: IndexSource) -> None:
        self._source = source
        self._starts, self._positions = array("Q", [0]), array("Q")
        """For each block, the number of its first offset, and one more for the end; and their positions."""
        self._first_pages, self._sums = array("Q"), array("I")
        """For each block, the number of its first page; for each page, its checksum."""
        self.pieces = array("Q")
        """Numbers from which on offsets may be read at once: they are in one block."""
        self._pages: dict[int, array[int]] = {}
        self._last: tuple[int, array[int]] = 0, array("Q")
        """The page that was looked up last, with the number of its first offset."""

    def __len__(self) -> int:
        return self._starts[-1]

    def add(self, position: int, count: int, sums: Sequence[int]) -> None:
        """Add a block's offsets: `count` numbers at this position. `sums`: CRC-32 of each page."""
        if count:
            first = self._starts[-1]
            self.pieces.extend(range(first, first + count, PIECE))
            self._starts.append(first + count)
            self._positions.append(position)
            self._first_pages.append(len(self._sums))
            self._sums.extend(sums)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> array[int]: ...
    def __getitem__(self, index: int | slice) -> int | array[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._starts[-1])
            if step != 1:
                raise ValueError(f"a step of {step}")
            return self._between(start, stop) if start < stop else array("Q")
        first, page = self._last
        if not first <= index < first + len(page):
            if not 0 <= index < len(self):
                raise IndexError(index)
            page, within = self._page_of(index)
            first = index - within
            self._last = first, page
        return page[index - first]

    def _between(self, start: int, stop: int) -> array[int]:
        """Return some numbers, once the pages that have them are compared with their checksums."""
        return array("Q", self.view(start, stop).tobytes())

    def view(self, start: int, stop: int) -> memoryview:
        """Return some numbers, as `_between` does, without a copy if they are in one block of the file."""
        block = bisect_right(self._starts, start) - 1
        first, end = self._starts[block], self._starts[block + 1]
        if stop > end:
            return memoryview(self._between(start, end) + self._between(end, stop))
        page, last = (start - first) // PAGE, (stop - 1 - first) // PAGE
        at, until = page * _PAGE_BYTES, min((last + 1) * _PAGE_BYTES, (end - first) * NUMBER)
        data = self._source.read(self._positions[block] + at, until - at)
        name = self._first_pages[block] + page
        if page == last:
            whole = crc32(data) == self._sums[name]
        else:
            view = memoryview(data)
            pages = [view[at : at + _PAGE_BYTES] for at in range(0, until - at, _PAGE_BYTES)]
            whole = array("I", map(crc32, pages)) == self._sums[name : name + len(pages)]
        if not whole:
            raise self._source.changed()
        skipped = (start - first) * NUMBER - at
        some = memoryview(data)[skipped : skipped + (stop - start) * NUMBER]
        return some.cast("Q") if sys.byteorder == "little" else memoryview(numbers_of(some))

    def _page_of(self, number: int) -> tuple[array[int], int]:
        """Return the page of a number, and its place in it."""
        block = bisect_right(self._starts, number) - 1
        page, within = divmod(number - self._starts[block], PAGE)
        name = self._first_pages[block] + page
        numbers = self._pages.get(name)
        if numbers is None:
            first = number - within
            numbers = self._between(first, min(first + PAGE, self._starts[block + 1]))
            if len(self._pages) >= MOST_PAGES:
                self._pages.pop(next(iter(self._pages)), None)  # another thread may do the same
            self._pages[name] = numbers
        return numbers, within
