"""Files that cannot be read in time: the caller goes on, with an error that names the reason."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamer.errors import Denied
from streamer.file_reads import outside, read_file
from streamer.s3.client.aws_files import AwsFiles
from streamer.secrets import redact


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[str]:
    """A FIFO that nobody writes; at the end the threads that wait for a writer get one."""
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    yield path
    os.close(os.open(path, os.O_RDWR))


def test_a_fifo_that_nobody_writes_is_given_up(fifo: str) -> None:
    with pytest.raises(TimeoutError, match=r"not read within 0.01 s: a FIFO that no process writes"):
        read_file(fifo, seconds=0.01)


def test_a_fifo_with_a_writer_is_read_once(fifo: str) -> None:
    writer = threading.Thread(target=Path(fifo).write_bytes, args=(b"document",))
    writer.start()
    assert read_file(fifo) == b"document"
    writer.join()
    with pytest.raises(OSError, match="no regular file, so it cannot be read again"):
        read_file(fifo, again=True)


def test_other_files_are_read_as_ever(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert read_file(str(tmp_path / "file"), 3) == b"con"
    assert read_file(str(tmp_path / "file"), again=True) == b"content"
    assert read_file("/dev/null", again=True) == b""
    with pytest.raises(IsADirectoryError):
        read_file(str(tmp_path), again=True)
    with pytest.raises(FileNotFoundError):
        read_file(str(tmp_path / "none"))


async def test_the_loop_goes_on_while_a_call_does_not_return() -> None:
    release = threading.Event()
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    def call() -> str:
        loop.call_soon_threadsafe(started.set)
        release.wait()
        return "value"

    running = asyncio.ensure_future(outside(call))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(TimeoutError, match=r"not read within 0.01 s"):
        await outside(call, seconds=0.01)
    release.set()
    assert await outside(call) == "value"
    with pytest.raises(ZeroDivisionError):
        await outside(divmod, 1, 0)


async def test_secrets_of_token_files_are_remembered_and_fifos_refused(tmp_path: Path, fifo: str) -> None:
    token, absent = tmp_path / "token", str(tmp_path / "absent")
    token.write_text("PLANTED-IN-A-FILE\n")
    await AwsFiles({"AWS_CONFIG_FILE": absent}, {"TOKEN": str(token)}, seconds=30).check()
    assert redact("PLANTED-IN-A-FILE") == "***"
    files = AwsFiles({"AWS_CONFIG_FILE": fifo}, {}, seconds=30)
    with pytest.raises(Denied, match=rf"cannot read {fifo} \(AWS_CONFIG_FILE\): no regular file"):
        await files.check()
