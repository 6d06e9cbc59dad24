"""Compares the PyTorch reader with WebDataset on the same tar bytes: `python -m benchmarks.torch_readers`.

WebDataset reads a local file (page cache). Penstock's reader reads the same file through a FIFO, into which
another process splices it, as the sidecar does; that process's CPU time is not counted. Every figure is of a
new process, from the first record to the last: wall time, and CPU time of the process and its workers. Rounds
rotate through all contestants; the table has medians. The contestants add up the records' lengths and decode
none, so that only reading is measured.

    webdataset       WebDataset(file), no shuffle
    penstock         PipeIterableDataset("train", "WebDataset")
    tarfile          the standard library's tarfile in stream mode on the FIFO, members read one by one
"""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from typing import TYPE_CHECKING, Any

from benchmarks.stats import in_turns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SIZES = {"1 kB": 1_000, "8 kB": 8_000, "100 kB": 100_000}
CONTESTANTS = ("webdataset", "penstock", "tarfile")
BLOCK = 1 << 20
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torch_readers", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=300, help="of tar per contestant and round (300)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0, help="DataLoader workers; as many shards (0)")
    parser.add_argument("--sizes", default=",".join(SIZES), help="which sizes of sample")
    parser.add_argument(
        "--measure", nargs=3, metavar=("CONTESTANT", "PLACE", "WORKERS"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    if arguments.measure:
        contestant, place, workers = arguments.measure
        print(json.dumps(measure(contestant, place, int(workers))), flush=True)
        return 0
    print("| samples | reader | GB/s | CPU-s/GB |\n|---|---|---|---|")
    for name in arguments.sizes.split(","):
        with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir="/dev/shm") as place:
            expected = make_shards(
                place, SIZES[name], arguments.megabytes * 1_000_000, max(1, arguments.workers)
            )
            for row in compare(place, expected, arguments.rounds, arguments.workers):
                print(f"| {name} {row}", flush=True)
    return 0


def make_shards(place: str, size: int, total: int, shards: int) -> tuple[int, int]:
    """Make tar files of samples with `jpg` and `cls`; return the numbers of samples and of members' bytes."""
    source = random.Random(1)  # noqa: S311 - sample data
    noise = source.randbytes(size + 1024)
    count = max(shards, total // size)
    members = 0
    tars = [tarfile.open(os.path.join(place, f"{shard}.tar"), "w") for shard in range(shards)]  # noqa: SIM115
    for number in range(count):
        start = source.randrange(1024)
        for field, data in (("jpg", noise[start : start + size]), ("cls", b"%d" % (number % 1000))):
            info = tarfile.TarInfo(f"{number:09}.{field}")
            info.size = len(data)
            members += len(data)
            tars[number % shards].addfile(info, io.BytesIO(data))
    for tar in tars:
        tar.close()
    return count, members


def compare(place: str, expected: tuple[int, int], rounds: int, workers: int) -> Iterator[str]:
    """Yield the rows of the table, one per contestant."""
    wanted = [each for each in CONTESTANTS if not (workers and each == "tarfile")]
    size = sum(os.path.getsize(path) for path in shards_of(place)) / 1e9
    found: dict[str, list[tuple[float, float]]] = {each: [] for each in wanted}
    for number, contestant in in_turns(rounds + 1, wanted):
        result = run(contestant, place, workers)
        if (result["samples"], result["bytes"]) != expected:
            raise SystemExit(f"{contestant} read {result}, and not {expected}")
        if number:  # the first round fills caches
            found[contestant].append((size / result["seconds"], result["cpu"] / size))
    for contestant, results in found.items():
        speeds, costs = zip(*results, strict=True)
        yield (
            f"| {contestant} | {statistics.median(speeds):.2f} ({min(speeds):.2f}-{max(speeds):.2f}) "
            f"| {statistics.median(costs):.2f} ({min(costs):.2f}-{max(costs):.2f}) |"
        )


def shards_of(place: str) -> list[str]:
    return sorted(os.path.join(place, name) for name in os.listdir(place) if name.endswith(".tar"))


def run(contestant: str, place: str, workers: int) -> dict[str, Any]:
    """Measure one contestant in a new process; return its figures."""
    command = [sys.executable, "-m", "benchmarks.torch_readers"]
    command += ["--measure", contestant, place, str(workers)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise SystemExit(f"{contestant} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(contestant: str, place: str, workers: int) -> dict[str, Any]:
    """Read everything once; return samples, bytes of their members, wall and CPU seconds."""
    if contestant == "webdataset":
        return timed(webdataset(place, workers))
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as base:
        data = os.path.join(base, "input", "data")
        os.makedirs(data)
        fifo = os.path.join(data, "train_0")
        os.mkfifo(fifo)
        child = os.fork()
        if child == 0:
            feed(fifo, shards_of(place))
            os._exit(0)
        os.environ["SAGEMAKER_BASE_DIR"] = base
        found = timed(penstock(workers) if contestant == "penstock" else with_tarfile(fifo))
        os.waitpid(child, 0)
        return found


def feed(fifo: str, paths: list[str]) -> None:
    """Splice the files into the FIFO."""
    out = os.open(fifo, os.O_WRONLY)
    fcntl.fcntl(out, fcntl.F_SETPIPE_SZ, BLOCK)
    for path in paths:
        with open(path, "rb") as file:
            while os.splice(file.fileno(), out, BLOCK):
                pass
    os.close(out)


def timed(samples: Iterable[int]) -> dict[str, Any]:
    """Exhaust `samples`, which are lengths; return the figures, with the CPU time of ended workers."""
    before, started = cpu(), time.perf_counter()
    count = total = 0
    for length in samples:
        count += 1
        total += length
    seconds = time.perf_counter() - started
    return {"samples": count, "bytes": total, "seconds": seconds, "cpu": cpu() - before}


def cpu() -> float:
    usages = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def length(sample: dict[str, Any]) -> int:
    return len(sample["jpg"]) + len(sample["cls"])


def webdataset(place: str, workers: int) -> Iterable[int]:
    import webdataset
    from torch.utils.data import DataLoader

    dataset = webdataset.WebDataset(shards_of(place), shardshuffle=False).map(length)
    samples: Iterable[int] = DataLoader(dataset, batch_size=None, num_workers=workers) if workers else dataset
    return samples


def penstock(workers: int) -> Iterable[int]:
    from torch.utils.data import DataLoader

    from streamer.readers.torch import PipeIterableDataset

    dataset = PipeIterableDataset("train", "WebDataset", decode=length)
    return DataLoader(dataset, batch_size=None, num_workers=workers) if workers else dataset


class _StreamedTar(tarfile.TarFile):
    members: list[tarfile.TarInfo]
    """Members read so far, an attribute of `tarfile` that typeshed leaves out."""


def with_tarfile(fifo: str) -> Iterator[int]:
    # Only for one shard: several shards in one stream have an end of archive in the middle.
    with (
        open(fifo, "rb", buffering=0) as file,
        _StreamedTar.open(fileobj=file, mode="r|", bufsize=BLOCK) as tar,
    ):
        total = 0
        for member in tar:
            body = tar.extractfile(member)
            total += len(body.read()) if body else 0
            if member.name.endswith(".cls"):
                yield total
                total = 0
            tar.members = []


if __name__ == "__main__":
    sys.exit(main())
