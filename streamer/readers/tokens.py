"""`TokenReader`: a channel of raw tokens as NumPy arrays of a fixed length.

The objects have tokens of one integer type, little-endian, without a header (nanoGPT's `train.bin`, the
`.bin` of Megatron's indexed data sets). A block is `length` successive tokens of the stream:

    for block in TokenReader("train", "uint16", length=1024, batch_size=8, overlap=True):
        inputs, targets = block[:, :-1], block[:, 1:]

`streamer.readers.token_blocks` cuts the stream, without a copy. The arrays can be written, so
`torch.from_numpy(block)` shares their memory.

A block is a record of the format `fixed:BYTES`. So ranks share such a channel by record, in equal steps, and
the state is that of `PipeReader`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from streamer.errors import ChannelError
from streamer.readers.core.channel_reader import ChannelReader, paths_of, with_defaults
from streamer.readers.core.read_loop import ReadLoop
from streamer.readers.core.record_names import KeyedRecord
from streamer.readers.core.record_spec import RecordSpec, format_of
from streamer.readers.core.start import drop_bytes
from streamer.readers.token_blocks import TokenBlocks, TokenLayout
from streamer.step_state import is_step_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from streamer.readers.core.channel_reader import ReadOptions
    from streamer.readers.core.position import ReaderPosition
    from streamer.readers.core.record_names import RecordKey
    from streamer.readers.core.stream import PipeStream


class TokenReader(ChannelReader):
    """The blocks of a channel of tokens. Each `iter()` reads the next epoch.

    `dtype`: type of a token in the objects: 'uint16', 'uint32' or 'int32'. `length`: tokens of a block.
    `batch_size`: blocks of an array of shape (batch_size, length), the last one of an epoch shorter; None for
    arrays of shape (length,). `overlap`: blocks of length + 1, whose last token is the first one of the next
    block; for channels whose ranks do not share records. `drop_remainder`: leave out the last tokens if they
    are no whole block, and the shorter last array. `vocabulary`: number of tokens; a token beyond it raises
    CorruptRecord. `skip`: number of blocks with such a token that may be replaced (`SkipPolicy.records`),
    each by the block before; `skipped` counts them. `key`: arrays are `KeyedRecord`s: the array, the key of
    the object in which the block begins, the block's number there, and the bucket; with `batch_size` lists of
    keys and buckets, and an array of numbers. Errors name the block too. The sidecar must keep key lists
    (`RecordKeys`). Other arguments: as for `PipeReader`.

    Raises ValueError for an invalid argument, PipeModeDatasetException for a channel that is not a Pipe
    channel, ChannelError if the quarantine list cannot be written. Iterating raises ChannelError,
    TruncatedStream and CorruptRecord, and CutRecord if the tokens of an epoch are no whole number of blocks.
    """

    def __init__(
        self,
        channel: str,
        dtype: str,
        *,
        length: int,
        batch_size: int | None = None,
        overlap: bool = False,
        drop_remainder: bool = False,
        vocabulary: int | None = None,
        epoch: int | None = None,
        **options: Unpack[ReadOptions],
    ) -> None:
        chosen = with_defaults(options)
        skip = chosen["skip"]
        if skip is not None and (skip.objects or vocabulary is None):
            raise ValueError(
                "skip of TokenReader replaces blocks with a token beyond the vocabulary: give vocabulary, "
                "and a SkipPolicy with records only"
            )
        self._layout = TokenLayout(dtype, length, batch_size, overlap, drop_remainder, vocabulary)
        record_format = format_of([channel], paths_of(chosen).config, self.record_format)
        spec = RecordSpec(record_format, chosen["key"], skip)
        super().__init__(channel, spec, chosen, epoch=epoch)
        self._blocks: TokenBlocks
        """The blocks of the present epoch."""

    @property
    def record_format(self) -> str:
        """The format of a block for `penstock index` and other readers, such as `fixed:2048`."""
        return f"fixed:{self._layout.block_bytes}"

    def __len__(self) -> int:
        """Return the number of arrays of an epoch, if ranks share the channel by record.

        Waits until the sidecar offers the first epoch. Raises TypeError if the channel has no known length.
        """
        blocks, size = self._epochs.counts().records, self._layout.batch_size or 1
        return blocks // size if self._layout.drop_remainder else -(-blocks // size)

    def __iter__(self) -> Iterator[Any]:
        with self._next_epoch() as loop:
            size = self._layout.batch_size or 1
            for array in loop.lists():
                for first in range(0, len(array), size):
                    self.left = max(0, len(array) - first - size)
                    keys = self._blocks.row_keys[first : first + size]
                    yield self._element(array[first : first + size], keys)

    def _loop(self, stream: PipeStream, position: ReaderPosition) -> ReadLoop:
        self._check(stream)
        left = position.skip * self._layout.block_bytes
        for _ in drop_bytes(stream, left):
            pass
        position.offset, position.skip = position.offset + left, 0
        keys, skips = self._spec.keys(stream, position), self._spec.skips(stream, self.channel)
        self._blocks = TokenBlocks(
            stream,
            self._layout,
            origin=position.offset,
            skips=skips,
            keys=keys,
            keyed=self._spec.key,
        )
        arrays = ((array, None) for array in self._blocks.batches())
        # The loop takes an array of blocks as a list of records.
        reader: Any = self._blocks
        return ReadLoop(stream, reader, self._spec, position, lists=arrays, keys=keys)

    def _element(self, blocks: NDArray[Any], keys: list[RecordKey]) -> Any:
        """Return the array of successive blocks, or of the only one, with their keys."""
        if self._layout.batch_size is None:
            return KeyedRecord(blocks[0], *keys[0]) if self._spec.key else blocks[0]
        if not self._spec.key:
            return blocks
        names, numbers, buckets = map(list, zip(*keys, strict=True))
        return KeyedRecord._make((blocks, names, np.array(numbers, np.int64), buckets))

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last array that was returned, as `PipeReader.state_dict` does."""
        state = super().state_dict()
        if self._start is not None or self._position is None or is_step_state(state):
            return state
        # Whole bytes, so that a reader of another block length goes on at the same token.
        return state | {"offset": state["offset"] + state["skip"] * self._layout.block_bytes, "skip": 0}

    def _check(self, stream: PipeStream) -> None:
        """Raise ChannelError if ranks share the blocks of this reader, and these overlap."""
        if self._layout.overlap and stream.trailer is not None and stream.trailer.order is not None:
            raise ChannelError(
                f"the ranks of channel {self.channel} share records, so the block that follows in the stream "
                "may be of another place: leave out overlap, and write blocks with one token more"
            )
