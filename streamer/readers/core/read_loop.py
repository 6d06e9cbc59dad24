"""`ReadLoop`: the one loop over the records of a stream, in plain Python, PyTorch and TensorFlow.

    RecordReader ─▶ lists, with keys or skips ─▶ counted ─▶ without what was received ─▶ (windows) ─▶ blocks

The loop numbers the records of the epoch. What a consumer makes of the numbers is its own: the readers of one
process move a `ReaderPosition` (`ReadLoop.lists`), PyTorch adds up the ranges that the trainer has received,
and processes that read one FIFO in turns pass the next number on (`streamer.readers.torch.shared_cursor`).

Ranks that share a channel by record have the number of records from the record index. If the index is not of
the objects, or the reader has another format, a rank would take more or fewer steps than the others, which
then wait for it for ever. So the loop raises an error: before the first surplus record, or at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamer.errors import ChannelError, StreamError
from streamer.readers.core.position import RankSteps, step_records
from streamer.readers.core.record_keys import with_keys
from streamer.readers.core.shuffle import NumberedRecords, Windows
from streamer.readers.core.skipping import Replacements

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from streamer.formats.window import RecordReader
    from streamer.readers.core.position import ReaderPosition
    from streamer.readers.core.record_keys import RecordKeys
    from streamer.readers.core.record_spec import RecordSpec
    from streamer.readers.core.stream import PipeStream

    Lists = Iterator[tuple[Any, int | None]]
    """Lists of records, each with the number in its object of the record before which it begins."""

_END = None, None


class ReadLoop:
    """The records of one stream, as `NumberedRecords`. The caller iterates the loop to its end, or closes it.

    `reader` reads `stream` from the byte of `position` on. The loop leaves out the records before the record
    of `position`, and those of `gaps`, of which each begins with two numbers, `first` and `end`. `lists`: the
    lists of `reader` in a form of the caller's, instead of those with the keys and skips of `spec`; `keys`:
    the key list that they use. A corrupt record is in its place as a `SkippedRecord`; if ranks share the
    channel by record, a good record takes its place.
    """

    def __init__(
        self,
        stream: PipeStream,
        reader: RecordReader,
        spec: RecordSpec,
        position: ReaderPosition,
        *,
        gaps: Iterable[tuple[Any, ...]] = (),
        lists: Lists | None = None,
        keys: RecordKeys | None = None,
    ) -> None:
        self.stream = stream
        self.spec = spec
        self.position = position
        """The position at which the loop begins. `lists` moves it."""
        self.number = position.records - position.skip
        """Number in the epoch of the next record."""
        self.left_out = 0
        """Corrupt records that `reader` has left out, which have no number."""
        self.rank: RankSteps | None = RankSteps.of(stream.trailer)
        """Steps of the epoch, by the trailer as last read."""
        if self.rank is not None and self.rank.workers > 1 and spec.shuffle is not None:
            raise ChannelError(
                f"shuffle would mix the global batches of {self.rank.channel}, which workers return in turn: "
                "leave shuffle out, and give the channel a ShuffleConfig, or remove Ranks.Workers"
            )
        self._trailer = stream.trailer
        self._reader = reader
        self._base = position.offset
        self._returned = 0 if position.window is None else position.records - position.window
        """Records of the first window that were returned before. The window is read again."""
        self._received = [(0, position.records - self._returned), *((gap[0], gap[1]) for gap in gaps)]
        """Records to leave out, by number: first, end."""
        self._left_out_before = reader.skipped_records
        self._keys = keys if lists is not None else spec.keys(stream, position)
        self.skips = spec.skips(stream, position.channel) if lists is None else None
        """What is left out of the epoch; None without `skip`."""
        self._replacements = Replacements(position.channel)
        self._lists = self._own_lists() if lists is None else lists

    def _own_lists(self) -> Lists:
        if self.skips is None:
            return with_keys(self._reader, self._keys, self._base)
        proven = self._trailer is not None
        return self.skips.lists(self._reader, self._keys, self._base, proven=proven)

    def close(self) -> None:
        """Close the key list. Safe to call again."""
        if self._keys is not None:
            self._keys.close()

    @property
    def fits(self) -> bool:
        """Whether the epoch has no further record; True if the trailer has no number of records."""
        return self._due is None or self.number + self.left_out == self._due

    @property
    def _due(self) -> int | None:
        return self._trailer.records if self._trailer else None

    def read(self) -> list[NumberedRecords] | None:
        """Read the next list; return what is left of it, an empty block if no bytes came, None at the end.

        Raises StreamError if the epoch has another number of records than the trailer promises; the records
        up to that number come before. Otherwise raises as the reader.
        """
        stream, reader, before = self.stream, self._reader, self.number + self.left_out
        # Before the next list, because another process may have found the surplus.
        if (due := self._due) is not None and before > due:
            raise self._miscounted(f"more than {due}")
        offset, first = self._base + reader.offset, self.number
        records, in_object = next(self._lists, _END)
        if (trailer := stream.trailer) is not self._trailer:
            self._trailer, self.rank = trailer, RankSteps.of(trailer)
        if records is None:
            if not self.fits:
                raise self._miscounted(f"{before} of {self._due}")
            return None
        self.number += len(records)
        self.left_out = reader.skipped_records - self._left_out_before
        if (due := trailer.records if trailer else None) is not None and self.number + self.left_out > due:
            if before >= due or not hasattr(records, "__getitem__"):  # a batch in place cannot be divided
                return []
            records = records[: due - before]
        if first < self._received[0][1] and self.left_out and self.rank is not None:
            raise ChannelError(
                f"{stream.name} has corrupt records before or near the step of the state, so the reader "
                "cannot count to that step; start the sidecar with --resume and this state"
            )
        last = trailer is not None and self._base + reader.offset == trailer.bytes_total
        block = NumberedRecords(records, first, offset, 0, in_object, None, last)
        return [block] if first >= self._received[-1][1] or not len(records) else self._remaining(block)

    def _remaining(self, block: NumberedRecords) -> list[NumberedRecords]:
        """Return the parts of a block that are not received yet."""
        count = len(block.records)
        parts = missing(block.first, count, self._received)
        if self.skips is not None and self.rank is not None:
            ends = [0, *(end for _, end in parts)]
            for end, begin in zip(ends, [*(begin for begin, _ in parts), count], strict=True):
                self._replacements.pass_over(block.records[end:begin])
        return [block.part(begin, end) for begin, end in parts]

    def __iter__(self) -> Iterator[NumberedRecords]:
        """Yield the records; a block without records if no bytes came, or none that can be returned yet.

        Raises CorruptRecord for a record that is over the budget, after the records before it, and as `read`.
        """
        skips, shuffle, windows = self.skips, self.spec.shuffle, None
        if shuffle is not None:
            windows = Windows(shuffle, self.stream.epoch, returned=self._returned)
        try:
            while (blocks := self.read()) is not None:
                for block in blocks:
                    none = True
                    for ready in self._ready(block, windows):
                        yield ready
                        none = False
                    if none and self.stream.patience is not None:
                        yield block.part(0, 0)
                if skips is not None:
                    skips.check_refused()
            self._replacements.check_filled()
            if windows is not None:
                yield from windows.finish()
        finally:
            self.close()

    def _ready(self, block: NumberedRecords, windows: Windows | None) -> Iterable[NumberedRecords]:
        """Return what a block makes ready: itself, or pieces of the windows that it completes."""
        skips = self.skips
        if not len(block.records):
            return [block]
        if skips is not None and skips.bad and (stop := skips.admit(block.records)) < len(block.records):
            block = block.part(0, stop)
        ready = [block]
        if skips is not None and self.rank is not None:
            ready = self._replacements.filled(block)
        if windows is None:
            return ready
        step = step_records(self.rank)
        return (piece for each in ready for piece in windows.add(each, step))

    def lists(self) -> Iterator[Any]:
        """Yield the lists of records, and move `position`, which is after the list that the caller has.

        `ReaderPosition.before` gives positions inside it. Digest and length of the epoch are those of the
        trailer as last read, because a plan may grow.
        """
        position = self.position
        position.rank = self.rank
        if self.spec.shuffle is not None:
            position.shuffle = self.spec.shuffle
        for block in self:
            position.rank, position.skipped = self.rank, self.left_out
            if len(block.records):
                position.digest = self.stream.digest
                position.reach(block)
            yield block.records
        position.end_epoch(self.stream.digest)

    def go_on(self, rest: bytes, offset: int, *, number: int, in_object: int | None) -> None:
        """Continue at record `number`, at `offset`, with the bytes from there on that another process read.

        `in_object`: number of that record in its object, if records are read with their keys.
        """
        self.number = number
        self._reader.go_on(rest, offset)
        if self._keys is not None:
            self._keys.go_on(offset, in_object)

    def hand_over(self) -> tuple[bytes, int, int | None]:
        """Return `rest`, `offset` and `in_object` for `go_on` in another process; call it after `read`."""
        in_object = None if self._keys is None else self._keys.number
        return *self._reader.hand_over(), in_object

    def _miscounted(self, found: str) -> StreamError:
        order = self.stream.trailer.order if self.stream.trailer else None
        kind = order["format"] if order is not None and "format" in order else "the record index"
        return StreamError(
            f"{self.stream.name} has {found} records that the sidecar promised: the record index lacks "
            f"records of the objects or has two as one, or this reader's format is not that of {kind}; read "
            "by the format of the index, or run `penstock index verify --all`, remove the index and build it "
            "again"
        )


def missing(first: int, count: int, received: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return which of `count` records from number `first` on are in no range of `received`: begin, end.

    `received`: numbers of records, in order. Begin and end count from `first`.
    """
    parts, begin = [], 0
    for start, end in received:
        stop = min(count, start - first)
        if stop > begin:
            parts.append((begin, stop))
        begin = max(begin, end - first)
    if begin < count:
        parts.append((begin, count))
    return parts
