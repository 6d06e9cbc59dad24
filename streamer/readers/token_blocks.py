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
from typing import TYPE_CHECKING, Any

import numpy as np

from streamer.errors import CorruptRecord, CutRecord
from streamer.readers.core.skipping import SkippedRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from streamer.formats.window import Source
    from streamer.readers.core.epoch_skips import EpochSkips
    from streamer.readers.core.record_keys import RecordKeys

ARRAY_BYTES = 1 << 20
"""Bytes of an array, if a batch is not larger: small reads cost more CPU time than the bytes do."""
_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint16", "uint32", "int32")}


@dataclass(frozen=True)
class BlockLayout:
    """How a stream is cut into blocks. Raises ValueError for an invalid field."""

    dtype: str
    """`uint16`, `uint32` or `int32`, little-endian."""
    length: int
    """Tokens from the begin of one block to that of the next."""
    batch_size: int | None = None
    """Blocks of a batch; None for single blocks."""
    overlap: bool = False
    drop_remainder: bool = False
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"the type of a token is {self.dtype!r}: write {', '.join(_DTYPES)}")
        for name in ("length", "batch_size", "vocabulary"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be 1 or more")

    @property
    def block_bytes(self) -> int:
        """Bytes from the begin of one block to that of the next."""
        return self.length * _DTYPES[self.dtype].itemsize

    def blocks(self, tokens: NDArray[Any], count: int) -> NDArray[Any]:
        """Return the first `count` blocks of `tokens` as a view."""
        shape, item = (count, self.length + self.overlap), tokens.itemsize
        return np.lib.stride_tricks.as_strided(tokens, shape, (self.length * item, item))


class TokenBlocks:
    """Reads one stream, once. As a RecordReader, but its `batches` yields arrays whose rows are records.

    `origin`: offset of the first byte in the epoch, for errors. `skips`: the layout has a vocabulary, and the
    blocks with a token beyond it are replaced within their budget. `keys`: to list the keys of those.
    """

    skipped_records = 0

    def __init__(
        self,
        source: Source,
        layout: BlockLayout,
        *,
        origin: int = 0,
        skips: EpochSkips | None = None,
        keys: RecordKeys | None = None,
    ) -> None:
        self._source = source
        self._layout = layout
        self._origin = origin
        self._skips = skips
        self._keys = keys
        self._good: NDArray[Any] | None = None
        """Copy of the last block, for the place of a corrupt one; only with skips."""
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
            rest = bytes(view[blocks * step : have])
            if self._skips is None:
                good, fault = self._checked(tokens[: have // dtype.itemsize], blocks)
                array = layout.blocks(tokens, good)
            else:
                array, fault = self._replaced(tokens, blocks, self._skips)
            if len(array):
                self.offset += len(array) * step
                yield array
            if fault is not None:
                raise fault
        self._finish(len(rest), dtype.itemsize)

    def _checked(self, tokens: NDArray[Any], blocks: int) -> tuple[int, CorruptRecord | None]:
        """Return the number of blocks before the first token that is beyond the vocabulary, and its error."""
        layout = self._layout
        if layout.vocabulary is None or not blocks:
            return blocks, None
        tokens = tokens[: blocks * layout.length + layout.overlap]
        if tokens.min() >= 0 and tokens.max() < layout.vocabulary:
            return blocks, None
        first = int(np.argmax((tokens < 0) | (tokens >= layout.vocabulary)))
        return max(0, first - layout.overlap) // layout.length, CorruptRecord(self._reason(tokens, first))

    def _reason(self, tokens: NDArray[Any], index: int) -> str:
        layout, offset = self._layout, self._origin + self.offset + index * tokens.itemsize
        return (
            f"token {tokens[index]} at offset {offset} of the stream is not one of the {layout.vocabulary} "
            f"tokens of the vocabulary: check that the objects have {layout.dtype} tokens and no header"
        )

    def _replaced(
        self, tokens: NDArray[Any], blocks: int, skips: EpochSkips
    ) -> tuple[NDArray[Any], CorruptRecord | None]:
        """Return the blocks up to the first one over the budget, corrupt ones replaced, and its error."""
        layout, rows = self._layout, self._layout.blocks(tokens, blocks)
        if not blocks:
            return rows, None
        tokens = tokens[: blocks * layout.length + layout.overlap]
        if tokens.min() < 0 or tokens.max() >= layout.vocabulary:
            wrong = (tokens < 0) | (tokens >= layout.vocabulary)
            bad = layout.blocks(wrong, blocks).any(axis=1)
            rows = rows.copy()
            if self._good is None and not bad.all():
                self._good = rows[int(np.argmin(bad))].copy()
            for place in np.flatnonzero(bad).tolist():
                first = place * layout.length
                reason = self._reason(tokens, first + int(np.argmax(wrong[first:])))
                start = self._origin + self.offset + first * tokens.itemsize
                # The number of a block in its object is not counted.
                key, _, bucket = (None, None, None) if self._keys is None else self._keys.take_line(start)
                if not skips.admit([SkippedRecord(start, reason, "record", key, None, bucket)]):
                    return rows[:place], skips.refusal()
                if self._good is None:
                    return rows[:0], CorruptRecord(
                        f"{reason}; the {blocks} blocks since reading began all have such a token, so no "
                        "block can take their places"
                    )
                rows[place] = rows[place - 1] if place else self._good
        self._good = rows[-1].copy()
        return rows, None

    def _finish(self, left: int, itemsize: int) -> None:
        whole, cut = divmod(left, itemsize)
        # The last block has used the only token of an overlap.
        if cut or (whole > self._layout.overlap and not self._layout.drop_remainder):
            raise CutRecord(
                f"the stream ends inside a token block: {left} bytes are left from offset "
                f"{self._origin + self.offset} on, and a block has {self._layout.block_bytes}; check dtype "
                "and length, fill up the objects, or set drop_remainder"
            )


def join_blocks(records: Sequence[bytes], dtype: str) -> NDArray[Any]:
    """Return records of the format `fixed:BYTES` as an array of shape (records, tokens).

    For `decode` of `PipeIterableDataset` with a `batch_size`. The array can be written. Raises ValueError for
    an unknown dtype, for no record, and for records that are no whole number of tokens or of several sizes.
    """
    token = BlockLayout(dtype, length=1).block_bytes
    sizes = set(map(len, records))
    if len(sizes) != 1 or min(sizes) % token:
        raise ValueError(
            f"{len(records)} records of {', '.join(map(str, sorted(sizes))) or 'no'} bytes are no blocks of "
            f"{dtype} tokens"
        )
    return np.frombuffer(bytearray().join(records), _DTYPES[dtype]).reshape(len(records), -1)
