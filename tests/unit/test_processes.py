"""How many engine processes `Processes: auto` starts."""

from __future__ import annotations

import pytest

from streamer.schedule.processes import automatic


@pytest.mark.parametrize(("cores", "engines"), [(1, 0), (7, 0), (8, 2), (16, 4), (200, 8)])
def test_engines_are_two_or_more_and_only_for_tls(cores: int, engines: int) -> None:
    assert (automatic(cores, tls=True), automatic(cores, tls=False)) == (engines, 0)
