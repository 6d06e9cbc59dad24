"""The incumbent's lines about reading speed, on stdout (contract §6.3); its "GB" is 2**30 bytes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamer.readers.spans import Places

_NONE: Places = np.empty(0, np.int64)


class Meter:
    """Counts one iterator's records, bytes and reading time, and prints them."""

    def __init__(self, *, benchmark: bool, interval: int) -> None:
        self._benchmark = benchmark
        self._interval = interval
        self._records = 0
        self._bytes = 0
        self._nanoseconds = 0
        self._reported = (0, 0)
        """Bytes and nanoseconds up to the last lines."""

    def measure(self, arrivals: Iterator[Places]) -> Iterator[Places]:
        """Pass sizes of records on; print the totals when they end, or are no longer wanted."""
        try:
            while True:
                started = time.perf_counter_ns()
                sizes = next(arrivals, None)
                self._count(_NONE if sizes is None else sizes, time.perf_counter_ns() - started)
                if sizes is None:
                    return
                yield sizes
        finally:
            self._total()

    def _count(self, sizes: Places, nanoseconds: int) -> None:
        if self._interval:
            self._report(sizes, nanoseconds)
        self._records += len(sizes)
        self._bytes += int(sizes.sum())
        self._nanoseconds += nanoseconds

    def _report(self, sizes: Places, nanoseconds: int) -> None:
        """Say every multiple of the interval that these records reach."""
        start = 0
        size, spent = self._bytes, self._nanoseconds
        for stop in range(self._interval - self._records % self._interval, len(sizes) + 1, self._interval):
            size += int(sizes[start:stop].sum())
            spent = self._nanoseconds + nanoseconds * stop // len(sizes)
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
