"""Entry point of the `penstock` command: settings of the garbage collector, and the command line.

It names a package that is not installed.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys

from sidecar.process.early_signals import keep
from streamer.finish import fork_if_first

COLLECT_AFTER = 50_000
"""Number of objects allocated and not freed before a collection starts; about 10 MB if all are garbage.

Reference counts free what a request allocates, so rare collections suffice. They save an eighth of the CPU
time while small objects are streamed.
"""


def main() -> None:
    """Run the command line, or name the package that is missing."""
    _open_standard_input()
    if sys.argv[1:2] == ["exec"]:
        fork_if_first()
    if sys.argv[1:2] in (["run"], ["exec"]):  # other commands end by SIGTERM as any program does
        keep()
    gc.set_threshold(COLLECT_AFTER)
    # These run at the end of the interpreter. Its collection would take a sixth of the CPU time of `plan`.
    atexit.register(gc.freeze)
    atexit.register(_ignore_handled_signals)
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


def _open_standard_input() -> None:
    """Open /dev/null as descriptor 0 if that is closed, or a file of ours would be the trainer's input."""
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)  # uvloop asks it for the descriptor


def _ignore_handled_signals() -> None:
    """Ignore signals that have a handler; the interpreter, as it ends, would restore the default action."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
