"""Limits of this process that stand for a machine that lacks something."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def full_after(most: int) -> Iterator[None]:
    """Let no file of this process become longer than `most` bytes, as if its disk were full then.

    Writes to pipes and sockets have no such limit. CPython ignores SIGXFSZ, so that the write fails (EFBIG).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
