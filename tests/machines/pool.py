"""Runs cases in processes, so that no case ends the search: what kills or hangs a process is a finding.

    tickets ──> parent ──a ticket──> worker: run(case) ──its result──>  parent ──> an Outcome for each

A worker runs one case after another until one raises, hangs, or kills it; then the next has a new worker.
A worker that hangs writes the stacks of its threads to standard error before it dies. All workers have begun
before the first case: imports keep the processors busy, and some cases have limits of time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from tests.kit.patience import Patience
from tests.machines.machine import Result, Ticket, case_of, load

ABORTED = 10.0
"""Seconds that a hung worker has to write its stacks."""
LOOK = 1.0
"""Seconds between two looks at the workers that say nothing."""
MOST_CAUSES = 8
"""Causes that a finding names."""


@dataclass(frozen=True)
class Outcome:
    """What came of one ticket."""

    ticket: Ticket
    result: Result
    case: str = ""
    """The case as text; empty if its process ended."""
    trace: str = ""


class PoolError(Exception):
    """A worker did not begin."""


def run_cases(
    module: str, tickets: Iterable[Ticket], *, workers: int, until: float = math.inf, trace: bool = False
) -> Iterator[Outcome]:
    """Run the case of every ticket, on the machine in `module`; begin none after `until`, of the clock.

    Outcomes come as cases end. Raises PoolError.
    """
    waiting, limit = iter(tickets), load(module).limit
    idle = [_Worker(module, trace=trace) for _ in range(workers)]
    busy: dict[Connection, _Worker] = {}
    try:
        for worker in idle:
            worker.wait_until_ready()
        while True:
            while len(busy) < workers and time.monotonic() < until:
                if (ticket := next(waiting, None)) is None:
                    break
                worker = idle.pop() if idle else _Worker(module, trace=trace)
                busy[worker.pipe] = worker
                worker.wait_until_ready()
                worker.begin(ticket)
            if not busy:
                return
            answered = wait(list(busy), LOOK)
            for pipe, worker in list(busy.items()):
                if pipe in answered or worker.hangs(limit):
                    outcome = worker.outcome(hung=pipe not in answered, limit=limit)
                    del busy[pipe]
                    if worker.goes_on:
                        idle.append(worker)
                    else:
                        worker.end()
                    yield outcome
    finally:
        for worker in (*idle, *busy.values()):
            worker.end()


class _Worker:
    def __init__(self, module: str, *, trace: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, module, trace), daemon=False)
        self._process.start()
        theirs.close()
        self._ready = False
        self._ticket: Ticket = 0
        self._looked_at = 0.0
        self._patience: Patience | None = None
        self.goes_on = True
        """Whether it can run another case."""

    def wait_until_ready(self) -> None:
        """The time that Python needs to start counts for no case."""
        if self._ready:
            return
        try:
            self._ready = self.pipe.recv()
        except EOFError:
            raise PoolError("a worker did not begin; its error is above") from None

    def begin(self, ticket: Ticket) -> None:
        self._ticket, self._looked_at, self._patience = ticket, time.monotonic(), None
        with contextlib.suppress(ConnectionError):  # it has died since; the pipe says so when it is read
            self.pipe.send(ticket)

    def hangs(self, limit: float) -> bool:
        """Whether its case has made no progress for `limit` seconds; counted from the first look."""
        if self._patience is None:
            if time.monotonic() - self._looked_at < min(limit, LOOK):
                return False
            self._patience = Patience(limit, self._process.pid)
        return self._patience.exhausted()

    def outcome(self, *, hung: bool, limit: float) -> Outcome:
        """Return what came of its case."""
        if hung:
            self.goes_on = False
            os.kill(self._process.pid or 0, signal.SIGABRT)
            self._process.join(ABORTED)
            return Outcome(self._ticket, Result(broken=f"hung for {limit:g} s"))
        try:
            case, result, trace, self.goes_on = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.goes_on = False
            self._process.join()
            code = self._process.exitcode or 0
            end = f"died by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            return Outcome(self._ticket, Result(broken=f"the process {end}"))
        return Outcome(self._ticket, result, case, trace)

    def end(self) -> None:
        """Whatever its threads wait for."""
        self.pipe.close()
        self._process.join(ABORTED)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, module: str, trace: bool) -> None:
    faulthandler.enable()  # SIGABRT, and what else kills, writes the stacks first
    # A search is ended by Ctrl-C in the parent, which closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    machine = load(module)
    with machine.opened():
        pipe.send(True)
        while True:
            try:
                ticket: Ticket = pipe.recv()
            except EOFError:
                return
            machine.trace = [] if trace else None
            case = ""
            try:
                drawn = case_of(machine, ticket)
                case = str(drawn)
                result, goes_on = machine.run(drawn), True
            except Exception as error:  # noqa: BLE001 - any is a finding
                result, goes_on = Result(broken=text_of(error)), False
            pipe.send((case, result, "\n".join(machine.trace or ()), goes_on))
            if not goes_on:
                sys.stderr.flush()
                os._exit(0)  # threads of the broken case may wait for ever


def text_of(error: BaseException) -> str:
    """Return the error with what it came from and where, in one line."""
    texts: list[str] = []
    at: BaseException | None = error
    while at is not None and len(texts) < MOST_CAUSES:  # causes may go round in a circle
        frames = traceback.extract_tb(at.__traceback__)[-1:]
        texts.append(repr(at) + "".join(f" in {each.filename}:{each.lineno}" for each in frames))
        inner = at.exceptions[0] if isinstance(at, BaseExceptionGroup) else None
        at = at.__cause__ or inner
    return ", from ".join(texts)
