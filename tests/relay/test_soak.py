"""The soak's first seeds: random faults over channels, epochs and transports, each byte against the truth.

More of them: `python -m tests.kit.soak`.
"""

from __future__ import annotations

import pytest

from tests.kit.soak import Account, Trial, run_trial


@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize("seed", range(16))
def test_every_epoch_is_right_or_fails_by_its_cause(seed):
    account = Account()
    run_trial(Trial.draw(seed), account)
    assert sum(account.epochs.values()) > 0


def test_a_seed_is_a_run():
    assert Trial.draw(7) == Trial.draw(7)
    assert Trial.draw(7) != Trial.draw(8)
