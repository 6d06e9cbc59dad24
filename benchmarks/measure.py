"""Measures one run: one client, one setting, one FIFO and reader per stream.

    readers and client are started             not measured
    all are ready                              clocks are read: wall, CPU of the client
    readers open their FIFOs, client begins
    the last reader has reached the end, or its time limit
                                               clocks are read again, and the client's peak memory

Throughput is the bytes that arrived at the readers, divided by wall time; the readers report the time of the
end.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass

from benchmarks.clients import Client, Running, environment
from benchmarks.dataset import DataSet
from benchmarks.origin import Origin
from benchmarks.process import Child, ProcessFailed, cpu_seconds, peak_memory, wait_for_all
from benchmarks.scenarios import Scenario
from benchmarks.task import Stream, Task

GB = 1e9
_HERE = os.path.dirname(os.path.abspath(__file__))
READER = os.path.join(_HERE, "reader.py")
INFLATER = os.path.join(_HERE, "peers", "inflate.py")
COMPRESSED = ".gz"
"""End of a FIFO's name whose bytes the harness inflates, for a client that cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Figures of one run."""

    seconds: float
    bytes: int
    """Bytes that arrived at the readers."""
    cpu_seconds: float
    """User and system time of the client and its children."""
    peak_rss: int
    """Largest resident size since the client started, in bytes; the sum if it has several processes."""
    cut: bool
    """Whether a reader reached its time limit before the stream's end."""
    verified: bool
    """Whether every byte that arrived has been hashed and is right."""
    received_bytes: int | None = None
    """Bytes that the client had fetched at the end, if it reports them; more than `bytes` is read-ahead."""
    transport: str | None = None

    @property
    def gb_per_second(self) -> float:
        return self.bytes / GB / self.seconds

    @property
    def cpu_per_gb(self) -> float:
        return self.cpu_seconds / (self.bytes / GB)


class WrongBytes(Exception):
    """A stream's bytes were not those of the origin's objects."""


def run_once(
    client: Client, setting: str, scenario: Scenario, origin: Origin, data: DataSet, *, hashed: bool
) -> Run:
    """Measure one run. Raises ProcessFailed if the client fails, WrongBytes if it delivers wrong bytes."""
    shape = scenario.shape
    inflated = shape.gzip and not client.inflates
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        url = origin.urls[scenario.server]
        streams = [
            Stream(
                bucket=shape.bucket(index),
                keys=[shape.key(number) for number in range(shape.objects)],
                size=shape.stored_size,
                fifo=client.fifo(directory, index) + (COMPRESSED if inflated else ""),
            )
            for index in range(shape.buckets)
        ]
        task = Task(
            url=url,
            ca_bundle=origin.ca_bundle if url.startswith("https:") else None,
            streams=streams,
            gzip=shape.gzip,
            setting=client.setting_for(setting, shape.buckets),
        )
        options = json.dumps({"hash": hashed, "rate": scenario.reader_rate, "limit": scenario.limit})
        command = [sys.executable, "-I", "-S", READER, options]
        readers: list[Child] = []
        inflaters: list[Child] = []
        try:
            readers.extend(Child("the reader", command, env=environment(directory)) for _ in streams)
            for reader in readers:
                reader.line(deadline=time.monotonic() + 30)
            running = client.start(task, directory)
            try:
                if inflated:
                    inflaters.extend(_inflater(stream) for stream in streams)
                return _measure(running, task, readers, inflaters, data, limit=scenario.limit)
            except ProcessLookupError:
                raise ProcessFailed(f"{client.name} ended early: {running.child.errors()}") from None
            finally:
                running.close()
        finally:
            for child in (*readers, *inflaters):
                child.close(patience=1)


def _inflater(stream: Stream) -> Child:
    """Start the program that inflates a client's stream into the FIFO of its reader."""
    plain = stream.fifo.removesuffix(COMPRESSED)
    os.mkfifo(plain)
    command = [sys.executable, INFLATER, stream.fifo, plain]
    made = Child("the inflater", command, env=environment(os.path.dirname(plain)))
    made.line(deadline=time.monotonic() + 30)
    return made


def _measure(
    running: Running,
    task: Task,
    readers: list[Child],
    inflaters: list[Child],
    data: DataSet,
    *,
    limit: float,
) -> Run:
    pid = running.child.pid
    beside = sum(cpu_seconds(each.pid) for each in inflaters)
    cpu, started = cpu_seconds(pid), time.monotonic()
    for reader, stream in zip(readers, task.streams, strict=True):
        reader.say(stream.fifo.removesuffix(COMPRESSED))
    for inflater in inflaters:
        inflater.say("go")
    running.go()
    lines = wait_for_all(readers, beside=running.child, deadline=started + limit + 30)
    cpu = cpu_seconds(pid) - cpu
    beside = sum(cpu_seconds(each.pid) for each in inflaters) - beside
    peak_rss = peak_memory(pid)
    peak_beside = sum(peak_memory(each.pid) for each in inflaters)
    report = running.after()
    answers = [json.loads(line) for line in lines]
    cut = any(answer["cut"] for answer in answers)
    if running.whole_process and not cut and any(report["exit"]):
        raise ProcessFailed(f"{running.child.name} ended with exit codes {report['exit']}")
    for index, answer in enumerate(answers):
        check(index, answer, data)
    return Run(
        seconds=max(answer["ended"] for answer in answers) - started,
        bytes=sum(answer["bytes"] for answer in answers),
        cpu_seconds=beside + (report["cpu"] if running.whole_process else cpu),
        peak_rss=peak_beside + (report["peak_rss"] if running.whole_process else peak_rss),
        cut=cut,
        verified=all(answer["sha256"] for answer in answers),
        received_bytes=report.get("received_bytes"),
        transport=report.get("transport"),
    )


def check(index: int, answer: dict[str, object], data: DataSet) -> None:
    """Check a reader's length and hash. Raises WrongBytes, or ProcessFailed if no byte arrived."""
    length, due = answer["bytes"], data.shape.stream_bytes
    if not isinstance(length, int) or length == 0:
        raise ProcessFailed(f"stream {index} delivered nothing")
    if length > due or (length < due and not answer["cut"]):
        raise WrongBytes(f"stream {index} had {length} bytes instead of {due}")
    if answer["sha256"] and answer["sha256"] != data.expected_sha256(index, length):
        raise WrongBytes(f"stream {index}: the hash of its first {length} bytes is wrong")
