"""The async shell of `hedge`: looks at the head of line while delivery waits for it, and asks a second time.

    first request   part bytes ──────────→ stage          until the second has more; then cancelled
    second request  the rest, another lane → Takeover → stage

The second request takes over with the first byte that the stage lacks; what the first has brought in
meanwhile is read from the second as well, and thrown away. Cancelling a task ends what it waits for at once,
so from then on no byte of the first reaches the stage. A second request that fails before is forgotten; one
that fails later goes on as any request does, and may be late in its turn.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any, Protocol

from streamer.errors import SourceError
from streamer.relay.hedge import Look
from streamer.relay.pipes import readable
from streamer.relay.retry import tell_failure
from streamer.units import KIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.plan import Part
    from streamer.relay.allotment import Share
    from streamer.relay.stages import Stage
    from streamer.relay.statistics import Tally
    from streamer.relay.window import Slot
    from streamer.source.ranges import Body, Phase, RangeSource

THROWN_AWAY = 64 * KIB
"""Bytes thrown away at a time."""


class Takeover:
    """The receiver of a second request: the stage's own, once it has brought a byte that the stage lacks."""

    def __init__(self, stage: Any, on_won: Callable[[], None]) -> None:
        """`stage`: a receiver of the kind that the transport wants."""
        self.part: Part = stage.part
        self.received = self._first = stage.received
        """As of a receiver, by this request's own count."""
        self.avoid: str | None = stage.peer
        self.peer: str | None = None
        self.won = False
        self.thrown_away = 0
        self._stage = stage
        self._on_won = on_won
        self._asked_at = time.monotonic()
        self._first_byte = 0.0
        self._scratch = memoryview(bytearray(THROWN_AWAY))
        self._own_room = False

    def doing(self, phase: Phase) -> None:
        if self.won:
            self._stage.doing(phase)

    def answered(self) -> None:
        self._first_byte = time.monotonic() - self._asked_at

    def tell(self, share: Share) -> None:
        """Tell how the request went."""
        now = time.monotonic()
        share.landed(
            now,
            received=self.received - self._first,
            first_byte=self._first_byte,
            seconds=now - self._asked_at,
        )

    def _surplus(self, limit: int) -> int:
        """How many of the next bytes the stage has already."""
        return int(min(limit, self._stage.received - self.received))

    def _throw_away(self, count: int) -> None:
        self.received += count
        self.thrown_away += count

    def _win(self) -> None:
        if not self.won:
            self.won = True
            self._stage.peer = self.peer
            self._stage.asked(self._asked_at)
            self._stage.doing("body")
            self._on_won()

    def leaves(self, body: Body, *, full: bool) -> bool:
        if self._surplus(body.left):
            return False
        if not self.won:
            if not (body.pending or readable(body.fd)):
                raise BlockingIOError
            self._win()
        return bool(self._stage.leaves(body, full=full))

    def take_from(self, body: Body) -> int:
        if surplus := self._surplus(body.left):
            count = len(os.read(body.fd, min(surplus, THROWN_AWAY)))
            self._throw_away(count)
        else:
            count = int(self._stage.take_from(body))
            self.received += count
        return count

    def moved(self, count: int) -> None:
        self.received += count
        self._stage.moved(count)

    def forget(self, body: Body) -> None:
        self._stage.forget(body)

    def room(self, limit: int) -> memoryview:
        self._own_room = not self.won or self._surplus(limit) > 0
        if self._own_room:
            return self._scratch[:limit]
        room: memoryview = self._stage.room(limit)
        return room

    def filled(self, count: int) -> None:
        if self._own_room:
            self.feed(bytes(self._scratch[:count]))
        else:
            self._stage.filled(count)
            self.received += count

    def feed(self, data: bytes) -> None:
        if surplus := self._surplus(len(data)):
            self._throw_away(surplus)
            data = data[surplus:]
        if data:
            self._win()
            self._stage.feed(data)
            self.received += len(data)

    @property
    def part_sum(self) -> Any:
        """As of `integrity.Summing`: the stage's, which sums what it takes from either request."""
        return self._stage.part_sum

    @part_sum.setter
    def part_sum(self, found: Any) -> None:
        self._stage.part_sum = found

    @property
    def full(self) -> bool:
        return bool(self._stage.full)

    @property
    def on_room(self) -> Callable[[], None] | None:
        found: Callable[[], None] | None = self._stage.on_room
        return found

    @on_room.setter
    def on_room(self, resume: Callable[[], None] | None) -> None:
        self._stage.on_room = resume


