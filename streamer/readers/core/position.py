"""Where a reader is in its channel, as a plain dict that a checkpoint can hold: `PipeReader.state_dict()`.

    {"format": 1, "channel": "train", "epoch": 2, "offset": 73400320, "skip": 17, "records": 90017,
     "digest": "33d8b0af…"}

`records` have been returned of `epoch`. The next one is the `skip`-th, from 0, of those that begin at byte
`offset` of the epoch's stream, which is the border of a record. `digest` is the plan's: under the same
digest the same bytes come in the same epoch, so the place means the same records; under another one it means
nothing, and to go on there is an error unless told.

Behind the last record of an epoch the place is the first record of the next one: at its end, or as soon as
that many bytes are cut as the trailer says the epoch has. Where no trailer says it beforehand (objects that
are inflated) a place may have nothing behind it in its epoch.

A FIFO may begin at its epoch's first byte or, under `penstock run --resume`, further on; its trailer says
where (`bytes_skipped`). What lies between that and the place is read and dropped here. So a reader resumes
rightly whether the sidecar knows of it or not: knowing saves the bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streamer.errors import ChannelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from streamer.formats.window import RecordReader
    from streamer.readers.core.stream import PipeStream

FORMAT = 1
_KEYS = ("channel", "epoch", "offset", "skip", "records", "digest")
_BLOCK = 1 << 20


@dataclass(slots=True)
class ReaderPosition:
    """The next record of a channel. It moves as records are returned."""

    channel: str
    epoch: int
    offset: int = 0
    skip: int = 0
    records: int = 0
    digest: str = ""
    """Empty before the first FIFO is open, and for one without a trailer."""
    last: bool = field(default=False, compare=False)
    """Whether the epoch is known to have no further record."""

    def state(self) -> dict[str, Any]:
        """As JSON and pickle take it."""
        return {"format": FORMAT} | {name: getattr(self, name) for name in _KEYS}

    @classmethod
    def of(cls, state: Mapping[str, Any], channel: str) -> ReaderPosition:
        """The place that `state` tells. Raises ValueError if that is none of `channel`."""
        if state.get("format") != FORMAT or state.keys() - {"format"} != set(_KEYS):
            raise ValueError(f"not what state_dict() of a PipeReader returned: {dict(state)!r}")
        place = cls(**{name: state[name] for name in _KEYS})
        if place.channel != channel:
            raise ValueError(f"the state is of channel {place.channel}, and this reader is of {channel}")
        numbers: tuple[object, ...] = place.epoch, place.offset, place.skip, place.records
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"no such place: {place}")
        return place

    def enter(self, stream: PipeStream, *, anyway: bool = False) -> None:
        """Bring an open stream to `offset`, and take its digest. Raises ChannelError as `entering` does."""
        for _ in self.entering(stream, anyway=anyway):
            pass

    def entering(self, stream: PipeStream, *, anyway: bool = False) -> Iterator[None]:
        """The same in steps, none of which waits longer than the stream's patience.

        Raises ChannelError if the plan is another one and not `anyway`, or if the FIFO begins behind it.
        """
        digest = stream.trailer.digest if stream.trailer else ""
        begun_at = stream.begun_at
        if self.digest not in ("", digest) and not anyway:
            raise ChannelError(
                f"the state of {self.channel} was saved under plan {self.digest[:16]}, and "
                f"{stream.name} is of plan {digest[:16] or 'unknown'}: other objects, or another order; "
                "restore them, begin anew, or call load_state_dict with anyway=True"
            )
        if begun_at > self.offset:
            raise ChannelError(
                f"{stream.name} begins at byte {begun_at}, and the reader is at byte {self.offset}: "
                "give this reader's own state to load_state_dict, or start the sidecar with it (--resume)"
            )
        self.digest = digest
        left = self.offset - begun_at
        buffer = memoryview(bytearray(min(left, _BLOCK)))
        while left:
            count = stream.readinto(buffer[: min(left, _BLOCK)])
            if count == 0:
                raise ChannelError(
                    f"{stream.name} ended {left} bytes before byte {self.offset}, where the state is"
                )
            left -= count or 0
            yield

    def follow(self, reader: RecordReader, total: int | None = None) -> Iterator[list[bytes]]:
        """The batches of `reader`, which begins at `offset`, without the first `skip` records.

        While the caller has a batch, the place is behind it; `returned` says otherwise. `total`: bytes of
        the epoch, if they are known.
        """
        base, dropped = self.offset, self.skip
        batches = reader.batches()
        while True:
            begin = base + reader.offset
            batch = next(batches, None)
            if batch is None:
                break
            count = len(batch)
            first = min(dropped, count)
            dropped -= first
            if count and first == count:
                continue
            if count:  # an empty one says that there is nothing for now
                self.offset, self.skip = begin, count
                self.records += count - first
                self.last = base + reader.offset == total
            yield batch[first:] if first else batch
        self.last = False
        self.epoch, self.offset, self.skip, self.records = self.epoch + 1, 0, 0, 0

    def returned(self, left: int) -> dict[str, Any]:
        """The state if the last `left` records of the batch have not been returned yet."""
        if self.last and not left:
            return self.state() | {"epoch": self.epoch + 1, "offset": 0, "skip": 0, "records": 0}
        return self.state() | {"skip": self.skip - left, "records": self.records - left}

    def texts(self, lefts: Iterable[int]) -> list[bytes]:
        """`returned` of each of `lefts` as JSON, at little cost for each."""
        head = json.dumps(self.state() | {"skip": None, "records": None})
        head = head.replace('"skip": null, "records": null', '"skip": %d, "records": %d')
        return [
            json.dumps(self.returned(0)).encode()
            if self.last and not left
            else (head % (self.skip - left, self.records - left)).encode()
            for left in lefts
        ]
