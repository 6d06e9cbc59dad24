"""Searches for an order of events in which the keeper breaks a promise.

python -m tests.keeper_model --seeds 50000 --seed 1   # ends with every seed that broke one
python -m tests.keeper_model --seeds 1 --seed 4711    # that one again
"""

from __future__ import annotations

import sys
from collections import Counter

from tests.keeper_model.world import run_seed
from tests.kit.seeds import run_seeds, search, seed_parser

LIMIT = 60.0
"""Seconds after which a seed counts as hung; it takes a twentieth of one."""


def main() -> int:
    parser = seed_parser("python -m tests.keeper_model", __doc__, seeds=1000)
    options = parser.parse_args()
    outcomes = run_seeds(run_seed, range(options.seed, options.seed + options.seeds), limit=LIMIT)
    return 1 if search(outcomes, Counter[str](), again="--seeds 1 --seed {}", show=_counts) else 0


def _counts(found: Counter[str]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in sorted(found.items()))


if __name__ == "__main__":
    sys.exit(main())
