"""Searches for an order of events that the relay does not stand.

python -m tests.schedules --seeds 100000 --seed 1   # a night; ends with every seed that broke a promise
python -m tests.schedules --seeds 1 --seed 4711     # that one again, the same events in the same order
python -m tests.schedules --trace 4711              # its events, one a line
python -m tests.schedules --seeds 200 --twice       # each seed twice: their events must be the same
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.kit.seeds import run_seeds
from tests.schedules.run import Found, prepare, run_seed
from tests.schedules.trial import SeedTrial

LIMIT = 120.0
"""Seconds after which a seed's process counts as hung; a seed takes a twentieth of one."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.schedules",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="the first; each further one is the next")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="at most")
    parser.add_argument("--twice", action="store_true", help="run each twice and compare the events")
    parser.add_argument("--stop", action="store_true", help="end with the first broken promise")
    parser.add_argument(
        "--trace", type=int, metavar="SEED", help="print what SEED stands for, and its events"
    )
    options = parser.parse_args()
    if options.trace is not None:
        return _trace(options.trace)
    found, broken, started = Found(), dict[int, str](), time.monotonic()
    told, seed, first = started, options.seed, ""
    seeds = range(options.seed, options.seed + options.seeds)
    again = 2 if options.twice else 1
    repeated = (each for each in seeds for _ in range(again))
    for number, outcome in enumerate(run_seeds(run_seed, repeated, limit=LIMIT, prepare=prepare)):
        seed = outcome.seed
        why = outcome.broken
        if why is None:
            found += outcome.found
            if number % again == 0:
                first = outcome.found.trace
            elif first != outcome.found.trace:
                why = "the second run had other events"
        if why is not None and seed not in broken:
            print(
                f"seed {seed}: {SeedTrial.draw(seed)!r:.2000}\nseed {seed}: {why}",
                file=sys.stderr,
                flush=True,
            )
            broken[seed] = why
        if time.monotonic() - told > 20:
            told = time.monotonic()
            print(f"{told - started:.0f} s: {found}, {len(broken)} broken", flush=True)
        if time.monotonic() - started > 60 * options.minutes or (broken and options.stop):
            break
    print(f"seeds {options.seed} to {seed} in {time.monotonic() - started:.0f} s: {found}")
    print(f"broken: {len(broken)}")
    for seed, why in broken.items():
        print(f"  --seeds 1 --seed {seed}: {why:.300}")
    return 1 if broken else 0


def _trace(seed: int) -> int:
    prepare()
    lines: list[str] = []
    print(SeedTrial.draw(seed))
    try:
        run_seed(seed, lines=lines)
    finally:
        print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
