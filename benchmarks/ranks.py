"""Measures ranks that share a channel by record: `python -m benchmarks.ranks`.

Each form streams one epoch of the same objects of records of one size, over HTTP, in turns:

    plain        a channel without ranks
    separately   ranks with a FIFO each; every rank is fetched on its own
    together     the same ranks, with `Fetch: together`
    copies N     one rank with N FIFOs, by `Copies`

The server is that of `benchmarks.index`. The figures are CPU seconds (user and system) of the sidecar for
each GB of the objects, from its event `ready` to the end of the last reader, and its requests.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from typing import Any

from benchmarks.index_server import running_server
from benchmarks.stats import in_turns, spread

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def measure(url: str, ranks: dict[str, Any] | None, fifos: int) -> tuple[float, int]:
    """Stream one epoch; return the sidecar's CPU seconds and its requests."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as base:
        source = {"S3DataType": "S3Prefix", "S3Uri": "s3://bucket/data/"}
        channel: dict[str, Any] = {"ChannelName": "train", "DataSource": {"S3DataSource": source}}
        if ranks is not None:
            channel["Penstock"] = {"Ranks": ranks}
        penstock = {
            "BaseDirectory": base,
            "MemoryBudget": "512MiB",
            "Admin": {"Port": 0},
            "Endpoint": {"Url": url, "PathStyle": True},
        }
        path = os.path.join(base, "job.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"InputDataConfig": [channel], "Penstock": penstock}, file)
        keys = {"AWS_ACCESS_KEY_ID": "AKIDBENCHMARK", "AWS_SECRET_ACCESS_KEY": "not-a-secret"}
        command = [sys.executable, "-m", "sidecar", "run", "-c", path]
        variables = {**os.environ, **keys, "AWS_DEFAULT_REGION": "us-east-1"}
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables) as sidecar:
            try:
                admin = ""
                for line in sidecar.stderr or ():
                    event = json.loads(line)
                    if event["event"] == "ready":
                        admin = event["admin"]
                        break
                began = cpu_seconds(sidecar.pid)
                names = ["train"] if ranks is None else [f"train-{number}" for number in range(fifos)]
                readers = [
                    subprocess.Popen(["/bin/cat", f"{base}/input/data/{name}_0"], stdout=subprocess.DEVNULL)
                    for name in names
                ]
                for reader in readers:
                    reader.wait()
                spent = cpu_seconds(sidecar.pid) - began
                with urllib.request.urlopen(admin + "status", timeout=10) as answer:  # noqa: S310 - ours
                    channels = json.load(answer)["channels"].values()
                return spent, sum(sum(each["requests"].values()) for each in channels)
            finally:
                sidecar.terminate()


def main() -> None:
    """Run the measurements."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=8192, help="bytes of a record (%(default)s)")
    parser.add_argument("--batches", default="32,256", help="records of a rank in a step (%(default)s)")
    parser.add_argument("--counts", default="2,4", help="numbers of ranks (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each (%(default)s)")
    parser.add_argument("--objects", type=int, default=16, help="objects (%(default)s)")
    arguments = parser.parse_args()
    forms: dict[str, tuple[dict[str, Any] | None, int]] = {"plain": (None, 1)}
    for count in map(int, arguments.counts.split(",")):
        for batch in map(int, arguments.batches.split(",")):
            ranks = {"Count": count, "Batch": batch, "RecordSize": arguments.size}
            forms[f"separately, {count} ranks, batch {batch}"] = ranks, count
            forms[f"together, {count} ranks, batch {batch}"] = ranks | {"Fetch": "together"}, count
        one = {"Count": 1, "Batch": 1024, "RecordSize": arguments.size}
        forms[f"copies {count}"] = one | {"Copies": count}, count
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        data = os.urandom(arguments.size) * (64_000_000 // arguments.size // 1024 * 1024)
        for number in range(arguments.objects):
            with open(os.path.join(folder, f"{number:04}"), "wb") as file:
                file.write(data)
        total = len(data) * arguments.objects / 1e9
        del data
        found: dict[str, list[tuple[float, int]]] = {}
        with running_server(folder) as url:
            for _, name in in_turns(arguments.rounds, list(forms)):
                found.setdefault(name, []).append(measure(url, *forms[name]))
    print(f"records of {arguments.size} bytes, {total:.2f} GB an epoch, {arguments.rounds} rounds")
    for name in forms:
        cpu = spread([seconds / total for seconds, _ in found[name]]).text()
        print(f"{name:32} {cpu} CPU-s/GB, {found[name][0][1]} requests")


if __name__ == "__main__":
    main()
