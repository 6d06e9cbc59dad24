"""When failed requests come back: spread out, never sooner than the server asked, never all at once."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.retry import RetryPolicy

PARTS = 64


def fullest(instants: list[float], width: float) -> int:
    """The most instants in any interval of `width` seconds on a grid of half that."""
    grids = [Counter(int((each + shift) / width) for each in instants) for shift in (0.0, width / 2)]
    return max(max(grid.values()) for grid in grids)


@pytest.mark.parametrize("retry_after", [None, 0.0, 1.0, 5.0])
@pytest.mark.parametrize("failures", [0, 1, 4, 20])
def test_parts_that_failed_together_do_not_return_together(retry_after, failures):
    """In a twentieth of the time over which they return, there are never more than a sixth of them."""
    random.seed(f"{retry_after} {failures}")
    policy = RetryPolicy()
    instants = [policy.wait(failures, retry_after) for _ in range(PARTS)]
    spread = max(instants) - min(instants)
    assert spread > 0.6 * max(min(0.1 * 2**failures, policy.longest_wait), retry_after or 0)
    assert fullest(instants, spread / 20) <= PARTS / 6


@given(st.integers(0, 10_000), st.floats(0, 1e6))
def test_what_the_server_asks_for_is_a_lower_bound_up_to_a_minute(failures, retry_after):
    policy = RetryPolicy()
    wait = policy.wait(failures, retry_after)
    asked = min(retry_after, policy.longest_retry_after)
    assert asked <= wait <= asked + max(policy.longest_wait, asked)


def test_waits_grow_to_their_longest():
    policy = RetryPolicy(first_wait=0.1, longest_wait=2.0)
    for failures, most in ((0, 0.1), (1, 0.2), (4, 1.6), (5, 2.0), (5000, 2.0)):
        waits = [policy.wait(failures, None) for _ in range(300)]
        assert most * 0.8 < max(waits) <= most
