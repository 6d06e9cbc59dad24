"""Compares the TensorFlow reader with TFRecordDataset on a local file: `python -m benchmarks.readers`.

    files in memory --splice--> FIFO --> PipeModeDataset --+--> batches --> lengths, added up in C++
    files in memory --------pread------> TFRecordDataset --+

Each reader has one process, which imports TensorFlow once; the readers' runs alternate, so that all readers
run in the same minute of the machine. A run reads the file several times, in batches; the consumer adds up
the lengths of the records inside TensorFlow, and the sum must be right. The clocks start when the dataset is
made. CPU time and minor page faults are those of the reader's process, without the import and without the
feeder. TFRecordDataset runs in a process with TensorFlow's default allocator settings. The first round is not
counted. The files of one case at a time are in /dev/shm, at most 1 GB for both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.dataset import directory_in_memory
from benchmarks.process import Child
from benchmarks.report import circumstances, insert_into, keep, kept
from benchmarks.stats import in_turns, spread
from streamer.formats import recordio, tfrecord
from streamer.trailer import Trailer, trailer_path, write_trailer

BEGIN = "<!-- readers: begin; written by python -m benchmarks.readers -->"
END = "<!-- readers: end -->"
Document = dict[str, Any]

_FEEDER = os.path.join(os.path.dirname(__file__), "feeder.py")
_PATIENCE = 60.0
"""Most seconds that a reader may take to import TensorFlow, or for one run."""


@dataclass(frozen=True, slots=True)
class Case:
    """Records of one size in one format, in batches of `batch`."""

    name: str
    record_format: str
    size: int
    total: int
    """Approximate bytes of the file."""
    passes: int
    """Number of times that one run reads the file."""
    batch: int

    def frame(self, payload: bytes) -> bytes:
        """Return one record as the stream has it."""
        match self.record_format:
            case "TFRecord":
                return tfrecord.encode(payload)
            case "RecordIO":
                return recordio.encode(payload)
            case _:
                return payload.replace(b"\n", b" ") + b"\n"


CASES = {
    case.name: case
    for case in (
        Case("tfrecord-200", "TFRecord", 200, 50_000_000, 8, 1024),
        Case("tfrecord-8k", "TFRecord", 8192, 500_000_000, 6, 128),
        Case("tfrecord-8k-x1024", "TFRecord", 8192, 500_000_000, 6, 1024),
        Case("tfrecord-100k", "TFRecord", 102_400, 500_000_000, 6, 16),
        Case("tfrecord-100k-x1024", "TFRecord", 102_400, 500_000_000, 6, 1024),
        Case("tfrecord-mixed", "TFRecord", -200, 50_000_000, 8, 1024),
        Case("recordio-8k", "RecordIO", 8192, 500_000_000, 6, 128),
        Case("recordio-100k", "RecordIO", 102_400, 500_000_000, 6, 16),
        Case("lines-100", "TextLine", 99, 50_000_000, 5, 1024),
    )
}
"""Cases by name. A negative size stands for sizes from 1 to twice its absolute value."""
READERS = ("TFRecordDataset", "PipeModeDataset", "PipeModeDataset, batch_size")


@dataclass(frozen=True, slots=True)
class Files:
    """Files with a case's records: in the format of the FIFO, and as TFRecord for TFRecordDataset."""

    stream: str
    tfrecord: str
    payload: int
    """Bytes of all records of a run, without their frames."""


