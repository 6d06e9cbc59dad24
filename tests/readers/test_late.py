"""Why an epoch does not come: no sidecar, an epoch that is over, a FIFO that something keeps open."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sidecar.job.layout import Layout
from streamer.errors import ChannelError
from streamer.readers import PipeReader
from streamer.readers.core.position import FORMAT, ReaderPosition
from streamer.readers.core.stream import PipeStream
from streamer.trailer import SIDECAR_LOCK, TrailerState, withdrawn_path
from tests.kit.users import NOBODY, root
from tests.readers.feeder import Feeder

DATA = bytes(1 << 20)


@pytest.fixture
def offers(feeder: Feeder) -> Iterator[Callable[[], None]]:
    """What a sidecar calls that has locked the directory, once it has offered its FIFOs."""
    with Layout(feeder.base).locked() as offer:
        yield offer


def why(feeder: Feeder, epoch: int, timeout: float = 0) -> str:
    """The error of a reader that waits for an epoch."""
    with (
        PipeStream(feeder.path("train", epoch), timeout=timeout) as stream,
        pytest.raises(ChannelError) as caught,
    ):
        stream.read(1)
    return str(caught.value)


@pytest.mark.parametrize("state", ["complete", "abandoned", None])
def test_an_epoch_that_is_over_is_an_error_at_once(
    feeder: Feeder, offers: Callable[[], None], state: TrailerState | None
) -> None:
    """Not before the sidecar is ready: the trailer may be of the run before."""
    if state is not None:
        feeder.publish(0, state, delivered=300)
    os.mkfifo(feeder.path("train", 1))
    assert "did not appear" in (early := why(feeder, 0))
    assert "the sidecar has not offered its FIFOs yet" in early
    offers()
    text = why(feeder, 0, timeout=600)
    with PipeStream(feeder.path("train", 0)) as stream:
        assert not stream.open(0)  # as a worker does that joins others
    how = f"after 300 bytes its trailer says '{state}'" if state else "its trailer is gone"
    assert text.startswith(f"train_0 is over ({how})")
    assert "--resume" in text
    assert text.endswith("read the next epoch, train_1, without a state")


def test_an_epoch_that_is_offered_or_open_is_not_over(feeder: Feeder, offers: Callable[[], None]) -> None:
    offers()
    feeder.publish(0, "open")
    os.mkfifo(feeder.path("train", 1))
    assert "did not appear" in why(feeder, 0)
    os.mkfifo(withdrawn_path(feeder.pipe_dir, "train", 0))
    feeder.withdraw(0)
    assert "another user or container has opened this FIFO already: a FIFO has one reader" in why(feeder, 0)


@pytest.mark.parametrize("made", [True, False])
def test_no_sidecar_runs(feeder: Feeder, caplog: pytest.LogCaptureFixture, made: bool) -> None:
    """The lock file stays when a sidecar is killed, and so does its FIFO."""
    with Layout(feeder.base).locked() as offer:
        offer()
    if made:
        os.mkfifo(feeder.path("train", 0))
    cause = f"no sidecar runs: no process has locked {feeder.pipe_dir}/.penstock.lock; start it again"
    assert cause in why(feeder, 0, timeout=2.2)
    (warning,) = caplog.messages
    assert re.search(r"yet, and the reader waits for it \d s more; no sidecar runs", warning)


def test_a_keeper_without_a_sidecar(feeder: Feeder, caplog: pytest.LogCaptureFixture) -> None:
    """The FIFO has a writer, so the wait has no end; a sidecar that starts again goes on."""
    with Layout(feeder.base).locked() as offer:
        offer()
    feeder.publish(0, "open")
    path = feeder.path("train", 0)
    os.mkfifo(path)
    with PipeStream(path, patience=2.2) as stream:
        stream.open()
        keeper = os.open(path, os.O_WRONLY)
        try:
            assert stream.read(1) is None
            assert stream.read(1) is None
        finally:
            os.close(keeper)
    (warning,) = caplog.messages
    assert "train_0 brings no bytes: its keeper holds it open; no sidecar runs: no process has l" in warning


@root
def test_another_user_sees_that_no_sidecar_runs(feeder: Feeder) -> None:
    """Who may read the FIFOs may read the lock."""
    with Layout(feeder.base).locked(0o640):
        path = Path(feeder.pipe_dir, SIDECAR_LOCK)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
    os.chown(path, 0, 7)
    child = os.fork()
    if not child:
        for each in path.parents[:-2]:
            os.chmod(each, 0o755)
        os.setgroups([7])
        os.setuid(NOBODY)
        os._exit("no sidecar runs" not in why(feeder, 0))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def kept_fifo(feeder: Feeder, offers: Callable[[], None]) -> str:
    """The FIFO of epoch 0, whose reader has come, while a reader waits for epoch 1."""
    offers()
    feeder.publish(0, "open")
    feeder.publish(1, "open")
    os.mkfifo(feeder.path("train", 1))
    path = withdrawn_path(feeder.pipe_dir, "train", 0)
    os.mkfifo(path)
    return path


def test_this_process_keeps_the_epoch_before(feeder: Feeder, kept_fifo: str) -> None:
    fd = os.open(kept_fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert "; this process still has train_0 open: a variable or a tr" in why(feeder, 1, timeout=0.1)
    finally:
        os.close(fd)
    assert "; a process of another user or container still has train_0 open" in why(feeder, 1, timeout=0.1)
    feeder.publish(0, "failed", error="it is gone")
    assert "; train_0 has failed: it is gone" in why(feeder, 1, timeout=0.1)


def test_another_process_keeps_the_epoch_before(feeder: Feeder, kept_fifo: str) -> None:
    """The sidecar's own descriptors of the FIFO, for its path and for writing, are no reader's."""
    code = f"import os; os.open({kept_fifo!r}, os.O_RDONLY | os.O_NONBLOCK); print(flush=True); input()"
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, os.open(kept_fifo, os.O_PATH))
        command = [sys.executable, "-c", code]
        other = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert other.stdout is not None
        other.stdout.readline()
        stack.callback(os.close, os.open(kept_fifo, os.O_WRONLY))
        text = why(feeder, 1, timeout=0.1)
        other.kill()
    assert f"; process {other.pid} (python" in text
    assert "still has train_0 open: end it, or the iterator or pool" in text


def test_a_fork_closes_its_copy(feeder: Feeder) -> None:
    """So the epoch ends when its reader leaves it, and the fork cannot read on."""
    feed = feeder.feed(0, DATA * 8)  # more than the reader takes at once
    reader = iter(PipeReader("train", "fixed:8", **feeder.directories))
    next(reader)
    out, held = os.pipe()
    child = os.fork()
    if not child:
        os.close(held)
        os.read(out, 1)
        with contextlib.suppress(ChannelError):
            while True:
                next(reader)
            os._exit(1)
        os._exit(0)
    os.close(out)
    reader.close()  # type: ignore[attr-defined]
    feed.join()
    assert feed.reader_gone
    os.close(held)
    assert os.waitpid(child, 0)[1] == 0


def test_a_fifo_that_an_earlier_sidecar_left_is_not_that_of_a_state(
    feeder: Feeder, offers: Callable[[], None]
) -> None:
    """The sidecar that starts removes it."""
    os.mkfifo(feeder.path("train", 1))
    with PipeStream(feeder.path("train", 1)) as stream:
        stream.leave_earlier()
        assert not stream.open(0)
        offers()
        assert stream.open(0)


def test_a_reader_without_a_sidecar_leaves_no_directory(tmp_path: Path) -> None:
    reader = PipeReader("train", "TFRecord", pipe_dir=str(tmp_path / "data"), state_dir=str(tmp_path / "s"))
    with pytest.raises(ChannelError, match="data does not exist, so no sidecar has started; start it first"):
        next(iter(reader))
    assert list(tmp_path.iterdir()) == []


@root
def test_a_fifo_of_another_group(feeder: Feeder) -> None:
    path = feeder.path("train", 0)
    os.mkfifo(path, 0o640)
    os.chown(path, 0, 7)
    child = os.fork()
    if not child:
        code = 1
        for each in Path(path).parents[:-2]:
            os.chmod(each, 0o755)
        os.setgroups([])
        os.setuid(NOBODY)
        with contextlib.suppress(BaseException):
            wanted = "Permission denied; it is of user 0 and group 7, and its mode 0640: run the trainer in"
            code = 0 if wanted in why(feeder, 0) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@root
def test_root_gives_its_counters_to_the_owner_of_the_tree(feeder: Feeder) -> None:
    os.chown(feeder.base, NOBODY, 7)
    reader = PipeReader("train", "TFRecord", timeout=0, **feeder.directories)
    with pytest.raises(ChannelError):
        next(iter(reader))
    status = os.stat(feeder.state_dir)
    assert (status.st_uid, status.st_gid) == (NOBODY, 7)


def test_a_pass_that_was_not_begun_leaves_the_epochs_before_the_state_too(feeder: Feeder) -> None:
    """A loader that loads a state at an epoch's end makes an iterator that it does not read."""
    pytest.importorskip("torch")
    from streamer.readers.torch import PipeIterableDataset

    first = feeder.feed(0, b"line\n")
    dataset = PipeIterableDataset("train", "TextLine")
    state = ReaderPosition("train", 1).state()
    dataset.load_state_dict({"format": FORMAT, "unit": 1, "channels": [state], "ahead": {}})
    iter(dataset)

    def follow() -> None:
        first.join()
        feeder.feed(1, b"a\nb\n")

    following = threading.Thread(target=follow)
    following.start()
    assert list(dataset) == [b"a", b"b"]
    following.join()
