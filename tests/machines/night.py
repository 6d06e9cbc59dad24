"""A night's run of every machine that looks for what breaks Penstock, one after the other.

    make night                             # all of them, some eight hours
    python -m tests.machines.night --hours 1        # the same in an eighth of the time
    python -m tests.machines.night crash hostile    # these

Every machine draws from a seed, today's date unless given, prints what it found with the command that repeats
it, and goes on past it. Its output is in build/night/NAME.log; a line for each is printed at its end. The
exit status is 1 if any machine found anything.
"""

from __future__ import annotations

import argparse
import datetime as dt
import subprocess
import sys
import time
from pathlib import Path

LOGS = Path(__file__).parents[2] / "build" / "night"
NIGHT = 8.0
"""Hours that the amounts below are for, on two cores.

Minutes on two cores with other programs, measured: hostile 39, crash 65, keeper 25, plants 60, guest 30,
fresh 25 for each of its four systems; schedules 90, from 0.05 s of CPU for each seed. Fuzz takes the
minutes that it is given.
"""

MACHINES = {
    "hostile": "tests.machines hostile --all --seed {seed}",
    "crash": "tests.machines crash --count {5000} --seed {seed}",
    "keeper": "tests.machines keeper --count {50000} --seed {seed}",
    "schedules": "tests.machines schedules --count {100000} --seed {seed}",
    "fuzz": "tests.machines fuzz --count {1000000} --minutes {30} --seed {seed}",
    "stops": "tests.kit.stops",
    "plants": "tests.machines plants",
    "guest": "tests.machines guest",
    "servers": "tests.machines servers",
    "proof": "benchmarks.proof",
    "fresh": "scripts/fresh-machine",
    "properties": "pytest -q tests/unit --timeout=0 --hypothesis-profile=night --hypothesis-seed={seed}",
}
"""By name: the module or script and its arguments, with amounts for a whole night in braces."""


def command(name: str, part: float, seed: int) -> list[str]:
    """What runs this machine for a part of a night."""
    words = [
        str(max(1, round(int(word[1:-1]) * part))) if word[0] == "{" else word
        for word in MACHINES[name].replace("{seed}", str(seed)).split()
    ]
    return words if "/" in words[0] else [sys.executable, "-m", *words]


def run(name: str, part: float, seed: int) -> bool:
    """Run one machine to its end; whether it found nothing."""
    LOGS.mkdir(parents=True, exist_ok=True)
    began, path = time.monotonic(), LOGS / f"{name}.log"
    with open(path, "wb") as log:
        status = subprocess.run(
            command(name, part, seed), stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
        ).returncode
    last = path.read_text(errors="replace").strip().splitlines()[-1:]
    minutes = (time.monotonic() - began) / 60
    print(f"{name:<10} exit {status}, {minutes:.0f} min: {''.join(last)}", flush=True)
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.machines.night", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "machines", nargs="*", metavar="MACHINE", help=f"of {', '.join(MACHINES)}; default: all"
    )
    parser.add_argument("--hours", type=float, default=NIGHT)
    parser.add_argument("--seed", type=int, default=int(dt.datetime.now(dt.UTC).strftime("%Y%m%d")))
    chosen = parser.parse_args()
    if unknown := set(chosen.machines) - set(MACHINES):
        parser.error(f"no such machine: {', '.join(sorted(unknown))}")
    names = chosen.machines or list(MACHINES)
    found = [name for name in names if not run(name, chosen.hours / NIGHT, chosen.seed)]
    print(f"{len(names) - len(found)} passed, {len(found)} failed", *found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
