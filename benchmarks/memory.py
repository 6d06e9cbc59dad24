"""Tests the memory budget under a memory limit: `python -m benchmarks.memory [--limits 160 256 512]`.

The sidecar runs in a cgroup with a limit, with twenty channels and 64 requests in flight, against an nginx
outside of it. All readers are slow; four open their FIFO and then stop reading, and one FIFO has no reader.
For every transport and limit a row has the most bytes that the kernel charged, the largest size of the
process, the longest wait of a reading reader for its next byte, and whether every stream was right. A sidecar
that the kernel kills has a row too.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import origin
from benchmarks.cgroup import Cgroup, NoCgroup, limited
from benchmarks.clients import ROOT, environment
from benchmarks.dataset import DataSet, Shape, directory_in_memory, nginx_etag
from benchmarks.process import Child, ProcessFailed, memory
from streamer.units import MIB

LIMITS = (160, 256, 512)
"""Memory limits in MiB."""
CHANNELS, ASLEEP, ABSENT = 20, 4, 1
REQUESTS = 64
RATE = 25e6
"""Bytes per second of a reader that reads."""
PATIENCE = 90.0
"""Most seconds for one run."""
ZIPPED = "zipped"
HEADINGS = ("transport", "limit, MiB", "charged, MiB", "sockets, MiB", "peak RSS, MiB", "longest wait, s", "")


@dataclass(frozen=True, slots=True)
class Source:
    """A bucket that a channel streams, and the length and hash of its stream."""

    bucket: str
    sha256: str
    size: int
    compressed: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one run, in bytes and seconds."""

    charged: int
    sockets: int | None
    """Bytes charged for sockets; None if `charged` contains them."""
    peak_rss: int
    longest_wait: float
    problem: str = ""
    """Text of the failure; empty if there was none."""


@dataclass(slots=True)
class Reader:
    """A thread that reads one channel."""

    source: Source
    path: str
    asleep: bool
    sha256: str = ""
    size: int = 0
    longest_wait: float = 0.0
    """Longest wait for a byte, in seconds."""
    over: threading.Event = field(default_factory=threading.Event)

    def read(self, wake: threading.Event, rate: float) -> None:
        """Read to the end, at most `rate` bytes per second; a sleeping reader pauses until `wake` is set."""
        digest, began = hashlib.sha256(), time.monotonic()
        with open(self.path, "rb", buffering=0) as file:
            while True:
                asked = time.monotonic()
                data = file.read(256 * 1024)
                if not self.asleep:
                    self.longest_wait = max(self.longest_wait, time.monotonic() - asked)
                if not data:
                    break
                digest.update(data)
                self.size += len(data)
                if self.asleep:
                    wake.wait()
                elif (ahead := self.size / rate - (time.monotonic() - began)) > 0:
                    time.sleep(ahead)
        self.sha256 = digest.hexdigest()
        self.over.set()

    @property
    def right(self) -> bool:
        """Return whether the reader has received the whole stream."""
        return self.sha256 == self.source.sha256


def run(
    job: dict[str, Any], sources: Sequence[Source], limit: int, directory: str, *, rate: float = RATE
) -> Outcome:
    """Run `job`, whose channels `c00`, `c01` and so on stream `sources`, under a limit of `limit` bytes.

    The last channel has no reader; those of the four before it sleep. Raises NoCgroup, ProcessFailed.
    """
    path = os.path.join(directory, "job.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(job, file)
    data = os.path.join(job["Penstock"]["BaseDirectory"], "input", "data")
    awake = len(sources) - ASLEEP - ABSENT
    readers = [
        Reader(source, os.path.join(data, f"c{index:02d}_0"), asleep=index >= awake)
        for index, source in enumerate(sources[: len(sources) - ABSENT])
    ]
    with limited(limit) as cgroup, _sidecar(cgroup, path, directory) as child:
        wake = threading.Event()
        for reader in readers:
            threading.Thread(target=reader.read, args=(wake, rate), daemon=True).start()
        deadline = time.monotonic() + PATIENCE
        late = _wait(readers[:awake], cgroup, deadline)
        wake.set()
        late += _wait(readers[awake:], cgroup, deadline)
        problem = _problem(cgroup, readers, late)
        try:
            peak_rss = memory(child.pid)[1]
        except ProcessLookupError:
            peak_rss, problem = 0, problem or "the sidecar ended"
        return Outcome(
            cgroup.peak, cgroup.sockets, peak_rss, max(each.longest_wait for each in readers), problem
        )


def _wait(readers: Sequence[Reader], cgroup: Cgroup, deadline: float) -> list[str]:
    """Wait for the readers; return the names of the FIFOs that did not end before the deadline.

    Returns at once if the sidecar was killed.
    """
    for reader in readers:
        while not reader.over.wait(0.2):
            if time.monotonic() > deadline or cgroup.killed:
                return [os.path.basename(each.path) for each in readers if not each.over.is_set()]
    return []


def _problem(cgroup: Cgroup, readers: Sequence[Reader], late: Sequence[str]) -> str:
    if cgroup.killed:
        return "killed by the kernel"
    if late:
        return f"no end of {', '.join(late)}"
    wrong = [os.path.basename(reader.path) for reader in readers if not reader.right]
    return f"wrong: {', '.join(wrong)}" if wrong else ""


@contextlib.contextmanager
def _sidecar(cgroup: Cgroup, path: str, directory: str) -> Iterator[Child]:
    """Run `penstock run` in the cgroup; the block begins when it is ready."""
    command = [sys.executable, "-m", "sidecar", "run", "-c", path]
    inside = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', os.path.join(cgroup.path, "cgroup.procs")]
    child = Child(
        "penstock",
        [*inside, *command],
        env=environment(directory) | {"PYTHONPATH": ROOT},
        cwd=ROOT,
        lines_on_stderr=True,
    )
    try:
        line = ""
        while '"ready"' not in line:
            line = child.line(deadline=time.monotonic() + 60)
        drain = threading.Thread(target=_drain, args=(child,), daemon=True)
        drain.start()
        yield child
    finally:
        child.terminate()
        child.close()


def _drain(child: Child) -> None:
    with contextlib.suppress(ProcessFailed, OSError, ValueError):
        while True:
            child.line(deadline=time.monotonic() + 2 * PATIENCE)


def job(sources: Sequence[Source], endpoint: dict[str, Any], base: str, **penstock: Any) -> dict[str, Any]:
    """Return a job with a channel for each source, and 64 requests in flight."""
    return {
        "InputDataConfig": [
            {
                "ChannelName": f"c{index:02d}",
                "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": f"s3://{source.bucket}/"}},
                **({"CompressionType": "Gzip"} if source.compressed else {}),
            }
            for index, source in enumerate(sources)
        ],
        "Penstock": {
            "BaseDirectory": base,
            "Endpoint": {"Region": "us-east-1", "PathStyle": True} | endpoint,
            "Admin": {"Port": 0},
            "RequestsInFlight": REQUESTS,
            "DrainFor": 0,
        }
        | penstock,
    }


