"""What the log says of a channel that has failed for good: the context of the error, and the remedy."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sidecar.process.exits import Exit, exit_code
from streamer.errors import SinkError
from streamer.s3.client.faults import NOT_BY_CREDENTIALS

if TYPE_CHECKING:
    from streamer.errors import SourceError
    from streamer.relay.channel_state import FifoFate

REMEDIES = {
    Exit.CONFIG: "correct the job file as the error says",
    Exit.DENIED: "give the credentials s3:GetObject on the object and s3:ListBucket, or renew them",
    Exit.MISSING: "put the object back as it was",
    Exit.CHANGED: "put the listed version back",
    Exit.UNREACHABLE: "see to the endpoint and the way to it",
    Exit.LOCAL: "see to the directory of the FIFOs and its file system",
    Exit.CORRUPT: "replace the corrupt object, and restart sidecar and trainer",
}
"""Remedies, by exit code."""


def context_fields(error: SourceError | SinkError) -> dict[str, Any]:
    """Return the fields of an error's context that are set: bucket, key, offset, attempt, request_id."""
    if isinstance(error, SinkError):
        return {}
    return {name: value for name, value in asdict(error.context).items() if value is not None}


def advice(error: SourceError | SinkError, *, mendable: bool) -> str:
    """Return the remedy for an error. `mendable`: whether a restarted sidecar can resume the epoch."""
    code = exit_code(error)
    remedy = REMEDIES[code]
    if getattr(error, "code", "") in NOT_BY_CREDENTIALS:
        remedy = "do as the error says"
    if code is Exit.CORRUPT:
        return remedy
    if mendable:
        return (
            f"{remedy}; then `penstock restart` goes on at the exact byte, for a reader that is still there"
        )
    return f"{remedy}, and restart sidecar and trainer"


FATES: dict[FifoFate, str] = {"held": "held open", "closed": "closed"}
"""Log texts for the state of a failed epoch's FIFO."""
