"""Every fault that a server can have, against every transport: `python -m tests.hostile --all`.

Cells run in worker processes, so that a crash, a hang or memory is one worker's; a cell that ends a worker,
or whose worker does not answer, is a finding as any other. Without `--all` a sample is drawn from `--seed`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from queue import Empty, Queue

from tests.hostile.cells import OPERATIONS, TRANSPORTS, Bench, Cell, Judgement, all_cells, as_dict
from tests.hostile.faults import BELOW, FAULTS

SAMPLE = 48
WORKERS = 8
HANGS = 100.0
"""Seconds after which a worker that says nothing is taken for hung."""
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIAHOSTILE",
    "AWS_SECRET_ACCESS_KEY": "secret-hostile",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "NO_PROXY": "*",
}


@dataclass
class Account:
    """What came of the cells."""

    states: dict[Cell, Judgement] = field(default_factory=dict)
    seconds: float = 0.0
    once_only: int = 0
    """Findings that did not come again when tried alone: the machine was busy."""

    @property
    def findings(self) -> dict[Cell, Judgement]:
        return {cell: judgement for cell, judgement in self.states.items() if judgement.finding}


@contextlib.contextmanager
def serving() -> Iterator[tuple[list[int], str]]:
    """The hostile server's ports, and the authority to trust."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.hostile.server"],
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


class _Worker:
    """A process that runs one cell after another."""

    def __init__(self, ports: list[int], bundle: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile", "--worker", json.dumps([ports, bundle])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | CREDENTIALS,
        )
        self._errors: list[str] = []
        self._drain = threading.Thread(target=self._keep_errors)
        self._drain.start()

    def _keep_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._errors = [*self._errors[-20:], line]

    def ready(self) -> None:
        """Wait until everything is imported."""
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def judge(self, cell: Cell, number: int) -> Judgement:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        killer = threading.Timer(HANGS, self.process.kill)
        killer.start()
        began = time.monotonic()
        try:
            self.process.stdin.write(json.dumps(as_dict(cell) | {"number": number}) + "\n")
            self.process.stdin.flush()
            if line := self.process.stdout.readline():
                return Judgement(**json.loads(line))
        except BrokenPipeError:
            pass
        finally:
            killer.cancel()
        code = self.process.wait()
        self._drain.join()
        what = f"the process ended with {code} after {time.monotonic() - began:.0f} s"
        return Judgement("ended", time.monotonic() - began, 0, 0.0, what, "".join(self._errors)[-500:])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.process.communicate(timeout=20)
        self._drain.join()


def judge_all(cells: list[Cell], *, workers: int, progress: bool = False) -> Account:
    """Run these cells; each finding twice, the second time alone, and it must be one again."""
    account, began = Account(), time.monotonic()
    _judge(account, cells, workers=workers, progress=progress)
    if suspects := [*account.findings]:
        account.once_only = len(suspects)
        _judge(account, suspects, workers=1, progress=progress)
        account.once_only -= len(account.findings)
    account.seconds = time.monotonic() - began
    return account


def _judge(account: Account, cells: list[Cell], *, workers: int, progress: bool) -> None:
    waiting: Queue[Cell] = Queue()
    for cell in cells:
        waiting.put(cell)
    numbers = itertools.count(random.randrange(1 << 30))
    together = threading.Barrier(min(workers, max(1, len(cells))))

    def work() -> None:
        with serving() as (ports, bundle):
            judge_waiting(ports, bundle)

    def judge_waiting(ports: list[int], bundle: str) -> None:
        worker = _Worker(ports, bundle)
        worker.ready()
        together.wait()  # imports keep the processors busy, and cells have limits of time
        with contextlib.suppress(Empty):
            while True:
                cell = waiting.get_nowait()
                judgement = worker.judge(cell, next(numbers))
                account.states[cell] = judgement
                if progress and judgement.finding:
                    print(f"FINDING  {cell}: {judgement.finding}\n         {judgement.text}", flush=True)
                if progress and waiting.qsize() % 100 == 0:
                    print(f"{waiting.qsize()} of {len(cells)} cells to come", flush=True)
                if worker.process.poll() is not None:
                    worker.close()
                    worker = _Worker(ports, bundle)
                    worker.ready()
        worker.close()

    threads = [threading.Thread(target=work) for _ in range(together.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def sample(seed: int, count: int) -> list[Cell]:
    """Draw `count` cells, no fault twice."""
    cells = all_cells()
    random.Random(seed).shuffle(cells)
    found: dict[str, Cell] = {}
    for cell in cells:
        found.setdefault(cell.fault, cell)
    return list(found.values())[:count]


def table(account: Account) -> str:
    """Faults by outcome, then what took longest, grew most and lagged most."""
    by_fault: dict[str, Counter[str]] = defaultdict(Counter)
    for cell, judgement in account.states.items():
        by_fault[cell.fault]["FINDING" if judgement.finding else judgement.outcome] += 1
    lines = [
        f"{fault:<50} {', '.join(f'{name} {count}' for name, count in sorted(counts.items()))}"
        for fault, counts in by_fault.items()
    ]
    total = Counter(
        "FINDING" if judgement.finding else judgement.outcome for judgement in account.states.values()
    )
    lines.append(f"{'all':<50} {', '.join(f'{name} {count}' for name, count in total.most_common())}")
    for name in ("seconds", "grown", "lag"):
        cell, judgement = max(account.states.items(), key=lambda each: float(getattr(each[1], name)))
        lines.append(f"most {name}: {getattr(judgement, name)} by {cell}")
    return "\n".join(lines)


def work(ports: list[int], bundle: str) -> None:
    """A worker: a cell a line in, its outcome a line out, whatever else is printed meanwhile."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("ready", file=out, flush=True)

    async def judge() -> None:
        async with Bench(ports, bundle) as bench:
            while line := await asyncio.to_thread(sys.stdin.readline):
                reported = json.loads(line)
                number = reported.pop("number")
                judgement = await bench.run(Cell(**reported), number)
                print(json.dumps(asdict(judgement)), file=out, flush=True)

    asyncio.run(judge())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="the whole matrix")
    parser.add_argument("--seed", type=int, default=0, help="of the sample, and of the order")
    parser.add_argument("--cells", type=int, default=SAMPLE, help="in the sample")
    parser.add_argument("--workers", type=int, default=WORKERS, help="processes")
    parser.add_argument("--fault", action="append", help="this fault alone; may be given again")
    parser.add_argument("--operation", choices=OPERATIONS, help="this operation alone")
    parser.add_argument("--transport", choices=TRANSPORTS, help="this transport alone")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(*json.loads(given.worker))
        return 0
    chosen = all_cells() if given.all or given.fault else sample(given.seed, given.cells)
    chosen = [
        cell
        for cell in chosen
        if (not given.fault or cell.fault in given.fault)
        and given.operation in (None, cell.operation)
        and given.transport in (None, cell.transport)
    ]
    random.Random(given.seed).shuffle(chosen)  # so that a run that is broken off has met a bit of everything
    if not chosen:
        parser.error("no such cell")
    account = judge_all(chosen, workers=given.workers, progress=True)
    print(table(account))
    print(
        f"{len(FAULTS) + len(BELOW)} faults known; {len(chosen)} cells in {account.seconds:.0f} s, "
        f"{len(account.findings)} findings, {account.once_only} that were none when run alone"
    )
    return 1 if account.findings else 0


if __name__ == "__main__":
    sys.exit(main())
