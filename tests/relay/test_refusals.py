"""A machine that refuses what a channel needs: told, waited for, and no end that a reader could believe."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from streamer.errors import Shortage
from streamer.key_list import key_list_path, parsed
from streamer.linux import PIPE_SIZE
from streamer.relay.channel_spec import WhenFailed
from streamer.retry import RetryPolicy
from streamer.sink.key_list import AHEAD
from streamer.sink.outlet import PipeOutlet
from streamer.units import MIB
from tests.kit.harness import EAGER, MORE_THAN_A_FIFO, Running, fill, running_channel
from tests.kit.limits import full_after
from tests.kit.pipes import eventually, off_loop, read_all
from tests.kit.stub import S3Stub
from tests.kit.trailers import published_trailer

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")

SOON = RetryPolicy(give_up_after=0.3, first_wait=0.001, longest_wait=0.01)


def has_no_end(reader: int) -> bool:
    """Whether the reader waits for more."""
    os.set_blocking(reader, False)
    try:
        return os.read(reader, 1) != b""
    except BlockingIOError:
        return True


async def read_until_the_end_is_due(running: Running, truth: bytes) -> int:
    """A reader that has every byte, and a directory that is not there when the epoch ends."""
    reader = await off_loop(os.open, running.fifo(0), os.O_RDONLY)
    got = await off_loop(os.read, reader, 1000)
    running.directory.rename(running.directory.with_name("away"))
    while len(got) < len(truth):
        got += await off_loop(os.read, reader, 1 << 20)
    assert got == truth
    return reader


async def test_a_directory_that_is_away_for_a_while_is_waited_for(stub: S3Stub, tmp_path: Path) -> None:
    truth = fill(stub, [MORE_THAN_A_FIFO])
    (tmp_path / "data").mkdir()
    async with running_channel(stub, tmp_path / "data", part_size=MIB, policy=EAGER) as running:
        reader = await read_until_the_end_is_due(running, truth)
        await eventually(lambda: running.channel.statistics().errors)
        note = running.channel.statistics().errors[-1]
        assert note.kind == "local"
        assert "check that the directory exists and is writable" in note.text
        assert has_no_end(reader)
        (tmp_path / "away").rename(tmp_path / "data")
        os.set_blocking(reader, True)
        assert await off_loop(os.read, reader, 1) == b""
        os.close(reader)
        assert published_trailer(tmp_path / "data", "train", 0).state == "complete"
        assert await off_loop(read_all, running.fifo(1)) == truth


@pytest.mark.parametrize("when_failed", ["hold", "close"])
async def test_a_directory_that_stays_away_fails_the_channel_and_ends_no_fifo(
    stub: S3Stub, tmp_path: Path, when_failed: WhenFailed
) -> None:
    """The trailer says so as soon as it can be written."""
    truth = fill(stub, [MORE_THAN_A_FIFO])
    (tmp_path / "data").mkdir()
    async with running_channel(
        stub, tmp_path / "data", part_size=MIB, policy=SOON, when_failed=when_failed
    ) as running:
        reader = await read_until_the_end_is_due(running, truth)
        await eventually(lambda: running.states)
        assert running.states[-1].state == "failed"
        assert isinstance(running.channel.error, Shortage)
        assert running.channel.failure is not None
        assert running.channel.failure.fifo == "held"
        assert running.channel.statistics().error_kind == "local"
        assert has_no_end(reader)
        assert not running.task.done()
        (tmp_path / "away").rename(tmp_path / "data")
        await eventually(lambda: published_trailer(tmp_path / "data", "train", 0).state == "failed")
        assert has_no_end(reader)
        assert len(running.states) == 1
        os.close(reader)


def read_to_the_end(reader: int) -> bytes:
    """Read what is left, and close."""
    with open(reader, "rb", buffering=0) as file:
        return b"".join(iter(lambda: file.read(MIB), b""))


def listed_offsets(directory: Path) -> list[int]:
    """Offsets of the objects in the key list of the first epoch."""
    lines = Path(key_list_path(str(directory), "train", 0)).read_bytes().splitlines()[1:]
    return [parsed(line).offset for line in lines]


async def test_a_key_list_that_cannot_be_made_is_waited_for(stub: S3Stub, tmp_path: Path) -> None:
    """Without a free inode no byte of the epoch comes before the list exists."""
    truth = fill(stub, [1000, 2000])
    async with running_channel(stub, tmp_path, lists_keys=True, policy=EAGER) as running:
        obstacle = Path(key_list_path(str(tmp_path), "train", 0))
        obstacle.mkdir()
        reading = asyncio.create_task(off_loop(read_all, running.fifo(0)))
        await eventually(lambda: running.channel.statistics().errors)
        assert obstacle.name in running.channel.statistics().errors[-1].text
        obstacle.rmdir()
        assert await reading == truth
        assert published_trailer(tmp_path, "train", 0).state == "complete"
        assert listed_offsets(tmp_path) == [0, 1000]


async def test_a_key_list_that_cannot_grow_is_waited_for(stub: S3Stub, tmp_path: Path) -> None:
    """No byte comes whose line the list lacks: here the FIFO is full, and soon the disk is too."""
    size, count = 2 * PIPE_SIZE // AHEAD, 2 * AHEAD
    truth = fill(stub, [size] * count)
    path = Path(key_list_path(str(tmp_path), "train", 0))
    async with running_channel(stub, tmp_path, lists_keys=True, policy=EAGER) as running:
        reader = await off_loop(os.open, running.fifo(0), os.O_RDONLY)
        got = await off_loop(os.read, reader, 1)
        with full_after(path.stat().st_size + 10):
            reading = asyncio.create_task(off_loop(read_to_the_end, reader))
            await eventually(lambda: running.channel.statistics().errors)
            note = running.channel.statistics().errors[-1]
            assert (note.kind, note.text.split("; ")[1]) == (
                "local",
                "free space on that file system, or remove RecordKeys",
            )
            assert not reading.done()
        assert got + await reading == truth
        assert published_trailer(tmp_path, "train", 0).state == "complete"
        assert listed_offsets(tmp_path) == [size * number for number in range(count)]


async def test_a_foreign_file_in_the_place_of_the_next_fifo_is_waited_for(
    stub: S3Stub, tmp_path: Path
) -> None:
    truth = fill(stub, [300_000])
    async with running_channel(stub, tmp_path, policy=EAGER) as running:
        running.fifo(1).write_bytes(b"mine")
        reading = asyncio.create_task(off_loop(read_all, running.fifo(0)))
        await eventually(lambda: len(running.channel.statistics().errors) == 2)
        assert "is not a FIFO of ours" in running.channel.statistics().errors[-1].text
        assert not reading.done()
        running.fifo(1).unlink()
        assert await reading == truth
        assert await off_loop(read_all, running.fifo(1)) == truth


async def test_a_next_fifo_that_was_removed_is_made_again(stub: S3Stub, tmp_path: Path) -> None:
    """Nobody could open a FIFO that has no name, so sidecar and reader would wait for each other."""
    truth = fill(stub, [MORE_THAN_A_FIFO])
    async with running_channel(stub, tmp_path, part_size=MIB, policy=EAGER) as running:
        with await off_loop(lambda: running.fifo(0).open("rb")) as first:
            await eventually(running.fifo(1).exists)
            running.fifo(1).unlink()
            running.fifo(1).write_bytes(b"mine")
            reading = asyncio.create_task(off_loop(first.read))
            await eventually(lambda: running.channel.statistics().errors)
            assert not reading.done()  # no end before the next FIFO is there
            running.fifo(1).unlink()
            assert await reading == truth
        assert await off_loop(read_all, running.fifo(1)) == truth


def another_fifo(fifo: Path) -> None:
    """Rename another FIFO over this one, so that there is one at any time."""
    other = fifo.with_name("other")
    os.mkfifo(other)
    other.rename(fifo)


def aside(fifo: Path) -> None:
    """Rename the FIFO; its inode stays."""
    fifo.rename(fifo.with_name(f"aside of {fifo.name}"))


@pytest.mark.parametrize("change", [Path.unlink, another_fifo, aside])
async def test_a_fifo_that_is_replaced_while_it_waits_is_offered_again(
    stub: S3Stub, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """Sidecar and reader would wait for each other, in two FIFOs."""
    truth = fill(stub, [300_000])
    async with running_channel(stub, tmp_path, policy=EAGER) as running:
        for epoch in range(3):
            change(running.fifo(epoch))
            await eventually(running.fifo(epoch).exists)
            assert await off_loop(read_all, running.fifo(epoch)) == truth
            assert published_trailer(tmp_path, "train", epoch).state == "complete"
            assert running.replaced == [str(running.fifo(past)) for past in range(epoch + 1)]


async def test_a_reader_that_has_come_keeps_its_fifo_whatever_becomes_of_the_name(
    stub: S3Stub, tmp_path: Path
) -> None:
    """The name may be removed after a reader has opened the FIFO and before the sidecar has noticed that."""
    truth = fill(stub, [300_000])
    async with running_channel(stub, tmp_path, policy=EAGER) as running:
        for epoch in range(10):
            await eventually(lambda: "1 names" in repr(running.names))
            fd = os.open(running.fifo(epoch), os.O_RDONLY | os.O_NONBLOCK)
            running.fifo(epoch).unlink()
            with open(fd, "rb") as reader:
                await off_loop(select.select, [fd], [], [])  # an end is ready, too
                os.set_blocking(fd, True)
                assert await off_loop(reader.read) == truth
        assert not running.replaced


async def test_a_foreign_file_or_a_missing_directory_is_told_while_no_reader_has_come(
    stub: S3Stub, tmp_path: Path
) -> None:
    truth = fill(stub, [300_000])
    (tmp_path / "data").mkdir()
    async with running_channel(stub, tmp_path / "data", policy=EAGER) as running:

        async def refused(why: str) -> None:
            await eventually(lambda: any(why in note.text for note in running.channel.statistics().errors))

        await eventually(lambda: "1 names" in repr(running.names))
        (tmp_path / "data").rename(tmp_path / "away")
        await refused("check that the directory exists")
        (tmp_path / "data").mkdir()
        await eventually(running.fifo(0).exists)
        assert await off_loop(read_all, running.fifo(0)) == truth

        await eventually(lambda: "1 names" in repr(running.names))
        mine = tmp_path / "mine"
        mine.write_bytes(b"mine")
        mine.rename(running.fifo(1))
        await refused("is not a FIFO of ours")
        assert running.fifo(1).read_bytes() == b"mine"
        running.fifo(1).unlink()
        await eventually(running.fifo(1).exists)
        assert await off_loop(read_all, running.fifo(1)) == truth

        await eventually(lambda: "1 names" in repr(running.names))
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        (tmp_path / "data").mkdir(exist_ok=True)
        await eventually(running.fifo(2).exists)
        assert await off_loop(read_all, running.fifo(2)) == truth


class Refused:
    """Bytes that the kernel refuses to write."""

    def drain_into(self, fd: int, most: int = 0) -> int:
        del fd, most
        raise OSError(errno.EIO, os.strerror(errno.EIO))


class Taken:
    """One byte."""

    def drain_into(self, fd: int, most: int = 0) -> int:
        del most
        return os.write(fd, b"x")


async def test_a_kernel_that_refuses_to_write_is_told_and_not_asked_for_ever() -> None:
    read_fd, write_fd = os.pipe()
    outlet = PipeOutlet(write_fd, on_gone=lambda: None)
    reported: list[object] = []
    outlet.on_short, outlet.give_up_after = reported.append, 0.2
    try:
        with pytest.raises(BlockingIOError):
            outlet.push(Refused())
        await outlet.writable()
        assert outlet.push(Taken()) == 1
        with pytest.raises(Shortage, match="the kernel refuses to write a FIFO: Input/output error"):
            while True:
                try:
                    outlet.push(Refused())
                except BlockingIOError:
                    await outlet.writable()
        assert [each is None for each in reported] == [False, True, False]
    finally:
        outlet.close()
        os.close(read_fd)
