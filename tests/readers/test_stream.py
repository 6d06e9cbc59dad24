"""`PipeStream` on real FIFOs: waiting, the four states of a FIFO, and the state at its end."""

from __future__ import annotations

import io
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from streamer.errors import ChannelError, StreamError, TruncatedStream
from streamer.readers import PipeStream
from streamer.readers.core import stream as readers_stream
from streamer.trailer import TrailerState, trailer_path
from tests.readers.feeder import Feeder

DATA = bytes(range(256)) * 4000  # about 1 MB: many times what a pipe holds


def read_all(feeder: Feeder, epoch: int = 0, **options: Any) -> bytes | None:
    with PipeStream(feeder.path("train", epoch), **options) as stream:
        return stream.read()


# The end, and who says so


def test_a_complete_epoch(feeder: Feeder) -> None:
    feed = feeder.feed(0, DATA)
    with PipeStream(feeder.path("train", 0)) as stream:
        assert stream.read() == DATA
        assert stream.received == len(DATA)
        assert stream.trailer is not None
        assert stream.trailer.state == "complete"
        assert stream.read(10) == b""
        assert repr(stream).endswith(f"train_0 [ended: {len(DATA)} of {len(DATA)} bytes]>")
    feed.join()
    assert not feed.reader_gone


def test_an_empty_epoch(feeder: Feeder) -> None:
    for epoch in range(20):  # open and close may fall on either side of the first poll
        feeder.feed(epoch, b"")
        assert read_all(feeder, epoch) == b""


def test_end_of_file_while_the_trailer_is_open_means_that_the_sidecar_died(feeder: Feeder) -> None:
    feeder.feed(0, DATA, state="open", total=len(DATA) + 5)
    stream = PipeStream(feeder.path("train", 0))
    with pytest.raises(
        TruncatedStream, match=f"received {len(DATA)} of {len(DATA) + 5} bytes of train_0: the sidecar died"
    ):
        stream.read()
    with pytest.raises(TruncatedStream):  # and no later read makes an end of it
        stream.read(1)
    stream.close()


def test_an_epoch_of_unknown_length_is_proven_all_the_same(feeder: Feeder) -> None:
    """Inflated objects: only the last trailer knows how many bytes there were."""
    feeder.feed(0, DATA, unknown=True, hold=True)
    with PipeStream(feeder.path("train", 0)) as stream:
        assert stream.read(10) == DATA[:10]
        assert "train_0 [open: 10 bytes]" in repr(stream)
        feeder.feeds[0][1].release.set()
        assert stream.read() == DATA[10:]
        assert stream.trailer is not None
        assert stream.trailer.bytes_total == len(DATA)
    feeder.feed(1, DATA, unknown=True, state="open")
    with pytest.raises(TruncatedStream, match=f"received {len(DATA)} bytes of train_1: the sidecar died"):
        read_all(feeder, 1)
    feeder.feed(2, DATA, unknown=True, delivered=len(DATA) + 1)
    with pytest.raises(TruncatedStream, match=f"received {len(DATA)} of {len(DATA) + 1} bytes of train_2"):
        read_all(feeder, 2)


def test_a_killed_writer_process(feeder: Feeder) -> None:
    feeder.publish(0, "open", total=10)
    os.mkfifo(feeder.path("train", 0))
    script = "import os, sys; os.write(os.open(sys.argv[1], os.O_WRONLY), b'12345'); sys.stdin.read()"
    writer = subprocess.Popen([sys.executable, "-c", script, feeder.path("train", 0)], stdin=subprocess.PIPE)
    with PipeStream(feeder.path("train", 0)) as stream:
        assert stream.read(5) == b"12345"
        writer.send_signal(signal.SIGKILL)
        with pytest.raises(TruncatedStream, match="received 5 of 10 bytes of train_0: the sidecar died"):
            stream.read(5)
    writer.communicate()


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        ("failed", "404 for s3://b/k (offset 7)", "the source failed: 404 for s3://b/k"),
        ("stopped", None, "the sidecar was stopped before the end"),
    ],
)
def test_a_state_reaches_a_reader_whose_fifo_is_held_open(
    feeder: Feeder, state: TrailerState, error: str | None, text: str
) -> None:
    feed = feeder.feed(0, b"12345", total=9, state=state, error=error, hold=True)
    with PipeStream(feeder.path("train", 0)) as stream:
        assert stream.read(5) == b"12345"
        with pytest.raises(TruncatedStream, match=f"received 5 of 9 bytes of train_0: {text}"):
            stream.read(5)
        assert feed.thread is not None
        assert feed.thread.is_alive()  # it was not the end of file that said so


