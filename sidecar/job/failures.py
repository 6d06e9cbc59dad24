"""What the operator is told of a channel that has failed for good: all that is known once, then a reminder.

A held FIFO means a trainer that waits, and it waits for somebody to act. So the line says what to do, and
what will then happen; it comes again every `REMIND_EVERY` seconds, for whoever looks at the end of a log.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sidecar.process.exits import Exit, exit_code
from sidecar.process.logs import log
from streamer.errors import SinkError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamer.errors import SourceError
    from streamer.relay.channel import Channel
    from streamer.relay.deliver.failure_policy import FifoFate

REMIND_EVERY = 300.0
"""Seconds between two lines about channels that are held."""

REMEDIES = {
    Exit.CONFIG: "correct Penstock.Endpoint as the error says",
    Exit.DENIED: "give the credentials s3:GetObject on the object, or renew them",
    Exit.MISSING: "put the object back as it was",
    Exit.CHANGED: "put the listed version back",
    Exit.UNREACHABLE: "see to the endpoint and the way to it",
    Exit.LOCAL: "see to the directory of the FIFOs and its file system",
    Exit.CORRUPT: "replace the damaged object, and restart sidecar and trainer",
}
"""By what the exit code will be."""


def place(error: SourceError | SinkError) -> dict[str, Any]:
    """Where in S3 an error occurred, as far as it knows: bucket, key, offset, attempt, request_id."""
    if isinstance(error, SinkError):
        return {}
    return {name: value for name, value in asdict(error.context).items() if value is not None}


def advice(error: SourceError | SinkError, *, mendable: bool) -> str:
    """What to do about it. `mendable`: whether a restart may go on with the epoch."""
    code = exit_code(error)
    remedy = REMEDIES[code]
    if code is Exit.CORRUPT:
        return remedy
    if mendable:
        return (
            f"{remedy}; then `penstock restart` goes on at the exact byte, for a reader that is still there"
        )
    return f"{remedy}, and restart sidecar and trainer"


FATES: dict[FifoFate, str] = {
    "held": "held open",
    "closed": "closed",
    "poisoned": "poisoned and closed",
}
"""Log texts for the state of a failed epoch's FIFO."""


async def remind(channels: Mapping[str, Channel]) -> None:
    """Log every channel that is held, again and again, until cancelled."""
    while True:
        await asyncio.sleep(REMIND_EVERY)
        for name, channel in channels.items():
            failure = channel.failure
            if failure is not None and failure.fifo == "held":
                log.error(
                    "still held",
                    channel=name,
                    seconds=round(time.monotonic() - failure.at),
                    error=str(failure.error),
                    do=advice(failure.error, mendable=channel.mendable),
                )
