"""Crash points that were broken once. The last part of an ID may drift by a call; the class holds."""

from __future__ import annotations

import pytest

from tests.machines.crash.machine import Crash
from tests.machines.machine import home
from tests.machines.report import search

WORKERS = 3
"""Most of a run is waiting; a worker takes some seconds to begin."""
ONCE_BROKEN = [
    # A sidecar that fails at something local closed what the keeper held, which looked like an end.
    "kept-splice:sidecar:rename:8:EIO",
    "kept-splice:successor:chmod:2:EPERM",
    "kept-gzip:successor:mknodat:3:EACCES",
    # On uvloop a keeper that died with a request unread was not missed. One ended with 1 at a failed unlink.
    "kept-closed:keeper:mprotect:1:kill",
    "kept-splice:keeper:unlink:2:EIO",
    # One that could not say that it is ready ended with a traceback.
    "kept-tls:keeper:write:1:ENOMEM",
    "kept-closed:keeper:openat:2:ENFILE",
    # The wake-up of a signal failed, and the signal went unnoticed.
    "kept-closed:handover:write:7:EINTR",
    # No memory to watch a connection's socket, or for the pages of a FIFO, ended the process by a traceback.
    "buffered:sidecar:epoll_ctl:60:ENOMEMx20",
    "kept-resumed:successor:writev:6:ENOMEMx20",
    "kept-wrapped:successor:splice:14:EIO",
    # Refused right behind a record's header, whose bytes then were not counted: the delivery waited for them.
    "kept-wrapped:successor:splice:13:EIO",
    # So did a lock that the file system refuses, a limit that may not be raised, no descriptor at the start.
    "kept-aiobotocore:sidecar:flock:1:ENOLCK",
    "splice:sidecar:prlimit64:2:EPERM",
    "resumed:sidecar:socket:3:EMFILEx20",
    "kept-tls-aiobotocore:sidecar:socket:1:EMFILEx20",
    # A command that could not load its modules ended with a traceback: its event loop did not run yet.
    "kept-gzip:successor:newfstatat:16:EIO",
    "closed:sidecar:read:1:ENOMEM",
]


@pytest.mark.timeout(600)
def test_points_that_were_broken() -> None:
    report = search(home("crash"), ONCE_BROKEN, workers=WORKERS)
    assert report.cases == len(ONCE_BROKEN)
    assert not report.broken, report


SHAPES = ["kept-splice", "kept-tls", "kept-gzip-wrapped", "ranks", "kept-closed", "resumed"]
"""Together they have every feature; the others are combinations, for the night."""


@pytest.mark.timeout(600)
def test_seeded_points() -> None:
    """Kills alone: how often a call is made varies, so a seed draws other points each time.

    The night's run takes the other faults.
    """
    drawn = {seed: Crash().draw(seed) for seed in range(1000)}
    kills = {seed: each.shape for seed, each in drawn.items() if each.sort == "kill"}
    chosen = [seed for shape in SHAPES for seed in [each for each in kills if kills[each] == shape][:1]]
    assert len(chosen) == len(SHAPES)
    report = search(home("crash"), chosen, workers=WORKERS)
    assert not report.broken, report
    assert report.counts["kill equal"] > 0