@pytest.mark.parametrize("delivered", [4, 6])
def test_complete_with_another_count_is_not_complete(feeder: Feeder, delivered: int) -> None:
    feeder.feed(0, b"12345", delivered=delivered)
    with pytest.raises(TruncatedStream, match=f"received 5 of {delivered} bytes of train_0.*another process"):
        read_all(feeder)


def test_abandoned_at_the_end_is_not_complete(feeder: Feeder) -> None:
    feeder.feed(0, b"12345", state="abandoned")
    with pytest.raises(TruncatedStream, match="a reader closed the FIFO early"):
        read_all(feeder)


def test_a_trailer_that_vanished_proves_nothing(feeder: Feeder) -> None:
    feed = feeder.feed(0, b"12345", hold=True)
    with PipeStream(feeder.path("train", 0)) as stream:
        assert stream.read(5) == b"12345"
        assert feed.written.wait()
        feeder.withdraw(0)
        feed.release.set()
        with pytest.raises(TruncatedStream, match="ended after 5 bytes and its trailer is gone"):
            stream.read(1)


def test_a_trailer_that_cannot_be_read_is_an_error_at_once(feeder: Feeder) -> None:
    os.mkfifo(feeder.path("train", 0))
    with open(trailer_path(feeder.pipe_dir, "train", 0), "w") as file:
        file.write('{"format": 2}')
    stream = PipeStream(feeder.path("train", 0))
    with stream, pytest.raises(StreamError, match="not a trailer of format 1"):
        stream.open()


def test_a_foreign_fifo_is_read_without_proof(feeder: Feeder, caplog: pytest.LogCaptureFixture) -> None:
    feeder.feed(0, DATA, proof=False)
    with caplog.at_level("INFO", logger="penstock"), PipeStream(feeder.path("train", 0)) as stream:
        assert stream.read() == DATA
        assert stream.trailer is None
    assert [line for line in caplog.messages if "no trailer" in line] == [
        f"{feeder.path('train', 0)} has no trailer: its end of file cannot be proven"
    ]


@pytest.mark.parametrize("state", ["failed", "stopped"])
@pytest.mark.parametrize("begins", [True, False])
def test_the_failure_of_an_earlier_run_is_not_that_of_the_next(
    feeder: Feeder, monkeypatch: pytest.MonkeyPatch, state: TrailerState, begins: bool
) -> None:
    """The FIFO was made beforehand, and a trailer of the last run lies beside it."""
    monkeypatch.setattr(readers_stream, "_CHECK_S", 0.01)
    feeder.publish(0, state, error="the old one", total=9)
    os.mkfifo(feeder.path("train", 0))
    with PipeStream(feeder.path("train", 0), patience=0.1) as stream:
        if begins:
            assert not stream.begin(wait=0.1)
        assert stream.read(10) is None
        feeder.feed(0, DATA)
        got = b""
        while (chunk := stream.read(len(DATA))) != b"":
            got += chunk or b""
        assert got == DATA
        assert stream.trailer is not None
        assert stream.trailer.state == "complete"


def test_the_failure_of_an_earlier_run_is_told_if_no_other_comes(feeder: Feeder) -> None:
    feeder.publish(0, "failed", error="the old one", total=9)
    os.mkfifo(feeder.path("train", 0))
    with (
        PipeStream(feeder.path("train", 0), timeout=0.1) as stream,
        pytest.raises(ChannelError, match="is running; the state of its trailer is 'failed': the old one"),
    ):
        stream.read(1)


