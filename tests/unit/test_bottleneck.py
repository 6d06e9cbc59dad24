"""Who is slow, from two snapshots: each state by the numbers that must lead to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sidecar.observe.bottleneck import REMEDIES, WAITED_FOR, Sample, diagnose, eta, rate
from streamer.relay.statistics import CAUSES, STATES

START = Sample(
    at=100.0, state="streaming", connected=True, error=None, epoch=2, total=1000, consumed=0,
    ever_consumed=5000,
    written=5000, seconds=dict.fromkeys(STATES, 7.0), starved=dict.fromkeys(CAUSES, 3.0), ok=10, failures=4,
    throttled=1,
)  # fmt: skip


def after(seconds=60.0, *, cause="first_byte", **spent):
    """A later moment: parts of `seconds` in states, starved for one cause; the rest moves."""
    parts = {**spent, "moving": 1 - sum(spent.values())}
    return replace(
        START,
        at=START.at + seconds,
        seconds={state: 7.0 + seconds * parts.get(state, 0) for state in STATES},
        starved={each: 3.0 + (seconds * spent.get("starved", 0) if each == cause else 0) for each in CAUSES},
        ok=110,
    )


def test_the_trainer():
    found = diagnose(START, after(blocked=0.83, starved=0.05))
    assert found.kind == "trainer"
    assert found.text == "trainer is the bottleneck: storage waited 83% of the last minute"


@pytest.mark.parametrize("cause", CAUSES)
def test_storage_and_why(cause):
    found = diagnose(START, after(20, starved=0.6, blocked=0.1, cause=cause))
    assert found.kind == "storage"
    assert found.text == (
        f"storage is the bottleneck: the trainer waited 60% of the last 20 s, mostly {WAITED_FOR[cause]}"
    )
    assert found.remedy == REMEDIES[cause]


def test_time_without_a_reader_does_not_count():
    """Of 60 s the reader was there for 12, and waited for 9 of them."""
    assert "waited 75%" in diagnose(START, after(idle=0.8, starved=0.15)).text


def test_faults():
    found = diagnose(START, replace(after(starved=0.5, cause="retry"), failures=54))
    assert found.kind == "faults"
    assert "33% of requests fail;" in found.text
    assert "asks for fewer" not in found.text
    slow_down = diagnose(START, replace(after(starved=0.5, cause="throttled"), failures=54, throttled=30))
    assert "fail and it asks for fewer;" in slow_down.text


def test_a_few_failures_are_not_the_storages_trouble():
    assert diagnose(START, replace(after(starved=0.5), failures=START.failures + 5)).kind == "storage"


def test_faults_that_do_no_harm_are_mentioned():
    found = diagnose(START, replace(after(blocked=0.9), failures=54))
    assert found.kind == "trainer"
    assert "S3 fails 33% of requests, so far without harm" in found.text


def test_a_limit():
    found = diagnose(START, after(limited=0.9, starved=0.05))
    assert (found.kind, "90%" in found.text) == ("limit", True)


def test_nobody():
    assert diagnose(START, after(blocked=0.1, starved=0.1)).kind == "even"


def test_no_reader_and_failed():
    assert (
        diagnose(START, replace(after(idle=1.0), connected=False)).text
        == "no reader: epoch 2 waits in its FIFO"
    )
    assert diagnose(START, replace(after(idle=1.0), connected=False, state="stopped")).text == "stopped"
    failed = diagnose(START, replace(after(blocked=1.0), error="access denied: s3://b/k"))
    assert (failed.kind, failed.text) == ("failed", "failed for good: access denied: s3://b/k")


def test_one_snapshot_is_no_evidence():
    assert diagnose(START, START).kind == "idle"
    assert rate(START, START) == 0.0
    assert eta(START, START) is None


def test_rate_and_time_left():
    later = replace(after(10), written=5500, consumed=250, ever_consumed=5250)
    assert rate(START, later) == 50
    assert eta(START, later) == 30
    assert eta(START, replace(later, state="waiting")) is None
