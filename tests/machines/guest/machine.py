"""Scenes of trouble with network and limits, each in a Linux guest of its own, over all transports."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.kit.credentials import SETTINGS
from tests.machines.guest.boot import guest
from tests.machines.guest.scenes import SCENES
from tests.machines.machine import Machine, Result

ROOT = Path(__file__).parents[3]
LONGEST = 1500.0
"""Seconds of a guest."""


class Guest(Machine[str]):
    """A case is a scene, and takes a minute or two."""

    count = None
    limit = 2 * LONGEST
    workers = 1

    def cases(self) -> Sequence[str]:
        return [*SCENES]

    def run(self, case: str) -> Result:
        command = [sys.executable, "-m", "tests.machines.guest.scenes", case]
        lines = list(guest(command, directory=str(ROOT), memory="3G", environment=SETTINGS, timeout=LONGEST))
        counts: Counter[str] = Counter()
        for report in (json.loads(line) for line in lines if line.startswith("{")):
            for state, count in report["outcomes"].items():
                counts[state.partition(":")[0]] += count
        if self.trace is not None:
            self.trace += lines
        broken = [line for line in lines if "BROKEN" in line]
        if "guest: exit 0" not in lines:
            broken += ["the guest did not end by itself:", *lines[-20:]]
        return Result(counts, "\n".join(broken))


MACHINE = Guest()
