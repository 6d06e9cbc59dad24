"""Prints the incumbent's lines about reading speed on stdout (contract §6.3); its "GB" is 2**30 bytes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Meter:
    """Counts one iterator's records, bytes and reading time, and prints them."""

    def __init__(self, *, benchmark: bool, interval: int) -> None:
        self._benchmark = benchmark
        self._interval = interval
        self._records = 0
        self._bytes = 0
        self._nanoseconds = 0
        self._reported = (0, 0)
        """Bytes and nanoseconds up to the last print."""

    def measure(self, batches: Iterator[list[bytes]]) -> Iterator[list[bytes]]:
        """Yield `batches`; print the totals when they end or the generator is closed."""
        try:
            while True:
                started = time.perf_counter_ns()
                batch = next(batches, None)
                self._count(batch or [], time.perf_counter_ns() - started)
                if batch is None:
                    return
                yield batch
        finally:
            self._total()

    def _count(self, batch: list[bytes], nanoseconds: int) -> None:
        if self._interval:
            self._report(batch, nanoseconds)
        self._records += len(batch)
        self._bytes += sum(map(len, batch))
        self._nanoseconds += nanoseconds

    def _report(self, batch: list[bytes], nanoseconds: int) -> None:
        """Print a report for every multiple of the interval that this batch reaches."""
        start = 0
        size, spent = self._bytes, self._nanoseconds
        for stop in range(self._interval - self._records % self._interval, len(batch) + 1, self._interval):
            size += sum(map(len, batch[start:stop]))
            spent = self._nanoseconds + nanoseconds * stop // len(batch)
            self._say("records", self._records + stop)
            self._say("records read_time_ns", spent - self._reported[1])
            self._say("records read_bytes", size - self._reported[0])
            self._reported = (size, spent)
            start = stop

    def _total(self) -> None:
        if not self._benchmark:
            return
        seconds = self._nanoseconds / 1e9
        self._say("total read_time_ms", self._nanoseconds // 1_000_000)
        self._say("total read_bytes", self._bytes)
        self._say("total read_GB/s", f"{self._bytes / 2**30 / seconds if seconds else 0.0:g}")

    def _say(self, what: str, value: object) -> None:
        print(f"PipeModeDatasetOp::Dataset::Iterator {what}: {value}", flush=True)  # noqa: T201 - the incumbent's output
