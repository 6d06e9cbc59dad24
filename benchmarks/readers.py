"""Compares the readers with those of other packages on a local file: `python -m benchmarks.readers`.

    files in memory --splice--> FIFO --> reader of Penstock ------------+--> lengths, added up
    files in memory --read-----> reader of another package, on a file --+

    tensorflow  PipeModeDataset                     beside tf.data.TFRecordDataset
    keras       PipeModeDataset and `fit`           beside TFRecordDataset and `fit`, a small model
    torch       PipeIterableDataset                 beside the package `tfrecord` in an IterableDataset
    plain       PipeReader, PipeReader.batches      beside the package `tfrecord`

Each reader has one process, which imports its libraries once; the readers' runs alternate, so that all
readers run in the same minute of the machine. A run reads the file several times, in batches; the consumer
adds up the lengths of the records (TensorFlow: in C++), and the sum must be right. The clocks start when the
reader is made. CPU time is that of the reader's process, without the import and without the feeder. Readers
of other packages run in a process with default allocator settings. The first round is not counted. The files
of one case at a time are in /dev/shm, at most 1 GB for both.

The package `tfrecord` checks no checksums, and Penstock's readers check all. It is no dependency: without it
(`pip install --group bench`) its rows, and the ratios of PyTorch and plain Python, are left out. With
`--before DIR` each reader of Penstock also runs with the `streamer` of that checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.dataset import directory_in_memory
from benchmarks.process import Child
from benchmarks.report import circumstances, insert_into, keep, kept
from benchmarks.stats import in_turns, list_of, spread
from streamer.formats import recordio, tfrecord
from streamer.trailer import Trailer, fifo_path, trailer_path, write_trailer

BEGIN = "<!-- readers: begin; written by python -m benchmarks.readers -->"
END = "<!-- readers: end -->"
Document = dict[str, Any]

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_FEEDER = os.path.join(_ROOT, "benchmarks", "feeder.py")
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
    families: tuple[str, ...] = ("tensorflow",)
    """The readers that read it."""

    def frame(self, payload: bytes) -> bytes:
        """Return one record as the stream has it."""
        match self.record_format:
            case "TFRecord":
                return tfrecord.encode(payload)
            case "RecordIO":
                return recordio.encode(payload)
            case _:
                return payload.replace(b"\n", b" ") + b"\n"


PYTHON = ("torch", "plain")
ALL = ("tensorflow", *PYTHON)
CASES = {
    case.name: case
    for case in (
        Case("tfrecord-200", "TFRecord", 200, 50_000_000, 4, 1024),
        Case("tfrecord-8k", "TFRecord", 8192, 500_000_000, 3, 128, ALL),
        Case("tfrecord-8k-x1024", "TFRecord", 8192, 500_000_000, 3, 1024, ("tensorflow", "torch")),
        Case("tfrecord-100k", "TFRecord", 102_400, 500_000_000, 3, 16, ALL),
        Case("tfrecord-100k-x1024", "TFRecord", 102_400, 500_000_000, 3, 1024, ("tensorflow", "torch")),
        Case("tfrecord-1m", "TFRecord", 1_048_576, 500_000_000, 3, 4, PYTHON),
        Case("tfrecord-mixed", "TFRecord", -200, 50_000_000, 4, 1024),
        Case("recordio-8k", "RecordIO", 8192, 500_000_000, 3, 128),
        Case("recordio-100k", "RecordIO", 102_400, 500_000_000, 3, 16),
        Case("lines-100", "TextLine", 99, 50_000_000, 3, 1024),
        Case("keras-3k", "TFRecord", 3072, 100_000_000, 4, 128, ("keras",)),
    )
}
"""Cases by name. A negative size stands for sizes from 1 to twice its absolute value."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A reader, and what it reads."""

    family: str
    name: str
    fifos: int = 1
    """Number of FIFOs, each with the whole file; 0: it reads the file."""
    checkout: str | None = None
    """Directory whose `streamer` it uses; None for that of this file."""

    @property
    def label(self) -> str:
        """Name in the results."""
        return self.name if self.checkout is None else f"before: {self.name}"


