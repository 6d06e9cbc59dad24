"""Entry point of the `penstock` command: settings of the garbage collector, and the command line.

It names a package that is not installed.
"""

from __future__ import annotations

import atexit
import gc
import sys

COLLECT_AFTER = 50_000
"""Number of objects allocated and not freed before a collection starts; about 10 MB if all are garbage.

Reference counts free what a request allocates, so rare collections suffice. They save an eighth of the CPU
time while small objects are streamed.
"""


def main() -> None:
    """Run the command line, or name the package that is missing."""
    gc.set_threshold(COLLECT_AFTER)
    # The interpreter collects at its end. That would take a sixth of the CPU time of `plan`.
    atexit.register(gc.freeze)
    try:
        from sidecar import cli
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"penstock: {error.name} is not installed. "
            "Install penstock-sidecar again, with all that it depends on\n"
        )
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
