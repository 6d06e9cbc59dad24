"""Reads epoch after epoch as one stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from streamer.errors import ChannelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")


def endless(passes: Iterable[T]) -> Iterator[T]:
    """Yield the elements of one pass over a reader, dataset or loader after the other, without end.

    Each pass is an epoch. A pass that resumes may have nothing left. Raises ChannelError if two successive
    passes are empty; otherwise as the passes do.
    """
    empty = 0
    while True:
        empty += 1
        for element in passes:
            empty = 0
            yield element
        if empty == 2:
            raise ChannelError(
                "two successive epochs have no record; give the channel objects, or end the loop earlier"
            )
