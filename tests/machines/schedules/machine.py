"""The relay in virtual time: a seed draws channels, faults, readers and operator, and the order of events."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from tests.machines.machine import Machine, Result
from tests.machines.schedules.run import run_trial
from tests.machines.schedules.trial import SeedTrial


class Schedules(Machine[SeedTrial]):
    """A case takes a twentieth of a second. `--trace` prints its events."""

    count = 1000

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        gc.collect()
        gc.freeze()  # each case collects what it has left
        yield

    def draw(self, seed: int) -> SeedTrial:
        return SeedTrial.draw(seed)

    def run(self, case: SeedTrial) -> Result:
        return Result(run_trial(case, lines=self.trace))


MACHINE = Schedules()
