"""`KeysAndSkips`: the options `key` and `skip` of a reader, and what they need in each epoch.

A reader with `key` names the object of each record, so it needs the epoch's key list. A reader with `skip`
leaves out corrupt records within a budget, and uses a key list if the FIFO has one.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from streamer.readers.core.epoch_skips import EpochSkips
from streamer.readers.core.record_keys import RecordKeys, with_keys
from streamer.readers.core.skipping import SkipCounts, check_skip

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamer.formats.window import RecordReader
    from streamer.readers.core.skipping import SkipPolicy
    from streamer.readers.core.stream import PipeStream


class KeysAndSkips:
    """The options of one reader, and what it has skipped so far."""

    def __init__(
        self, record_format: str, *, key: bool = False, skip: SkipPolicy | None = None, placed: bool = False
    ) -> None:
        """`placed`: as for `EpochSkips`. Raises as `check_skip`."""
        check_skip(skip, record_format)
        kind, _, size = record_format.partition(":")
        self._size = int(size) if kind == "fixed" else 0
        self.key = key
        self.skip = skip
        self.skipped = SkipCounts()
        """What `skip` has left out so far."""
        self._placed = placed

    @contextlib.contextmanager
    def epoch(
        self, stream: PipeStream, channel: str, *, offset: int, number: int | None = None
    ) -> Iterator[tuple[RecordKeys | None, EpochSkips | None]]:
        """Yield the keys and the skips of an epoch's records, each None if it is not needed.

        `offset`, `number`: as for `RecordKeys`. Raises ChannelError.
        """
        keys = RecordKeys.wanted(
            stream,
            offset=offset,
            number=number,
            size=self._size,
            key=self.key,
            skip=self.skip is not None,
        )
        skips = None
        if self.skip is not None:
            skips = EpochSkips(
                self.skip, channel, stream.epoch, self.skipped, keyed=self.key, placed=self._placed
            )
        with contextlib.closing(keys) if keys is not None else contextlib.nullcontext():
            yield keys, skips


def placed_lists(
    reader: RecordReader, stream: PipeStream, keys: RecordKeys | None, skips: EpochSkips | None, base: int
) -> Iterator[tuple[list[Any], int | None]]:
    """Yield the lists of `reader` on `stream`, each with the number before it.

    `base`: offset in the epoch of the reader's first byte.
    """
    if skips is None:
        return with_keys(reader, keys, base)
    return skips.lists(reader, keys, base, proven=stream.trailer is not None)
