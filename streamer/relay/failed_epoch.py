"""Publishes an epoch's failure to its readers: first in the trailer, then through the FIFO.

The trailer becomes `failed` before the FIFO is touched, so a reader that sees an end of file finds the reason
in the trailer. While this machine refuses to write a trailer or to make the next FIFO, the FIFO stays open.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from streamer.aio import first_of
from streamer.errors import ReaderGone
from streamer.retry import retry_while_refused

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from streamer.errors import Shortage
    from streamer.retry import RetryPolicy
    from streamer.sink.fifo import FifoDirectory
    from streamer.trailer import Trailer


@dataclass(slots=True)
class FailedEpoch:
    """Steps after an epoch's failure; each is retried without a time limit."""

    fifos: FifoDirectory
    trailer: Trailer
    successor: Trailer | None
    """Next epoch's trailer, if its FIFO exists: a reader that left early may wait on that FIFO."""
    retry: RetryPolicy
    published: bool = False
    """Whether the trailers have been written."""

    def __post_init__(self) -> None:
        self.retry = replace(self.retry, give_up_after=math.inf)

    def publish(self) -> None:
        """Write the trailers. Raises SinkError."""
        self.fifos.publish(self.trailer)
        if self.successor is not None:
            self.fifos.publish(self.successor)
        self.published = True

    async def publish_before(self, stop: Coroutine[Any, Any, object]) -> None:
        """Retry writing the trailers until this machine allows it or `stop` returns."""

        async def publish() -> None:
            self.publish()

        await first_of(retry_while_refused(publish, self.retry, lambda _: None), stop)

    async def end_fifo(self, on_shortage: Callable[[Shortage], None]) -> None:
        """Remove the FIFO's name. The caller closes the FIFO by `FifoDirectory.retire`."""
        with contextlib.suppress(ReaderGone):
            await self.fifos.settle()

        async def conclude() -> None:
            self.fifos.conclude(self.trailer)

        await retry_while_refused(conclude, self.retry, on_shortage)
