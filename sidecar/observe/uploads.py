"""What the uploader has done, as its process reports it: for metrics, status page and log lines."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class UploadFigures:
    """Snapshot of the uploader."""

    bytes: int = 0
    """Bytes of finished objects since the start."""
    files: dict[str, int] = field(default_factory=dict)
    """Files since the start, by outcome: uploaded, or the kind of what failed."""
    waiting_files: int = 0
    """Files that are closed and not in S3."""
    waiting_bytes: int = 0
    """Their bytes."""
    newest: float | None = None
    """When the newest complete checkpoint in S3 was written, in Unix time; None without one."""
    last_seconds: float = 0.0
    """What the newest checkpoint took to upload."""
    output: str = "waiting"
    """Phase of what is uploaded at the trainer's end: waiting, running, complete or incomplete."""
