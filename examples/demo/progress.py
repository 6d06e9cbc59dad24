"""Progress of one step: a bar on a terminal, a line per tenth where the output is a file or a pipe."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how many of `total` bytes are done until the end of the block.

    What is yielded is called with the bytes done since the last call, from one thread.
    """
    console = Console()
    if not console.is_terminal:
        yield _Lines(what, total).advance
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    # What others write to standard error (warnings, logs) must stay there.
    with Progress(*columns, console=console, redirect_stderr=False) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, min(count, total - bar.tasks[task].completed))


class _Lines:
    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = max(total, 1)
        self._done = 0
        self._tenth = 0
        self._started = time.monotonic()

    def advance(self, count: int) -> None:
        self._done = min(self._done + count, self._total)
        tenth = 10 * self._done // self._total
        if tenth > self._tenth:
            self._tenth = tenth
            rate = self._done / 1e6 / max(time.monotonic() - self._started, 1e-3)
            print(
                f"{self._what}: {self._done / 1e6:,.1f} of {self._total / 1e6:,.1f} MB, {rate:,.0f} MB/s",
                flush=True,
            )
