"""Measures the first global batch after a start with `--resume`: `python -m benchmarks.resumed`.

A sidecar starts as a new process with a state in the middle of an epoch, and a thread for each rank waits
in its FIFO. The figures are seconds from exec until every rank has the records of one step, and the
sidecar's CPU seconds until then, in turns over the numbers of ranks. The trainer's own imports are not
in them: the readers are imported before.

Objects are in memory, on a server in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.process import await_ready, cpu_seconds
from benchmarks.startup import environment
from benchmarks.stats import in_turns, spread
from streamer.formats import tfrecord
from streamer.readers import PipeReader
from tests.kit.stub import StubThread

OBJECTS, RECORDS, SIZE, BATCH = 8, 512, 8000, 256
MIDDLE = OBJECTS * RECORDS // BATCH // 2
"""Step of the state: half of those of an epoch."""


def job(directory: Path, index: Path, ranks: int) -> str:
    """Write the job file of so many ranks."""
    source = {"S3DataType": "S3Prefix", "S3Uri": "s3://bucket/data/"}
    divided = {"Count": ranks, "GlobalBatch": BATCH, "Index": str(index)}
    channel = {"ChannelName": "train", "DataSource": {"S3DataSource": source}, "Penstock": {"Ranks": divided}}
    penstock = {
        "BaseDirectory": str(directory), "Endpoint": {"PathStyle": True}, "Admin": {"Port": 0},
        "MemoryBudget": "512MiB",
    }  # fmt: skip
    path = directory / "job.json"
    path.write_text(json.dumps({"InputDataConfig": [channel], "Penstock": penstock}))
    return str(path)


def measure(ranks: int, index: Path, state: str, variables: dict[str, str]) -> tuple[float, float]:
    """Start a sidecar; return seconds until the first global batch, and its CPU seconds until then.

    Without a state: read half of an epoch and save the state.
    """
    steps = 1 if state else MIDDLE
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        directory = Path(name)
        path = job(directory, index, ranks)
        below = {"pipe_dir": "input/data", "config_dir": "input/config", "state_dir": "state"}
        paths: dict[str, Any] = {key: str(directory / path) for key, path in below.items()}
        options = ("--resume", state) if state else ()
        began = time.monotonic()
        command = [sys.executable, "-m", "sidecar", "run", "-c", path, *options]
        with (
            ThreadPoolExecutor(ranks) as threads,
            subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True) as sidecar,
        ):
            try:
                await_ready(sidecar)
                readers = [PipeReader(f"train-{rank}", "TFRecord", epoch=0, **paths) for rank in range(ranks)]
                passes = [iter(reader) for reader in readers]
                batch = threads.map(lambda each: list(islice(each, steps * BATCH // ranks)), passes)
                records = sum(map(len, batch))
                took, cpu = time.monotonic() - began, cpu_seconds(sidecar.pid)
                if records != steps * BATCH:
                    raise RuntimeError(f"{records} records came, not {steps * BATCH}")
                if not state:
                    Path(index, "state.json").write_text(json.dumps(readers[0].state_dict()))
            finally:
                sidecar.send_signal(signal.SIGKILL)
    return took, cpu


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resumed", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,8,64", help="numbers of ranks that divide 256 (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="starts of each (%(default)s)")
    options = parser.parse_args()
    thread = StubThread()
    stub = thread.start()
    stub.objects |= {
        f"bucket/data/{number}": tfrecord.encode(bytes(SIZE)) * RECORDS for number in range(OBJECTS)
    }
    numbers = [int(number) for number in options.ranks.split(",")]
    found: dict[int, list[tuple[float, float]]] = {number: [] for number in numbers}
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
            index = Path(name, "index")
            variables = environment(stub.url, name)
            options_of = ["--format", "TFRecord", "--every", "1"]
            build = ["index", "build", "-c", job(Path(name), index, 1), "--to", str(index), *options_of]
            subprocess.run([sys.executable, "-m", "sidecar", *build], check=True, env=variables)
            measure(1, index, "", variables)
            state = os.path.join(index, "state.json")
            for _, number in in_turns(options.rounds, numbers):
                found[number].append(measure(number, index, state, variables))
    finally:
        thread.stop()
    for number, starts in found.items():
        first, cpu = (spread([each[at] for each in starts]) for at in (0, 1))
        print(
            f"{number:3} ranks: {first.text()} s to the first global batch, {cpu.text()} CPU-s of the sidecar"
        )


if __name__ == "__main__":
    main()
