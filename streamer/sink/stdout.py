"""The error of a failed write to standard output, for the commands' texts and for `penstock cat`'s stream.

A module of its own, because every command imports it, and the outlets import asyncio.
"""

from __future__ import annotations

from streamer.errors import ReaderGone, SinkError


def refused(error: OSError) -> SinkError:
    """Return the SinkError of a failed write to standard output."""
    if isinstance(error, (BrokenPipeError, ConnectionError)):
        return ReaderGone("nobody reads standard output")
    return SinkError(f"cannot write standard output: {error.strerror}")
