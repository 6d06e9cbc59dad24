"""The soak's first seeds: random faults over channels, epochs and transports, each byte against the truth.

More of them: `python -m tests.kit.soak`.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from functools import partial
from typing import Any

import pytest

from tests.kit.faults import PASSING, SPOILT, WRONG
from tests.kit.outcomes import Broken
from tests.kit.seeds import Outcome, run_seeds, search
from tests.kit.soak import open_shared, run_trial
from tests.kit.trials import REDIRECTS, Trial

SEEDS = [3, 35, 125, 175, 203, 215, 222, 277, 334, 348]
"""Together they draw all that any seed draws; in 161 the sidecar is killed three times."""

FEATURES = {
    *(
        "aiobotocore",
        "buffered",
        "splice",
        "TLS",
        "proxied",
        "hedges",
        "checksums",
        "readers leave",
        "killed",
    ),
    *("manifest", "augmented", "wrapped", "gzip", "zstd", "shuffled", "sharded", "ranks", "early"),
}


@pytest.fixture(scope="module")
def shared() -> None:
    """The first test of a worker may be any of these."""
    open_shared()


@pytest.mark.usefixtures("credentials", "shared")
@pytest.mark.parametrize("seed", SEEDS)
def test_every_epoch_is_right_or_fails_by_its_cause(seed: int) -> None:
    trial = Trial.draw(seed)
    account = run_trial(trial)
    assert sum(account.epochs.values()) > 0
    assert account.faults["sidecar killed"] == len(trial.kills)


def test_a_seed_is_a_run() -> None:
    assert Trial.draw(7) == Trial.draw(7)
    assert Trial.draw(7) != Trial.draw(8)


def drawn_by(seed: int) -> set[Any]:
    """Everything that the trial draws, in words."""
    trial = Trial.draw(seed)
    return {*trial.features, trial.listing, trial.change, *trial.rates, *trial.wrong}


def test_these_seeds_draw_what_any_seed_draws() -> None:
    assert set().union(*map(drawn_by, SEEDS)) == set().union(*map(drawn_by, range(400)))


def test_the_seeds_draw_every_feature() -> None:
    """What no seed draws is not soaked."""
    drawn = {feature for seed in range(400) for feature in Trial.draw(seed).features}
    assert drawn == FEATURES
    assert {Trial.draw(seed).listing for seed in range(400)} == {"right", "goes round", "sent twice"}
    assert {kind for seed in range(400) for kind in Trial.draw(seed).rates} == {*PASSING, *REDIRECTS}
    assert {kind for seed in range(400) for kind in Trial.draw(seed).wrong} == {*WRONG, *SPOILT}


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
    assert re.match(r"Broken\('a promise'\) in .*test_soak.py:\d+, from ValueError", outcomes[2].broken)
    assert (outcomes[3].died, outcomes[3].broken) == ("SIGSEGV", "the process died by SIGSEGV")
    assert outcomes[5].broken == "hung for 5 s"
    assert "in broken_in_its_way" in capfd.readouterr().err  # where it hung
    searched = search(outcomes.values(), 0, again="--seed {} --runs 1", drawn=lambda seed: f"trial {seed}")
    assert (searched.found, {*searched.broken}, searched.died) == (1 + 4 + 6, {2, 3, 5}, {"SIGSEGV": 1})
    reported = capfd.readouterr()
    assert "  --seed 3 --runs 1: the process died by SIGSEGV\n" in reported.out
    assert "seed 5: trial 5\nseed 5: hung for 5 s\n" in reported.err


def test_a_search_runs_broken_seeds_again(capsys: pytest.CaptureFixture[str]) -> None:
    """A busy machine may have broken a seed that is kept when it runs alone."""
    outcomes = [Outcome(seed, 0.1, broken="gave up after 31 s") for seed in (1, 2)]
    run_again = partial(run_seeds, broken_in_its_way, limit=5)
    searched = search(outcomes, 0, again="--seed {}", run_again=run_again)
    assert {*searched.broken} == {1, 2}
    assert re.search(
        r"--seed 1: gave up after 31 s\n +run again: kept\n"
        r" +--seed 2: gave up after 31 s\n +run again: Broken\('a promise'\)",
        capsys.readouterr().out,
    )
