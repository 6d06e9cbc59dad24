"""The keeper under a drawn order of events, kills and failing system calls, against a model."""

from __future__ import annotations

from tests.machines.keeper.world import run_seed
from tests.machines.machine import Machine, Result


class KeeperModel(Machine[int]):
    """A case is its seed, which draws as the model goes; it takes a twentieth of a second."""

    count = 1000
    limit = 60.0

    def draw(self, seed: int) -> int:
        return seed

    def run(self, case: int) -> Result:
        return Result(run_seed(case))


MACHINE = KeeperModel()
