"""Proof of an end: trailers that come late, change, go or are no trailers, and FIFOs under other names."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamer.errors import StreamError, TruncatedStream
from streamer.readers import PipeReader, PipeStream
from streamer.readers.samples import grouped
from streamer.trailer import TrailerState, trailer_path
from tests.kit.late import LATE
from tests.readers.feeder import Feeder

if LATE:
    import tensorflow as tf

    from streamer.readers.tensorflow import PipeModeDataset
    from streamer.readers.torch import PipeIterableDataset

LINES = [b"line %d" % number for number in range(1000)]
DATA = b"".join(line + b"\n" for line in LINES)


def plain() -> PipeReader:
    return PipeReader("train", "TextLine")


READERS: dict[str, Callable[[], Iterable[Any]]] = {
    "plain": plain,
    "plain, this epoch": lambda: PipeReader("train", "TextLine", epoch=0),
    "stream": lambda: PipeStream(path(0)),
    "samples": lambda: grouped(plain(), 2),
    "torch": lambda: PipeIterableDataset("train", "TextLine"),
    "tensorflow": lambda: PipeModeDataset("train", "TextLine").as_numpy_iterator(),
    "tensorflow, positions": lambda: PipeModeDataset("train", "TextLine", positions=True).as_numpy_iterator(),
    "tensorflow, a path": lambda: PipeModeDataset.from_path(path(0), "TextLine").as_numpy_iterator(),
}


def path(epoch: int) -> str:
    return os.path.join(os.environ["SAGEMAKER_BASE_DIR"], "input", "data", f"train_{epoch}")


def waiting(
    feeder: Feeder,
    read: Callable[[], list[Any]] | Callable[[], list[bytes]] | Callable[[], None] | Callable[[], bytes],
) -> Any:
    """Run `read` in a thread until it has opened FIFO 0, which lies there already; its thread and errors."""
    errors = []

    def run() -> None:
        try:
            read()
        except (StreamError, tf.errors.OpError) as error:
            errors.append(error)

    os.mkfifo(path(0))
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while path(0) not in _open_files():
        time.sleep(0.001)  # nothing tells when another thread has opened a file
    return thread, errors


def _open_files() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(f"/proc/self/fd/{fd}")


@pytest.mark.parametrize("name", list(READERS))
def test_a_sidecar_that_came_after_the_reader_and_died(feeder: Feeder, name: str) -> None:
    """There was no trailer when the FIFO was opened; there is one at its end, and it says `open`."""
    thread, errors = waiting(feeder, lambda: list(READERS[name]()))
    feeder.feed(0, DATA, total=2 * len(DATA), state="open")
    thread.join()
    assert not thread.is_alive()
    reported = f"received {len(DATA)} of {2 * len(DATA)} bytes of train_0: the sidecar died"
    assert [reported in str(error) for error in errors] == [True]


def test_a_sidecar_that_came_after_the_reader_and_failed(feeder: Feeder) -> None:
    """Its FIFO is held open, so nothing but the trailer says it."""
    thread, errors = waiting(feeder, lambda: list(plain()))
    feeder.feed(0, DATA, total=2 * len(DATA), state="failed", error="404", hold=True)
    thread.join()
    assert ["the source failed: 404" in str(error) for error in errors] == [True]


@pytest.mark.parametrize("old", [None, {"bytes_skipped": 7}], ids=["no trailer", "one of an earlier run"])
def test_a_sidecar_that_came_after_a_reader_that_resumes(feeder: Feeder, old: dict[str, Any] | None) -> None:
    """Where the FIFO begins is what the trailer of its writer says, and no other."""
    at = len(b"".join(line + b"\n" for line in LINES[:600]))
    state = {
        "format": 1,
        "channel": "train",
        "epoch": 0,
        "offset": at,
        "skip": 0,
        "records": 600,
        "digest": "",
    }
    if old:
        feeder.publish(0, "open", total=len(DATA), digest="old", run="old", **old)
    got: list[bytes] = []

    def read() -> None:
        reader = plain()
        reader.load_state_dict(state)
        got.extend(reader)

    thread, errors = waiting(feeder, read)
    feeder.feed(0, DATA[at:], total=len(DATA), bytes_skipped=at, run="new")
    thread.join()
    assert (errors, got) == ([], LINES[600:])


def test_the_run_of_a_stream_does_not_change(feeder: Feeder) -> None:
    """A sidecar that was killed and started again writes the epoch anew into the FIFO that is still open."""
    os.mkfifo(path(0))
    stream = PipeStream(path(0))
    with stream:
        stream.open()
        for run in ("old", "new"):
            feeder.publish(0, "open", total=len(DATA), run=run)
            with open(path(0), "wb", buffering=0) as sidecar:
                sidecar.write(DATA)
                if run == "old":
                    assert stream.read(len(DATA)) == DATA
                    continue
                feeder.publish(0, "complete", total=len(DATA), delivered=len(DATA), run=run)
                with pytest.raises(TruncatedStream, match="to write train_0 died, and another one"):
                    stream.read(len(DATA))


@pytest.mark.parametrize("data", [b"", DATA], ids=["no byte", "bytes"])
def test_a_fifo_that_promised_a_trailer_and_has_none(feeder: Feeder, data: bytes) -> None:
    """It came and went while the reader slept; a sidecar that came later has trailers of its own."""
    thread, errors = waiting(feeder, lambda: PipeStream(path(0)).readall())
    feeder.publish(5, "open")
    feeder.feed(0, data, proof=False)
    thread.join()
    assert [str(error) for error in errors] == [
        f"train_0 ended after {len(data)} bytes and its trailer is gone: nothing proves that this is the end"
    ]


@pytest.mark.parametrize("state", ["complete", "open"])
@pytest.mark.parametrize("how", ["a link", "a descriptor", "standard input"])
def test_another_name_of_the_fifo(feeder: Feeder, tmp_path: Path, how: str, state: TrailerState) -> None:
    feeder.feed(0, DATA, state=state)
    script = "import sys; from streamer.readers import PipeStream; print(len(PipeStream(sys.argv[1]).read()))"
    os.symlink(path(0), tmp_path / "link")
    name = {"a link": str(tmp_path / "link"), "a descriptor": "/dev/fd/0", "standard input": "/dev/stdin"}[
        how
    ]
    with open(path(0) if how != "a link" else os.devnull, "rb") as source:
        run = [sys.executable, "-c", script, name]
        done = subprocess.run(run, stdin=source, capture_output=True, check=False, text=True)
    if state == "complete":
        assert done.stdout == f"{len(DATA)}\n", done.stderr
    else:
        assert "bytes of train_0: the sidecar died" in done.stderr


def test_a_trailer_of_an_earlier_run_proves_no_foreign_fifo(feeder: Feeder) -> None:
    """Nobody can tell: the end is an error, and the text names the file."""
    feeder.publish(0, "complete", total=5, delivered=5)
    feeder.feed(0, DATA, proof=False)
    reported = f"received {len(DATA)} of 5 bytes"
    with PipeStream(path(0)) as stream, pytest.raises(TruncatedStream, match=reported):
        stream.readall()


GOOD = {
    "channel": "train",
    "epoch": 0,
    "state": "complete",
    "bytes_total": len(DATA),
    "bytes_delivered": len(DATA),
    "format": 1,
}
BAD = {
    "another epoch": GOOD | {"epoch": 1},
    "another channel": GOOD | {"channel": "eval"},
    "a text for a number": GOOD | {"bytes_delivered": str(len(DATA))},
    "a fraction": GOOD | {"bytes_delivered": float(len(DATA))},
    "a list": GOOD | {"state": ["complete"]},
    "a number below 0": GOOD | {"bytes_skipped": -1},
    "nothing": GOOD | {"bytes_skipped": None},
    "no text": GOOD | {"error": 5},
    "no state": {key: value for key, value in GOOD.items() if key != "state"},
}


@pytest.mark.parametrize("when", ["before", "at the end"])
@pytest.mark.parametrize("bad", [*BAD, "cut", "empty", "a directory"])
def test_what_is_no_trailer_proves_nothing(feeder: Feeder, bad: str, when: str) -> None:
    where = trailer_path(feeder.pipe_dir, "train", 0)

    def spoil() -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(where)
        if bad == "a directory":
            os.mkdir(where)
            return
        text = json.dumps(BAD.get(bad, GOOD))
        with open(where, "w") as file:
            file.write(text[:-5] if bad == "cut" else "" if bad == "empty" else text)

    feeder.publish(0, "open", total=len(DATA))
    os.mkfifo(path(0))
    if when == "before":
        spoil()
    with (
        PipeStream(path(0)) as stream,
        pytest.raises(StreamError, match="the end of train_0 cannot be proven"),
    ):
        stream.open()
        with open(path(0), "wb", buffering=0) as sidecar:
            sidecar.write(DATA)
            assert stream.read(len(DATA)) == DATA
            spoil()
        stream.read(1)


def test_a_foreign_fifo_whose_directory_is_gone_has_its_end(feeder: Feeder, tmp_path: Path) -> None:
    """An emulator removes everything after its last byte."""
    os.mkdir(tmp_path / "foreign")
    name = tmp_path / "foreign" / "train_0"
    os.mkfifo(name)
    with PipeStream(name) as stream:
        stream.open()
        with open(name, "wb", buffering=0) as writer:
            writer.write(DATA)
            os.unlink(name)
            os.rmdir(tmp_path / "foreign")
        assert stream.readall() == DATA


@pytest.mark.parametrize("source", ["a file", "a foreign FIFO", "a pipe"])
def test_where_proof_is_asked_for_an_end_without_it_is_an_error(
    feeder: Feeder, tmp_path: Path, source: str
) -> None:
    """Without `proof` it is no error, because nobody has promised a proof."""
    for proof in (False, True):
        name = path(0)
        if source == "a file":
            name = str(tmp_path / "file")
            Path(name).write_bytes(DATA)
        elif source == "a foreign FIFO":
            feeder.feed(0, DATA, proof=False)
        else:
            near, far = os.pipe()
            os.write(far, DATA)
            os.close(far)
            name = f"/dev/fd/{near}"
            other = os.open(name, os.O_WRONLY)  # a pipe without a writer looks like a new one
        with PipeStream(name, proof=proof) as stream:
            stream.open()
            if source == "a pipe":
                os.close(other)
                os.close(near)
            if not proof:
                assert stream.readall() == DATA
                continue
            with pytest.raises(TruncatedStream, match="and nothing proves that this is the end"):
                stream.readall()
