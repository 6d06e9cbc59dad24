"""The bound on a sidecar's memory: above every measurement, and consistent with the budget that it allows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.process.resources import Footprint
from streamer.units import MIB

FOOTPRINTS = st.builds(
    Footprint,
    transport=st.sampled_from(["splice", "buffered", "aiobotocore"]),
    fifos=st.integers(1, 1000),
    requests=st.integers(1, 1024),
    keeper=st.booleans(),
)


@pytest.mark.parametrize(
    ("transport", "fifos", "requests", "budget", "measured"),
    [
        ("splice", 1, 64, 64, 105.8),
        ("splice", 20, 64, 64, 83.9),
        ("buffered", 1, 64, 64, 112.3),
        ("buffered", 20, 20, 40, 117.1),
        ("buffered", 20, 64, 40, 131.3),
        ("buffered", 20, 64, 40, 134.4),  # all of them inflated
        ("buffered", 20, 64, 64, 160.5),
        ("buffered", 20, 256, 64, 163.8),
        ("buffered", 20, 256, 256, 275.8),
        ("buffered", 20, 64, 512, 565.2),
        ("buffered", 40, 64, 80, 198.3),
        ("aiobotocore", 1, 64, 64, 143.5),
        ("aiobotocore", 20, 64, 64, 183.9),
    ],
)
def test_the_bound_is_above_what_was_measured(
    transport: str, fifos: int, requests: int, budget: int, measured: float
) -> None:
    """Measured: private pages, kernel memory and sockets together, in MiB; TLS where it is not spliced."""
    bound = Footprint(transport=transport, fifos=fifos, requests=requests).needed(budget * MIB) / MIB
    assert measured < bound < 1.7 * measured


@given(FOOTPRINTS, st.integers(0, 1 << 36))
def test_the_largest_budget_fits_and_no_larger_one_does(footprint: Footprint, limit: int) -> None:
    budget = footprint.largest_budget(limit)
    assert budget >= 0
    assert budget % MIB == 0
    assert budget == 0 or footprint.needed(budget) <= limit
    assert footprint.needed(budget + 3 * MIB) > limit


@given(FOOTPRINTS, st.integers(0, 1 << 36))
def test_more_of_anything_takes_no_less(footprint: Footprint, budget: int) -> None:
    least = footprint.needed(budget)
    for more in (
        replace(footprint, fifos=footprint.fifos + 1),
        replace(footprint, requests=footprint.requests + 1),
        replace(footprint, keeper=True),
    ):
        assert more.needed(budget) >= least
    assert footprint.needed(budget + MIB) >= least + MIB
