"""Fetches by aiobotocore what our own client does not support: redirects, bodies of unknown length, and
buckets whose requests it cannot sign.

A request costs aiobotocore ten times the CPU time, so the operator is shown the cause: each once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamer.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.s3.ranges import Body, RangeRequest, RangeSource


class LeftToAiobotocore(SourceError):
    """A response or a bucket that our own client does not support; the message is the cause."""

    kind = "left_to_aiobotocore"


def no_cause(_: LeftToAiobotocore) -> None:
    """Ignore the cause."""


class Fallback:
    """Opens by `source` what is left to it."""

    def __init__(self, source: RangeSource, on_cause: Callable[[LeftToAiobotocore], None] = no_cause) -> None:
        """`on_cause` is called with the first error of each cause."""
        self._source = source
        self._on_cause = on_cause
        self._causes: set[str] = set()

    async def open(self, request: RangeRequest, left: LeftToAiobotocore) -> Body:
        """As `RangeSource.open`, for a request that has failed with `left`."""
        if left.message not in self._causes:
            self._causes.add(left.message)
            self._on_cause(left)
        return await self._source.open(request)
