"""The opt-in run of training frameworks: what it reports, and what it calls broken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.machines.frameworks.interrupted import Broken
from tests.machines.frameworks.machine import MACHINE, RANKS, Trained, judge
from tests.machines.frameworks.programs.task import EPOCHS, GLOBAL_BATCH, UNEVEN

STEPS = sum(UNEVEN) // GLOBAL_BATCH
EPOCH = [list(range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)) for step in range(STEPS)]
RIGHT = Trained(EPOCH * EPOCHS, [1.0] * STEPS * EPOCHS, 1.0)


def test_what_was_seen_is_told_in_one_cell() -> None:
    trained = replace(RIGHT, losses=[1.000002, *RIGHT.losses[1:]])
    assert judge(trained, RIGHT) == f"{STEPS * EPOCHS} steps, 2e-06, 1.00"
    lines = MACHINE.table({"ddp": {f"N = {ranks}": "x" for ranks in RANKS}}, "").splitlines()
    assert lines[0] == "|  | N = 1 | N = 2 | N = 3 | N = 4 | N = 8 |"
    assert lines[2:] == ["| PyTorch DDP | x | x | x | x | x |"]


@pytest.mark.parametrize(
    ("trained", "reported"),
    [
        (replace(RIGHT, records=RIGHT.records[1:]), "steps instead of"),
        (replace(RIGHT, records=[EPOCH[1], *EPOCH[1:], *EPOCH]), "of them different"),
        (replace(RIGHT, records=[EPOCH[0][::-1], *RIGHT.records[1:]]), "other records"),
        (replace(RIGHT, losses=[1.1, *RIGHT.losses[1:]]), r"losses differ by up to 1\.0e-01"),
    ],
    ids=["steps", "twice", "other", "losses"],
)
def test_a_broken_promise_is_named(trained: Trained, reported: str) -> None:
    with pytest.raises(Broken, match=reported):
        judge(trained, RIGHT)
