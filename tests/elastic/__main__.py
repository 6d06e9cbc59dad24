"""Searches for a kill and a resize after which a job loses or repeats a global batch.

python -m tests.elastic --seeds 1000          # ends with every seed that broke the promise
python -m tests.elastic --seeds 1 --seed 47   # that one again
"""

from __future__ import annotations

import sys

from tests.elastic.drawn import Job
from tests.elastic.run import Found, prepare, run
from tests.kit.seeds import run_seeds, search, seed_parser

LIMIT = 300.0
"""Seconds after which a seed's process counts as hung; a seed takes some seconds."""


def main() -> int:
    """Run the seeds; return 1 if one is broken."""
    parser = seed_parser("python -m tests.elastic", __doc__, seeds=100)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="at most")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.seeds)
    outcomes = run_seeds(run, seeds, limit=LIMIT, prepare=prepare)
    again = "--seeds 1 --seed {}"
    broken = search(outcomes, Found(), again=again, minutes=options.minutes, drawn=Job.draw)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
