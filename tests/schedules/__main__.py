"""Searches for an order of events that the relay does not stand.

python -m tests.schedules --seeds 100000 --seed 1   # a night; ends with every seed that broke a promise
python -m tests.schedules --seeds 1 --seed 4711     # that one again, the same events in the same order
python -m tests.schedules --trace 4711              # its events, one a line
python -m tests.schedules --seeds 200 --twice       # each seed twice: their events must be the same
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace

from tests.kit.seeds import Outcome, run_seeds, search, seed_parser
from tests.schedules.run import Found, prepare, run_seed
from tests.schedules.trial import SeedTrial

LIMIT = 120.0
"""Seconds after which a seed's process counts as hung; a seed takes a twentieth of one."""


def main() -> int:
    parser = seed_parser("python -m tests.schedules", __doc__, seeds=1000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="at most")
    parser.add_argument("--twice", action="store_true", help="run each twice and compare the events")
    parser.add_argument("--stop", action="store_true", help="end with the first broken promise")
    parser.add_argument(
        "--trace", type=int, metavar="SEED", help="print what SEED stands for, and its events"
    )
    options = parser.parse_args()
    if options.trace is not None:
        return _trace(options.trace)
    seeds = range(options.seed, options.seed + options.seeds)
    repeated = (each for each in seeds for _ in range(1 + options.twice))
    outcomes = run_seeds(run_seed, repeated, limit=LIMIT, prepare=prepare)
    broken = search(
        _compared(outcomes) if options.twice else outcomes,
        Found(),
        again="--seeds 1 --seed {}",
        minutes=options.minutes,
        stop=options.stop,
        drawn=SeedTrial.draw,
    )
    return 1 if broken else 0


def _compared(outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    """One outcome for both runs of each seed; broken if their events differ."""
    pairs = iter(outcomes)
    for first, second in zip(pairs, pairs, strict=True):
        if first.broken is None and second.broken is None and first.found.trace != second.found.trace:
            yield replace(first, broken="the second run had other events")
        else:
            yield first if first.broken is not None else second


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
