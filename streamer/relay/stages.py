"""Where a part's bytes wait between arrival and delivery: the receiver of a transport, the source of an
outlet. This is what all stages have in common; `pipes` has the one in the kernel, `memory` the other.

A part of more than `SMALL_PART` may be left in its socket until delivery comes to it. A stage's room is
reserved in the window before the stage exists. A delivery that waits for the stage sets `awaited`; the stage
then calls `on_change` when bytes arrive or when it fails for good.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from streamer.errors import BadAnswer, SourceError, Where
from streamer.plan import Part
from streamer.relay.allotment import Share
from streamer.relay.statistics import Tally
from streamer.source.ranges import Body, NoRoom, Phase
from streamer.units import MIB

MOST_WRITTEN = 1 * MIB
"""Bytes given to one writev(2), or one chunk more: what a pipe takes at the most. To name all that wait,
however many, cost more than to move those that fit."""
_MAX_VECTORS = 64
"""Chunks given to one writev(2), however small; the kernel allows 1,024."""

SMALL_PART = 1 * MIB
"""Bytes of a part that is taken as it comes: to wait in its socket, it would keep a lane for little."""
_LEAST_SHARE = 2 * MIB
"""Bytes of a part that are not given up for more lanes: requests cost too."""


def lane_room(share: Share) -> int:
    """Bytes of room for the part of one lane: as many parts as lanes, or more lanes would be of no use."""
    return max(_LEAST_SHARE, share.quota // share.lanes)


@dataclass(slots=True)
class Chunk:
    """Bytes in memory: those between `sent` and `filled` are to be delivered."""

    memory: bytes | bytearray
    filled: int
    sent: int = 0

    @property
    def unsent(self) -> memoryview:
        return memoryview(self.memory)[self.sent : self.filled]


class Stage(ABC):
    """One part on its way. Subclasses say where its bytes lie."""

    def __init__(self, part: Part, *, on_change: Callable[[], None], tally: Tally) -> None:
        self.part = part
        self.received = 0
        """Bytes of the part's body that have arrived, delivered or not."""
        self.error: SourceError | None = None
        """Why no further byte will come; set once, when retrying is over."""
        self.awaited = False
        """Whether a delivery waits for this stage."""
        self.final = False
        """Whether a part given up is lost: delivery was waiting for it, or has asked for it again."""
        self.on_room: Callable[[], None] | None = None
        self.phase: Phase = "first_byte"
        """What the request is at."""
        self.on_phase: Callable[[Phase], None] | None = None
        """Told what it is at from now on; set where delivery waits for this stage."""
        self._on_change = on_change
        self._tally = tally
        self.asking = False
        """Whether a request for what is missing is under way, not waiting for its turn after a failure."""
        self.peer: str | None = None
        """The address that the last request went to, if the transport tells."""
        self.avoid: str | None = None
        """As of a receiver; the only request of a part may go anywhere."""
        self._asked_at = time.monotonic()
        self.first_byte_after = 0.0
        """Seconds from the last request to its answer."""
        self._chunks: deque[Chunk] = deque()
        self._in_memory = 0
        self._waits = part.body > SMALL_PART
        """Whether it waits in its socket, on its lane."""
        self._body: Body | None = None
        """The rest of the part, while a request for it is under way."""
        self._there = False
        """Whether its socket may have some of it."""
        self._discarded = False
        self._head = memoryview(part.head)
        """What is left of the literals before the body; they go first, wherever the body lies."""
        self._arrived(0)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.received}/{self.part.body} bytes arrived, {self.staged} staged>"

    @property
    @abstractmethod
    def staged(self) -> int:
        """Bytes that have arrived and are not delivered."""

    @property
    def ready(self) -> bool:
        """Whether there may be something to drain."""
        return self._there or self.staged > 0

    @property
    def full(self) -> bool:
        """As `streamer.source.ranges.Receiver`; never, where room for the whole part is reserved."""
        return False

    def drain_into(self, fd: int) -> int:
        """As `streamer.sink.outlet.Drainable`."""
        count = 0
        if self._head:
            count = os.write(fd, self._head)
            self._head = self._head[count:]
            if self._head or not self.staged:
                return count
        try:
            return count + self._drain_rest(fd)
        except OSError:
            if not count:
                raise
            return count  # of what was moved the caller must know; what lasts of the error comes again

    @abstractmethod
    def _drain_rest(self, fd: int) -> int:
        """The same for what comes behind `_head`, which has been moved."""

    def leaves(self, body: Body, *, full: bool) -> bool:
        """As `streamer.source.ranges.WaitingReceiver`."""
        if self._discarded:
            raise NoRoom
        self._body, self._there = body, True
        if self.awaited:
            self._changed()
            return True
        return self._waits and not full

    def forget(self, body: Body) -> None:
        """As `streamer.source.ranges.WaitingReceiver`."""
        if self._body is body:
            self._body, self._there = None, False

    def discard(self) -> None:
        """Give back what the stage holds; nothing may arrive any more."""
        self._discarded = True
        self._body, self._there = None, False
        self._head = memoryview(b"")
        self._chunks.clear()
        self._in_memory = 0

    def asked(self, at: float | None = None) -> None:
        """A request for what is missing is about to be sent, or was at a moment of time.monotonic()."""
        self._asked_at = time.monotonic() if at is None else at
        self.doing("first_byte")

    def doing(self, phase: Phase) -> None:
        """As `streamer.source.ranges.Receiver`."""
        self.phase = phase
        if self.on_phase is not None:
            self.on_phase(phase)

    def seconds_since_asked(self) -> float:
        return time.monotonic() - self._asked_at

    def answered(self) -> None:
        self.first_byte_after = self.seconds_since_asked()
        self._tally.first_byte.add(self.first_byte_after)
        self.doing("body")

    def feed(self, data: bytes) -> None:
        if self.received + len(data) > self.part.body:
            ref = self.part.object
            raise BadAnswer(
                "the body is longer than its head promised",
                Where(ref.bucket, ref.key, self.part.start + self.received),
            )
        self._hold(data)
        self._arrived(len(data))
        self._changed()

    def _hold(self, data: bytes) -> None:
        self._chunks.append(Chunk(data, len(data)))
        self._in_memory += len(data)

    def _arrived(self, count: int) -> None:
        """`count` more bytes of the body are here; behind its last one come the literals after it."""
        self.received += count
        self._tally.received_bytes += count
        if self.received == self.part.body and self.part.tail:
            self._hold(self.part.tail)

    def fail(self, error: SourceError) -> None:
        """No further byte will come; what is staged stays deliverable."""
        self.error = error
        self.final = self.final or self.awaited
        self._changed()

    def _changed(self) -> None:
        if self.awaited:
            self.awaited = False
            self._on_change()

    def _write_memory(self, fd: int) -> int:
        chunks, vectors, size = self._chunks, [], 0
        for chunk in chunks:
            vectors.append(chunk.unsent)
            size += chunk.filled - chunk.sent
            if size >= MOST_WRITTEN or len(vectors) == _MAX_VECTORS:
                break
        count = os.writev(fd, vectors)
        self._in_memory -= count
        left = count
        while left:
            chunk = chunks[0]
            step = min(left, chunk.filled - chunk.sent)
            chunk.sent += step
            left -= step
            if chunk.sent == chunk.filled:
                self._sent(chunks.popleft())
        return count

    def _sent(self, chunk: Chunk) -> None:  # noqa: B027 - most memory is simply let go
        """All of the chunk is delivered."""


class Stages(Protocol):
    """One channel's supply of stages, and what they cost its share."""

    @property
    def share(self) -> Share:
        """What the channel may hold."""

    def part_size(self) -> int:
        """Bytes of the body of the next part to be cut."""

    def room(self, part: Part) -> int:
        """Bytes of room that the part's stage will hold."""

    def make(self, part: Part, *, on_change: Callable[[], None], tally: Tally) -> Stage:
        """A stage for a part whose room is reserved."""
