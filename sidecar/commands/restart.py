"""`penstock restart`: has a running sidecar start itself anew, and waits until it is ready again.

The sidecar appends notes to its lock file (`Layout.note`): that it is ready, or why it cannot restart.
"""

from __future__ import annotations

import os
import select
import signal
import time
from typing import TYPE_CHECKING

from streamer.errors import SinkError

if TYPE_CHECKING:
    from sidecar.job.layout import Layout

LOOK_EVERY = 0.1
"""Seconds between two looks at the lock file."""


def restart(layout: Layout, *, within: float) -> tuple[int, float]:
    """Return the process id of the sidecar and the seconds until it was ready again. Raises SinkError."""
    pid, began = layout.owner(), time.monotonic()
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        raise SinkError(f"the sidecar, process {pid}, has just ended") from None
    try:
        signalled: int | None = None
        """Time of the last note when the signal was sent."""
        while True:
            note = layout.last_note()
            event = None if note is None else note.get("event")
            if event == "trainer runs":
                raise SinkError(
                    f"penstock exec serves {layout.data}; only a sidecar of penstock run restarts"
                )
            if signalled is None and note is not None:
                _signal(process, pid)
                signalled = note["at"]
            elif note is not None and note["at"] != signalled:
                if event == "ready":
                    return pid, time.monotonic() - began
                raise SinkError(f"the sidecar, process {pid}, cannot restart and goes on: {note['error']}")
            if select.select([process], [], [], LOOK_EVERY)[0]:
                raise SinkError(f"the sidecar, process {pid}, ended instead of restarting; its log says why")
            if time.monotonic() - began > within:
                raise SinkError(
                    f"the sidecar, process {pid}, is not ready after {within:g} s; its log says why"
                )
    finally:
        os.close(process)


def _signal(process: int, pid: int) -> None:
    try:
        signal.pidfd_send_signal(process, signal.SIGUSR2)
    except OSError as error:
        raise SinkError(
            f"cannot signal the sidecar, process {pid}: {error.strerror}; run this command as its user"
        ) from error
