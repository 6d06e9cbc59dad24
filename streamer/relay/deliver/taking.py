"""Takes bytes from the stages of a window's parts in stream order, also of parts whose turn has not come.

    stages of the first parts ── pieces ──▶ `Taking` ── to be inflated ahead ──▶ TransformRunner
                                                    └── in their turn ─────────▶ Delivery

A part keeps its reserved bytes until its last byte is delivered, wherever its bytes are. The pieces that wait
here are within the memory of the lookahead.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamer.relay.staging.buffers import BufferStage
from streamer.units import KIB

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamer.plan import Segment
    from streamer.relay.deliver.transform_runner import TransformRunner
    from streamer.relay.fetch.part_fetch import PartFetch
    from streamer.schedule.window import Slot, Window

MOST_TAKEN = 512 * KIB
"""Maximum bytes taken from a stage at a time."""
LESS_TAKEN = 128 * KIB
"""Maximum bytes taken at a time under a bandwidth limit, which is checked in between, and for a thread that
inflates, which has the first bytes sooner."""
AT_ONCE = 4
"""Pieces taken before one is delivered, while the lookahead has room: it fills faster than it is used."""


@dataclass(frozen=True, slots=True)
class TakenBytes:
    """Bytes taken from a stage and not yet delivered."""

    slot: Slot
    at: int
    """Offset in the slot's part."""
    item: Segment | bytes
    """Range or literal that the bytes are of."""
    place: int
    """Offset in the item."""
    data: bytes | bytearray

    @property
    def begins_object(self) -> bool:
        """Whether the first byte is the first one of an object."""
        return not isinstance(self.item, bytes) and self.item.start + self.place == 0


class Taking:
    """Pieces of one epoch that were taken from stages and are not delivered. True if there are some."""

    def __init__(self, window: Window, fetches: Mapping[Slot, PartFetch], runner: TransformRunner) -> None:
        self.runner = runner
        self._window = window
        self._fetches = fetches
        self._pieces: deque[TakenBytes] = deque()
        self._emptied = 0
        """Number of parts, from the head of line on, whose last byte is taken."""

    def __repr__(self) -> str:
        return f"<Taking {len(self._pieces)} pieces, {self._emptied} whole parts>"

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def take(self, most: int, *, ahead: bool) -> TakenBytes | None:
        """Return the next piece to deliver, at most `most` bytes; None if its stage has no byte.

        Passes it to `feed`, and with `ahead` further pieces that may be inflated before their turn.
        """
        for _ in range(AT_ONCE):
            slot = self._window.slot(self._emptied)
            if slot is None or (self._pieces and not (ahead and self._may_precede(slot))):
                break
            last = self._pieces[-1] if self._pieces else None
            at = slot.delivered if last is None or last.slot is not slot else last.at + len(last.data)
            item, place = slot.part.item_at(at)
            if not (data := self._stage(slot).take(min(most, len(item) - place))):
                break
            self.runner.feed(item, place, data)
            self._pieces.append(TakenBytes(slot, at, item, place, data))
            if at + len(data) == slot.part.size:
                self._emptied += 1
        return self._pieces.popleft() if self._pieces else None

    def _may_precede(self, slot: Slot) -> bool:
        """Return whether bytes of `slot` may be taken before those that are taken are delivered."""
        part, runner = slot.part, self.runner
        if part.epoch != self._pieces[0].slot.part.epoch or runner.room_ahead <= 0:
            return False
        return runner.lookahead.may_precede(part.object)

    def _stage(self, slot: Slot) -> BufferStage:
        stage = self._fetches[slot].stage
        if isinstance(stage, BufferStage):
            return stage
        raise RuntimeError("bytes that are transformed must be in memory: give `stages` the reason")

    def part_delivered(self) -> None:
        """Note that the head of line has been delivered."""
        self._emptied = max(0, self._emptied - 1)

    def drop(self) -> int:
        """Drop all pieces; return their bytes."""
        dropped = sum(len(piece.data) for piece in self._pieces)
        self._pieces.clear()
        return dropped
