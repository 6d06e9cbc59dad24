"""A run: consecutive bytes of one object, which can be inflated without those before them.

The first run of an object begins with the object. A further run begins where a member seems to begin: that is
a guess until the run before it ends there with a whole member. A run whose turn has not come keeps its bytes,
so that they can be inflated again: after the run before it if the guess was wrong, or from the start if the
run is spoiled. So what is inflated ahead is either right or dropped, and every error of an object is found by
inflating its bytes in order.

Invariant: the run's inflater and its content are used with `lock` held. The event loop alone adds bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from streamer.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.inflate import Inflater


class Run:
    """Bytes of one object from offset `start` on."""

    def __init__(self, start: int, inflater: Inflater, *, make: Callable[..., Inflater]) -> None:
        """`inflater` is replaced by `make(start=start)` if it fails before the turn has come."""
        self.start = start
        self.inflater = inflater
        self.lock = threading.Lock()
        self.ended = False
        """Whether no byte will be added."""
        self.fed = 0
        """Bytes added."""
        self.used = 0
        """Bytes passed to the inflater."""
        self.wanted = False
        """Whether the thread that delivers waits for the run."""
        self.dropped = False
        """Whether the run is over: its bytes belong to the run before it."""
        self.spoiled = False
        """Whether the bytes cannot be inflated ahead."""
        self._make = make
        self._input: deque[bytes | memoryview] = deque()
        self._kept: list[bytes | memoryview] | None = []
        """All bytes added; None when the run's turn has come."""
        self._inflated: deque[bytes] = deque()
        """Content that was inflated ahead."""

    def __repr__(self) -> str:
        return f"<Run from {self.start}, {self.used}/{self.fed} bytes used>"

    @property
    def its_turn(self) -> bool:
        """Whether the content of all runs before this one is delivered."""
        return self._kept is None

    @property
    def pending(self) -> bool:
        """Whether bytes that were added can be inflated."""
        return bool(self._input) or not self.inflater.drained

    @property
    def over_ahead(self) -> bool:
        """Whether the run will not be inflated ahead any more."""
        return self.wanted or self.dropped or self.spoiled or (self.ended and not self.pending)

    @property
    def has_content(self) -> bool:
        """Whether the next content was inflated ahead."""
        return bool(self._inflated)

    @property
    def held(self) -> int:
        """Bytes of content that was inflated ahead and is not delivered."""
        return sum(map(len, self._inflated))

    def add(self, data: bytes | memoryview) -> None:
        """Add the run's next bytes."""
        if self._kept is not None:
            self._kept.append(data)
        self._input.append(data)
        self.fed += len(data)

    def pieces(self, most: int) -> list[bytes]:
        """Return the next content, at most `most` bytes; none if more bytes are needed.

        Raises the error of a damaged object.
        """
        if self._inflated:
            pieces = [self._inflated.popleft()]
            most -= len(pieces[0])
            while self._inflated and len(self._inflated[0]) <= most:
                most -= len(self._inflated[0])
                pieces.append(self._inflated.popleft())
            return pieces
        return self._inflate(most)

    def inflate_ahead(self, most: int) -> int:
        """Inflate at most `most` bytes before the run's turn has come; return how many."""
        if self.over_ahead:
            return 0
        try:
            pieces = self._inflate(most)
        except (PenstockError, MemoryError):
            pieces = []
            self.spoiled = True
        if self.inflater.is_damaged:  # the error would name a wrong member
            self.spoiled = True
        self._inflated.extend(pieces)
        return sum(map(len, pieces))

    def _inflate(self, most: int) -> list[bytes]:
        while True:
            if self.inflater.drained:
                if not self._input:
                    return []
                data = self._input.popleft()
                self.used += len(data)
                self.inflater.feed(data)
            if pieces := self.inflater.pieces(most):
                return pieces

    def begin(self, previous: Run | None) -> int:
        """Begin the run's turn; `previous`: the run of the object before it, which has ended.

        Returns the bytes of content that are dropped, because the run is spoiled.
        """
        lost = 0
        if self.spoiled and self._kept is not None:
            lost = self.held
            self._inflated.clear()
            self._input = deque(self._kept)
            self.inflater, self.used = self._make(start=self.start), 0
        self._kept = None
        if previous is not None:
            self.inflater.follow(previous.inflater)
        return lost

    def join(self, run: Run) -> int:
        """Take the bytes of `run`, the next one, which is over; return the bytes of content dropped."""
        lost = run.held
        run.dropped = True
        for data in run._kept or ():
            self.add(data)
        self.ended = run.ended
        return lost