def _zip(data: DataSet, objects: int) -> Source:
    """Make a bucket of compressed objects beside those of the data set."""
    directory = os.path.join(data.root, "objects", ZIPPED)
    os.makedirs(directory)
    digest, entries, size = hashlib.sha256(), [], 0
    for index in range(objects):
        with open(
            os.path.join(data.root, "objects", data.shape.bucket(0), data.shape.key(index)), "rb"
        ) as file:
            plain = file.read().hex().encode()  # hexadecimal text compresses to half its size
        digest.update(plain)
        size += len(plain)
        packed, key, mtime = gzip.compress(plain, 1, mtime=0), f"part-{index:05d}.gz", 1_700_000_000 + index
        path = os.path.join(directory, key)
        with open(path, "wb") as file:
            file.write(packed)
        os.utime(path, (mtime, mtime))
        entries.append((key, len(packed), nginx_etag(mtime, len(packed))))
    data.write_listing(ZIPPED, entries)
    return Source(ZIPPED, digest.hexdigest(), size, compressed=True)


def rows(limits: Sequence[int], transports: Sequence[str], place: str) -> Iterator[tuple[str, int, Outcome]]:
    """Run every transport under every limit; yield transport, limit in MiB and outcome.

    Raises NoCgroup, OriginFailed.
    """
    data = DataSet(Shape("plain", 1, 12, 4 * MIB), os.path.join(place, "data"))
    data.create()
    zipped = _zip(data, 4)
    shape = data.shape
    plain = Source(shape.bucket(0), data.expected_sha256(0, shape.stream_bytes), shape.stream_bytes)
    with origin.running_origin(data, os.path.join(place, "nginx")) as running:
        for transport in transports:
            tls = transport == "tls"
            endpoint = {"Url": running.urls["tls" if tls else "fast"]}
            if tls:
                endpoint["CaBundle"] = running.ca_bundle
            wish = "buffered" if tls else transport
            first = [plain if transport == "splice" else zipped]
            sources = first + [plain] * (CHANNELS - 1)
            for limit in limits:
                with tempfile.TemporaryDirectory(dir=place) as directory:
                    document = job(sources, endpoint, os.path.join(directory, "ml"), Transport=wish)
                    yield transport, limit, run(document, sources, limit * MIB, directory)


def cells(transport: str, limit: int, outcome: Outcome) -> tuple[str, ...]:
    """Return the cells of a row, in the order of `HEADINGS`."""
    sockets = "in the sum" if outcome.sockets is None else f"{outcome.sockets / MIB:.0f}"
    return (
        transport,
        str(limit),
        f"{outcome.charged / MIB:.0f}",
        sockets,
        f"{outcome.peak_rss / MIB:.0f}",
        f"{outcome.longest_wait:.1f}",
        outcome.problem or "all right",
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--limits", type=int, nargs="+", default=LIMITS, metavar="MIB")
    parser.add_argument("--transports", nargs="+", default=("splice", "buffered", "tls"))
    arguments = parser.parse_args()
    if problem := origin.missing():
        sys.stderr.write(f"{problem}\n")
        return 1
    sys.stdout.write(f"| {' | '.join(HEADINGS)} |\n{'|---' * len(HEADINGS)}|\n")
    failed = False
    with directory_in_memory("penstock-memory-") as place:
        try:
            for transport, limit, outcome in rows(arguments.limits, arguments.transports, place):
                sys.stdout.write(f"| {' | '.join(cells(transport, limit, outcome))} |\n")
                sys.stdout.flush()
                failed = failed or bool(outcome.problem)
        except (NoCgroup, ProcessFailed, origin.OriginFailed) as error:
            sys.stderr.write(f"{error}\n")
            return 1
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
