"""Who is slow, from two snapshots: each state by the numbers that must lead to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sidecar.observe.bottleneck import REMEDIES, WAITED_FOR, Sample, diagnose, eta, rate
from streamer.relay.statistics import CAUSES, STATES

START = Sample(
    at=100.0, state="streaming", connected=True, error=None, refused=None, epoch=2, total=1000, consumed=0,
    ever_consumed=5000,
    written=5000, seconds=dict.fromkeys(STATES, 7.0), starved=dict.fromkeys(CAUSES, 3.0), ok=10, failures=4,
    held_back_by=(), untaken=0.0, throttled=1,
)  # fmt: skip


def after(seconds: float = 60.0, *, cause: Any = "first_byte", **spent: float) -> Sample:
    """A later moment: parts of `seconds` in states, starved for one cause; the rest moves."""
    parts = {**spent, "moving": 1 - sum(spent.values())}
    return replace(
        START,
        at=START.at + seconds,
        seconds={state: 7.0 + seconds * parts.get(state, 0) for state in STATES},
        starved={each: 3.0 + (seconds * spent.get("starved", 0) if each == cause else 0) for each in CAUSES},
        ok=110,
    )


def test_the_trainer() -> None:
    found = diagnose(START, after(blocked=0.83, starved=0.05))
    assert found.kind == "trainer"
    assert found.text == "the trainer is the bottleneck: the sidecar waited for it 83% of the last minute"


@pytest.mark.parametrize("cause", CAUSES)
def test_storage_and_why(cause: Any) -> None:
    found = diagnose(START, after(20, starved=0.6, blocked=0.1, cause=cause))
    assert found.kind == "storage"
    assert found.text == (
        f"storage is the bottleneck: the trainer waited 60% of the last 20 s, mostly {WAITED_FOR[cause]}"
    )
    assert found.remedy == REMEDIES[cause]


def test_time_without_a_reader_does_not_count() -> None:
    """The reader was there for 12 of 60 s, and waited for 9 of them."""
    assert "waited 75%" in diagnose(START, after(idle=0.8, starved=0.15)).text


def test_a_short_epoch_after_a_long_wait_had_a_reader() -> None:
    moment = replace(after(idle=0.999), connected=False)
    assert diagnose(START, moment).text.startswith("no reader")
    assert "neither side waits much" in diagnose(START, moment, when="the epoch").text


def test_this_machine_comes_before_all_waits() -> None:
    now = replace(after(blocked=0.9), refused="/d: No space left on device; free space")
    found = diagnose(START, now)
    assert found.kind == "machine"
    assert found.text == "waiting for this machine: /d: No space left on device; free space"
    assert diagnose(START, replace(now, error="gone")).kind == "failed"
    over = diagnose(START, after(refused=0.5, blocked=0.4))
    assert (over.kind, over.text) == ("machine", "waited for this machine 50% of the last minute")


def test_a_trainer_that_takes_nothing_is_not_a_slow_one() -> None:
    found = diagnose(START, replace(after(blocked=0.9), untaken=25.4))
    assert (found.kind, found.text) == ("stuck", "the trainer has taken no byte for 25 s")
    assert "Look at the trainer" in found.remedy
    assert diagnose(START, replace(after(blocked=0.9), untaken=5.0)).kind == "trainer"


def test_faults() -> None:
    found = diagnose(START, replace(after(starved=0.5, cause="retry"), failures=54))
    assert found.kind == "faults"
    assert found.text == "S3 fails 33% of requests: the trainer waited for storage 50% of the last minute"
    slow_down = diagnose(START, replace(after(starved=0.5, cause="throttled"), failures=54, throttled=30))
    assert slow_down.text.startswith("S3 fails 33% of requests and asks for fewer: ")


def test_a_few_failures_are_not_the_storages_trouble() -> None:
    assert diagnose(START, replace(after(starved=0.5), failures=START.failures + 5)).kind == "storage"


def test_failures_while_storage_keeps_up_are_mentioned() -> None:
    found = diagnose(START, replace(after(blocked=0.9, starved=0.03), failures=54))
    assert found.kind == "trainer"
    assert found.text.endswith("; S3 fails 33% of requests, the trainer waited 3%")


def test_failures_while_the_trainer_waits_for_storage_are_faults() -> None:
    """Longer waits for the trainer do not hide them."""
    found = diagnose(START, replace(after(blocked=0.5, starved=0.39), failures=54))
    assert (found.kind, found.remedy) == ("faults", REMEDIES["retry"])
    assert "the trainer waited for storage 39%" in found.text


def test_a_longer_wait_for_the_trainer_does_not_hide_storage() -> None:
    found = diagnose(START, after(blocked=0.5, starved=0.39, cause="connect"))
    assert (found.kind, found.remedy) == ("mixed", REMEDIES["connect"])
    assert found.text == (
        "storage and the trainer are slow in turn: the trainer waited 39% of the last minute, "
        "mostly for new connections; the sidecar waited for the trainer 50%"
    )


def test_a_shorter_wait_for_a_limit_does_not_hide_storage() -> None:
    assert diagnose(START, after(blocked=0.45, limited=0.25, starved=0.22)).kind == "mixed"


def test_a_limit() -> None:
    found = diagnose(START, after(limited=0.9, starved=0.05))
    assert (found.kind, found.text) == ("limit", "held to its bandwidth limit 90% of the last minute")
    assert diagnose(START, after(limited=0.6, starved=0.3)).text.endswith(
        "; the trainer waited for storage 30%"
    )


def test_another_fifo_of_a_shared_stream() -> None:
    now = replace(after(held_back=0.6, starved=0.1), held_back_by=("train-2",))
    found = diagnose(START, now)
    assert found.kind == "held_back"
    assert found.text == "held back 60% of the last minute by train-2, which is full or without a reader"
    assert "train-2" in found.remedy
    assert "set Fetch: separately" in found.remedy
    two = diagnose(START, replace(now, held_back_by=("train-2", "train-3")))
    assert two.text.endswith(" by train-2, train-3, which are full or without a reader")
    between = diagnose(START, replace(now, held_back_by=()))
    text = "held back 60% of the last minute by another FIFO of the channel"
    assert (between.text, between.remedy) == (text, "")
    assert diagnose(START, after(held_back=0.3, blocked=0.4)).kind == "trainer"


def test_nobody() -> None:
    assert diagnose(START, after(blocked=0.1, starved=0.1)).kind == "even"


def test_no_reader_and_failed() -> None:
    assert (
        diagnose(START, replace(after(idle=1.0), connected=False)).text
        == "no reader: nothing has opened the FIFO of epoch 2"
    )
    assert diagnose(START, replace(after(idle=1.0), connected=False, state="stopped")).text == "stopped"
    failed = diagnose(START, replace(after(blocked=1.0), error="access denied: s3://b/k"))
    assert (failed.kind, failed.text) == ("failed", "failed for good: access denied: s3://b/k")


def test_one_snapshot_is_no_evidence() -> None:
    assert diagnose(START, START).kind == "idle"
    assert rate(START, START) == 0.0
    assert eta(START, START) is None


def test_rate_and_time_left() -> None:
    later = replace(after(10), written=5500, consumed=250, ever_consumed=5250)
    assert rate(START, later) == 50
    assert eta(START, later) == 30
    assert eta(START, replace(later, state="waiting")) is None
