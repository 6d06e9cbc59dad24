"""The limit of bandwidth: whatever is sent when it may be, the average holds; changes hold at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.schedule.bandwidth import BURST, Bandwidth
from streamer.schedule.budget import MemoryBudget
from streamer.schedule.concurrency import ConcurrencyController


@given(st.integers(1, 10**9), st.lists(st.tuples(st.integers(1, 10**7), st.floats(0, 2)), max_size=50))
def test_the_average_holds(limit: int, writes: list[tuple[int, float]]) -> None:
    bucket, now, sent = Bandwidth(limit), 1000.0, 0
    bucket.change(limit, now)
    for count, later in writes:
        now += later + bucket.wait(now + later)
        # Before each write no more than a burst was sent beyond what the time allows.
        assert sent <= limit * (now - 1000) + BURST * limit + 1e-3 * limit
        bucket.sent(count, now)
        sent += count


def test_without_a_limit_nothing_waits() -> None:
    bucket = Bandwidth()
    bucket.sent(10**12, 5.0)
    assert bucket.wait(5.0) == 0
    bucket.change(100, 6.0)
    assert bucket.wait(6.0) == 0, "what went before the limit is no debt"


def test_a_change_holds_at_once() -> None:
    bucket = Bandwidth()
    bucket.change(100, 0.0)
    bucket.sent(1000, 0.0)
    assert bucket.wait(0.0) == pytest.approx(10)
    assert bucket.wait(4.0) == pytest.approx(6)
    bucket.change(None, 4.0)
    assert bucket.wait(4.0) == 0
    with pytest.raises(ValueError, match="more than 0"):
        bucket.change(0, 5.0)


def test_a_channel_waits_for_the_stricter_of_both_limits() -> None:
    whole = MemoryBudget(1000, ConcurrencyController(8, 4), members=2)
    one, other = whole.quota(), whole.quota()
    assert not one.limited
    whole.bandwidth.change(100, 0.0)
    one.bandwidth.change(50, 0.0)
    assert one.limited
    assert other.limited
    one.sent(100, 0.0)
    assert one.wait(0.0) == pytest.approx(2)
    assert other.wait(0.0) == pytest.approx(1), "what one has sent counts for all"
