"""Base of all stages: a stage holds a part's bytes between arrival and delivery.

`pipes` has the stage that keeps bytes in the kernel, `buffers` the one that reads them. A fetch attaches the
body of each of its requests; the stage then decides where the body's bytes are kept:

    no body      no request is in flight; the rest of the part is missing
    parked       a part of more than `SMALL_PART` bytes stays in the socket until delivery needs it or the
                 socket is full
    filling      the bytes of a small part or of a full socket are moved into the stage as they arrive
    full         the stage holds all it may; further bytes stay in the socket until delivery has taken some
    direct       delivery waits for this stage, and moves the bytes from the socket itself

The bytes of a stage are reserved before the stage is made. Delivery sets `awaited` when it waits for the
stage. When bytes have arrived, the stage clears `awaited` and calls `on_change` once; a failed fetch clears
it too.

Bytes of an unfinished response may be foreign (`streamer.s3.client.doubt`). A stage does not deliver the last
of them that it has (`in_doubt`); spliced ones stay in the socket. If the response fails, all of its bytes
that are not delivered are in doubt, until `attach` takes a body that has repeated some of them. Even then the
last of them stay in doubt, as the body may have gone on with more of the same foreign text.

A stage that has bytes must be `ready`: if a stage is not ready and its fetch has failed, delivery concludes
that the stream's next byte is missing. To delay a part, delay `attach`, or delivery, as a bandwidth limit
does.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from mmap import mmap
from typing import Protocol

from streamer.errors import SourceError
from streamer.linux import ALL
from streamer.plan import Part
from streamer.relay.staging.taps import Tap
from streamer.relay.statistics import ChannelCounters
from streamer.s3.client.doubt import DOUBTED, NothingArrived, all_differ
from streamer.s3.ranges import Body, OnWhole
from streamer.schedule.budget import ChannelQuota
from streamer.units import KIB, MIB

MOST_WRITTEN = 1 * MIB
"""Bytes passed to one writev(2), plus up to one chunk: the capacity of a pipe. Passing all staged chunks
would cost more than moving those that fit."""
_MAX_VECTORS = 64
"""Chunks passed to one writev(2); the kernel allows 1,024."""

TURN = 1 * MIB
"""Bytes that are moved out of stages before the event loop runs other callbacks. With a turn for each small
object, sockets would take most of the loop's time, and the FIFO would run empty."""
LEAST = 32 * KIB
"""Minimum bytes that a move counts for, so that a turn of small parts takes about a millisecond too."""
SMALL_PART = 1 * MIB
"""Parts up to this many bytes are taken on arrival: parked, they would occupy a connection for few bytes."""
_LEAST_QUOTA = 2 * MIB
"""Minimum of `bytes_per_request`: smaller parts would cost more in requests than they gain."""


