"""Runs seeds in a child process, so that no seed ends the search: what kills or hangs a child is a finding.

    seeds ──> parent ──a seed──> child: run(seed) ──what it found──> parent ──> an Outcome for each

A child runs one seed after another until one breaks a promise, hangs, or kills it; then the next seed has a
new child. A child that hangs writes the stacks of its threads to standard error before it dies.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tests.kit.patience import Patience

ABORTED = 10.0
"""Seconds that a hung child has to write its stacks."""

MOST_CAUSES = 8
"""Causes that a finding names."""


@dataclass(frozen=True)
class Outcome:
    """What came of one seed."""

    seed: int
    seconds: float
    found: Any = None
    """What the run returned, unless it is broken."""
    broken: str | None = None
    """Why the seed is a finding: the error, or how the child ended."""


def seed_parser(prog: str, description: str | None, *, seeds: int) -> argparse.ArgumentParser:
    """Return a parser with `--seeds` and `--seed`. `seeds`: how many, unless told."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=seeds, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="the first; each further one is the next")
    return parser


def run_seeds(
    run: Callable[[int], Any],
    seeds: Iterable[int],
    *,
    limit: float,
    prepare: Callable[[], None] | None = None,
) -> Iterator[Outcome]:
    """Run every seed. `limit`: seconds without progress after which a seed counts as hung.

    `prepare` runs once in each child.
    Both functions must be importable by name: children are spawned, not forked.
    """
    child = None
    try:
        for seed in seeds:
            child = child or _Child(run, prepare)
            outcome = child.run(seed, limit)
            yield outcome
            if outcome.broken is not None:
                child.end()
                child = None
    finally:
        if child is not None:
            child.end()


def search(
    outcomes: Iterable[Outcome],
    found: Any,
    *,
    again: str,
    minutes: float = math.inf,
    stop: bool = False,
    drawn: Callable[[int], object] | None = None,
    show: Callable[[Any], str] = str,
) -> dict[int, str]:
    """Add up outcomes, print findings as they come and the state each 20 s, and end with a summary.

    Returns by seed why it is broken.

    `found`: a sum of nothing. `again`: the arguments that run a seed again, with `{}` for it. `stop`: end
    with the first finding. `drawn`: what a seed stands for, shown with a finding. `show`: the sum as text.
    """
    began = reported = time.monotonic()
    broken: dict[int, str] = {}
    first = last = None
    for outcome in outcomes:
        last = outcome.seed
        first = last if first is None else first
        if outcome.broken is None:
            found += outcome.found
        elif last not in broken:
            broken[last] = outcome.broken
            what = f"seed {last}: {drawn(last)!s:.2000}\n" if drawn else ""
            print(f"{what}seed {last}: {outcome.broken:.2000}", file=sys.stderr, flush=True)
        now = time.monotonic()
        if now - reported > 20:
            reported = now
            print(f"{now - began:.0f} s: to seed {last}, {show(found)}, {len(broken)} broken", flush=True)
        if now - began > 60 * minutes or (broken and stop):
            break
    print(f"seeds {first} to {last} in {time.monotonic() - began:.0f} s: {show(found)}")
    print(f"broken: {len(broken)}")
    for seed, why in broken.items():
        print(f"  {again.format(seed)}: {why:.300}")
    return broken


class _Child:
    def __init__(self, run: Callable[[int], Any], prepare: Callable[[], None] | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, run, prepare), daemon=False)
        self._process.start()
        theirs.close()
        self._ready = False
        """Whether it has begun; the time that Python needs to start counts for no seed."""

    def run(self, seed: int, limit: float) -> Outcome:
        started = time.monotonic()
        try:
            if not self._ready:
                self._ready = self._pipe.recv()
                started = time.monotonic()
            self._pipe.send(seed)
            patience = Patience(limit)
            while not self._pipe.poll(min(limit, 1.0)):
                if patience.exhausted():
                    self._stop()
                    return Outcome(seed, time.monotonic() - started, broken=f"hung for {limit:g} s")
            found, broken = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode or 0
            broken = f"the process ended with {code}"
            if code < 0:
                broken = f"the process died by {signal.Signals(-code).name}"
            return Outcome(seed, time.monotonic() - started, broken=broken)
        return Outcome(seed, time.monotonic() - started, found, broken)

    def _stop(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGABRT)
        self._process.join(ABORTED)

    def end(self) -> None:
        """Whatever its threads wait for."""
        self._pipe.close()
        self._process.join(ABORTED)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, run: Callable[[int], Any], prepare: Callable[[], None] | None) -> None:
    faulthandler.enable()  # SIGABRT, and what else kills, writes the stacks first
    # A search is ended by Ctrl-C in the parent, which closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if prepare is not None:
        prepare()
    pipe.send(True)
    while True:
        try:
            seed = pipe.recv()
        except EOFError:
            return
        try:
            answer = run(seed), None
        except Exception as error:  # noqa: BLE001 - any is a finding
            pipe.send((None, _text(error)))
            sys.stderr.flush()
            os._exit(0)  # threads of the broken run may wait for ever
        pipe.send(answer)


def _text(error: BaseException) -> str:
    """The error with what it came from and where, in one line."""
    texts: list[str] = []
    at: BaseException | None = error
    while at is not None and len(texts) < MOST_CAUSES:  # causes may go round in a circle
        frames = traceback.extract_tb(at.__traceback__)[-1:]
        texts.append(repr(at) + "".join(f" in {each.filename}:{each.lineno}" for each in frames))
        inner = at.exceptions[0] if isinstance(at, BaseExceptionGroup) else None
        at = at.__cause__ or inner
    return ", from ".join(texts)
