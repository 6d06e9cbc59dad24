"""Trailers that a test reads."""

from __future__ import annotations

from pathlib import Path

from streamer.trailer import Trailer, read_trailer


def published_trailer(directory: Path, channel: str, epoch: int) -> Trailer:
    """Return the epoch's trailer. Raises AssertionError if there is none."""
    trailer = read_trailer(str(directory), channel, epoch)
    assert trailer is not None, f"{channel}_{epoch} has no trailer in {directory}"
    return trailer
