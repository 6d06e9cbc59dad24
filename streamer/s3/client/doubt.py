"""What a response is worth before it is whole, for every reader of bodies.

A server that meets an error after the response header may send the text of the error in place of the rest, or
the next response, and then close. So:

    whole        exactly the bytes of the range have come, and nothing follows: all of them count
    unfinished   all but the last `DOUBTED` bytes that have come may be delivered
    failed       what is not delivered waits for a response that overlaps it, agrees, and goes on after it

The second response begins inside the bytes in doubt. It must go on after their end: where a server always
breaks at one byte of an object, two responses would end with the same text. So if it breaks no later than the
first one did, or little later, the next one begins nearer to the end. That also serves a server that breaks
each response off after a few bytes. Nothing that differs is delivered. If all bytes in doubt differ, and
bytes before them are delivered, these may be foreign too, and the epoch fails by name.

Agreement ends no doubt: the second response may have more of the same text. The last `DOUBTED` bytes stay
in doubt until a response is whole.
"""

from __future__ import annotations

from streamer.errors import BadAnswer, ErrorContext, Truncated
from streamer.units import KIB

DOUBTED = 16 * KIB
"""Last bytes of an unfinished response that are not delivered. Texts of errors are shorter."""
LEAST_OVERLAP = 64
"""Bytes that agree by chance in no two responses; an overlap has as many if there are twice as many."""


class NothingArrived(BlockingIOError):
    """No byte of a body has arrived that may be moved now."""


def overlap(doubted: int, misses: int) -> int:
    """Return how many of the bytes in doubt another response is to repeat.

    `misses`: responses in a row that ended with fewer new bytes than those that they were to repeat.
    """
    return max(min(doubted, DOUBTED) >> misses, min(LEAST_OVERLAP, (doubted + 1) // 2))


def all_differ(doubted: bytes, again: bytes) -> bool:
    """Return whether bytes before those that `again` repeats may be foreign too: its first bytes differ."""
    return doubted[-len(again) :][:LEAST_OVERLAP] != again[:LEAST_OVERLAP]


FOREIGN = (
    "the last bytes of a response that broke off are not those of the next one: a server or a proxy puts "
    "other bytes, such as an error's text, into bodies; see to what is between Penstock and S3"
)
"""Text of the error of responses that differ."""


class Withheld:
    """The last bytes of an object's body that is passed on in pieces, and may come by several responses."""

    def __init__(self) -> None:
        self.received = 0
        """Bytes that have come, those in doubt included."""
        self.doubted = b""
        """The last of them, which are not passed on."""
        self._awaited = 0
        """Bytes in doubt that the response is to repeat."""
        self._again = b""
        """What it has sent of them so far."""
        self._resumed = self._repeated = 0
        """Bytes that had come when the response was requested, and those of them that it was to repeat."""
        self._misses = 0
        self._begun = 0
        """Offset of the first byte of the response, or of the first one that agreed with it."""

    def resume(self) -> int:
        """Return the offset at which the next response is to begin."""
        self._again, self._awaited = b"", overlap(len(self.doubted), self._misses)
        self._resumed, self._repeated = self.received, self._awaited
        if not self._awaited:
            self._begun = self.received
        return self.received - self._awaited

    def add(self, piece: bytes, context: ErrorContext) -> bytes:
        """Add bytes of the response; return those to pass on. Raises Truncated, BadAnswer if they differ."""
        if self._awaited:
            self._again += piece
            if len(self._again) <= self._awaited:
                return b""
            again, piece = self._again[: self._awaited], self._again[self._awaited :]
            self._awaited = 0
            if not self.doubted.endswith(again):
                if self._begun < self.received - len(self.doubted) and all_differ(self.doubted, again):
                    raise BadAnswer(f"{FOREIGN}; others of them may be delivered", context)
                self.received -= len(self.doubted)
                self.doubted, self._repeated = b"", 0
                raise Truncated(FOREIGN, context)
        self.received += len(piece)
        data = self.doubted + piece
        self.doubted = data[-DOUBTED:]
        return data[:-DOUBTED]

    def fail(self) -> None:
        """Note that the response has failed."""
        # Without this, a server that cuts at 16 KiB and one byte would bring one byte with each response.
        few = max(0, self.received - self._resumed) < self._repeated
        self._misses = self._misses + 1 if few else 0