def bytes_per_request(quota: ChannelQuota) -> int:
    """Return the bytes that one part may reserve so that the quota holds a part for every request."""
    return max(_LEAST_QUOTA, quota.byte_limit // quota.requests_limit)


def at_most_the_floor(held: int, least: int, quota: ChannelQuota) -> int:
    """Return `held`, but if that exceeds the quota's floor, the floor or `least`: else it might never fit."""
    return min(held, max(least, quota.floor))


class StageFull(Exception):
    """The stage is full: further bytes stay in the socket, and TCP stops the server."""


@dataclass(slots=True)
class Chunk:
    """Bytes in memory; those between `sent` and `filled` are not delivered yet."""

    memory: bytes | bytearray | mmap
    filled: int
    sent: int = 0

    @property
    def unsent(self) -> memoryview:
        return memoryview(self.memory)[self.sent : self.filled]


class Stage(ABC):
    """Bytes of one part between arrival and delivery, a `Drainable`. Subclasses decide where to keep them."""

    taps: tuple[Tap, ...] = ()
    """What sees the bytes that are delivered; only of a stage in memory."""
    on_whole: OnWhole | None = None
    """See `RangeRequest`."""

    def __init__(self, part: Part, *, on_change: Callable[[], None], counters: ChannelCounters) -> None:
        self.part = part
        self.received = 0
        """Bytes of the part taken from bodies, delivered or not."""
        self.awaited = False
        """Whether delivery waits for this stage."""
        self._on_change = on_change
        self._counters = counters
        self._chunks: list[Chunk] = []  # a deque takes 600 bytes more, and most parts have one chunk
        self._in_memory = 0
        self.in_doubt = 0
        """Last bytes in the stage that may not be delivered: nothing proves that they are right."""
        self._attached_at = 0
        """`received` when the body was attached."""
        self._unproven_from = 0
        """Offset in the part of the first byte that only unfinished responses have brought."""
        self._parks = part.size > SMALL_PART
        self._body: Body | None = None
        self._dry = True
        """Whether the body had no byte at the last attempt to move some."""
        self._full = False
        """Whether the stage is full and further bytes stay in the socket."""
        self._discarded = False
        if not part.requests:
            for item in part.items:
                if isinstance(item, bytes):
                    self._hold(item)
            self._arrived(part.size)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.received}/{self.part.size} bytes arrived, {self.staged} staged>"

    @property
    @abstractmethod
    def staged(self) -> int:
        """Bytes in the stage that are not delivered."""

    @property
    def proven(self) -> int:
        """Bytes of the part that have arrived and are not in doubt, delivered or not."""
        return self.received - self.in_doubt

    @property
    def ready(self) -> bool:
        """Whether there may be bytes to drain. False: each byte that has arrived is delivered or in doubt."""
        return self.staged > self.in_doubt or not self._dry

    def attach(self, body: Body) -> None:
        """Take the rest of the part from this body; it replaces an earlier one.

        The body has agreed with bytes in doubt (`agrees`), if there were any.
        """
        if self._body is not None:
            self._body.hush()
        if not self.in_doubt:
            self._unproven_from = self.received
        self._body, self._full, self._attached_at = body, False, self.received
        self.in_doubt = min(self.in_doubt, DOUBTED)
        self._on_bytes()

    def detach(self, body: Body) -> None:
        """Stop taking bytes from this body, which is about to be closed."""
        body.hush()
        if self._body is body:
            self._body, self._dry, self._full = None, True, False
            if body.left and not self._discarded:
                self._doubt(body)

    def _doubt(self, body: Body) -> None:
        """Keep back the bytes of a response that has failed, and those that had stayed in its socket."""
        self._recall()
        taken, stayed = body.doubted()
        # Fewer, if ranges before this one are whole; more, if bytes were repeated.
        if taken < self.received - self._attached_at:
            self._unproven_from = self.received - taken
        if stayed:
            self._hold(stayed)
            self._arrived(len(stayed))
        self.in_doubt = min(self.received - self._unproven_from, self.staged)

    def agrees(self, again: bytes) -> bool:
        """Return whether the bytes in doubt end as `again` does, which is of another response."""
        count = min(self.in_doubt, len(again))
        return self._last(count) == again[len(again) - count :]

    def drop_doubted(self, again: bytes) -> bool:
        """Drop the bytes in doubt, which do not end as `again` does; return whether those before are right.

        If not, nothing is dropped.
        """
        some_delivered = self.received - self._unproven_from > self.in_doubt
        if some_delivered and all_differ(self._last(self.in_doubt), again):
            return False
        count, self.in_doubt = self.in_doubt, 0
        self._recall()
        self.received -= count
        self._in_memory -= count
        self._counters.wasted_bytes += count
        while count:
            chunk = self._chunks[-1]
            step = min(count, chunk.filled - chunk.sent)
            chunk.filled -= step
            count -= step
            if chunk.sent == chunk.filled:
                self._release(self._chunks.pop())
        return True

    def _last(self, count: int) -> bytes:
        """Return the last `count` bytes in the stage, after it has all of its bytes in memory."""
        self._recall()
        views: list[memoryview] = []
        for chunk in reversed(self._chunks):
            if count <= 0:
                break
            views.insert(0, chunk.unsent[-count:])
            count -= len(views[0])
        return b"".join(views)

    def _recall(self) -> None:  # noqa: B027 - nothing to do where all are there
        """Bring all bytes of the stage into memory."""

    def _release(self, chunk: Chunk) -> None:  # noqa: B027 - as above
        """Take back the memory of a chunk that is dropped or delivered."""

    def _on_bytes(self) -> None:
        """Take bytes from the body, or wake delivery if it waits. Called when bytes may have arrived."""
        if self._discarded or self._body is None:
            return
        self._dry = False
        if self.awaited:
            self._changed()
        elif self._parks:
            self._body.park(self._on_full)
        else:
            self._take_some(self._body)

    def _on_full(self) -> None:
        """Take bytes from a parked body. Called when its socket is full."""
        if self.awaited or self._discarded or self._body is None:
            self._on_bytes()
        else:
            self._take_some(self._body)

    def _take_some(self, body: Body) -> None:
        """Move bytes from the body into the stage, and watch for more."""
        if not self._filled(body):
            return
        if body.left:
            self._wait(body)
        else:
            self._dry = True

    def _filled(self, body: Body) -> bool:
        """Move bytes from the body into the stage; return False if it is full or the body has failed."""
        try:
            self._fill(body)
        except BlockingIOError:
            self._dry = True
        except StageFull:
            self._full = True
            return False
        except SourceError:
            self._dry = True
            return False  # `Body.taken` raises it too
        return True

    def _wait(self, body: Body) -> None:
        if self._parks and not self.awaited:
            self._dry = False  # a parked body does not report a few bytes, so delivery must look
            body.park(self._on_full)
        else:
            body.notify(self._on_bytes)

    @abstractmethod
    def _fill(self, body: Body) -> None:
        """Move some bytes from the body into the stage, and wake delivery if it waits.

        Raises BlockingIOError if no byte has arrived, StageFull, and SourceError if no further byte will.
        """

    @abstractmethod
    def drain_into(self, fd: int, most: int = ALL) -> int:
        """Move bytes of the stage into `fd` (`Drainable.drain_into`)."""

    @abstractmethod
    def _read(self, body: Body) -> None:
        """Read some bytes from the body into memory. Raises as `_fill`."""

    def _pull(self) -> None:
        """Take bytes of the body into the stage if it has none that may be delivered."""
        body = self._body
        if self._in_memory > self.in_doubt or body is None or not body.left:
            return
        if self._filled(body) and body.left and (self._dry or not self._parks):
            body.notify(self._on_bytes)  # read the rest of a small part on arrival, to free its connection

    def _move_on(self, fd: int, body: Body, most: int) -> int:
        """Splice bytes from the socket into `fd`; the stage itself must be empty."""
        try:
            count = body.splice_into(fd, min(body.left, most))
        except NothingArrived:
            self._dry = True
            body.notify(self._on_bytes)
            return 0
        except BlockingIOError:
            if not self._parks:
                body.notify(self._on_bytes)  # take a small part into the stage, to free its connection
            raise
        except SourceError:
            self._dry = True
            return 0  # `Body.taken` raises it too
        self._arrived(count)
        return count

    def _note_freed(self) -> None:
        """Watch the body again if the stage was full. Called when bytes have left the stage."""
        if self._full and self._body is not None:
            self._full = False
            self._body.notify(self._on_bytes)

    def discard(self) -> None:
        """Drop all bytes and return their memory; no byte may arrive any more."""
        self._discarded = True
        if self._body is not None:
            self.detach(self._body)
        self._chunks.clear()
        self._in_memory = 0

    def _hold(self, data: bytes | bytearray) -> None:
        self._chunks.append(Chunk(data, len(data)))
        self._in_memory += len(data)

    def _doubt_more(self, body: Body, count: int) -> None:
        """Put the next `count` bytes in doubt, which the body has just brought and `_arrived` will count."""
        taken, _ = body.doubted()
        if self.received + count == self.part.size:
            self.in_doubt = 0
        elif taken < self.received + count - self._attached_at:
            # Ranges before this one are whole. Without this, bytes of theirs waited for a late one.
            self.in_doubt = min(DOUBTED, taken)
        else:
            self.in_doubt = min(DOUBTED, self.in_doubt + count)

    def _arrived(self, count: int) -> None:
        """Count `count` more bytes of the part."""
        self.received += count
        self._counters.received_bytes += count
        if self.received == self.part.size:
            self._dry, self.in_doubt = True, 0

    def _changed(self) -> None:
        if self.awaited:
            self.awaited = False
            self._on_change()

    def _write_memory(self, fd: int, most: int) -> int:
        most = min(most, self._in_memory - self.in_doubt)
        if most <= 0:
            return 0
        chunks, vectors, size = self._chunks, [], 0
        for chunk in chunks:
            vectors.append(chunk.unsent[: most - size])
            size += len(vectors[-1])
            if size >= min(most, MOST_WRITTEN) or len(vectors) == _MAX_VECTORS:
                break
        count = os.writev(fd, vectors)
        self._leave_some(count)
        return count

    def _leave_some(self, count: int) -> None:
        """Note that the next `count` bytes in memory are delivered."""
        while count:
            chunk = self._chunks[0]
            step = min(count, chunk.filled - chunk.sent)
            self._leave(chunk, step)
            count -= step

    def _leave(self, chunk: Chunk, count: int) -> None:
        """Note that the next `count` bytes of the first chunk are delivered."""
        chunk.sent += count
        self._in_memory -= count
        if chunk.sent == chunk.filled:
            self._release(chunk)
            del self._chunks[0]


class Stages(Protocol):
    """Factory of one channel's stages."""

    @property
    def quota(self) -> ChannelQuota:
        """Quota of the channel, from which stages reserve bytes."""

    def part_size(self) -> int:
        """Return the most bytes of the next range to cut."""

    def reserved_bytes(self, part: Part) -> int:
        """Return the bytes that the part's stage reserves."""

    def make(self, part: Part, *, on_change: Callable[[], None], counters: ChannelCounters) -> Stage:
        """Return a stage for a part whose bytes are reserved."""
