"""Searches for an order of events in which the keeper breaks a promise.

python -m tests.keeper_model --seeds 50000 --seed 1   # ends with every seed that broke one
python -m tests.keeper_model --seeds 1 --seed 4711    # that one again
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.keeper_model.world import run_seed
from tests.kit.seeds import run_seeds

LIMIT = 60.0
"""Seconds after which a seed counts as hung; it takes a twentieth of one."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.keeper_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="the first; each further one is the next")
    options = parser.parse_args()
    found, broken, began = Counter[str](), dict[int, str](), time.monotonic()
    told = began
    for outcome in run_seeds(run_seed, range(options.seed, options.seed + options.seeds), limit=LIMIT):
        if outcome.broken is None:
            found += outcome.found
        else:
            broken[outcome.seed] = outcome.broken
            print(f"seed {outcome.seed}: {outcome.broken:.2000}", file=sys.stderr, flush=True)
        if time.monotonic() - told > 20:
            told = time.monotonic()
            print(f"{told - began:.0f} s: to seed {outcome.seed}, {len(broken)} broken", flush=True)
    print(", ".join(f"{name}: {count}" for name, count in sorted(found.items())))
    for seed, why in broken.items():
        print(f"  --seeds 1 --seed {seed}: {why:.300}")
    print(f"{options.seeds} seeds in {time.monotonic() - began:.0f} s, broken: {len(broken)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