READERS = (
    Contestant("tensorflow", "TFRecordDataset", 0),
    Contestant("tensorflow", "PipeModeDataset"),
    Contestant("tensorflow", "PipeModeDataset, batch_size"),
    Contestant("keras", "fit(TFRecordDataset)", 0),
    Contestant("keras", "fit(PipeModeDataset, batch_size)"),
    Contestant("torch", "tfrecord in an IterableDataset", 0),
    Contestant("torch", "PipeIterableDataset"),
    Contestant("torch", "PipeIterableDataset, batch_size"),
    Contestant("plain", "tfrecord", 0),
    Contestant("plain", "PipeReader"),
    Contestant("plain", "PipeReader.batches"),
)
"""All readers. The first one of a family is what the others are compared with."""


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

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
        program = (
            f"import sys; sys.path.insert(0, {contestant.checkout or _ROOT!r}); import streamer; "
            f"sys.path[0] = {_ROOT!r}; from benchmarks.readers_task import main; "
            f"main({contestant.family!r}, on_file={not contestant.fifos})"
        )
        self._child = Child(contestant.label, [sys.executable, "-c", program], env=env)

    def ready(self) -> str:
        """Wait until the libraries are imported; return the version of the one that is measured.

        It is empty if that is not installed.
        """
        return self._child.line(deadline=time.monotonic() + _PATIENCE)

    def run(self, case: Case, files: Files, directory: str) -> dict[str, float]:
        """Do one run; return GB/s and CPU-s/GB of payload. Raises RuntimeError for a wrong sum."""
        fifos = self.contestant.fifos
        names = [f"bench{number}" for number in range(fifos)]
        payload = files.payload * max(1, fifos)
        order: Document = asdict(case) | {
            "reader": self.contestant.name,
            "path": files.tfrecord,
            "directory": directory,
            "names": names,
            "payload": payload,
            "count": payload // case.size if case.size > 0 else 0,
        }
        with contextlib.ExitStack() as stack:
            order["state"] = stack.enter_context(tempfile.TemporaryDirectory(dir=directory))
            with open(os.path.join(order["state"], "inputdataconfig.json"), "w", encoding="utf-8") as file:
                json.dump({name: {"TrainingInputMode": "Pipe"} for name in names}, file)
            for name in names:
                _feed(name, directory, files, case.passes, stack)
            self._child.say(json.dumps(order))
            answer = json.loads(self._child.line(deadline=time.monotonic() + _PATIENCE))
        if answer["payload"] != payload:
            raise RuntimeError(
                f"{self._child.name} read {answer['payload']} of {payload} bytes of {case.name}"
            )
        gigabytes = payload / 1e9
        return {
            "throughput": gigabytes / answer["seconds"],
            "cpu": answer["cpu_seconds"] / gigabytes,
        }

    def close(self) -> None:
        """End the process."""
        self._child.close()


def _feed(name: str, directory: str, files: Files, passes: int, stack: contextlib.ExitStack) -> None:
    """Offer an epoch of a channel; `stack` ends the feeder and removes FIFO and trailer."""
    path, size = fifo_path(directory, name, 0), passes * os.path.getsize(files.stream)
    trailer = Trailer(channel=name, epoch=0, state="complete", bytes_total=size, bytes_delivered=size)
    write_trailer(directory, trailer)
    stack.callback(os.unlink, trailer_path(directory, name, 0))
    os.mkfifo(path)
    stack.callback(os.unlink, path)
    command = [sys.executable, "-I", "-S", _FEEDER, files.stream, path, str(passes)]
    stack.callback(Child("feeder", command, env=os.environ).close)


