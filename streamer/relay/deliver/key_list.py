"""The key list of an epoch, as what delivers the epoch uses it (`streamer.sink.key_list`)."""

from __future__ import annotations

from typing import Protocol


class KeyList(Protocol):
    """Says which object the bytes of one epoch are of. Its owner closes it once."""

    def reach(self, consumed: int, count: int, delivered: int) -> None:
        """List the objects that begin in `count` bytes of the plan from `consumed` on.

        `delivered`: offset of the first of them in the stream. Raises Shortage.
        """

    def close(self) -> None:
        """Close the list."""


class KeyLists(Protocol):
    """Begins the key lists of one FIFO's epochs."""

    async def __call__(self, epoch: int, consumed: int) -> KeyList:
        """Return the key list of an epoch whose delivery begins at byte `consumed` of its plan.

        A thread walks over the objects before that byte. Raises SinkError.
        """
