"""Where the bytes of a part wait between arrival and delivery, and what all stages have in common.

`pipes` has the stage that keeps bytes in the kernel, `buffers` the one that reads them. A fetch attaches the
body of each of its requests; from then on the stage decides where the body's bytes wait:

    no body      a request has still to be sent, or has ended; the rest of the part is missing
    parked       a part of more than `SMALL_PART`: its bytes stay in the socket until delivery comes to it, or
                 the socket is full
    filling      a small part, or a full socket: its bytes are moved into the stage as they arrive
    full         the stage has no room; the bytes stay in the socket until delivery has taken some
    direct       delivery waits for this stage, and moves the bytes from the socket itself

The bytes of a stage are reserved before it exists. Delivery sets `awaited` when it waits for the stage; the
stage calls `on_change` once when bytes have arrived, and clears `awaited`; a failed fetch clears it too.

A stage that has bytes must be `ready`: delivery takes a stage that is not ready, and whose fetch has failed,
for the first missing byte of the stream. To delay a part, delay delivery, as a bandwidth limit does.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from streamer.errors import SourceError
from streamer.plan import Part
from streamer.relay.statistics import ChannelCounters
from streamer.s3.ranges import Body
from streamer.schedule.budget import ChannelQuota
from streamer.units import MIB

MOST_WRITTEN = 1 * MIB
"""Bytes given to one writev(2), or one chunk more: what a pipe takes at the most. Naming all that wait,
however many, costs more than moving those that fit."""
_MAX_VECTORS = 64
"""Chunks given to one writev(2), however small; the kernel allows 1,024."""

SMALL_PART = 1 * MIB
"""Bytes of a part that is taken as it comes: parked in its socket, it would keep a connection for little."""
_LEAST_SHARE = 2 * MIB
"""Bytes of a part that are not given up for more connections: requests cost too."""


def bytes_per_request(quota: ChannelQuota) -> int:
    """Bytes of room for the part of one connection, so that there are as many parts as connections."""
    return max(_LEAST_SHARE, quota.byte_limit // quota.requests_limit)


class StageFull(Exception):
    """The stage is full: the rest stays in the socket, where TCP holds the sender back."""


@dataclass(slots=True)
class Chunk:
    """Bytes in memory: those between `sent` and `filled` are to be delivered."""

    memory: bytes | bytearray
    filled: int
    sent: int = 0
    literal: bool = False
    """Whether they come from the plan and not from the object."""

    @property
    def unsent(self) -> memoryview:
        return memoryview(self.memory)[self.sent : self.filled]


class Stage(ABC):
    """One part on its way. Subclasses say where its bytes lie."""

    def __init__(self, part: Part, *, on_change: Callable[[], None], counters: ChannelCounters) -> None:
        self.part = part
        self.received = 0
        """Bytes of the part's body that have been taken from a request, delivered or not."""
        self.awaited = False
        """Whether a delivery waits for this stage."""
        self._on_change = on_change
        self._counters = counters
        self._chunks: deque[Chunk] = deque()
        self._in_memory = 0
        self._parks = part.body > SMALL_PART
        self._body: Body | None = None
        self._dry = True
        """Whether the body had no byte when it was asked last."""
        self._full = False
        """Whether the body waits for room in the stage."""
        self._discarded = False
        self._before = memoryview(part.leading)
        """The rest of the literals before the body; they go first, wherever the body lies."""
        self._arrived(0)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.received}/{self.part.body} bytes arrived, {self.staged} staged>"

    @property
    @abstractmethod
    def staged(self) -> int:
        """Bytes that have arrived and are not delivered."""

    @property
    def ready(self) -> bool:
        """Whether bytes may be drained now. False means that every byte that arrived has been delivered."""
        return self.staged > 0 or not self._dry

    def attach(self, body: Body) -> None:
        """Take the rest of the part from this body, instead of an earlier one."""
        if self._body is not None:
            self._body.hush()
        self._body, self._full = body, False
        self._on_bytes()

    def detach(self, body: Body) -> None:
        """The body is about to be closed."""
        body.hush()
        if self._body is body:
            self._body, self._dry, self._full = None, True, False

    def _on_bytes(self) -> None:
        """The body may have some bytes."""
        self._dry = False
        if self._discarded or self._body is None:
            return
        if self.awaited:
            self._changed()
        elif self._parks:
            self._body.park(self._on_full)
        else:
            self._take_some(self._body)

    def _on_full(self) -> None:
        """The body's socket can hold no more."""
        if self.awaited or self._discarded or self._body is None:
            self._on_bytes()
        else:
            self._take_some(self._body)

    def _take_some(self, body: Body) -> None:
        """Move bytes of the body into the stage, and wait for more."""
        try:
            self._fill(body)
        except BlockingIOError:
            self._dry = True
        except StageFull:
            self._full = True
            return
        except SourceError:
            self._dry = True
            return  # raised by `Body.taken`, too
        if body.left:
            self._wait(body)
        else:
            self._dry = True

    def _wait(self, body: Body) -> None:
        if self._parks and not self.awaited:
            self._dry = False  # a parked body calls nobody for a few bytes: delivery must look
            body.park(self._on_full)
        else:
            body.notify(self._on_bytes)

    @abstractmethod
    def _fill(self, body: Body) -> None:
        """Move some bytes of the body into the stage, and tell a waiting delivery.

        Raises BlockingIOError if none has arrived, StageFull, and SourceError if none will come.
        """

    def drain_into(self, fd: int) -> int:
        """As `streamer.sink.outlet.Drainable`."""
        count = 0
        if self._before:
            count = os.write(fd, self._before)
            self._before = self._before[count:]
            if self._before or not self.staged:
                return count
        try:
            return count + self._drain_rest(fd)
        except OSError:
            if not count:
                raise
            return count  # the caller must learn of the bytes that moved; a lasting error comes again

    @abstractmethod
    def _drain_rest(self, fd: int) -> int:
        """Move what follows the literals before the body, which have been moved."""

    def _made_room(self) -> None:
        """Some bytes have left the stage."""
        if self._full and self._body is not None:
            self._full = False
            self._body.notify(self._on_bytes)

    def discard(self) -> None:
        """Give back what the stage holds; nothing may arrive any more."""
        self._discarded = True
        if self._body is not None:
            self.detach(self._body)
        self._before = memoryview(b"")
        self._chunks.clear()
        self._in_memory = 0

    def _hold(self, data: bytes | bytearray, *, literal: bool = False) -> None:
        self._chunks.append(Chunk(data, len(data), literal=literal))
        self._in_memory += len(data)

    def _arrived(self, count: int) -> None:
        """`count` more bytes of the body are here; the literals after it follow the last one."""
        self.received += count
        self._counters.received_bytes += count
        if self.received == self.part.body:
            self._dry = True
            if self.part.trailing:
                self._hold(self.part.trailing, literal=True)

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
        count = left = os.writev(fd, vectors)
        while left:
            chunk = chunks[0]
            step = min(left, chunk.filled - chunk.sent)
            self._leave(chunk, step)
            left -= step
        return count

    def _leave(self, chunk: Chunk, count: int) -> None:
        """The next `count` bytes of the first chunk are delivered."""
        chunk.sent += count
        self._in_memory -= count
        if chunk.sent == chunk.filled:
            self._chunks.popleft()


class Stages(Protocol):
    """One channel's supply of stages, and what they cost its share."""

    @property
    def quota(self) -> ChannelQuota:
        """What the channel may hold."""

    def part_size(self) -> int:
        """Bytes of the body of the next part to be cut."""

    def reserved_bytes(self, part: Part) -> int:
        """Bytes of room that the part's stage will hold."""

    def make(self, part: Part, *, on_change: Callable[[], None], counters: ChannelCounters) -> Stage:
        """A stage for a part whose room is reserved."""
