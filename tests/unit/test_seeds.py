"""Searches by seeds: they go on past what breaks, kills or hangs a run, and name it."""

from __future__ import annotations

import os
import re
import signal
import threading

import pytest

from tests.kit.seeds import run_seeds, search


class Broken(Exception):
    """A promise was not kept."""


def broken_in_its_way(seed: int) -> int:
    """What a search may meet: a promise that is broken, a process that dies, one that hangs."""
    if seed == 2:
        raise Broken("a promise") from ValueError("its cause")
    if seed == 3:
        os.kill(os.getpid(), signal.SIGSEGV)
    if seed == 5:
        threading.Event().wait()
    return seed


def test_a_search_goes_on_past_what_it_finds(capfd: pytest.CaptureFixture[str]) -> None:
    outcomes = {each.seed: each for each in run_seeds(broken_in_its_way, range(1, 7), limit=5)}
    assert [each.found for each in outcomes.values()] == [1, None, None, 4, None, 6]
    assert outcomes[2].broken is not None
    assert re.match(r"Broken\('a promise'\) in .*test_seeds.py:\d+, from ValueError", outcomes[2].broken)
    assert outcomes[3].broken == "the process died by SIGSEGV"
    assert outcomes[5].broken == "hung for 5 s"
    assert "in broken_in_its_way" in capfd.readouterr().err  # where it hung
    broken = search(outcomes.values(), 0, again="--seed {} --runs 1", drawn=lambda seed: f"trial {seed}")
    assert {*broken} == {2, 3, 5}
    reported = capfd.readouterr()
    assert f" s: {1 + 4 + 6}\n" in reported.out
    assert "  --seed 3 --runs 1: the process died by SIGSEGV\n" in reported.out
    assert "seed 5: trial 5\nseed 5: hung for 5 s\n" in reported.err
