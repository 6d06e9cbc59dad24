"""One emulated accelerator: `trainer.py ORDER`, a JSON file. Run by path in a bare interpreter.

    loader 0 --"bytes of batch 0"--> |                       |
    loader 1 --"bytes of batch 1"--> | in order of the steps | --> wait `computation` seconds
    loader N --    ...           --> |                       |

As in DLIO, which MLPerf Storage runs, the accelerator waits for a batch, then sleeps for the computation
time, while loaders read further batches. A loader begins a batch when it has a line for it. At most `ahead`
batches are begun and not computed. A batch that has other bytes than it should ends the run.

The trainer prints `ready`, begins when it reads a line, prints `begin` after the first step, which does not
count, and then its figures: steps, bytes and seconds of the steps that count, and its own CPU seconds. It
ends its loaders when its standard input ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any


class Loader:
    """A loader's process."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("no pipes")
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def begin(self) -> None:
        """Make the loader read its next batch."""
        self._stdin.write("\n")
        self._stdin.flush()

    def answer(self) -> str:
        """Return the loader's next line."""
        line = self._stdout.readline()
        if not line:
            sys.exit("a loader has ended")
        return line

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        order = json.load(file)
    loaders = [Loader(argv) for argv in order["loaders"]]
    try:
        for loader in loaders:
            loader.answer()
        say("ready")
        sys.stdin.readline()
        train(order, loaders)
        sys.stdin.read()
    finally:
        for loader in loaders:
            loader.close()


def train(order: dict[str, Any], loaders: Sequence[Loader]) -> None:
    """Compute on batches until the time is over."""
    sizes: list[int] = order["sizes"]
    ahead: int = order["ahead"]
    for step in range(min(ahead, len(sizes))):
        loaders[step % len(loaders)].begin()
    steps = total = 0
    started = cpu = 0.0
    for step, size in enumerate(sizes):
        found = int(loaders[step % len(loaders)].answer())
        if found != size:
            sys.exit(f"batch {step} has {found} bytes instead of {size}")
        if step + ahead < len(sizes):
            loaders[(step + ahead) % len(loaders)].begin()
        time.sleep(order["computation"])
        now = time.monotonic()
        if step == 0:
            say("begin")
            started, cpu = now, time.process_time()
            continue
        steps, total = steps + 1, total + size
        if now - started >= order["seconds"]:
            break
    seconds, own = time.monotonic() - started, time.process_time() - cpu
    say(json.dumps({"steps": steps, "bytes": total, "seconds": seconds, "accelerator_cpu": own}))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
