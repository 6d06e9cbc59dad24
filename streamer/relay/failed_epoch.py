"""How the readers of a failed epoch learn of its failure: first by its trailer, then by its FIFO.

The trailer says `failed` before anything happens to the FIFO, so a reader that meets an end of file finds the
reason there. This machine may refuse to write a trailer, or to make the next FIFO, for as long as it likes:
the FIFO stays open until it allows both.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from streamer.aio import first_of
from streamer.errors import ReaderGone
from streamer.relay.deliver.transform import ByteQueue
from streamer.retry import retry_while_refused

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from streamer.errors import Shortage
    from streamer.retry import RetryPolicy
    from streamer.sink.fifo import FifoDirectory
    from streamer.sink.outlet import PipeOutlet
    from streamer.trailer import Trailer


@dataclass(slots=True)
class FailedEpoch:
    """The steps after an epoch's failure; each is tried again without limit."""

    fifos: FifoDirectory
    trailer: Trailer
    successor: Trailer | None
    """The next epoch's trailer, where its FIFO exists: a reader that left early may wait there."""
    retry: RetryPolicy
    published: bool = False
    """Whether the trailers are written."""

    def __post_init__(self) -> None:
        self.retry = replace(self.retry, give_up_after=math.inf)

    def publish(self) -> None:
        """Write the trailers. Raises SinkError."""
        self.fifos.publish(self.trailer)
        if self.successor is not None:
            self.fifos.publish(self.successor)
        self.published = True

    async def publish_before(self, stop: Coroutine[Any, Any, object]) -> None:
        """Write the trailers as soon as this machine allows it, unless `stop` returns before."""

        async def publish() -> None:
            self.publish()

        await first_of(retry_while_refused(publish, self.retry, lambda _: None), stop)

    async def end_fifo(
        self, outlet: PipeOutlet, poison: bytes, on_shortage: Callable[[Shortage], None]
    ) -> None:
        """Write `poison` once its reader has taken the bytes before, and remove the FIFO's name.

        The caller closes the FIFO by `FifoDirectory.retire`.
        """
        left = ByteQueue([poison])
        with contextlib.suppress(ReaderGone):
            while left:
                try:
                    outlet.push(left)
                except BlockingIOError:
                    await outlet.writable()
            await self.fifos.settle()

        async def conclude() -> None:
            self.fifos.conclude(self.trailer)

        await retry_while_refused(conclude, self.retry, on_shortage)
