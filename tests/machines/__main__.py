"""Run a machine: `python -m tests.machines NAME --seed S [--count N] [--workers W]`.

Every case has a seed; the next case has the next one. Of a machine with a list of cases the seed is the place
in the list. What is broken is named with the command that repeats it. The exit code is 1 if a case is broken.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import insert_into
from tests.machines.machine import ABOUT, Machine, Ticket, home, load
from tests.machines.report import search

MOST_LOOKED_AT = 1000
"""Drawn cases for each that `--only` is to find."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    about = "\n".join(f"  {name:<12}{text}" for name, text in ABOUT.items())
    found = argparse.ArgumentParser(
        prog="python -m tests.machines",
        description=__doc__,
        epilog=f"machines:\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("machine", choices=ABOUT, metavar="NAME", help="of the machines below")
    found.add_argument("--seed", type=int, default=0, help="of the first case (0)")
    found.add_argument("--count", type=int, help="of cases; a machine has a default of its own")
    found.add_argument("--all", action="store_true", help="all cases of a machine that lists them")
    found.add_argument("--minutes", type=float, default=math.inf, help="begin no case after these")
    found.add_argument("--workers", type=int, help="processes; a machine has a default of its own")
    found.add_argument("--only", action="append", metavar="WORD", help="cases whose text has this word")
    found.add_argument("--case", action="append", metavar="TEXT", help="the case with this text")
    found.add_argument("--stop", action="store_true", help="end with the first broken case")
    found.add_argument("--trace", action="store_true", help="print each case and what it traces")
    found.add_argument("--into", metavar="FILE", help="replace the machine's table in this Markdown file")
    return found


def tickets(machine: Machine[Any], given: argparse.Namespace) -> Sequence[Ticket]:
    """Return what is to be run. Raises ValueError if no case is meant."""
    if given.case:
        return list(given.case)
    known = len(machine.cases())
    if given.all and not known:
        raise ValueError("this machine draws cases without end: --count")
    asked: int | None = given.count or (None if given.only and known else machine.count)
    count = known if given.all or asked is None else asked
    if not given.only:
        return range(given.seed, given.seed + count)
    seeds = range(given.seed, given.seed + (known or MOST_LOOKED_AT * count))
    meant = (seed for seed in seeds if any(word in str(machine.draw(seed)) for word in given.only))
    found = list(itertools.islice(meant, count))
    if not found:
        raise ValueError(f"no case has {' or '.join(given.only)}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    command = parser()
    given = command.parse_args(arguments)
    module = home(given.machine)
    machine = load(module)
    try:
        chosen = tickets(machine, given)
    except ValueError as error:
        command.error(str(error))
    report = search(
        module,
        chosen,
        name=given.machine,
        workers=given.workers,
        minutes=given.minutes,
        stop=given.stop,
        trace=given.trace,
        show=lambda text: print(text, flush=True),
    )
    if given.into:
        begin, end = marks(given.machine)
        page = Path(given.into).read_text(encoding="utf-8")
        table = machine.table(report.cells, page.partition(begin)[2].partition(end)[0])
        insert_into(given.into, table, begin=begin, end=end)
    print(report)
    return 1 if report.broken else 0


def marks(name: str) -> tuple[str, str]:
    """Return the lines around a machine's table on a page."""
    return f"<!-- {name}: begin; written by python -m tests.machines {name} -->", f"<!-- {name}: end -->"


if __name__ == "__main__":
    sys.exit(main())
