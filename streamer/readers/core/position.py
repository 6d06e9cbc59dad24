"""Position of a reader in its channel, which `PipeReader.state_dict()` returns as a plain dict.

    {"format": 1, "channel": "train", "epoch": 2, "offset": 73400320, "skip": 17, "records": 90017,
     "digest": "33d8b0af…"}

The reader has returned `records` records of `epoch`. A record begins at byte `offset` of the epoch's stream;
the next record is the `skip`-th after that one. `digest` is the plan's. Under the same digest an epoch has
the same bytes, so the position names the same record. A reader refuses a position with another digest unless
`anyway` is given.

While the sidecar lists objects, the digest is partial, `N:HEX`, over the plan's first N entries, which have
all bytes before the position. Only a sidecar with that state (`--resume`) can compare it with its plan; its
trailer then names the partial digest (`resumed`).

After the last record of an epoch the position is the first record of the next epoch. The reader recognises
the last record by the trailer's byte count, or else by the end of the stream. If the byte count is not known
before the end (objects that are inflated), a position taken before the end may have no record after it.

A FIFO begins at its epoch's first byte or, under `penstock run --resume`, at a later one, which its trailer
states (`bytes_skipped`). The reader drops the bytes from there to the position. Without `--resume` a new
sidecar offers epoch 0, so only a position in epoch 0 can be resumed without it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from streamer.errors import ChannelError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping

    from streamer.formats.window import RecordReader
    from streamer.readers.core.stream import PipeStream

FORMAT = 1
_KEYS = ("channel", "epoch", "offset", "skip", "records", "digest")
_BLOCK = 1 << 20


@dataclass(slots=True)
class ReaderPosition:
    """Position of a channel's next record. It moves as records are returned."""

    channel: str
    epoch: int
    offset: int = 0
    skip: int = 0
    records: int = 0
    digest: str = ""
    """Empty before the first FIFO is open, and for a FIFO without a trailer."""
    last: bool = field(default=False, compare=False)
    """Whether the epoch is known to have no further record."""

    def state(self) -> dict[str, Any]:
        """Return the position as a dict for JSON or pickle."""
        return {"format": FORMAT} | {name: getattr(self, name) for name in _KEYS}

    @classmethod
    def of(cls, state: Mapping[str, Any], channel: str) -> ReaderPosition:
        """Parse a saved `state`. Raises ValueError if it is no position in `channel`."""
        if state.get("format") != FORMAT or state.keys() - {"format"} != set(_KEYS):
            raise ValueError(f"the state is not what PipeReader.state_dict() returns: {dict(state)!r}")
        position = cls(**{name: state[name] for name in _KEYS})
        if position.channel != channel:
            raise ValueError(f"the state is of channel {position.channel}, and this reader is of {channel}")
        numbers: tuple[object, ...] = position.epoch, position.offset, position.skip, position.records
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"the position is invalid: {position}")
        return position

    def follow(self, reader: RecordReader, stream: PipeStream) -> Iterator[list[bytes]]:
        """Yield the batches of `reader`, which reads `stream` from `offset`, without `skip` records.

        While the caller has a batch, the position is after it; `returned` gives positions inside it. Digest
        and length of the epoch are those of the trailer as last read, because a plan may grow.
        """
        base, dropped = self.offset, self.skip
        batches = reader.batches()
        while True:
            offset = base + reader.offset
            batch = next(batches, None)
            if batch is None:
                break
            count = len(batch)
            first = min(dropped, count)
            dropped -= first
            if count and first == count:
                continue
            if count:  # an empty batch: no bytes for now
                self.offset, self.skip = offset, count
                self.records += count - first
                self.last = base + reader.offset == stream.bytes_total
                self.digest = _digest(stream)
            yield batch[first:] if first else batch
        self.last, self.digest = False, _digest(stream)
        self.epoch, self.offset, self.skip, self.records = self.epoch + 1, 0, 0, 0

    def returned(self, left: int) -> dict[str, Any]:
        """Return the state if the last `left` records of the batch have not been returned yet."""
        if self.last and not left:
            return self.state() | {"epoch": self.epoch + 1, "offset": 0, "skip": 0, "records": 0}
        return self.state() | {"skip": self.skip - left, "records": self.records - left}

    def texts(self, lefts: Iterable[int]) -> list[bytes]:
        """Return, for each of `lefts`, `returned` as JSON; cheaper than one call for each."""
        template = json.dumps(self.state() | {"skip": None, "records": None})
        template = template.replace('"skip": null, "records": null', '"skip": %d, "records": %d')
        return [
            json.dumps(self.returned(0)).encode()
            if self.last and not left
            else (template % (self.skip - left, self.records - left)).encode()
            for left in lefts
        ]


