"""Search for inputs that a parser does not end as it must on.

A case is a target and some hundred mutations of what it is known to take, or of what is kept in `corpus`.
With atheris (a build of libFuzzer; `pip install atheris`) mutations are led by which branches they reach;
without it they are blind. A finding is kept in `corpus`, where every run of the tests tries it again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.machines.fuzz.inputs import add, kept, mutated
from tests.machines.fuzz.targets import TARGETS
from tests.machines.machine import Machine, Result

MEMORY = 3 << 30
"""Bytes of address space that a process may have."""
TOO_LONG = 10
"""Seconds of one input; blind, of CPU, as other programs are busy too."""
INPUTS, GUIDED = 500, 20_000
"""Inputs of a case, blind and with atheris."""


@dataclass(frozen=True)
class Batch:
    """Inputs of one target."""

    seed: int
    target: str

    def inputs(self) -> Iterator[bytes]:
        """Mutate what is known, in the same way for the same seed and corpus."""
        dice = random.Random(self.seed)
        known = [*TARGETS[self.target].seeds, *kept(self.target)]
        return (mutated(dice.choice(known), known, dice) for _ in range(INPUTS))


class Fuzz(Machine[Batch]):
    """Consecutive seeds take the targets in turn; a case takes about a second."""

    count = 10 * len(TARGETS)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        self._guided = importlib.util.find_spec("atheris") is not None
        if not self._guided:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            signal.signal(signal.SIGVTALRM, _too_long)
        yield

    def draw(self, seed: int) -> Batch:
        return Batch(seed, [*TARGETS][seed % len(TARGETS)])

    def run(self, case: Batch) -> Result:
        return _guided(case) if self._guided else _blind(case)


def _blind(case: Batch) -> Result:
    for data in case.inputs():
        signal.setitimer(signal.ITIMER_VIRTUAL, TOO_LONG)
        try:
            TARGETS[case.target].run(data)
        except BaseException:
            add(case.target, data)
            raise
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return Result(Counter(inputs=INPUTS))


def _too_long(*_: object) -> None:
    raise TimeoutError(f"an input took more than {TOO_LONG} s")


def _guided(case: Batch) -> Result:
    """libFuzzer ends its process, so it has one of its own."""
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as scratch:
        work, crash = Path(scratch, "work"), Path(scratch, "crash")
        work.mkdir()
        crash.mkdir()
        for number, data in enumerate([*TARGETS[case.target].seeds, *kept(case.target)]):
            (work / str(number)).write_bytes(data)
        command = [
            sys.executable, "-m", "tests.machines.fuzz.guided", case.target, str(work),
            f"-seed={case.seed + 1}", f"-runs={GUIDED}", f"-artifact_prefix={crash}/",
            f"-timeout={TOO_LONG}", "-rss_limit_mb=1024", "-max_len=4096",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
        for found in crash.iterdir():
            add(case.target, found.read_bytes())
    lines = re.findall(r"^.*(?:Error|Exception|Warning|ALARM)\b.*$", done.stderr, re.MULTILINE)
    return Result(Counter(inputs=GUIDED), (done.returncode and (lines or ["no text"])[0][:300]) or "")


MACHINE = Fuzz()
