"""Where a part's bytes wait between arrival and delivery: the receiver of a transport, the source of an
outlet. This is the stage in user memory; `pipes` has the one in the kernel.

Its room is reserved in the window before a stage exists. A delivery that waits for the stage sets
`awaited`; the stage then calls `on_change` when bytes arrive or when it fails for good.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Protocol

from streamer.errors import BadAnswer, SourceError, Where
from streamer.plan import Part
from streamer.relay.statistics import Durations
from streamer.sink.outlet import Outlet

_MAX_VECTORS = 64
"""Chunks given to one writev(2); 64 of the transport's chunks overfill a 1 MiB pipe anyway."""


class Stage(ABC):
    """One part on its way. Subclasses say where its bytes lie."""

    def __init__(self, part: Part, *, on_change: Callable[[], None], first_byte: Durations) -> None:
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
        self._on_change = on_change
        self._first_byte = first_byte
        self._asked_at = time.monotonic()
        self._chunks: deque[memoryview] = deque()
        self._in_memory = 0
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
        except BlockingIOError:
            if not count:
                raise
            return count

    @abstractmethod
    def _drain_rest(self, fd: int) -> int:
        """The same for what comes behind `_head`, which has been moved."""

    @abstractmethod
    def discard(self) -> None:
        """Give back what the stage holds; nothing may arrive any more."""

    def deliver_directly(self, outlet: Outlet, account: Callable[[int], None]) -> None:  # noqa: B027
        """Let arriving bytes go to `outlet` at once, told to `account`: the part is the head of line.

        A stage that cannot do so ignores it.
        """

    def asked(self) -> None:
        """A request for what is missing is about to be sent."""
        self._asked_at = time.monotonic()

    def seconds_since_asked(self) -> float:
        return time.monotonic() - self._asked_at

    def answered(self) -> None:
        self._first_byte.add(self.seconds_since_asked())

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
        self._chunks.append(memoryview(data))
        self._in_memory += len(data)

    def _arrived(self, count: int) -> None:
        """`count` more bytes of the body are here; behind its last one come the literals after it."""
        self.received += count
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
        chunks = self._chunks
        count = os.writev(fd, [chunks[i] for i in range(min(len(chunks), _MAX_VECTORS))])
        self._in_memory -= count
        left = count
        while left:
            size = len(chunks[0])
            if size > left:
                chunks[0] = chunks[0][left:]
                break
            chunks.popleft()
            left -= size
        return count


class MemoryStage(Stage):
    """All bytes in user memory."""

    @property
    def staged(self) -> int:
        return len(self._head) + self._in_memory

    def _drain_rest(self, fd: int) -> int:
        return self._write_memory(fd)

    def discard(self) -> None:
        self._head = memoryview(b"")
        self._chunks.clear()
        self._in_memory = 0


class Stages(Protocol):
    """One channel's supply of stages, and what they cost its window."""

    @property
    def budget(self) -> int:
        """Bytes of room in all."""

    def room(self, part: Part) -> int:
        """Bytes of room that the part's stage will hold."""

    def make(self, part: Part, *, on_change: Callable[[], None], first_byte: Durations) -> Stage:
        """A stage for a part whose room is reserved."""

    def close(self) -> None:
        """Free everything; all stages are discarded."""


class MemoryStages:
    """Stages in user memory: a part takes its length."""

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def room(self, part: Part) -> int:
        return len(part)

    def make(self, part: Part, *, on_change: Callable[[], None], first_byte: Durations) -> Stage:
        return MemoryStage(part, on_change=on_change, first_byte=first_byte)

    def close(self) -> None:
        pass
