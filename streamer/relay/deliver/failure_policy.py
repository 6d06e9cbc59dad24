"""Policy for the FIFO of a failed epoch: the job file's `WhenFailed`.

    WhenFailed    FIFO of the failed epoch
    hold          stays open, so its reader waits (the default)
    close         is closed: an end of file that only the trailer contradicts

Two failures always hold the FIFO: one of this machine, because the policy's own steps could fail too; and one
before this process has the write end, because a sidecar with the right plan can still continue the epoch.
"""

from __future__ import annotations

from typing import Literal

WhenFailed = Literal["hold", "close"]
FifoFate = Literal["held", "closed"]
"""State that the FIFO of a failed epoch is brought into."""


def fifo_fate(when_failed: WhenFailed, *, local: bool, reader_came: bool) -> FifoFate:
    """Decide the state of a failed epoch's FIFO.

    `local`: this machine failed, not storage. `reader_came`: this process has the write end.
    """
    return "closed" if when_failed == "close" and reader_came and not local else "held"
