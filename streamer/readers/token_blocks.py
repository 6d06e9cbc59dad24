"""Cuts a stream of tokens into NumPy arrays of blocks.

    readinto -> [ rest | tokens ... ] -> view of shape (blocks, length) -> caller
                                 `-> rest: the incomplete block, copied into the next array

The bytes are read into the array of which the caller gets views, so there is no copy between. With an
overlap, a block has the first token of the next block too: the blocks are overlapping views of one array.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from streamer.errors import CorruptRecord, CutRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from streamer.formats.window import Source

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

    `origin`: offset of the first byte in the epoch, for errors.
    """

    skipped_records = 0

    def __init__(self, source: Source, layout: BlockLayout, *, origin: int = 0) -> None:
        self._source = source
        self._layout = layout
        self._origin = origin
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
            good, fault = self._checked(tokens[: have // dtype.itemsize], blocks)
            if good:
                self.offset += good * step
                yield layout.blocks(tokens, good)
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
        offset = self._origin + self.offset + first * tokens.itemsize
        return max(0, first - layout.overlap) // layout.length, CorruptRecord(
            f"token {tokens[first]} at offset {offset} of the stream is not one of the {layout.vocabulary} "
            f"tokens of the vocabulary: check that the objects have {layout.dtype} tokens and no header"
        )

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
