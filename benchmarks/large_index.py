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
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from benchmarks.index_server import Periodic, etag, running_server
from benchmarks.process import await_ready, cpu_seconds
from benchmarks.startup import environment
from benchmarks.stats import in_turns, spread
from sidecar.job.index_file import open_index
from streamer.formats.record_format import RecordFormat
from streamer.formats.record_index import IndexedObject, object_name, object_version
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


def write_index(path: str, periodic: Periodic) -> None:
    """Write the index of every record of the periodic objects."""
    step, size = len(periodic.record), periodic.size
    offsets = array("Q", range(0, size, step))
    with open_index(path, RecordFormat.parse("TFRecord"), 1) as file:
        for number in range(periodic.objects):
            key = f"data/{number:08}"
            version = object_version("bucket", key, size=size, etag=etag(key), version=None)
            row = IndexedObject(object_name("bucket", key), version, size, len(offsets), size, offsets)
            file.append([row])


def write_job(folder: str, index: str, ranks: int) -> str:
    """Write the job file of so many ranks; return its path."""
    path = os.path.join(folder, "job.json")
    source = {"S3DataType": "S3Prefix", "S3Uri": "s3://bucket/data/"}
    divided = {"Count": ranks, "GlobalBatch": GLOBAL_BATCH, "Index": index}
    channel = {"ChannelName": "train", "DataSource": {"S3DataSource": source}, "Penstock": {"Ranks": divided}}
    channel["ShuffleConfig"] = {"Seed": 1}
    penstock = {
        "BaseDirectory": os.path.join(folder, "ml"),
        "MemoryBudget": "512MiB",
        "Admin": {"Port": 0},
        "Endpoint": {"PathStyle": True},
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"InputDataConfig": [channel], "Penstock": penstock}, file)
    return path


def start(folder: str, url: str, job: str, ranks: int, state: str) -> tuple[Start, dict[str, Any]]:
    """Start the sidecar; return its figures and the trailer of rank 0. `state`: to resume from, or empty.

    Raises RuntimeError if a rank gets fewer bytes than its records have.
    """
    options = ["--resume", state] if state else []
    data = os.path.join(folder, "ml/input/data")
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
        os.mkdir(index)
        path = os.path.join(index, "train.index")
        write_index(path, periodic)
        size, total = os.path.getsize(path), periodic.objects * periodic.records
        print(
            f"{total:,} records in {periodic.objects:,} objects: the index has {size / 1e6:.0f} MB",
            flush=True,
        )
        found: dict[tuple[int, bool], list[Start]] = {}
        with running_server(served, periodic) as url:
            _, trailer = start(folder, url, write_job(folder, index, counts[0]), counts[0], "")
            state = {"format": 1, "channel": "train", "epoch": 0, "step": trailer["steps"] // 2}
            states = ["", json.dumps(state | {"order": trailer["order"]})]
            for _, (count, each) in in_turns(rounds, [(count, each) for count in counts for each in states]):
                job = write_job(folder, index, count)
                found.setdefault((count, bool(each)), []).append(start(folder, url, job, count, each)[0])
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
