"""The soak's first seeds: random faults over channels, epochs and transports, each byte against the truth.

More of them: `python -m tests.kit.soak`.
"""

from __future__ import annotations

import pytest

from tests.kit.faults import PASSING, SPOILT, WRONG
from tests.kit.soak import run_trial
from tests.kit.trials import REDIRECTS, Trial

SEEDS = [*range(10), 17, 161]
"""Among them a listing that leads back, and a sidecar that is killed three times."""

FEATURES = {
    *("portable", "copying", "kernel", "TLS", "proxied", "hedges", "checksums", "readers leave", "killed"),
    *("manifest", "augmented", "wrapped", "gzip", "zstd", "shuffled", "sharded", "lanes"),
}


@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize("seed", SEEDS)
def test_every_epoch_is_right_or_fails_by_its_cause(seed):
    trial = Trial.draw(seed)
    account = run_trial(trial)
    assert sum(account.epochs.values()) > 0
    assert account.faults["sidecar killed"] == len(trial.kills)


def test_a_seed_is_a_run():
    assert Trial.draw(7) == Trial.draw(7)
    assert Trial.draw(7) != Trial.draw(8)


def test_the_seeds_draw_every_feature():
    """What no seed draws is not soaked."""
    drawn = {feature for seed in range(400) for feature in Trial.draw(seed).features}
    assert drawn == FEATURES
    assert {Trial.draw(seed).listing for seed in range(400)} == {"right", "goes round", "sent twice"}
    assert {kind for seed in range(400) for kind in Trial.draw(seed).rates} == {*PASSING, *REDIRECTS}
    assert {kind for seed in range(400) for kind in Trial.draw(seed).wrong} == {*WRONG, *SPOILT}