def measure(
    cases: Sequence[Case], readers: Sequence[Contestant], rounds: int, keep: Callable[[Document], None]
) -> None:
    """Measure readers over all cases, interleaved; `keep` gets the results after every case."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(directory_in_memory("penstock-readers-"))
        for family in dict.fromkeys(family for case in cases for family in case.families):
            with contextlib.ExitStack() as processes:
                started = [Reader(each) for each in readers if each.family == family]
                for reader in started:
                    processes.callback(reader.close)
                versions = {reader.contestant: reader.ready() for reader in started}
                started = [reader for reader in started if versions[reader.contestant]]
                for case in cases:
                    if family not in case.families or not started:
                        continue
                    files = write_files(case, directory)
                    runs: dict[str, list[dict[str, float]]] = {
                        reader.contestant.label: [] for reader in started
                    }
                    for number, reader in in_turns(rounds + 1, started):
                        run = reader.run(case, files, directory)
                        if number:
                            runs[reader.contestant.label].append(run)
                    keep(
                        {
                            "versions": {family: versions[started[0].contestant]},
                            "cases": {f"{family}/{case.name}": runs},
                        }
                    )
                    print("\n".join(rows(family, case, runs)), flush=True)


def rows(family: str, case: Case, runs: dict[str, list[dict[str, float]]]) -> Iterator[str]:
    """Yield the table's rows for one case."""
    reference = next(each.label for each in READERS if each.family == family)
    for reader, found in runs.items():
        throughput, cpu = (spread([run[what] for run in found]) for what in ("throughput", "cpu"))
        cells = [f"{throughput.text()} | {cpu.text()}"]
        for beside in (reference, f"before: {reader}"):
            if beside in runs:
                pairs = list(zip(found, runs[beside], strict=True))
                cells += [
                    f"{spread([a[what] / b[what] for a, b in pairs]).median:.2f}"
                    for what in ("throughput", "cpu")
                ]
            elif beside == reference:
                cells += ["", ""]
        if reader.startswith("before: "):
            cells += ["", ""]
        shown = reader
        if family == "keras":
            shown += f": {throughput.median * 1e9 / case.size / case.batch:,.0f} steps/s"
        yield f"| `{case.name}` | {shown} | {' | '.join(cells)} |"


def markdown(results: Document) -> str:
    """Return date, machine and a table for each family, as Markdown."""
    machine = results["machine"]
    reported = (
        f"Measured on {results['date']}, commit {results['commit']}, {results['rounds']} counted rounds: "
        "median, and in parentheses minimum and maximum; ratios are medians of the rounds' ratios to the "
        f"first reader of each table. {machine['cores']} cores, Linux {machine['kernel']}, "
        f"Python {machine['python']}."
    )
    lines = [reported]
    for family in dict.fromkeys(each.family for each in READERS):
        found = {name: runs for name, runs in results["cases"].items() if name.startswith(f"{family}/")}
        if not found:
            continue
        before = any(label.startswith("before: ") for runs in found.values() for label in runs)
        last = ["× before", "× its CPU"] if before else []
        head = ["records", "reader", "GB/s", "CPU-s/GB", "× throughput", "× CPU", *last]
        lines += [
            "",
            f"{results['versions'][family]}:",
            "",
            f"| {' | '.join(head)} |",
            "|---" * len(head) + "|",
        ]
        for name, runs in found.items():
            lines += rows(family, CASES[name.partition("/")[2]], runs)
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readers", description=__doc__.splitlines()[0])
    families = list(dict.fromkeys(each.family for each in READERS))
    for name, known in (("readers", families), ("cases", list(CASES))):
        text = f"comma-separated: {', '.join(known)} (all)"
        parser.add_argument(f"--{name}", type=list_of(known), default="all", metavar="LIST", help=text)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (5)")
    parser.add_argument("--before", metavar="DIR", help="measure the readers of this checkout beside ours")
    parser.add_argument(
        "--out",
        default="build/benchmarks/readers.json",
        metavar="FILE",
        help="results; cases of an earlier run stay",
    )
    parser.add_argument(
        "--into", metavar="FILE", help="put the tables of all results into this Markdown file"
    )
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 1:
        parser.error("--rounds must be at least 1")
    contestants = [
        each if checkout is None else replace(each, checkout=checkout)
        for each in READERS
        if each.family in chosen.readers
        for checkout in ([None, os.path.abspath(chosen.before)] if chosen.before and each.fifos else [None])
    ]
    results = kept(chosen.out) or {"cases": {}, "versions": {}}

    def add(found: Document) -> None:
        merged = {name: results[name] | found[name] for name in ("cases", "versions")}
        results.update(merged | circumstances() | {"rounds": chosen.rounds, "commit": commit()})
        keep(results, chosen.out)

    if chosen.cases:
        measure([CASES[name] for name in chosen.cases], contestants, chosen.rounds, add)
    if chosen.into is not None:
        insert_into(chosen.into, markdown(results), begin=BEGIN, end=END)
    return 0


def commit() -> str:
    """Return the short name and date of the commit that is checked out."""
    command = ["git", "-C", _ROOT, "log", "-1", "--format=%h of %cs"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
