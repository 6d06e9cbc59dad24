"""How many Python calls an object costs: a figure without the machine's noise, which only goes down."""

import pytest

from benchmarks.calls import calls_an_object


@pytest.mark.parametrize(("command", "most"), [("run", 340), ("cat", 340)])
def test_an_object_of_100_kb_costs_no_more_calls(command: str, most: int) -> None:
    assert 100 < calls_an_object(command, objects=4000) < most
