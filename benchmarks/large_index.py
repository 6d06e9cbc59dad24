"""Measures the start of ranks with a large record index: `python -m benchmarks.large_index`.

A start is timed from exec until every rank has its records of the first global batch, with `--resume` of the
one in the middle of the epoch. The other figures are the sidecar's CPU seconds and most memory until then.
Starts with and without a state take turns, for each number of ranks.

The objects have 8,192 bytes a record and exist only as ranges that the server makes. So the index is written
from arithmetic, not by a scan; the plan is made as for any channel: listing, index, headers that are sampled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from benchmarks.index_server import Periodic, running_server
from benchmarks.jobs import environment, write_index, write_job
from benchmarks.process import await_ready, cpu_seconds
from benchmarks.stats import in_turns, spread
from streamer.units import MIB

RECORDS_EACH = 100_000
PAYLOAD = 8192
GLOBAL_BATCH = 256


class Start(NamedTuple):
    """What one start took, up to the first global batch."""

    seconds: float
    cpu: float
    memory: float
    """Most bytes of the sidecar's memory."""


def start(folder: str, url: str, index: str, ranks: int, state: str) -> tuple[Start, dict[str, Any]]:
    """Start the sidecar; return its figures and the trailer of rank 0. `state`: to resume from, or empty.

    Raises RuntimeError if a rank gets fewer bytes than its records have.
    """
    base = os.path.join(folder, "ml")
    divided = {
        "Ranks": {"Count": ranks, "GlobalBatch": GLOBAL_BATCH},
        "Records": {"Format": "TFRecord", "Index": index},
    }
    job = write_job(base, divided, shuffled=True, MemoryBudget="512MiB")
    options, data = ["--resume", state] if state else [], os.path.join(base, "input/data")
    due = GLOBAL_BATCH // ranks * len(Periodic(1, 1, PAYLOAD).record)
    began = time.monotonic()

    def read(rank: int) -> int:
        """Return the bytes of a step; leave the epoch after them."""
        with open(os.path.join(data, f"train-{rank}_0"), "rb") as fifo:
            return len(fifo.read(due))

    with (
        ThreadPoolExecutor(ranks) as readers,
        subprocess.Popen(
            [sys.executable, "-m", "sidecar", "run", "-c", job, *options],
            env=environment(url, folder),
            stderr=subprocess.PIPE,
            text=True,
        ) as sidecar,
    ):
        try:
            await_ready(sidecar)
            taken = list(readers.map(read, range(ranks)))
            seconds, cpu = time.monotonic() - began, cpu_seconds(sidecar.pid)
            with open(f"/proc/{sidecar.pid}/status", encoding="ascii") as status:
                peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
            with open(os.path.join(data, ".train-0_0.penstock.json"), encoding="utf-8") as file:
                trailer: dict[str, Any] = json.load(file)
        finally:
            sidecar.kill()
    if set(taken) != {due}:
        raise RuntimeError(f"{taken} bytes came, not {due} for each rank")
    return Start(seconds, cpu, peak * 1024), trailer


def measure(periodic: Periodic, counts: list[int], rounds: int) -> None:
    """Print what a start takes for each number of ranks, with and without a state."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        served, index = os.path.join(folder, "served"), os.path.join(folder, "index")
        os.mkdir(served)
        keys, total = periodic.keys, periodic.objects * periodic.records
        size = write_index(index, keys, record=len(periodic.record), records=periodic.records)
        print(
            f"{total:,} records in {periodic.objects:,} objects: the index has {size / 1e6:.0f} MB",
            flush=True,
        )
        found: dict[tuple[int, bool], list[Start]] = {}
        with running_server(served, periodic) as url:
            _, trailer = start(folder, url, index, counts[0], "")
            state = {"format": 1, "channel": "train", "epoch": 0, "step": trailer["steps"] // 2}
            states = ["", json.dumps(state | {"order": trailer["order"]})]
            for _, (count, each) in in_turns(rounds, [(count, each) for count in counts for each in states]):
                found.setdefault((count, bool(each)), []).append(start(folder, url, index, count, each)[0])
    for (count, resumed), starts in found.items():
        seconds, cpu, memory = (spread(figures) for figures in zip(*starts, strict=True))
        print(
            f"{count:3} ranks{', --resume' if resumed else '':10}: first global batch after "
            f"{seconds.text()} s, {cpu.text()} CPU-s, {memory.median / MIB:.0f} MiB of memory"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.large_index", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--records", type=int, default=100_000_000, help="of the index (%(default)s)")
    parser.add_argument("--ranks", default="8", help="numbers of ranks that divide 256 (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each (%(default)s)")
    arguments = parser.parse_args()
    each = min(arguments.records, RECORDS_EACH)
    periodic = Periodic(arguments.records // each, each, PAYLOAD)
    measure(periodic, [int(count) for count in arguments.ranks.split(",")], arguments.rounds)


if __name__ == "__main__":
    main()
