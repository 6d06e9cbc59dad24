"""What to do about an error, by its cause: S3's error code, the error of the network, or the exit code."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from sidecar.doctor.machine import Finding
from sidecar.process.exits import Exit, exit_code
from streamer.errors import Barred, BarredNow, ForeignAnswer, SourceError
from streamer.s3.client import faults
from streamer.s3.client.barriers import causes
from streamer.s3.client.credentials import REWRITTEN

if TYPE_CHECKING:
    from streamer.errors import PenstockError

FIXES = {
    Exit.DENIED: "Check the keys, the region and the bucket's policy.",
    Exit.MISSING: "Correct S3Uri; on an S3-compatible server try Endpoint.PathStyle: true.",
    Exit.UNREACHABLE: "Correct Endpoint.Url, and let this host through firewalls and proxies to it.",
    Exit.CONFIG: "Correct the key of the job file, or the variable, that the text names.",
    Exit.LOCAL: "Raise the limit of this machine, or correct the path, that the text names.",
    Exit.CHANGED: "Let nothing replace objects while a job reads them.",
    Exit.CORRUPT: "Store the object again.",
}
CAUSES = {
    "AccessDenied": "Allow {action} in the policies of the credentials and of the bucket; for objects "
    "encrypted with SSE-KMS, kms:Decrypt on their key too.",
    "SignatureDoesNotMatch": "Correct AWS_SECRET_ACCESS_KEY: it does not belong to the access key. If "
    "it does, correct Endpoint.Region.",
    "NoSuchKey": "Correct the key in S3Uri; keys are case-sensitive.",
    "SlowDown": "Lower RequestsInFlight, or spread the keys over more prefixes.",
    "InvalidBucketName": "Correct the bucket in S3Uri.",
}
"""Remedies by S3's error code, where more can be said than `EXPLANATIONS` does; `FIXES` has other codes'."""
CAUSES["403"] = CAUSES["AccessDenied"]
NETWORK_CAUSES: tuple[tuple[type[BaseException], str], ...] = (
    (socket.gaierror, "Correct the host in Endpoint.Url, or the resolver of this machine."),
    (ConnectionRefusedError, "Start the endpoint, or correct the port in Endpoint.Url."),
    (
        TimeoutError,
        "Let this host through firewalls to the endpoint; a private network needs an endpoint for S3.",
    ),
)
"""Remedies by the error of the network, the first that fits."""


def remedy(error: PenstockError, action: str) -> str:
    """Return what to do. `action`: the actions that a policy must allow for the request."""
    code = error.code if isinstance(error, SourceError) else ""
    stated = next((each for each in faults.FIXES if each in str(error)), "")
    if not stated and code not in CAUSES:
        stated = faults.EXPLANATIONS.get(code, "").partition("; ")[2]
    in_text = isinstance(error, Barred | BarredNow | ForeignAnswer) or str(error).startswith(REWRITTEN)
    if in_text and isinstance(error, SourceError):
        stated = error.message.partition(" (S3 responded")[0].rpartition("; ")[2]
    if stated:
        return f"{stated[0].upper()}{stated[1:]}."
    fix = CAUSES.get(code) or _network_fix(error) or FIXES.get(exit_code(error)) or "Report this as a bug."
    return fix.format(action=action)


def _network_fix(error: PenstockError) -> str:
    """Return the remedy for the first cause of an error that is one of the network's; empty for others."""
    for cause in causes(error):
        for kind, fix in NETWORK_CAUSES:
            if isinstance(cause, kind):
                return fix
    return ""


def failed(check: str, error: PenstockError, action: str = "s3:ListBucket and s3:GetObject") -> Finding:
    """Return a failure with its remedy. `action`: the actions that a policy must allow for the request."""
    return Finding(check, "failure", str(error), remedy(error, action), exit_code(error))