def write_files(case: Case, directory: str) -> Files:
    """Write both files, each with every record of the case. A piece of about 8 MB is repeated."""
    sizes = _sizes(case)
    payloads = [os.urandom(size).replace(b"\n", b" ") for size in sizes]
    repeats = max(1, case.total // sum(sizes))
    files = Files(
        os.path.join(directory, "stream"),
        os.path.join(directory, "tfrecord"),
        case.passes * repeats * sum(sizes),
    )
    plain = Case("", "TFRecord", 0, 0, 0, 0)
    for path, kind in ((files.stream, case), (files.tfrecord, plain)):
        piece = b"".join(map(kind.frame, payloads))
        with open(path, "wb") as file:
            file.writelines(piece for _ in range(repeats))
    return files


def _sizes(case: Case) -> list[int]:
    most = 8_000_000
    if case.size > 0:
        return [case.size] * max(1, min(most, case.total) // case.size)
    cycle = range(1, -2 * case.size)
    return [*cycle] * (most // sum(cycle))


class Reader:
    """A process that reads the files of one run after the other (`benchmarks.readers_task`)."""

    def __init__(self, name: str) -> None:
        self.name = name
        env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
        self._child = Child(name, [sys.executable, "-m", "benchmarks.readers_task"], env=env)

    def ready(self) -> str:
        """Wait until TensorFlow is imported; return its version."""
        return self._child.line(deadline=time.monotonic() + _PATIENCE)

    def run(self, case: Case, files: Files, directory: str) -> dict[str, float]:
        """Do one run; return GB/s, CPU-s/GB and faults/GB of payload. Raises RuntimeError for a wrong sum."""
        order: Document = asdict(case) | {
            "reader": self.name,
            "path": files.tfrecord,
            "payload": files.payload,
        }
        feeder = None
        if self.name != READERS[0]:
            order["path"] = os.path.join(directory, "bench_0")
            size = case.passes * os.path.getsize(files.stream)
            trailer = Trailer(
                channel="bench", epoch=0, state="complete", bytes_total=size, bytes_delivered=size
            )
            write_trailer(directory, trailer)
            os.mkfifo(order["path"])
            command = [sys.executable, "-I", "-S", _FEEDER, files.stream, order["path"], str(case.passes)]
            feeder = Child("feeder", command, env=os.environ)
        try:
            self._child.say(json.dumps(order))
            answer = json.loads(self._child.line(deadline=time.monotonic() + _PATIENCE))
        finally:
            if feeder is not None:
                feeder.close()
                os.unlink(order["path"])
                os.unlink(trailer_path(directory, "bench", 0))
        if answer["payload"] != files.payload:
            raise RuntimeError(
                f"{self.name} read {answer['payload']} of {files.payload} bytes of {case.name}"
            )
        gigabytes = files.payload / 1e9
        return {
            "throughput": gigabytes / answer["seconds"],
            "cpu": answer["cpu_seconds"] / gigabytes,
            "faults": answer["faults"] / gigabytes,
        }

    def close(self) -> None:
        """End the process."""
        self._child.close()


def measure(cases: Sequence[Case], rounds: int, keep: Callable[[Document], None]) -> None:
    """Measure all readers over all cases, interleaved; `keep` gets the results after every case."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(directory_in_memory("penstock-readers-"))
        readers = [Reader(name) for name in READERS]
        for reader in readers:
            stack.callback(reader.close)
        version = {reader.ready() for reader in readers}.pop()
        for case in cases:
            files = write_files(case, directory)
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in READERS}
            for number, reader in in_turns(rounds + 1, readers):
                run = reader.run(case, files, directory)
                if number:
                    runs[reader.name].append(run)
            keep({"tensorflow": version, "cases": {case.name: runs}})
            print("\n".join(rows(case.name, runs)), flush=True)


def rows(name: str, runs: dict[str, list[dict[str, float]]]) -> Iterator[str]:
    """Yield the table's rows for one case."""
    beside = runs[READERS[0]]
    for reader, found in runs.items():
        throughput, cpu = (spread([run[what] for run in found]) for what in ("throughput", "cpu"))
        ratios = " | ".join(
            f"{spread([a[what] / b[what] for a, b in zip(found, beside, strict=True)]).median:.2f}"
            for what in ("throughput", "cpu")
        )
        faults = spread([run["faults"] for run in found]).median
        yield f"| `{name}` | {reader} | {throughput.text()} | {cpu.text()} | {ratios} | {faults:,.0f} |"


def markdown(results: Document) -> str:
    """Return date, machine and table as Markdown."""
    machine = results["machine"]
    reported = (
        f"Measured on {results['date']}, {results['rounds']} counted rounds: median, and in parentheses "
        "minimum and maximum; ratios are medians of the rounds' ratios to TFRecordDataset. "
        f"{machine['cores']} cores, Linux {machine['kernel']}, Python {machine['python']}, "
        f"TensorFlow {results['tensorflow']}."
    )
    head = "| records | reader | GB/s | CPU-s/GB | × throughput | × CPU | page faults/GB |"
    lines = [reported, "", head, "|---|---|---|---|---|---|---|"]
    for name, runs in results["cases"].items():
        lines += rows(name, runs)
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readers", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", default=",".join(CASES), metavar="LIST", help=f"comma-separated: {', '.join(CASES)} (all)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (5)")
    parser.add_argument(
        "--out",
        default="build/benchmarks/readers.json",
        metavar="FILE",
        help="results; cases of an earlier run stay",
    )
    parser.add_argument("--into", metavar="FILE", help="put the table of all results into this Markdown file")
    chosen = parser.parse_args(arguments)
    names = [name for name in chosen.cases.split(",") if name]
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    if chosen.rounds < 1:
        parser.error("--rounds must be at least 1")
    results = kept(chosen.out) or {"cases": {}}

    def add(found: Document) -> None:
        cases = {"cases": results["cases"] | found["cases"]}
        results.update(found | cases | circumstances() | {"rounds": chosen.rounds})
        keep(results, chosen.out)

    if names:
        measure([CASES[name] for name in names], chosen.rounds, add)
    if chosen.into is not None:
        insert_into(chosen.into, markdown(results), begin=BEGIN, end=END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
