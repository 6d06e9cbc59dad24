"""Runs without a fault, in which the calls are counted."""

from __future__ import annotations

import multiprocessing
import threading

import pytest

from tests.crash.__main__ import Staff, recorded
from tests.crash.shapes import SHAPES
from tests.crash.trial import Outcome

BUSY = Outcome("broken", ["the server was slower than GiveUpAfter"])
SOUND = Outcome("equal", calls={"sidecar": {"read": ["file", "pipe"]}})


def calls_after(*outcomes: Outcome) -> dict[str, list[str]]:
    """Return the calls that are recorded if a worker has these outcomes, one after the other."""
    ours, theirs = multiprocessing.Pipe()

    def work() -> None:
        for outcome in outcomes:
            theirs.recv()
            theirs.send(outcome)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        return {each.call: each.kinds for each in recorded([SHAPES["splice"]], Staff([ours]))}
    finally:
        worker.join()
        ours.close()
        theirs.close()


def test_a_run_that_a_busy_machine_has_broken_is_run_again() -> None:
    assert calls_after(BUSY, BUSY, SOUND) == {"read": ["file", "pipe"]}


def test_a_run_that_is_broken_each_time_ends_the_search() -> None:
    with pytest.raises(SystemExit, match="slower than GiveUpAfter"):
        calls_after(BUSY, BUSY, BUSY)
