"""One FIFO of a shared stream, with real pipes."""

from __future__ import annotations

import asyncio
import errno
import os
from functools import partial
from pathlib import Path

import pytest

from streamer.errors import ReaderGone
from streamer.linux import ALL
from streamer.plan import START, ObjectRef, Plan, Position
from streamer.plan.dealing import DealtEpoch, Turn
from streamer.plan.folds import object_starts
from streamer.plan.record_table import END_MARK
from streamer.relay.deliver.dealt_outlet import DealtOutlet
from streamer.relay.deliver.epoch_writer import ByteQueue
from streamer.relay.deliver.object_ends import KeyList
from streamer.relay.deliver.shared_fifo import SharedFifo, SharedGroup
from streamer.sink.key_list import AHEAD, KeyListWriter
from streamer.sink.outlet import PipeOutlet
from streamer.units import MIB
from tests.kit.harness import EAGER
from tests.kit.limits import full_after

MARK = len(END_MARK)


async def test_a_reader_that_left_before_the_stream_began_is_noticed() -> None:
    """Its outlet reports the end once, before the FIFO waits for the other FIFOs."""
    read_end, write_end = os.pipe()
    gone = asyncio.Event()
    outlet = PipeOutlet(write_end, on_gone=gone.set)
    group = SharedGroup([], 0)
    fifo = SharedFifo("train-0", Plan.of([ObjectRef("b", "k", 10, "e")]), START, group)
    group.ranks = [[fifo]]
    os.close(read_end)
    await gone.wait()
    with pytest.raises(ReaderGone):
        await fifo.deliver(0, outlet)
    assert not fifo.takes(0)
    outlet.close()


async def test_bytes_that_no_copy_took_are_not_of_the_next_epoch() -> None:
    """All readers leave while the copies lack bytes that are in the pipe of the shared outlet."""
    group = SharedGroup([], 0)
    plan = Plan.of([ObjectRef("b", "k", 4 * MIB, "e")])
    fifos = [SharedFifo(f"train-{copy}", plan, START, group) for copy in range(2)]
    group.ranks = [fifos]
    dealt = DealtOutlet(group, give_up_after=60)
    for epoch, byte in enumerate((b"a", b"b")):
        pipes = [os.pipe() for _ in fifos]
        outlets = [PipeOutlet(end, on_gone=fifo.wake) for (_, end), fifo in zip(pipes, fifos, strict=True)]
        async with asyncio.TaskGroup() as tasks:
            for fifo, outlet in zip(fifos, outlets, strict=True):
                fifo.begin(epoch)
                tasks.create_task(left_early(fifo, epoch, outlet))
            while dealt.reader_gone:
                group.changed.clear()
                await group.changed.wait()
            dealt.begin(DealtEpoch(0, [0], iter([Turn(0, 4 * MIB)])))
            while not dealt.holding:
                dealt.push(ByteQueue([byte * MIB]))
            for reader, _ in pipes:
                assert set(os.read(reader, 2 * MIB)) == set(byte)
                os.close(reader)
            # The stream notices that its readers have left, and moves no byte any more.
            while not dealt.reader_gone:
                group.changed.clear()
                await group.changed.wait()
        for outlet in outlets:
            outlet.close()
        for fifo in fifos:
            fifo.abandon(epoch)
        group.epoch += 1
    dealt.close()


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("skipped", [0, 5, 1000, 1034, 2000])
async def test_end_marks_go_into_full_fifos_once_they_take_bytes(copies: int, skipped: int) -> None:
    """Two ranks, of which the first is full at each end mark; a FIFO that resumes skips what it has."""
    group = SharedGroup([], 0)
    plan = Plan.of([ObjectRef("b", "k", 2 * MIB + 2 * MARK, "e")])
    group.ranks = [
        [SharedFifo(f"train-{rank}-{copy}", plan, Position(0, skipped), group) for copy in range(copies)]
        for rank in range(2)
    ]
    pieces = [Turn(0, 10), Turn(0, MARK, mark=True), Turn(1, 10), Turn(1, MARK, mark=True)]
    pieces += [Turn(0, 2 * MIB - 10), Turn(0, MARK, mark=True)]
    pieces += [Turn(1, 2 * MIB - 10), Turn(1, MARK, mark=True)]
    due = b"a" * 10 + bytes(MARK) + b"b" * (2 * MIB - 10) + bytes(MARK)
    sources = [ByteQueue([each]) for each in (b"a" * 10, b"a" * 10, *[b"b" * (2 * MIB - 10)] * 2)]
    dealt = DealtOutlet(group, give_up_after=60)
    pipes = [os.pipe() for _ in group.fifos]
    outlets = [PipeOutlet(end, on_gone=fifo.wake) for (_, end), fifo in zip(pipes, group.fifos, strict=True)]
    async with asyncio.TaskGroup() as tasks:
        for fifo, outlet in zip(group.fifos, outlets, strict=True):
            fifo.begin(0)
            tasks.create_task(fifo.deliver(0, outlet))
        while not all(fifo.takes(0) for fifo in group.fifos):
            group.changed.clear()
            await group.changed.wait()
        read = [tasks.create_task(asyncio.to_thread(read_whole, end)) for end, _ in pipes]
        dealt.begin(DealtEpoch(0, [0, 0], iter(pieces)))
        while dealt.holding or any(sources):
            if dealt.holding:
                await dealt.writable()
                continue
            while not sources[0]:
                del sources[0]
            try:
                dealt.push(sources[0])
            except BlockingIOError:
                await dealt.writable()
        dealt.end()
        for outlet in outlets:
            outlet.close()
    assert [each.result() for each in read] == [due[skipped:]] * len(pipes)
    for reader, _ in pipes:
        os.close(reader)
    dealt.close()


