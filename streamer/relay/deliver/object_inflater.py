"""Inflates the bytes of one object, in its turn or ahead of it.

An object whose turn has not come keeps its bytes. If they cannot be inflated ahead, because they are damaged
or need more memory than there is for it, they are inflated again from the start in the object's turn. So what
is inflated ahead is either right or dropped, and the errors of objects come in stream order.

Invariant: the inflater and its content are used with `lock` held. The event loop alone adds bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from streamer.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.inflate import Inflater

WINDOW_AHEAD = 23
"""Largest window of content inflated ahead: 8 MiB, which suffices for Zstandard's levels up to 19."""


class ObjectInflater:
    """Content of one object: `add` its bytes in order, take `pieces`."""

    def __init__(self, make: Callable[..., Inflater], *, ahead: bool) -> None:
        """`make` returns an inflater, of a `largest_window` for bytes before their turn.

        `ahead`: whether bytes may be inflated before the object's turn.
        """
        self.lock = threading.Lock()
        self.ended = False
        """Whether no byte will be added."""
        self.used = 0
        """Bytes passed to the inflater."""
        self.wanted = False
        """Whether the thread that delivers waits for the content."""
        self.spoiled = False
        """Whether the bytes cannot be inflated ahead."""
        self._make = make
        self._inflater = make(largest_window=WINDOW_AHEAD) if ahead else make()
        self._adding = threading.Lock()
        """Held while bytes are added, or begun again with."""
        self._input: deque[bytes | bytearray] = deque()
        self._kept: list[bytes | bytearray] | None = [] if ahead else None
        """All bytes added; None when the object's turn has come."""
        self._inflated: deque[bytes] = deque()
        """Content that was inflated ahead."""

    def __repr__(self) -> str:
        return f"<ObjectInflater, {self.used} bytes used>"

    @property
    def pending(self) -> bool:
        """Whether bytes that were added can be inflated."""
        return bool(self._input) or not self._inflater.drained

    @property
    def over_ahead(self) -> bool:
        """Whether the object will not be inflated ahead any more."""
        return self.wanted or self.spoiled or (self.ended and not self.pending)

    @property
    def has_content(self) -> bool:
        """Whether the next content was inflated ahead."""
        return bool(self._inflated)

    def add(self, data: bytes | bytearray, *, last: bool) -> None:
        """Add the object's next bytes; `last`: there are no more."""
        with self._adding:
            if self._kept is not None:
                self._kept.append(data)
            self._input.append(data)
            self.ended = last

    def begin(self) -> int:
        """Begin the object's turn; return the bytes of content that are dropped, because it is spoiled."""
        if self._kept is None:
            return 0
        lost = 0
        with self._adding:
            if self.spoiled:
                lost = sum(map(len, self._inflated))
                self._inflated.clear()
                self._input = deque(self._kept)
                self._inflater, self.used = self._make(), 0
            self._kept = None
        return lost

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
        """Inflate at most `most` bytes before the object's turn has come; return how many."""
        if self.over_ahead:
            return 0
        try:
            pieces = self._inflate(most)
        except (PenstockError, MemoryError):
            pieces = []
            self.spoiled = True
        if self._inflater.is_damaged:
            self.spoiled = True
        self._inflated.extend(pieces)
        return sum(map(len, pieces))

    def _inflate(self, most: int) -> list[bytes]:
        while True:
            if self._inflater.drained:
                if not self._input:
                    return []
                data = self._input.popleft()
                self.used += len(data)
                self._inflater.feed(data)
            if pieces := self._inflater.pieces(most):
                return pieces

    def finish(self) -> None:
        """Check that the object is complete, after all its content was taken. Raises its error."""
        self._inflater.finish()
