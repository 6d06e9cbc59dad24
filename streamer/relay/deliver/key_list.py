"""The key list of an epoch, as what delivers the epoch uses it (`streamer.sink.key_list`).

If this machine refuses a line, `reach` reports it as a full pipe does, and delivery waits in `writable`. So
the FIFO never has a byte whose line the file lacks.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from streamer.errors import ReaderGone, Shortage
from streamer.retry import retry_while_refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.retry import RetryPolicy
    from streamer.sink.key_list import KeyListWriter
    from streamer.sink.outlet import Outlet


class KeyList:
    """Says which object the bytes of one epoch are of. Its owner closes it once."""

    def __init__(
        self, writer: KeyListWriter, policy: RetryPolicy, on_shortage: Callable[[Shortage | None], None]
    ) -> None:
        """`policy`: of waits while this machine refuses lines. `on_shortage`: see `retry_while_refused`."""
        self._writer = writer
        self._policy = policy
        self._on_shortage = on_shortage

    def reach(self, consumed: int, count: int, delivered: int) -> None:
        """List the objects that begin in `count` bytes of the plan from `consumed` on.

        `delivered`: offset of the first of them in the stream. Raises BlockingIOError if this machine refuses
        a line; the caller waits in `writable`, and repeats the call.
        """
        try:
            self._writer.reach(consumed, count, delivered)
        except Shortage as error:
            raise BlockingIOError(errno.EAGAIN, "the key list takes nothing now") from error

    async def writable(self, outlet: Outlet) -> None:
        """Wait until the lines that this machine has refused are written.

        Raises Shortage if the machine refuses them for too long, ReaderGone if the reader of `outlet` closes.
        """

        async def flush() -> None:
            if outlet.reader_gone:
                raise ReaderGone("the reader closed the pipe")
            self._writer.flush()

        await retry_while_refused(flush, self._policy, self._on_shortage)

    def close(self) -> None:
        """Close the list."""
        self._writer.close()
