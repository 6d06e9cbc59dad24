"""Brings the stream of an epoch to the position at which a reader begins.

A FIFO begins at its epoch's first byte or, under `penstock run --resume`, at a later one, which its trailer
states (`bytes_skipped`). The reader drops the bytes from there to the position. Without `--resume` a new
sidecar offers epoch 0, and the reader leaves the epochs before that of the position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from streamer.errors import ChannelError
from streamer.readers.core.position import RankSteps, ReaderPosition
from streamer.step_state import StepState, why_not_begin
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from streamer.readers.core.stream import PipeStream

_BLOCK = 1 << 20


def start_in(stream: PipeStream, channel: str, start: ReaderPosition) -> ReaderPosition:
    """Return a start with its record, by the trailer of an open stream of its epoch. Raises ChannelError."""
    if start.start is None:
        return start
    return _at_step(stream, channel, start.start, anyway=start.anyway)


def approach_start(
    stream: PipeStream, channel: str, start: ReaderPosition | None
) -> Generator[list[bytes], None, ReaderPosition]:
    """Open `stream`, drop the bytes before the start, and return the start as a new position.

    Leaves the epochs before a loaded state's that are offered. The start is `start` if that is of the
    stream's epoch, else the FIFO's first byte. Yields an empty list after each wait; no wait is longer than
    the stream's patience.

    Raises ChannelError if the plan has changed and `start.anyway` is false, or if the FIFO begins after the
    start; otherwise as `PipeStream.begin` and `PipeStream.readinto`.
    """
    if start is not None and start.epoch == stream.epoch:
        stream.leave_earlier()
    while not stream.begin(stream.patience):
        yield []
    offset = stream.start_offset
    if start is None or start.epoch != stream.epoch:
        first = stream.trailer.records_skipped if stream.trailer else 0
        return ReaderPosition(channel, stream.epoch, offset=offset, records=first, digest=stream.digest)
    if start.start is not None:
        return _at_step(stream, channel, start.start, anyway=start.anyway)
    begun = bool(start.digest or start.offset or start.records)
    while begun and not start.anyway and not stream.wait_for_plan(stream.patience):
        yield []
    digest = stream.digest
    resumed = stream.trailer.resumed if stream.trailer else ""
    if ":" in start.digest and start.digest != resumed and not start.anyway:
        raise ChannelError(
            f"the state of {channel} was saved while the sidecar was listing, and only the sidecar "
            "can compare those with its plan: start it with --resume and this state, begin without the "
            "state, or call load_state_dict with anyway=True"
        )
    if begun and start.digest not in (digest, resumed or digest) and not start.anyway:
        raise ChannelError(
            f"the state of {channel} was saved under plan {start.digest[:16] or 'unknown'}, and "
            f"{stream.name} is of plan {digest[:16] or 'unknown'}: the objects or their order have "
            "changed; restore them, begin without the state, or call load_state_dict with anyway=True"
        )
    if offset > start.offset:
        raise ChannelError(
            f"{stream.name} begins at byte {offset}, and the reader is at byte {start.offset}: "
            "give this reader's own state to load_state_dict, or start the sidecar with it (--resume)"
        )
    yield from drop_bytes(stream, start.offset - offset)
    return replace(start, digest=digest)


def drop_bytes(stream: PipeStream, left: int) -> Iterator[list[bytes]]:
    """Drop `left` bytes of an open stream; yield an empty list after each read. Raises ChannelError."""
    buffer = memoryview(bytearray(min(left, _BLOCK)))
    while left:
        count = stream.readinto(buffer[: min(left, _BLOCK)])
        if count == 0:
            raise ChannelError(
                f"{stream.name} ended {counted(left, 'byte')} before the position of the state"
            )
        left -= count or 0
        yield []


def _at_step(stream: PipeStream, channel: str, start: StepState, *, anyway: bool) -> ReaderPosition:
    """Return the position of a step in `stream`. Raises ChannelError."""
    rank = RankSteps.of(stream.trailer)
    order, steps = (None, 0) if rank is None else (rank.order, rank.steps)
    if (why := why_not_begin(start, order, steps, anyway=anyway)) is not None or rank is None:
        raise ChannelError(f"{stream.name}: {why}")
    records, begin = rank.before(start.step), rank.before(start.begin)
    if start.shuffle is not None and start.shuffle["batch"] != rank.records:
        raise ChannelError(
            f"the state of {channel} is inside a window of shuffled records, and only the same number of "
            f"ranks can go on there: a rank had {start.shuffle['batch']} records of a step, and this one has "
            f"{rank.records}; load a state that was saved at the end of a window"
        )
    if begin < rank.first:
        raise ChannelError(
            f"{stream.name} begins after step {start.begin}, the step of the state of {channel}: save "
            "the checkpoint first and the file of --resume after it, or give the sidecar this state"
        )
    return ReaderPosition(
        channel,
        start.epoch,
        offset=stream.start_offset,
        skip=records - rank.first,
        records=records,
        digest=stream.digest,
        rank=rank,
        window=None if start.shuffle is None else begin,
    )


def reach_start(
    stream: PipeStream,
    channel: str,
    start: ReaderPosition | None = None,
    *,
    check: Callable[[], None] = lambda: None,
) -> ReaderPosition:
    """Call `approach_start` until it ends; return its position.

    `check` is called after each wait and may raise to give up.
    """
    waits = approach_start(stream, channel, start)
    while True:
        try:
            next(waits)
        except StopIteration as end:
            position: ReaderPosition = end.value
            return position
        check()
