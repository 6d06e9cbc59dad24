"""Runs without a fault, in which the calls are counted, and the points that are drawn from them."""

from __future__ import annotations

import pytest

from tests.machines.crash.calls import Point, errors_of
from tests.machines.crash.machine import Draw, recorded
from tests.machines.crash.trial import Outcome

BUSY = Outcome("broken", ["the server was slower than GiveUpAfter"])
SOUND = Outcome("equal", calls={"sidecar": {"read": ["file", "pipe"]}})


def test_a_run_that_a_busy_machine_has_broken_is_run_again() -> None:
    outcomes = iter([BUSY, BUSY, SOUND])
    assert recorded(lambda: next(outcomes)) == {"sidecar": {"read": ["file", "pipe"]}}


def test_a_run_that_is_broken_each_time_ends_the_search() -> None:
    with pytest.raises(RuntimeError, match="slower than GiveUpAfter"):
        recorded(lambda: BUSY)


def test_a_seed_draws_a_fault_that_its_call_can_have() -> None:
    calls = {"close": ["file"] * 9, "epoll_ctl": ["add", "other"]}
    errors = {Draw(seed, "splice", "sidecar", "error").point(calls) for seed in range(50)}
    assert {(each.call, each.n) for each in errors} == {("epoll_ctl", 1)}
    assert {each.fault for each in errors} == {*errors_of("epoll_ctl", "add")}
    kills = {Draw(seed, "splice", "sidecar", "kill").point(calls) for seed in range(50)}
    assert {each.call for each in kills} == {"close", "epoll_ctl"}
    assert {each.fault for each in kills} == {"kill"}
    assert Draw(7, "splice", "sidecar", "kill").point(calls) in kills
    assert Point.of("splice:sidecar:close:3:kill") in kills
