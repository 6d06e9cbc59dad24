"""Measures ranks that share a channel by record: `python -m benchmarks.ranks`.

Each form streams one epoch of the same objects of records of one size, over HTTP, in turns:

    plain        a channel without ranks
    auto         ranks with a FIFO each, as by default
    separately   the same ranks, with `Fetch: separately`: every rank is fetched on its own
    together     the same ranks, with `Fetch: together`
    copies N     one rank with N FIFOs, by `Copies`

Records are of one size, which need no index. The server is `benchmarks.index_server`.
The figures are CPU seconds (user and system) of the sidecar for each GB of the objects, and GB a second, both
from its event `ready` to the end of the last reader, and its requests. Readers are `cat`. With `--lockstep`
each reader takes the batch of a step, and then waits for all others, as ranks of DDP do.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.index_server import running_server
from benchmarks.jobs import environment, write_job
from benchmarks.process import await_ready, cpu_seconds
from benchmarks.stats import in_turns, spread

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

PIECE = 1 << 18
"""Bytes that a reader in lockstep reads at once."""


class Epoch(NamedTuple):
    """What one epoch took."""

    cpu: float
    """CPU seconds of the sidecar."""
    seconds: float
    requests: int


def read_all(paths: list[str]) -> None:
    """Read each FIFO by `cat`, all at the same time."""
    readers = [subprocess.Popen(["/bin/cat", path], stdout=subprocess.DEVNULL) for path in paths]
    for reader in readers:
        reader.wait()


def take_steps(path: str, size: int, rate: float, step: Barrier) -> None:
    """Read `size` bytes of a FIFO, wait for the other readers, and so on to its end.

    `rate`: most bytes a second, as of a reader that decodes them; 0: no limit.
    """
    buffer = memoryview(bytearray(size))
    with open(path, "rb", buffering=0) as fifo:
        taken = size
        while taken == size:
            taken = 0
            while taken < size and (count := fifo.readinto(buffer[taken : taken + PIECE])):
                taken += count
                if rate:
                    time.sleep(count / rate)
            step.wait()


def read_in_lockstep(paths: list[str], size: int, rate: float) -> None:
    """Read all FIFOs, each in a process that takes `size` bytes a step and then waits for all others."""
    context = multiprocessing.get_context("fork")
    step = context.Barrier(len(paths))
    readers = [context.Process(target=take_steps, args=(path, size, rate, step)) for path in paths]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()


def measure(
    url: str,
    extras: dict[str, Any] | None,
    fifos: int,
    *,
    shuffled: bool = False,
    step: int = 0,
    rate: float = 0,
) -> Epoch:
    """Stream one epoch.

    `extras`: the section `Penstock` of the channel; None: no ranks. `shuffled`: the blocks of the ranks, of
    1 MiB, come in another order. `step`: bytes that a reader takes before it waits for all others; 0: readers
    do not wait. `rate`: bytes a second that such a reader decodes.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        path = write_job(os.path.join(folder, "ml"), extras, shuffled=shuffled, MemoryBudget="512MiB")
        command, variables = [sys.executable, "-m", "sidecar", "run", "-c", path], environment(url, folder)
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables) as sidecar:
            try:
                admin = await_ready(sidecar)["admin"]
                began, started = cpu_seconds(sidecar.pid), time.monotonic()
                names = ["train"] if extras is None else [f"train-{number}" for number in range(fifos)]
                paths = [f"{folder}/ml/input/data/{name}_0" for name in names]
                if step:
                    read_in_lockstep(paths, step, rate)
                else:
                    read_all(paths)
                seconds, spent = time.monotonic() - started, cpu_seconds(sidecar.pid) - began
                with urllib.request.urlopen(admin + "status", timeout=10) as answer:  # noqa: S310 - ours
                    channels = json.load(answer)["channels"].values()
                requests = sum(sum(each["requests"].values()) for each in channels)
                return Epoch(spent, seconds, requests)
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
    parser.add_argument("--shuffled", action="store_true", help="shuffle the ranks' blocks of 1 MiB")
    parser.add_argument(
        "--lockstep", action="store_true", help="readers wait for each other after each batch"
    )
    parser.add_argument(
        "--rate", type=float, default=0, help="most MB/s of a reader in lockstep; 0: no limit"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        compare(arguments, folder)


def compare(arguments: argparse.Namespace, folder: str) -> None:
    """Measure all forms in turns, and print a line for each. `folder`: for the objects."""
    forms: dict[str, tuple[dict[str, Any] | None, int, int]] = {}
    if not arguments.lockstep:
        forms["plain"] = None, 1, 0
    for count in map(int, arguments.counts.split(",")):
        for batch in map(int, arguments.batches.split(",")):
            ranks = {"Count": count, "GlobalBatch": batch * count}
            step = batch * arguments.size if arguments.lockstep else 0
            for fetch in ("auto", "separately", "together"):
                forms[f"{fetch}, {count} ranks, batch {batch}"] = ranks | {"Fetch": fetch}, count, step
        if not arguments.lockstep:
            one = {"Count": 1, "GlobalBatch": 1024}
            forms[f"copies {count}"] = one | {"Copies": count}, count, 0
    served, names = os.path.join(folder, "served"), [f"{number:04}" for number in range(arguments.objects)]
    os.mkdir(served)
    records = max(1, 64_000_000 // arguments.size)
    data = os.urandom(arguments.size) * records
    for name in names:
        with open(os.path.join(served, name), "wb") as file:
            file.write(data)
    total = len(data) * arguments.objects / 1e9
    del data
    fixed = {"Format": f"fixed:{arguments.size}"}
    found: dict[str, list[Epoch]] = {}
    with running_server(served) as url:
        for _, name in in_turns(arguments.rounds, list(forms)):
            ranks_of, fifos, step = forms[name]
            extras = None if ranks_of is None else {"Ranks": ranks_of, "Records": fixed}
            epoch = measure(
                url, extras, fifos, shuffled=arguments.shuffled, step=step, rate=arguments.rate * 1e6
            )
            found.setdefault(name, []).append(epoch)
    print(f"records of {arguments.size} bytes, {total:.2f} GB an epoch, {arguments.rounds} rounds")
    for name in forms:
        cpu = spread([each.cpu / total for each in found[name]]).text()
        speed = spread([total / each.seconds for each in found[name]]).text()
        print(f"{name:32} {cpu} CPU-s/GB, {speed} GB/s, {found[name][0].requests} requests")


if __name__ == "__main__":
    main()
