"""What to do about the error that failed a channel: one text, for the log, `/status`, the page and `top`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.process.exits import Exit, exit_code
from streamer.errors import Denied, Expired
from streamer.s3.client.faults import EXPIRED, NOT_BY_CREDENTIALS

if TYPE_CHECKING:
    from streamer.errors import SinkError, SourceError

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


def advice(error: SourceError | SinkError, *, mendable: bool) -> str:
    """Return the remedy for an error. `mendable`: whether a restarted sidecar can resume the epoch."""
    code = exit_code(error)
    remedy = REMEDIES[code]
    if getattr(error, "code", "") in NOT_BY_CREDENTIALS:
        remedy = "do as the error says"
    if code is Exit.CORRUPT:
        return remedy
    if isinstance(error, Denied) and error.code in EXPIRED and not isinstance(error, Expired):
        # Those of environment variables: other keys are renewed. execve(2) keeps the environment.
        return "set new keys in the environment, which `penstock restart` keeps, and start the job again"
    if mendable:
        return (
            f"{remedy}; then `penstock restart` goes on at the exact byte, for a reader that is still there"
        )
    return f"{remedy}, and restart sidecar and trainer"
