"""Runs a sidecar that names FIFOs which hold others back earlier: `python -m tests.kit.impatient SECONDS …`.

The rest of the arguments is the command of a sidecar, of this interpreter, which becomes this process.
"""

from __future__ import annotations

import runpy
import sys

from sidecar.job import held_back


def prefix(seconds: float) -> list[str]:
    """What to put before the command of a sidecar."""
    return [sys.executable, "-m", "tests.kit.impatient", str(seconds)]


def main() -> None:
    """Run the command of the arguments."""
    seconds, _, _, module, *arguments = sys.argv[1:]
    held_back.HELD_BACK_AFTER = float(seconds)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
