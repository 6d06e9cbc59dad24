"""Shows the progress of one step: as a bar on a terminal, as a line per tenth in a file or a pipe."""

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
    """Show, until the end of the block, how many of `total` bytes are done.

    Yields a function to call, from one thread, with the number of bytes since the last call.
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
    # Warnings and logs that other code writes to standard error must stay there.
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
