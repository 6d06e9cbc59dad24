"""Measures an index of very many records: its file, and plan and start of ranks.

A start is timed from exec until every rank has the records of its first step; with a state, of a step in the
middle of the epoch. The objects have 8,192 bytes a record and exist only as ranges that the server makes. So
the index is written from arithmetic, not by a scan; the plan is made as for any channel: listing, index,
headers that are sampled.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.index_server import Periodic, etag, running_server
from benchmarks.process import await_ready, cpu_seconds
from sidecar.job.index_file import open_index
from streamer.formats.record_format import RecordFormat
from streamer.formats.record_index import IndexedObject, object_name, object_version

RECORDS_EACH = 100_000
PAYLOAD = 8192
RANKS = 8
BATCH = 32
KEYS = {"AWS_ACCESS_KEY_ID": "AKIDBENCHMARK", "AWS_SECRET_ACCESS_KEY": "not-a-secret"}


def measure_large(records: int, rounds: int) -> None:
    """Print what an index of so many records takes."""
    periodic = Periodic(max(1, records // RECORDS_EACH), RECORDS_EACH, PAYLOAD)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        served = os.path.join(folder, "served")
        os.mkdir(served)
        path = os.path.join(served, "train.index")
        began = time.process_time()
        write_index(path, periodic)
        size, seconds = os.path.getsize(path), time.process_time() - began
        total = periodic.objects * periodic.records
        print(
            f"large  {total:,} records in {periodic.objects:,} objects: the file has {size / 1e6:.0f} MB, "
            f"{size / total:.3f} bytes a record, written in {seconds:.1f} CPU-s",
            flush=True,
        )
        with running_server(served, periodic) as url:
            for place in (served, "s3://bucket/index/"):
                for _ in range(rounds):
                    print(f"large  plan of {RANKS} ranks, index in {_plan(folder, url, place)}", flush=True)
            for _ in range(rounds):
                text, trailer = _start(folder, url, served, len(periodic.record))
                print(f"large  start of {RANKS} ranks: {text}", flush=True)
                state = {"format": 1, "channel": "train", "epoch": 0, "step": trailer["steps"] // 2}
                state["order"] = trailer["order"]
                text, _ = _start(folder, url, served, len(periodic.record), "--resume", json.dumps(state))
                print(f"large  start of {RANKS} ranks, in the middle of an epoch: {text}", flush=True)


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


def _job(folder: str, url: str, place: str) -> str:
    """Write the job file of ranks whose index is in `place`; return its path."""
    path = os.path.join(folder, "job.json")
    source = {"S3DataType": "S3Prefix", "S3Uri": "s3://bucket/data/"}
    ranks = {"Count": RANKS, "Batch": BATCH, "Index": place}
    channel = {"ChannelName": "train", "DataSource": {"S3DataSource": source}, "Penstock": {"Ranks": ranks}}
    channel["ShuffleConfig"] = {"Seed": 1}
    penstock = {
        "BaseDirectory": os.path.join(folder, "ml"),
        "MemoryBudget": "512MiB",
        "Admin": {"Port": 0},
        "Endpoint": {"Url": url, "PathStyle": True},
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"InputDataConfig": [channel], "Penstock": penstock}, file)
    return path


def _start(folder: str, url: str, place: str, record: int, *options: str) -> tuple[str, dict[str, Any]]:
    """Start the sidecar; return its figures as text, and the trailer of rank 0. `record`: bytes of one."""
    command = [sys.executable, "-m", "sidecar", "run", "-c", _job(folder, url, place), *options]
    data = os.path.join(folder, "ml/input/data")
    variables = os.environ | KEYS | {"AWS_DEFAULT_REGION": "us-east-1"}
    began = time.monotonic()

    def read(rank: int) -> int:
        """Return the bytes of a step; leave the epoch after them."""
        with open(os.path.join(data, f"train-{rank}_0"), "rb") as fifo:
            return len(fifo.read(BATCH * record))

    with (
        ThreadPoolExecutor(RANKS) as readers,
        subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True) as sidecar,
    ):
        try:
            await_ready(sidecar)
            taken = sum(readers.map(read, range(RANKS)))
            seconds, cpu = time.monotonic() - began, cpu_seconds(sidecar.pid)
            with open(f"/proc/{sidecar.pid}/status", encoding="ascii") as status:
                peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
            with open(os.path.join(data, ".train-0_0.penstock.json"), encoding="utf-8") as file:
                trailer = json.load(file)
        finally:
            sidecar.kill()
    if taken != RANKS * BATCH * record:
        raise RuntimeError(f"{taken} bytes came")
    return f"first global batch after {seconds:.1f} s, {cpu:.1f} CPU-s, {peak // 1024} MiB of memory", trailer


def _plan(folder: str, url: str, place: str) -> str:
    """Run `penstock plan`; return its figures as text. Raises RuntimeError."""
    path = _job(folder, url, place)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "benchmarks.large_index", "plan", "-c", path, "--json"]
    variables = os.environ | KEYS | {"AWS_DEFAULT_REGION": "us-east-1", "TMPDIR": folder}
    done = subprocess.run(command, check=False, env=variables, capture_output=True)
    if done.returncode:
        raise RuntimeError(done.stderr.decode())
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    steps = json.loads(done.stdout)["channels"]["train"]["steps"]
    kind, memory = "S3" if "://" in place else "a folder", int(done.stderr.split()[-1]) / 1024
    return f"{kind}: {steps:,} steps, {wall:.1f} s, {cpu:.1f} CPU-s, {memory:.0f} MiB of memory"


def _command() -> None:
    """Run `penstock` in this process; write its peak of memory, in KiB, to standard error.

    The peak is the kernel's VmHWM, because ru_maxrss also has that of the process that started this one.
    """
    from sidecar.cli import main

    try:
        main()
    finally:
        with open("/proc/self/status", encoding="ascii") as file:
            peak = next(line.split()[1] for line in file if line.startswith("VmHWM"))
        print(peak, file=sys.stderr)


if __name__ == "__main__":
    _command()