@dataclass(frozen=True, slots=True)
class StartPosition:
    """A saved position at which a reader resumes."""

    position: ReaderPosition
    anyway: bool = False
    """Whether to use the position under another plan too."""


def _digest(stream: PipeStream) -> str:
    return stream.trailer.digest if stream.trailer else ""


def approach_start(
    stream: PipeStream, channel: str, start: StartPosition | None
) -> Generator[list[bytes], None, ReaderPosition]:
    """Open `stream`, drop the bytes before the start, and return the start as a new position.

    The start is `start` if that is of the stream's epoch, else the FIFO's first byte. Yields an empty list
    after each wait; no wait is longer than the stream's patience.

    Raises ChannelError if the plan has changed and `start.anyway` is false, or if the FIFO begins after the
    start; otherwise as `PipeStream.begin` and `PipeStream.readinto`.
    """
    while not stream.begin(stream.patience):
        yield []
    offset = stream.start_offset
    if start is None or start.position.epoch != stream.epoch:
        return ReaderPosition(channel, stream.epoch, offset=offset, digest=_digest(stream))
    position = start.position
    while position.digest and not start.anyway and not stream.wait_for_plan(stream.patience):
        yield []
    digest = _digest(stream)
    resumed = stream.trailer.resumed if stream.trailer else ""
    if ":" in position.digest and position.digest != resumed and not start.anyway:
        raise ChannelError(
            f"the state of {channel} was saved while the sidecar was listing, and only the sidecar "
            "can compare those with its plan: start it with --resume and this state, begin without the "
            "state, or call load_state_dict with anyway=True"
        )
    if position.digest not in ("", digest, resumed) and not start.anyway:
        raise ChannelError(
            f"the state of {channel} was saved under plan {position.digest[:16]}, and "
            f"{stream.name} is of plan {digest[:16] or 'unknown'}: the objects or their order have "
            "changed; restore them, begin without the state, or call load_state_dict with anyway=True"
        )
    if offset > position.offset:
        raise ChannelError(
            f"{stream.name} begins at byte {offset}, and the reader is at byte {position.offset}: "
            "give this reader's own state to load_state_dict, or start the sidecar with it (--resume)"
        )
    left = position.offset - offset
    buffer = memoryview(bytearray(min(left, _BLOCK)))
    while left:
        count = stream.readinto(buffer[: min(left, _BLOCK)])
        if count == 0:
            raise ChannelError(
                f"{stream.name} ended {left} bytes before byte {position.offset}, the position of the state"
            )
        left -= count or 0
        yield []
    return replace(position, digest=digest)


def reach_start(
    stream: PipeStream,
    channel: str,
    start: StartPosition | None = None,
    *,
    check: Callable[[], None] = lambda: None,
) -> ReaderPosition:
    """Do as `approach_start`, in one call. `check` is called after each wait and may raise to give up."""
    waits = approach_start(stream, channel, start)
    while True:
        try:
            next(waits)
        except StopIteration as end:
            position: ReaderPosition = end.value
            return position
        check()
