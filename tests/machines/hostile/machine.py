"""Every fault that a server can have, at every kind of request, over every transport.

Each worker has a hostile server and clients of its own. Most of a cell is waiting, hence eight run at once.
A cell has limits of time: what breaks on a busy machine must break again alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from tests.kit.credentials import set_credentials
from tests.machines.hostile.cells import Bench, Cell, all_cells
from tests.machines.machine import Machine, Result


class Hostile(Machine[Cell]):
    """The cells of `all_cells`; the first some 400 have a fault each."""

    count = 48
    limit = 100.0
    workers = 8
    timed = True

    def cases(self) -> Sequence[Cell]:
        return all_cells()

    def named(self, text: str) -> Cell:
        return Cell.of(text)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        set_credentials()
        os.environ["NO_PROXY"] = "*"
        self._numbers = itertools.count(random.randrange(1 << 30))
        with _serving() as (ports, bundle), asyncio.Runner() as self._runner:
            self._bench = Bench(ports, bundle)
            yield
            self._runner.run(self._bench.close())

    def run(self, case: Cell) -> Result:
        judgement = self._runner.run(self._bench.run(case, next(self._numbers)))
        return Result(Counter([judgement.outcome]), judgement.finding, cells={"outcome": judgement.outcome})


@contextlib.contextmanager
def _serving() -> Iterator[tuple[list[int], str]]:
    """The hostile server's ports, and the authority to trust."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.machines.hostile.server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        reported = json.loads(process.stdout.readline())
        yield reported["ports"], reported["bundle"]
    finally:
        process.communicate("")


MACHINE = Hostile()
