"""Cuts a stream of tokens into NumPy arrays of blocks.

    readinto -> [ rest | tokens ... ] -> view of shape (blocks, length) -> caller
                                 `-> rest: the incomplete block, copied into the next array

The bytes are read into the array of which the caller gets views, so there is no copy between. With an
overlap, a block has the first token of the next block too: the blocks are overlapping views of one array.

With skips, the block before takes the place of a block that has a token beyond the vocabulary, so arrays,
steps and positions are the same as without damage. Only an array with such a block is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from streamer.errors import CorruptRecord, CutRecord
from streamer.formats.signatures import LOOKED_AT, foreign
from streamer.readers.core.record_names import KeyRun, Named, named
from streamer.readers.core.skipping import SkippedRecord
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from streamer.formats.window import Source
    from streamer.readers.core.epoch_skips import EpochSkips
    from streamer.readers.core.record_keys import RecordKeys
    from streamer.readers.core.record_names import RecordKey

LEAST_LOOKED_AT = 64
"""Least number of tokens that show a wrong width."""
ARRAY_BYTES = 1 << 20
"""Bytes of an array, if a batch is not larger: small reads cost more CPU time than the bytes do."""
_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint16", "uint32", "int32")}


@dataclass(frozen=True)
class TokenLayout:
    """How a stream is cut into blocks. Raises ValueError for an invalid field."""

    dtype: str
    """`uint16`, `uint32` or `int32`, little-endian."""
    length: int
    """Tokens from the start of one block to the start of the next."""
    batch_size: int | None = None
    """Blocks of a batch; None for single blocks."""
    overlap: bool = False
    drop_remainder: bool = False
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"the type of a token is {self.dtype!r}: write {', '.join(_DTYPES)}")
        if self.vocabulary is not None and self.vocabulary - 1 > np.iinfo(self.dtype).max:
            raise ValueError(
                f"{self.dtype} has no {self.vocabulary} tokens: the objects have a wider type, or the "
                "vocabulary is smaller"
            )
        for name in ("length", "batch_size", "vocabulary"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be 1 or more")

    @property
    def block_bytes(self) -> int:
        """Bytes from the start of one block to the start of the next."""
        return self.length * _DTYPES[self.dtype].itemsize

    def blocks(self, tokens: NDArray[Any], count: int) -> NDArray[Any]:
        """Return the first `count` blocks of `tokens` as a view."""
        shape, item = (count, self.length + self.overlap), tokens.itemsize
        return np.lib.stride_tricks.as_strided(tokens, shape, (self.length * item, item))


class TokenBlocks:
    """Reads one stream, once. As a RecordReader, but its `batches` yields arrays whose rows are records.

    `origin`: offset of the first byte in the epoch, for errors. `skips`: the layout has a vocabulary, and the
    blocks with a token beyond it are replaced within their budget. `keys`: errors and skips name the blocks.
    `keyed`: the keys of all blocks are in `row_keys`.
    """

    skipped_records = 0

    def __init__(
        self,
        source: Source,
        layout: TokenLayout,
        *,
        origin: int = 0,
        skips: EpochSkips | None = None,
        keys: RecordKeys | None = None,
        keyed: bool = False,
    ) -> None:
        self._source = source
        self._layout = layout
        self._origin = origin
        self._skips = skips
        self._keys = keys
        self._keyed = keyed
        self._good: tuple[NDArray[Any], RecordKey | None] | None = None
        """Copy of the last block, for the place of a corrupt one, and its key; only with skips."""
        self.row_keys: list[RecordKey] = []
        """Keys of the last array's blocks, if `keyed`."""
        self.offset = 0
        """Offset in the stream of the next block, in bytes."""

    def batches(self) -> Iterator[NDArray[Any]]:
        """Yield arrays of shape (blocks, tokens), of whole batches but for the last one.

        Raises CorruptRecord at a token beyond the vocabulary, after the blocks before it; CutRecord if tokens
        are left at the end of the stream that are no whole block; and the source's errors.
        """
        layout, step = self._layout, self._layout.block_bytes
        dtype = _DTYPES[layout.dtype]
        extra = layout.overlap * dtype.itemsize
        batch = layout.batch_size or 1
        rows = max(1, ARRAY_BYTES // (step * batch)) * batch
        wanted = step * batch + extra
        rest, ended = b"", False
        while not ended:
            tokens = np.empty(rows * layout.length + layout.overlap, dtype)
            view = memoryview(tokens.data).cast("B")
            view[: len(rest)] = rest
            have = len(rest)
            while have < wanted and not ended:
                count = self._source.readinto(view[have:])
                ended = count == 0
                have += count or 0
            blocks = max(0, have - extra) // step
            if not ended or layout.drop_remainder:
                blocks -= blocks % batch
            if not self._origin + self.offset:
                self._check_begin(tokens, bytes(view[: min(have, LOOKED_AT)]), have // dtype.itemsize)
            rest = bytes(view[blocks * step : have])
            array, fault = layout.blocks(tokens, blocks), None
            bad = self._bad_blocks(tokens, blocks)
            names = self._names(range(blocks) if self._keyed else bad if self._skips else islice(bad, 1))
            if self._skips is not None and blocks:
                array, fault = self._replaced(array, bad, names, self._skips)
            elif bad:
                first, reason = next(iter(bad.items()))
                array, fault = array[:first], _named(CorruptRecord(reason), names.get(first))
            self.row_keys = [names[row] for row in range(len(array))] if self._keyed else []
            if len(array):
                self.offset += len(array) * step
                yield array
            if fault is not None:
                raise fault
        self._finish(len(rest), dtype.itemsize)

    def _check_begin(self, tokens: NDArray[Any], first: bytes, count: int) -> None:
        """Raise CorruptRecord if an epoch begins with a header, or with tokens of a wider type.

        Tokens of twice the width are pairs of a token and its upper half. If all upper halves are 0, both
        stay within the vocabulary.
        """
        if (found := foreign(first, "fixed")) is not None:
            raise CorruptRecord(f"the stream does not begin with tokens: {found.refusal('tokens')}")
        if self._layout.vocabulary is None or count < LEAST_LOOKED_AT:
            return
        if not tokens[1:count:2].any() and tokens[0:count:2].any():
            raise CorruptRecord(
                f"every second one of the first {count} tokens is 0: the objects have tokens of a wider type "
                f"than {self._layout.dtype}"
            )

    def _bad_blocks(self, tokens: NDArray[Any], blocks: int) -> dict[int, str]:
        """Return, for each block with a token beyond the vocabulary, why it is corrupt."""
        layout = self._layout
        if layout.vocabulary is None or not blocks:
            return {}
        tokens = tokens[: blocks * layout.length + layout.overlap]
        if tokens.min() >= 0 and tokens.max() < layout.vocabulary:
            return {}
        wrong = (tokens < 0) | (tokens >= layout.vocabulary)
        bad = np.flatnonzero(layout.blocks(wrong, blocks).any(axis=1))
        starts = bad * layout.length
        return {
            row: self._reason(tokens, start + int(np.argmax(wrong[start:])))
            for row, start in zip(bad.tolist(), starts.tolist(), strict=True)
        }

    def _reason(self, tokens: NDArray[Any], index: int) -> str:
        layout, offset = self._layout, self._origin + self.offset + index * tokens.itemsize
        return (
            f"token {tokens[index]} at offset {offset} of the stream is not one of the {layout.vocabulary} "
            f"tokens of the vocabulary: check that the objects have {layout.dtype} tokens and no header"
        )

    def _begin(self, row: int) -> int:
        """Return the offset in the epoch of a block of the present array."""
        return self._origin + self.offset + row * self._layout.block_bytes

    def _names(self, rows: Iterable[int]) -> dict[int, RecordKey]:
        """Return the keys of these blocks of the present array; none without a key list."""
        if self._keys is None:
            return {}
        names: dict[int, RecordKey] = {}
        for together in [list(rows)] if self._keyed else [[row] for row in rows]:  # runs have no gaps
            runs = self._keys.take(list(map(self._begin, together)))
            names.update(zip(together, chain.from_iterable(map(KeyRun.record_keys, runs)), strict=True))
        return names

    def _replaced(
        self, rows: NDArray[Any], bad: dict[int, str], names: dict[int, RecordKey], skips: EpochSkips
    ) -> tuple[NDArray[Any], CorruptRecord | None]:
        """Return the blocks up to the first one over the budget, corrupt ones replaced, and its error.

        In `names` the key of a replaced block becomes that of the block in its place.
        """
        if bad:
            rows = rows.copy()
            if self._good is None and len(bad) < len(rows):
                first = next(row for row in range(len(rows)) if row not in bad)
                self._good = rows[first].copy(), names.get(first)
            for row, reason in bad.items():
                place = names.get(row, (None, None, None))
                if not skips.admit([SkippedRecord(self._begin(row), reason, "record", *place)]):
                    return rows[:row], skips.refusal()
                if self._good is None:
                    return rows[:0], CorruptRecord(
                        f"{reason}; the {len(rows)} blocks since reading began all have such a token, so no "
                        "block can take their places"
                    )
                rows[row], name = (rows[row - 1], names.get(row - 1)) if row else self._good
                if name is not None:
                    names[row] = name
        self._good = rows[-1].copy(), names.get(len(rows) - 1)
        return rows, None

    def _finish(self, left: int, itemsize: int) -> None:
        whole, cut = divmod(left, itemsize)
        # The last block has used the only token of an overlap.
        if cut or (whole > self._layout.overlap and not self._layout.drop_remainder):
            error = CutRecord(
                f"the stream ends inside a token block: {counted(left, 'byte is', 'bytes are')} left from "
                f"offset {self._begin(0)} on, and a block has {self._layout.block_bytes}; check dtype "
                "and length, fill up the objects, or set drop_remainder"
            )
            raise _named(error, self._names([0]).get(0))


def _named(error: Named, key: RecordKey | None) -> Named:
    return error if key is None else named(error, key)


def join_blocks(records: Sequence[bytes], dtype: str) -> NDArray[Any]:
    """Return records of the format `fixed:BYTES` as an array of shape (records, tokens).

    For `decode` of `PipeIterableDataset` with a `batch_size`. The array can be written. Raises ValueError for
    an unknown dtype, for no record, and for records that are no whole number of tokens or of several sizes.
    """
    token = TokenLayout(dtype, length=1).block_bytes
    sizes = set(map(len, records))
    if len(sizes) != 1 or min(sizes) % token:
        raise ValueError(
            f"{len(records)} records of {', '.join(map(str, sorted(sizes))) or 'no'} bytes are no blocks of "
            f"{dtype} tokens"
        )
    return np.frombuffer(bytearray().join(records), _DTYPES[dtype]).reshape(len(records), -1)
