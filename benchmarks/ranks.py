"""Measures ranks that share a channel by record: `python -m benchmarks.ranks`.

Each form streams one epoch of the same objects of records of one size, over HTTP, in turns:

    plain        a channel without ranks
    separately   ranks with a FIFO each; every rank is fetched on its own
    together     the same ranks, with `Fetch: together`
    copies N     one rank with N FIFOs, by `Copies`

The ranks have a record index with the offset of every record. The server is that of `benchmarks.index`. The
figures are CPU seconds (user and system) of the sidecar for each GB of the objects, from its event `ready` to
the end of the last reader, and its requests.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from array import array
from typing import Any

from benchmarks.index_server import etag, running_server
from benchmarks.stats import in_turns, spread
from sidecar.job.index_file import open_index
from streamer.formats.record_format import RecordFormat
from streamer.formats.record_index import IndexedObject, object_name, object_version

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def measure(url: str, ranks: dict[str, Any] | None, fifos: int, *, shuffled: bool) -> tuple[float, int]:
    """Stream one epoch; return the sidecar's CPU seconds and its requests.

    `shuffled`: the ranks' blocks of 1 MiB come in another order.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as base:
        source = {"S3DataType": "S3Prefix", "S3Uri": "s3://bucket/data/"}
        channel: dict[str, Any] = {"ChannelName": "train", "DataSource": {"S3DataSource": source}}
        if ranks is not None:
            channel["Penstock"] = {"Ranks": ranks}
            if shuffled:
                channel["ShuffleConfig"] = {"Seed": 1}
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


def write_index(folder: str, names: list[str], size: int, records: int) -> None:
    """Write the index of objects that have equal numbers of records of one size."""
    total = size * records
    offsets = array("Q", range(0, total, size))
    with open_index(os.path.join(folder, "train.index"), RecordFormat.parse(f"fixed:{size}"), 1) as file:
        for name in names:
            key = f"data/{name}"
            version = object_version("bucket", key, size=total, etag=etag(key), version=None)
            row = IndexedObject(object_name("bucket", key), version, total, records, total, offsets)
            file.append([row])


def main() -> None:
    """Run the measurements."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=8192, help="bytes of a record (%(default)s)")
    parser.add_argument("--batches", default="32,256", help="records of a rank in a step (%(default)s)")
    parser.add_argument("--counts", default="2,4", help="numbers of ranks (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each (%(default)s)")
    parser.add_argument("--objects", type=int, default=16, help="objects (%(default)s)")
    parser.add_argument("--shuffled", action="store_true", help="shuffle the ranks' blocks of 1 MiB")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        compare(arguments, folder)


def compare(arguments: argparse.Namespace, folder: str) -> None:
    """Measure all forms in turns, and print a line for each. `folder`: for the objects and their index."""
    index = os.path.join(folder, "index")
    forms: dict[str, tuple[dict[str, Any] | None, int]] = {"plain": (None, 1)}
    for count in map(int, arguments.counts.split(",")):
        for batch in map(int, arguments.batches.split(",")):
            ranks = {"Count": count, "Batch": batch, "Index": index}
            forms[f"separately, {count} ranks, batch {batch}"] = ranks, count
            forms[f"together, {count} ranks, batch {batch}"] = ranks | {"Fetch": "together"}, count
        one = {"Count": 1, "Batch": 1024, "Index": index}
        forms[f"copies {count}"] = one | {"Copies": count}, count
    served, names = os.path.join(folder, "served"), [f"{number:04}" for number in range(arguments.objects)]
    os.mkdir(served)
    os.mkdir(index)
    records = max(1, 64_000_000 // arguments.size)
    write_index(index, names, arguments.size, records)
    data = os.urandom(arguments.size) * records
    for name in names:
        with open(os.path.join(served, name), "wb") as file:
            file.write(data)
    total = len(data) * arguments.objects / 1e9
    del data
    found: dict[str, list[tuple[float, int]]] = {}
    with running_server(served) as url:
        for _, name in in_turns(arguments.rounds, list(forms)):
            found.setdefault(name, []).append(measure(url, *forms[name], shuffled=arguments.shuffled))
    print(f"records of {arguments.size} bytes, {total:.2f} GB an epoch, {arguments.rounds} rounds")
    for name in forms:
        cpu = spread([seconds / total for seconds, _ in found[name]]).text()
        print(f"{name:32} {cpu} CPU-s/GB, {found[name][0][1]} requests")


if __name__ == "__main__":
    main()
