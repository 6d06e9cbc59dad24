"""Readers that are processes: stopped, killed, two at once. What a minute would do happens at once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.harness import MORE_THAN_A_FIFO, fill
from tests.kit.pipes import read_all
from tests.kit.processes import PENSTOCK, job, sidecar, write_job
from tests.kit.proxy import TcpProxy
from tests.kit.stub import S3Stub
from tests.kit.trailers import published_trailer

READER = """
import hashlib, os, signal, sys
from streamer.readers.core.stream import PipeStream
with PipeStream(sys.argv[1]) as stream:
    digest = hashlib.sha256(stream.read(100_000))
    if sys.argv[2] == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    while data := stream.read(1 << 20):
        digest.update(data)
    print(stream.received, digest.hexdigest())
"""
"""Stops itself in mid-stream if told to, so that this needs no timing."""


def reader(fifo: Path, how: str, stdin: int | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", READER, fifo, how],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def stopped(process: Any) -> None:
    """Wait until the reader has stopped itself."""
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), process.stderr.read()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("transport", ["splice", "buffered"])
def test_a_reader_that_is_stopped_while_every_connection_is_cut(
    stub: S3Stub, proxy: TcpProxy, tmp_path: Path, transport: str
) -> None:
    """Servers and firewalls do so with connections on which nothing moves for a minute."""
    truth = fill(stub, [MORE_THAN_A_FIFO // 10] * 14, prefix="b/train/")
    document = job(f"http://127.0.0.1:{proxy.port}", tmp_path / "ml", "b/train/", Transport=transport)
    with sidecar(write_job(tmp_path / "job.yaml", document)) as running:
        running.wait_for("ready")
        process = reader(tmp_path / "ml" / "input" / "data" / "train_0", "stops")
        stopped(process)
        while running.status()["channels"]["train"]["fifo_bytes"] < 900_000:
            pass  # each look is a request to the sidecar; the test's own time limit ends it
        proxy.cut_all()
        process.send_signal(signal.SIGCONT)
        output, errors = process.communicate()
        assert output.split() == [str(len(truth)), sha256(truth)], errors
        assert running.end() == 0


def test_a_reader_that_is_killed_and_the_next(stub: S3Stub, tmp_path: Path) -> None:
    """The epoch is abandoned (contract §1.3); the next reader has the next one from its first byte."""
    truth = fill(stub, [MORE_THAN_A_FIFO], prefix="b/train/")
    data = tmp_path / "ml" / "input" / "data"
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    with sidecar(path) as running:
        running.wait_for("ready")
        with reader(data / "train_0", "stops") as process:
            stopped(process)
            process.kill()
        running.wait_for("epoch abandoned", epoch=0)
        assert not (data / "train_0").exists()
        with reader(data / "train_1", "goes on") as process:
            output, errors = process.communicate()
        assert output.split() == [str(len(truth)), sha256(truth)], errors
        assert running.end() == 0
    assert published_trailer(data, "train", 0).state == "abandoned"
    assert published_trailer(data, "train", 1).state == "complete"


WAITS = """
import os, signal, sys
from streamer.readers import PipeReader, PipeStream
what, path = sys.argv[1:]
if what == "bytes":
    stream = PipeStream(path)
    stream.open()
    print("open", flush=True)
    print(len(stream.read(100_000)), flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    print(len(stream.read()))
else:
    print("open", flush=True)
    records = iter(PipeReader("train", "TextLine", epoch=0))
    print(len(next(records)), flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    print(sum(map(len, records)))
"""
"""Waits in a FIFO that was made beforehand, and stops itself when the first bytes have come."""


def waits(data: Path, what: str) -> subprocess.Popen[str]:
    """Such a reader, which has opened the FIFO already."""
    os.makedirs(data, exist_ok=True)
    os.mkfifo(data / "train_0")
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS, what, data / "train_0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"SAGEMAKER_BASE_DIR": str(data.parent.parent)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


@pytest.mark.parametrize("what", ["bytes", "records"])
def test_a_reader_that_came_first_is_told_that_the_sidecar_died(
    stub: S3Stub, tmp_path: Path, what: str
) -> None:
    """It opened the FIFO before there was a trailer, and the records before the end are whole."""
    stub.objects["b/train/lines"] = (b"x" * 99_999 + b"\n") * 600
    data = tmp_path / "ml" / "input" / "data"
    process = waits(data, what)
    with sidecar(write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))) as running:
        stopped(process)
        running.process.kill()
        running.wait()
        process.send_signal(signal.SIGCONT)
        output, errors = process.communicate()
    assert len(output.split()) == 1
    assert process.returncode
    assert "bytes of train_0: the sidecar died" in errors
    assert published_trailer(data, "train", 0).state == "open"


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_reader_is_told_though_another_sidecar_has_come_already(
    stub: S3Stub, tmp_path: Path, epoch: int
) -> None:
    """It begins epoch 0 anew in the same FIFO, or removes FIFO and trailer and begins with epoch 1."""
    fill(stub, [MORE_THAN_A_FIFO], prefix="b/train/")
    data = tmp_path / "ml" / "input" / "data"
    process = waits(data, "bytes")
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    with sidecar(path) as running:
        stopped(process)
        running.process.kill()
        running.wait()
    state = {"format": 1, "channel": "train", "epoch": 1, "offset": 0, "skip": 0, "records": 0, "digest": ""}
    (tmp_path / "state.json").write_text(json.dumps(state))
    later = [] if epoch == 0 else ["--resume", str(tmp_path / "state.json"), "--resume-anyway"]
    with sidecar(path, *later) as running:
        running.wait_for("ready")
        process.send_signal(signal.SIGCONT)
        output, errors = process.communicate()
    assert output == "100000\n"
    reported = "died, and another one writes it from the start" if epoch == 0 else "its trailer is gone"
    assert reported in errors


PIPED = {
    "stream": """
import os, signal
from streamer.readers import PipeStream
with PipeStream("/dev/stdin") as stream:
    first = stream.read(1000)
    if STOPS:
        os.kill(os.getpid(), signal.SIGSTOP)
    print(len(first) + len(stream.readall()))
""",
    "tensorflow": """
import os, signal
from streamer.readers.tensorflow import PipeModeDataset
records = PipeModeDataset.from_path("/dev/stdin", "TextLine", proof=True).as_numpy_iterator()
first = next(records)
if STOPS:
    os.kill(os.getpid(), signal.SIGSTOP)
print(len(first) + 1 + sum(len(record) + 1 for record in records))
""",
}
"""Readers of standard input, which stop themselves behind the first record if told to."""


@contextlib.contextmanager
def piped(stub: S3Stub, how: str, *uris: str, stops: bool = False) -> Iterator[Any]:
    """`penstock cat URI... | python`; both processes."""
    read, write = os.pipe()
    with contextlib.ExitStack() as stack:
        program = PIPED[how].replace("STOPS", str(stops))
        reads = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=read,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        command = [*PENSTOCK, "cat", "--endpoint-url", stub.url, "--path-style", "-q", *uris]
        cats = stack.enter_context(subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE))
        stack.callback(reads.kill)
        stack.callback(cats.kill)
        os.close(read)
        os.close(write)
        yield cats, reads


def test_a_pipe_from_cat_ends_where_the_objects_end(stub: S3Stub) -> None:
    lines = b"".join(b"line %d\n" % number for number in range(30_000))
    stub.objects["b/lines"] = lines
    with piped(stub, "stream", "s3://b/lines") as (cats, reads):
        output, errors = reads.communicate()
        assert (cats.wait(), output) == (0, f"{len(lines)}\n"), errors


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", list(PIPED))
def test_a_pipe_from_a_cat_that_is_killed_has_no_end(stub: S3Stub, how: str) -> None:
    """The pipe ends at a line's end, as every page of it does."""
    stub.objects["b/lines"] = (b"x" * 4095 + b"\n") * (MORE_THAN_A_FIFO // 4096)
    with piped(stub, how, "s3://b/lines", stops=True) as (cats, reads):
        stopped(reads)
        cats.kill()
        cats.wait()
        reads.send_signal(signal.SIGCONT)
        output, errors = reads.communicate()
        assert output == ""
        assert "and its writer promised more" in errors


def test_a_pipe_from_a_cat_that_finds_nothing_has_no_end(stub: S3Stub) -> None:
    with piped(stub, "stream", "s3://b/nothing") as (cats, reads):
        output, errors = reads.communicate()
        assert (cats.wait() != 0, output) == (True, "")
        assert "stdin ended after 0 bytes, and its writer promised more" in errors


def test_two_readers_of_one_fifo_are_both_told(stub: S3Stub, tmp_path: Path) -> None:
    """Readers that open a FIFO before its first byte take bytes from each other, and nobody can prevent it:
    neither has the epoch, and both raise.
    """
    truth = fill(stub, [MORE_THAN_A_FIFO], prefix="b/train/")
    data = tmp_path / "ml" / "input" / "data"
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    data.mkdir(parents=True)
    os.mkfifo(data / "train_0")
    ends = [os.open(data / "train_0", os.O_RDONLY | os.O_NONBLOCK) for _ in range(2)]
    with sidecar(path) as running:
        running.wait_for("ready")
        select.select(ends[:1], [], [])
        with reader(Path("/dev/stdin"), "stops", stdin=ends[0]) as first:
            stopped(first)
            with reader(Path("/dev/stdin"), "goes on", stdin=ends[1]) as second:
                for end in ends:
                    os.close(end)
                output, errors = second.communicate()
            first.send_signal(signal.SIGCONT)
            said_first, errors_first = first.communicate()
        assert output + said_first == ""
        for each in (errors, errors_first):
            assert "another process reads this FIFO too" in each
        assert read_all(data / "train_1") == truth
        assert running.end() == 0