def read_whole(fd: int) -> bytes:
    """Read a pipe to its end."""
    return b"".join(iter(partial(os.read, fd, 1 << 16), b""))


async def left_early(fifo: SharedFifo, epoch: int, outlet: PipeOutlet) -> None:
    """Wait in an epoch until its reader leaves."""
    with pytest.raises(ReaderGone):
        await fifo.deliver(epoch, outlet)


class RefusedOnce:
    """Bytes that the kernel refuses to write at first."""

    def __init__(self) -> None:
        self.left = ByteQueue([b"a" * 10])
        self.refused = False

    def drain_into(self, fd: int, most: int = ALL) -> int:
        if not self.refused:
            self.refused = True
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return self.left.drain_into(fd, most)


async def test_a_key_list_on_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    """No byte of an object comes before its line; a reader that leaves meanwhile ends the epoch."""
    size, count = 10, 2 * AHEAD
    plan = Plan.of([ObjectRef("b", f"k{number}", size, "e") for number in range(count)])
    path, group, refused = tmp_path / "list", SharedGroup([], 0), asyncio.Event()
    fifo = SharedFifo("train-0", plan, START, group)
    group.ranks = [[fifo]]

    starts = partial(object_starts, plan, 0)
    for leaves in (False, True):
        reader, write_end = os.pipe()
        outlet = PipeOutlet(write_end, on_gone=fifo.wake)
        fifo.begin(0)
        writer = KeyListWriter(str(path), "r", starts, first=0, consumed=0, ahead=True, held=False)
        keys = KeyList(writer, EAGER, lambda _: refused.set())
        delivering = asyncio.create_task(fifo.deliver(0, outlet, keys))
        while not fifo.takes(0):
            group.changed.clear()
            await group.changed.wait()
        fifo.begin_stream(0)
        source = ByteQueue([bytes(size * count)])
        assert fifo.take(source, size * AHEAD) == size * AHEAD
        with full_after(path.stat().st_size):
            with pytest.raises(BlockingIOError):
                fifo.take(source, size)
            waiting = asyncio.create_task(fifo.writable())
            await refused.wait()
            assert (len(os.read(reader, MIB)), waiting.done()) == (size * AHEAD, False)
            if leaves:
                os.close(reader)
                await waiting
                with pytest.raises(ReaderGone):
                    await delivering
        if not leaves:
            await waiting
            assert fifo.take(source, size * AHEAD) == size * AHEAD
            await delivering
            assert len(path.read_bytes().splitlines()) == 1 + count
            os.close(reader)
        refused.clear()
        keys.close()
        outlet.close()


async def test_a_shortage_of_the_pipe_of_copies_is_waited_for() -> None:
    group = SharedGroup([], 0)
    plan = Plan.of([ObjectRef("b", "k", 10, "e")])
    fifos = [SharedFifo(f"train-{copy}", plan, START, group) for copy in range(2)]
    group.ranks = [fifos]
    dealt = DealtOutlet(group, give_up_after=60)
    pipes = [os.pipe() for _ in fifos]
    outlets = [PipeOutlet(end, on_gone=fifo.wake) for (_, end), fifo in zip(pipes, fifos, strict=True)]
    async with asyncio.TaskGroup() as tasks:
        for fifo, outlet in zip(fifos, outlets, strict=True):
            tasks.create_task(fifo.deliver(0, outlet))
        while not all(fifo.takes(0) for fifo in fifos):
            group.changed.clear()
            await group.changed.wait()
        dealt.begin(DealtEpoch(0, [0], iter([Turn(0, 10)])))
        source = RefusedOnce()
        with pytest.raises(BlockingIOError):
            dealt.push(source)
        assert all("Cannot allocate memory" in str(fifo.counters.refusal) for fifo in fifos)
        await dealt.writable()
        assert dealt.push(source) == 10
    assert [os.read(reader, 100) for reader, _ in pipes] == [b"a" * 10] * 2
    assert [[note.kind for note in fifo.counters.notes] for fifo in fifos] == [["local"]] * 2
    assert [fifo.counters.refusal for fifo in fifos] == [None, None]
    for (reader, _), outlet in zip(pipes, outlets, strict=True):
        os.close(reader)
        outlet.close()
    dealt.close()
