"""Machines go on past what breaks, kills or hangs a case, and name it with the command that repeats it."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.machines.__main__ import main, parser, tickets
from tests.machines.machine import ABOUT, Machine, Result, home, load
from tests.machines.report import search

HOME = "tests.machines.test_pool"


class Promised(Exception):
    """A promise was not kept."""


class InItsWay(Machine[int]):
    """What a search may meet: a promise that is broken, a process that dies, one that hangs."""

    limit = 2.0

    def draw(self, seed: int) -> int:
        return seed

    def run(self, case: int) -> Result:
        if self.trace is not None:
            self.trace.append(f"runs {case}")
        match case:
            case 2:
                raise Promised("a promise") from ValueError("its cause")
            case 3:
                os.kill(os.getpid(), signal.SIGSEGV)
            case 5:
                threading.Event().wait()
            case 7:
                return Result(Counter(judged=1), "not as it should be", case="the seventh")
        return Result(Counter(sum=case))


class Listed(Machine[str]):
    def cases(self) -> Sequence[str]:
        return ("moto/a", "moto/b", "ceph/a")


MACHINE = InItsWay()


def test_a_search_goes_on_past_what_it_finds(capfd: pytest.CaptureFixture[str]) -> None:
    shown: list[str] = []
    report = search(HOME, range(1, 8), name="way", workers=2, show=shown.append)
    broken = {ticket: outcome.result.broken for ticket, outcome in report.broken.items()}
    assert re.match(r"Promised\('a promise'\) in .*test_pool.py:\d+, from ValueError", broken.pop(2))
    assert broken == {
        3: "the process died by SIGSEGV",
        5: "hung for 2 s",
        7: "not as it should be",
    }
    assert report.again == dict.fromkeys((2, 3, 5, 7), True)
    assert report.counts == {"sum": 1 + 4 + 6, "judged": 1}
    assert "in run" in capfd.readouterr().err  # where it hung
    assert "5: hung for 2 s" in "\n".join(shown)
    lines = str(report).splitlines()
    assert "  python -m tests.machines way --seed 3 --count 1" in lines
    assert "    broken again: the process died by SIGSEGV" in lines
    assert "  python -m tests.machines way --case 'the seventh'" in lines
    assert lines[-1] == "way: 7 cases, 4 broken"


def test_what_limits_of_time_judge_must_break_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InItsWay, "timed", True)
    assert {*search(HOME, [3, 4], workers=1).broken} == {3}


def test_a_search_may_end_with_the_first_finding_and_print_what_cases_trace() -> None:
    shown: list[str] = []
    report = search(HOME, range(1, 100), workers=1, stop=True, trace=True, show=shown.append)
    assert (report.cases, {*report.broken}) == (2, {2})
    assert shown[:2] == ["1\nruns 1", "2\nruns 2"]


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        (["--seed", "4", "--count", "2"], [4, 5]),
        (["--all", "--seed", "4"], [4, 5, 6]),
        (["--only", "moto/"], [0, 1]),
        (["--only", "/a", "--count", "1"], [0]),
        (["--case", "ceph/a"], ["ceph/a"]),
    ],
)
def test_cases_are_chosen_by_seed_and_by_text(options: list[str], chosen: list[int | str]) -> None:
    assert list(tickets(Listed(), parser().parse_args(["fuzz", *options]))) == chosen


def test_no_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["caffe"], ["keeper", "--all"], ["servers", "--only", "caffe"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
    assert "no case has caffe" in capsys.readouterr().err


@pytest.mark.parametrize("name", ABOUT)
def test_a_seed_is_a_case(name: str) -> None:
    machine = load(home(name))
    assert [str(machine.draw(seed)) for seed in range(20)] == [str(machine.draw(seed)) for seed in range(20)]
    for case in machine.cases()[:20]:
        assert machine.named(str(case)) == case