def test_a_failure_before_the_first_byte_is_told(feeder: Feeder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sidecar of this run holds the FIFO open; or it failed in the epoch before, and nobody does."""
    monkeypatch.setattr(readers_stream, "_CHECK_S", 0.01)
    feeder.publish(0, "failed", error="a new one", total=9)
    feeder.publish(1, "failed", error="the one before", total=9)
    for epoch in (0, 1):
        os.mkfifo(feeder.path("train", epoch))
    with PipeStream(feeder.path("train", 0)) as stream:
        stream.open()
        writer = os.open(feeder.path("train", 0), os.O_WRONLY)
        with pytest.raises(TruncatedStream, match="the source failed: a new one"):
            stream.read(1)
        os.close(writer)
    with (
        PipeStream(feeder.path("train", 1)) as stream,
        pytest.raises(TruncatedStream, match="the source failed: the one before"),
    ):
        stream.read(1)


# Waiting for the FIFO and for its writer


def test_waits_for_the_fifo_to_appear(feeder: Feeder) -> None:
    with PipeStream(feeder.path("train", 0)) as stream:
        assert not stream.open(wait=0)
        feeder.feed(0, DATA)
        assert stream.open()
        assert stream.read() == DATA


def test_waits_in_another_thread(feeder: Feeder) -> None:
    got = []
    waiting = threading.Event()

    def read() -> None:
        waiting.set()
        got.append(read_all(feeder))

    thread = threading.Thread(target=read)
    thread.start()
    waiting.wait()
    feeder.feed(0, DATA)
    thread.join()
    assert got == [DATA]


def test_waits_for_the_directory_too(feeder: Feeder, tmp_path: Path) -> None:
    base = tmp_path / "late"
    with PipeStream(base / "train_0") as stream:
        assert not stream.open(wait=0)
        base.mkdir()
        (base / "train_0").write_bytes(b"12345")
        assert stream.read() == b"12345"


def test_says_what_is_there_instead(feeder: Feeder) -> None:
    feeder.feed(0, b"", channel="train")
    feeder.feed(1, b"", channel="validation")
    feeder.publish(7, "abandoned")
    with (
        PipeStream(feeder.path("train", 7), timeout=0, hint="have a look") as stream,
        pytest.raises(ChannelError) as caught,
    ):
        stream.open()
    assert str(caught.value) == (
        f"train_7 did not appear in {feeder.pipe_dir} in 0 s; the directory has train_0, "
        "and the state of the trailer of train_7 is 'abandoned': have a look"
    )


class MakesTheFifo(logging.Handler):
    """Makes a FIFO when a warning comes."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self.path = path
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        os.mkfifo(self.path)


@pytest.mark.parametrize("wait", [None, 0.05])
def test_warns_once_that_the_fifo_is_late(feeder: Feeder, wait: float | None) -> None:
    feeder.feed(0, b"", channel="train")
    maker, logger = MakesTheFifo(Path(feeder.path("train", 1))), logging.getLogger("penstock")
    logger.addHandler(maker)
    try:
        with PipeStream(feeder.path("train", 1), timeout=1.2) as stream:
            while not stream.open(wait):
                pass
    finally:
        logger.removeHandler(maker)
    assert maker.texts == [
        f"train_1 has not appeared in {feeder.pipe_dir} yet, and the reader waits for it 1 s more; "
        "the directory has train_0"
    ]


def test_says_that_there_is_nothing(feeder: Feeder, tmp_path: Path) -> None:
    with PipeStream(feeder.path("train", 7), timeout=0) as stream:
        with pytest.raises(
            ChannelError, match="the directory has no FIFO of this channel; .* SAGEMAKER_BASE_DIR"
        ):
            stream.open()
        with pytest.raises(ChannelError, match="did not appear"):
            stream.read(1)
    stream = PipeStream(tmp_path / "nowhere" / "train_0", timeout=0)
    with (
        stream,
        pytest.raises(ChannelError, match="the directory cannot be read: No such file .* SAGEMAKER_BASE_DIR"),
    ):
        stream.open()


def test_a_fifo_without_a_writer_is_not_at_its_end(feeder: Feeder) -> None:
    os.mkfifo(feeder.path("train", 0))
    buffer = bytearray(8)
    with PipeStream(feeder.path("train", 0), patience=0) as stream:
        assert stream.readinto(buffer) is None  # nobody there
        writer = os.open(feeder.path("train", 0), os.O_WRONLY)
        assert stream.readinto(buffer) is None  # somebody there, nothing written
        os.write(writer, b"12345")
        assert stream.readinto(buffer) == 5
        assert stream.readinto(buffer) is None
        os.close(writer)
        assert stream.readinto(buffer) == 0


def test_a_writer_that_came_and_went_without_a_byte_is_the_end(feeder: Feeder) -> None:
    os.mkfifo(feeder.path("train", 0))
    with PipeStream(feeder.path("train", 0), patience=0) as stream:
        assert stream.readinto(bytearray(8)) is None
        os.close(os.open(feeder.path("train", 0), os.O_WRONLY))
        assert stream.readinto(bytearray(8)) == 0


def test_gives_up_on_a_fifo_that_nobody_writes(feeder: Feeder) -> None:
    os.mkfifo(feeder.path("train", 0))
    with (
        PipeStream(feeder.path("train", 0), timeout=0.1) as stream,
        pytest.raises(ChannelError, match=r"no process opened .*train_0 for writing in 0.1 s"),
    ):
        stream.read(1)


# Leaving early, and other sources


def test_leaving_early_tells_the_writer(feeder: Feeder) -> None:
    feed = feeder.feed(0, DATA * 4)
    stream = PipeStream(feeder.path("train", 0))
    assert stream.read(100) == DATA[:100]
    stream.close()
    stream.close()
    feed.join()
    assert feed.reader_gone
    with pytest.raises(ValueError, match="closed"):
        stream.read(1)


def test_opening_and_leaving_without_a_read_tells_the_writer(feeder: Feeder) -> None:
    feed = feeder.feed(0, DATA)
    with PipeStream(feeder.path("train", 0)) as stream:
        stream.open()
    feed.join()
    assert feed.reader_gone


def test_making_a_stream_opens_nothing(feeder: Feeder) -> None:
    feed = feeder.feed(0, DATA)
    stream = PipeStream(feeder.path("train", 0))
    with pytest.raises(io.UnsupportedOperation):
        stream.fileno()
    stream.close()
    assert not feed.opened.is_set()
    assert read_all(feeder) == DATA


def test_unused_is_called_only_for_a_stream_that_no_writer_saw(feeder: Feeder) -> None:
    calls = []
    feeder.feed(0, b"12345")
    PipeStream(feeder.path("train", 0), unused=lambda: calls.append("closed")).close()
    stream = PipeStream(feeder.path("train", 9), timeout=0, unused=lambda: calls.append("absent"))
    with stream, pytest.raises(ChannelError):
        stream.open()
    os.mkfifo(feeder.path("train", 8))
    stream = PipeStream(feeder.path("train", 8), timeout=0, unused=lambda: calls.append("no writer"))
    with stream, pytest.raises(ChannelError):
        stream.read(1)
    with PipeStream(feeder.path("train", 0), unused=lambda: calls.append("used")) as stream:
        stream.read()
    feeder.feed(1, DATA)
    with PipeStream(feeder.path("train", 1), unused=lambda: calls.append("opened")) as stream:
        stream.open()
    assert calls == ["closed", "absent", "no writer"]


def test_children_do_not_inherit_the_fifo(feeder: Feeder) -> None:
    feeder.feed(0, b"12345")
    with PipeStream(feeder.path("train", 0)) as stream:
        stream.open()
        assert not os.get_inheritable(stream.fileno())
        assert stream.read() == b"12345"


def test_a_directory_is_refused(feeder: Feeder) -> None:
    os.mkdir(feeder.path("train", 0))
    with (
        PipeStream(feeder.path("train", 0)) as stream,
        pytest.raises(ChannelError, match="is a directory: that is a File channel"),
    ):
        stream.open()


def test_what_cannot_be_opened_is_a_channel_error(feeder: Feeder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(feeder.pipe_dir)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("train_0")
        stream = PipeStream(feeder.path("train", 0))
        with stream, pytest.raises(ChannelError, match=r"cannot read .*train_0: No such device"):
            stream.open()


def test_a_regular_file_is_read_without_proof(tmp_path: Path) -> None:
    (tmp_path / "train_0").write_bytes(DATA)
    with PipeStream(tmp_path / "train_0") as stream:
        assert stream.read(10) == DATA[:10]
        assert stream.readall() == DATA[10:]
        assert stream.trailer is None


@pytest.mark.parametrize("redirect", ["pipe", "file"])
def test_standard_input(tmp_path: Path, redirect: str) -> None:
    script = (
        "import sys; from streamer.readers import PipeStream; print(len(PipeStream('/dev/stdin').read()))"
    )
    if redirect == "file":
        (tmp_path / "in").write_bytes(DATA)
        with (tmp_path / "in").open("rb") as file:
            out = subprocess.run([sys.executable, "-c", script], stdin=file, capture_output=True, check=True)
        assert int(out.stdout) == len(DATA)
        return
    # The writer has come and gone before the reader looks: the pipe still holds what it wrote.
    for data in (b"", b"12345"):
        near, far = os.pipe()
        os.write(far, data)
        os.close(far)
        out = subprocess.run([sys.executable, "-c", script], stdin=near, capture_output=True, check=True)
        os.close(near)
        assert int(out.stdout) == len(data)


# Like a file


def test_under_a_buffered_reader(feeder: Feeder) -> None:
    text = "".join(f"{number},{number * number}\n" for number in range(50_000))
    feeder.feed(0, text.encode())
    with io.TextIOWrapper(io.BufferedReader(PipeStream(feeder.path("train", 0)))) as lines:
        assert "".join(lines) == text


def test_reads_all_that_is_there_at_once(feeder: Feeder) -> None:
    feed = feeder.feed(0, b"x" * 50_000, hold=True)
    buffer = bytearray(1 << 20)
    with PipeStream(feeder.path("train", 0)) as stream:
        stream.open()
        assert feed.written.wait()
        assert stream.readinto(buffer) == 50_000
        assert stream.readinto(bytearray()) == 0
        feed.release.set()
        assert stream.readinto(memoryview(buffer)[:10]) == 0