class Owner(Protocol):
    """Who keeps the slots and their tasks."""

    def is_head(self, slot: Slot) -> bool:
        """Whether the slot is still the head of line."""

    def replace(self, slot: Slot, task: asyncio.Task[None]) -> None:
        """From now on the slot's task is the one given, that of a second request: cancel the first."""

    def landed(self, slot: Slot) -> None:
        """The second request, which has become the slot's own, has brought the rest."""

    async def fetch(self, slot: Slot, stage: Stage) -> None:
        """Bring what is missing as any part is brought: the second request has failed as the slot's own."""

    def lane_freed(self) -> None:
        """A second request has ended, whatever became of it."""


class Stragglers:
    """One channel's: at most one second request for a part at a time."""

    def __init__(
        self,
        owner: Owner,
        source: RangeSource,
        *,
        share: Share,
        tally: Tally,
        requests: asyncio.TaskGroup,
    ) -> None:
        self._owner = owner
        self._source = source
        self._share = share
        self._tally = tally
        self._requests = requests
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._awaited: tuple[Slot, Stage] | None = None
        """What delivery last began to wait for."""
        self._tasks: dict[Slot, asyncio.Task[None]] = {}

    def starving(self, slot: Slot, stage: Stage) -> None:
        """Delivery begins to wait for this head of line."""
        self._awaited = (slot, stage)
        if self._timer is None and self._share.hedging.enabled and slot.part.body:
            self._look_later(slot, stage)

    def _look_later(self, slot: Slot, stage: Stage) -> None:
        self._timer = self._loop.call_later(
            self._share.hedging.patience, self._look, slot, stage, self._seen(slot)
        )

    def _seen(self, slot: Slot) -> Look:
        return Look(time.monotonic(), slot.delivered, self._tally.watch.seconds()["starved"])

    def _look(self, slot: Slot, stage: Stage, before: Look) -> None:
        self._timer = None
        if not self._owner.is_head(slot) and self._awaited is not None:
            slot, stage = self._awaited
            if self._owner.is_head(slot) and slot.part.body:
                self._look_later(slot, stage)
            return
        missing = slot.part.body - stage.received
        if not missing:
            return
        asked = stage.asking and not stage.ready and slot not in self._tasks
        if (
            asked
            and not self._share.pace.slowed
            and self._share.hedging.worth(before, self._seen(slot), missing)
        ):
            name = f"GET {slot.part.object.key} {slot.part.start + stage.received}-{slot.part.end}, again"
            self._tasks[slot] = self._requests.create_task(self._ask(slot, stage), name=name)
        self._look_later(slot, stage)

    async def _ask(self, slot: Slot, stage: Stage) -> None:
        tally = self._tally
        tally.hedges["issued"] += 1
        into = Takeover(stage, lambda: self._won(slot))
        self._share.begin()
        outcome, failed = "cancelled", False
        try:
            await self._source.fetch(into, attempt=1)
            outcome = "ok"
            into.tell(self._share)
        except SourceError as error:
            outcome, failed = error.kind, True
            tell_failure(error, tally, self._share)
        finally:
            self._share.end()
            tally.requests[outcome] += 1
            tally.wasted_bytes += into.thrown_away
            if not into.won:
                self._tasks.pop(slot, None)
                tally.hedges["lost"] += 1
            self._owner.lane_freed()
        if not into.won:
            return  # whatever it was, the first request goes on
        if failed:
            await self._owner.fetch(slot, stage)
        else:
            self._owner.landed(slot)

    def _won(self, slot: Slot) -> None:
        self._tally.hedges["won"] += 1
        self._owner.replace(slot, self._tasks.pop(slot))

    def forget(self, slot: Slot) -> None:
        """The slot's first request has ended, or the slot is dropped."""
        if task := self._tasks.pop(slot, None):
            task.cancel()

    def close(self) -> None:
        """Look at nothing any more; second requests are forgotten with their slots."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._awaited = None
