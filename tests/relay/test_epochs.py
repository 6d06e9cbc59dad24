"""The life of a channel's FIFOs, as contract §1 asks, with real FIFOs and real readers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import stat
import threading
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from streamer.errors import SinkError
from streamer.key_list import key_list_path, parsed
from streamer.plan import ObjectRef, Plan
from streamer.sink import outlet
from streamer.trailer import trailer_path
from tests.kit.harness import MORE_THAN_A_FIFO, RunChannel, fill
from tests.kit.pipes import eventually, off_loop, probe, read_all, read_some
from tests.kit.raw import etag
from tests.kit.stub import S3Stub, stalls
from tests.kit.trailers import published_trailer

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")

SIZES = [120_000, 1, 0, 99_999, 50_000, 300_001]


async def test_two_epochs_are_the_objects_in_order(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    """Every epoch is the concatenation of the objects, and has its proof when the reader sees its end."""
    truth = fill(stub, SIZES)
    async with run(stub, tmp_path) as running:
        for epoch in range(3):
            assert await off_loop(read_all, running.fifo(epoch)) == truth
            trailer = published_trailer(tmp_path, "train", epoch)
            assert (trailer.state, trailer.bytes_delivered) == ("complete", len(truth))
            assert trailer.digest == running.plan.digest


async def test_a_thread_makes_the_key_list(server: S3Stub, run_own: RunChannel, tmp_path: Path) -> None:
    """It may walk over millions of objects; other channels share the event loop."""
    truth = fill(server, SIZES)
    async with run_own(lists_keys=True) as running:
        for epoch in range(2):
            assert await off_loop(read_all, running.fifo(epoch)) == truth
            lines = Path(key_list_path(str(tmp_path), "train", epoch)).read_bytes().splitlines()[1:]
            offsets = [parsed(line).offset for line in lines]
            assert offsets == [0, *accumulate(SIZES[:-1])]


async def test_next_fifo_is_there_and_this_one_gone_before_the_end_of_file(
    run: RunChannel, stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers that list the directory, and readers that give n+1 two seconds (contract §1.4, §7)."""
    fill(stub, SIZES)
    seen, ends, hung_up = [], list[int](), list[bool]()

    def look(path: Any, *more: Any, really: Any = os.unlink, **named: Any) -> None:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISFIFO(os.stat(path, dir_fd=named.get("dir_fd")).st_mode):
                reader = select.poll()
                reader.register(ends[-1], select.POLLHUP)
                hung_up.append(bool(reader.poll(0)))
        really(path, *more, **named)

    def read_and_look(path: Path) -> None:
        with open(path, "rb", buffering=0) as file:
            ends.append(os.dup(file.fileno()))
            while file.read(1 << 20):
                pass
            seen.append(sorted(name for name in os.listdir(tmp_path) if not name.startswith(".")))

    async with run(stub, tmp_path) as running:
        monkeypatch.setattr(os, "unlink", look)
        await off_loop(read_and_look, running.fifo(0))
        await off_loop(read_and_look, running.fifo(1))
        monkeypatch.undo()
    for end in ends:
        os.close(end)
    assert seen == [["train_1"], ["train_2"]]
    assert hung_up == [False, False]


class _SlowPlan(Plan):
    """A plan whose second epoch has no known length before the first byte of the first one is read."""

    varies = True
    begun: threading.Event

    def total_bytes(self, epoch: int) -> int:
        if epoch and not self.begun.wait(60):
            raise TimeoutError(f"epoch {epoch} was needed before the first byte")
        return super().total_bytes(epoch)


async def test_an_epoch_begins_before_the_length_of_the_next_is_known(
    server: S3Stub, run_own: RunChannel, tmp_path: Path
) -> None:
    """To sum up 100 million records takes many seconds, in which the trainer has its first batches."""
    truth = fill(server, SIZES)

    begun = threading.Event()

    async def make(_: Any) -> Plan:
        objects = sorted(server.objects.items())
        plan = _SlowPlan.of(ObjectRef("b", key[2:], len(data), etag(data)) for key, data in objects)
        assert isinstance(plan, _SlowPlan)
        plan.begun = begun
        return plan

    def read(path: Path) -> tuple[bytes, list[str]]:
        with open(path, "rb", buffering=0) as file:
            first = file.read(1)
            assert not (tmp_path / "train_1").exists()
            begun.set()
            rest = b"".join(iter(lambda: file.read(1 << 20), b""))
            return first + rest, [name for name in os.listdir(tmp_path) if name[:6] == "train_"]

    async with run_own(make_plan=make) as running:
        assert await off_loop(read, running.fifo(0)) == (truth, ["train_1"])
        assert await off_loop(read_all, running.fifo(1)) == truth


async def test_next_epoch_opens_while_the_reader_still_holds_the_last(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """TensorFlow's repeat opens n+1 before it closes n (contract §1.5): waiting would dead-lock."""
    truth = fill(stub, SIZES)

    def read_two(first: Path, second: Path) -> bytes:
        with open(first, "rb") as one:
            assert one.read() == truth
            with open(second, "rb") as two:
                return two.read()

    async with run(stub, tmp_path) as running:
        assert await off_loop(read_two, running.fifo(0), running.fifo(1)) == truth


async def test_the_trailer_says_open_until_the_last_byte(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """Whatever of the epoch the reader has: a process that dies now must not leave a proof."""
    truth = fill(stub, [MORE_THAN_A_FIFO])
    async with run(stub, tmp_path, part_size=1_000_000) as running:
        with await off_loop(lambda: open(running.fifo(0), "rb", buffering=0)) as reader:
            count = len(await off_loop(reader.read, 100_000))
            trailer = published_trailer(tmp_path, "train", 0)
            assert (trailer.state, trailer.bytes_delivered) == ("open", 0)
            while chunk := await off_loop(reader.read, 1 << 20):
                count += len(chunk)
        assert count == len(truth)
        assert published_trailer(tmp_path, "train", 0).state == "complete"


async def test_early_close_ends_the_epoch_and_nothing_of_it_leaks_into_the_next(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    truth = fill(stub, [MORE_THAN_A_FIFO])
    async with run(stub, tmp_path, part_size=1_000_000) as running:
        assert await off_loop(read_some, running.fifo(0), 1000) == truth[:1000]
        assert await off_loop(read_all, running.fifo(1)) == truth
        assert [trailer.state for trailer in running.states] == ["abandoned", "complete"]


async def test_no_reader_comes_in_after_another_has_had_a_byte(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """In `head -c 9 train_0; cat train_0` the kernel reports no close if the next open comes first."""
    truth = fill(stub, SIZES)

    def read_and_open_again(path: Path) -> bytes:
        with open(path, "rb") as file:
            first = file.read(9)
            with pytest.raises(FileNotFoundError):
                os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            return first + file.read()

    async with run(stub, tmp_path) as running:
        for epoch in range(2):
            assert await off_loop(read_and_open_again, running.fifo(epoch)) == truth
            assert published_trailer(tmp_path, "train", epoch).state == "complete"
    assert not [name for name in os.listdir(tmp_path) if stat.S_ISFIFO(os.lstat(tmp_path / name).st_mode)]


async def test_a_reader_that_comes_when_another_has_left_gets_the_whole_epoch(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """In `head -c 0 train_0; cat train_0`: while the FIFO has its name, the second program opens it.

    The FIFO cannot be withdrawn meanwhile, because its directory has another name.
    """
    truth = fill(stub, SIZES)
    directory, moved = tmp_path / "data", tmp_path / "moved"
    directory.mkdir()
    async with run(stub, directory) as running:
        for epoch in range(2):
            await eventually(running.fifo(epoch).exists)
            first = os.open(running.fifo(epoch), os.O_RDONLY | os.O_NONBLOCK)
            directory.rename(moved)  # before the event loop goes on
            await eventually(lambda: running.channel.statistics().readers_come == 2 * epoch + 1)  # noqa: B023
            os.close(first)
            await eventually(lambda: running.channel.statistics().readers_gone == epoch + 1)  # noqa: B023
            with open(os.open(moved / f"train_{epoch}", os.O_RDONLY | os.O_NONBLOCK), "rb") as second:
                moved.rename(directory)
                os.set_blocking(second.fileno(), True)
                assert await off_loop(second.read) == truth
            assert published_trailer(directory, "train", epoch).state == "complete"
        assert (running.channel.statistics().readers_come, len(running.states)) == (4, 2)


async def test_a_lack_of_descriptors_at_such_a_reader_is_waited_for(
    run: RunChannel, stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = fill(stub, SIZES)
    refused: list[Any] = []

    def scarce(path: Any, flags: int, *more: Any, really: Any = os.open, **named: Any) -> int:
        if flags == os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC and not refused:
            refused.append(path)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return int(really(path, flags, *more, **named))

    directory, moved = tmp_path / "data", tmp_path / "moved"
    directory.mkdir()
    async with run(stub, directory) as running:
        first = os.open(running.fifo(0), os.O_RDONLY | os.O_NONBLOCK)
        directory.rename(moved)
        await eventually(lambda: running.channel.statistics().readers_come == 1)
        os.close(first)
        await eventually(lambda: running.channel.statistics().readers_gone == 1)
        monkeypatch.setattr(os, "open", scarce)
        moved.rename(directory)
        await eventually(lambda: running.states)
        assert (running.states[0].state, len(refused)) == ("abandoned", 1)
        assert await off_loop(read_all, running.fifo(1)) == truth


@pytest.fixture
def long_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine so busy that the reader leaves late must not change the outcome."""
    monkeypatch.setattr(outlet, "LOOKS", (0.01,) * 10_000)


@pytest.mark.usefixtures("long_looks")
@pytest.mark.parametrize(("taken", "state"), [(10, "abandoned"), (50_000, "complete")])
async def test_an_epoch_is_complete_when_its_reader_has_taken_the_bytes(
    run: RunChannel, stub: S3Stub, tmp_path: Path, taken: int, state: str
) -> None:
    """Not when they are in the FIFO; and the reader need not wait for the end of file."""
    truth = fill(stub, [30_000, 20_000])
    async with run(stub, tmp_path) as running:
        for epoch in range(3):
            await eventually(running.fifo(epoch).exists)
            with open(await off_loop(os.open, running.fifo(epoch), os.O_RDONLY), "rb", buffering=0) as file:
                await eventually(lambda: running.channel.statistics().fifo_bytes == len(truth))
                assert await off_loop(file.read, taken) == truth[:taken]
            await eventually(lambda: len(running.states) > epoch)  # noqa: B023
        assert [each.state for each in running.states] == [state] * 3
        assert published_trailer(tmp_path, "train", 2).state == state


async def test_a_reader_that_takes_its_time_gets_its_end_all_the_same(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """One that leaves later than that counts as complete: nobody can look into a FIFO that is closed."""
    truth = fill(stub, [50_000])
    async with run(stub, tmp_path) as running:
        await eventually(running.fifo(0).exists)
        with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb", buffering=0) as file:
            await eventually(lambda: running.states)
            assert running.states[0].state == "complete"
            assert await off_loop(file.readall) == truth


async def test_early_close_is_noticed_while_storage_is_silent(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """Not only at the next write: prefetch for a reader that is gone must stop (contract §1.7-3)."""
    truth = fill(stub, [90_000])
    stub.script(stalls(stub, after=60_000), *[stalls(stub)] * 20)
    async with run(stub, tmp_path, part_size=100_000, stall_timeout=1e6) as running:
        await eventually(lambda: stub.seen)  # the request that stalls is epoch 0's, not the next one's
        assert await off_loop(read_some, running.fifo(0), 10) == truth[:10]
        await eventually(lambda: running.states)
        assert running.states[0].state == "abandoned"
        stub.release()
        assert await off_loop(read_all, running.fifo(1)) == truth


async def test_open_without_read_consumes_an_epoch(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    """An instant open and close must not be missed, or reader and sidecar fall out of step (§1.7-1)."""
    truth = fill(stub, [MORE_THAN_A_FIFO])
    async with run(stub, tmp_path, part_size=1_000_000) as running:
        for epoch in range(10):
            await eventually(running.fifo(epoch).exists)
            await off_loop(probe, running.fifo(epoch))
        await eventually(running.fifo(10).exists)
        assert await off_loop(read_all, running.fifo(10)) == truth
        assert [trailer.state for trailer in running.states] == ["abandoned"] * 10 + ["complete"]


async def test_an_unread_channel_holds_no_more_than_its_budget(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """It prefetches, then waits for as long as it takes, asking S3 for nothing more."""
    fill(stub, [20_000_000])
    async with run(stub, tmp_path, parts=8, part_size=1 << 20) as running:
        await eventually(lambda: running.channel.statistics().received_bytes == 8 << 20)
        statistics = running.channel.statistics()
        assert (statistics.reserved_bytes, statistics.state) == (statistics.quota_bytes, "waiting")
        assert statistics.written_bytes == 0
        assert len(stub.seen) == 8


async def test_the_next_epoch_is_already_in_memory_when_this_one_ends(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    truth = fill(stub, [100_000, 60_000])
    async with run(stub, tmp_path, parts=8) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        await eventually(lambda: running.channel.statistics().received_bytes == 2 * len(truth))
        asked = len(stub.seen)
        assert await off_loop(read_all, running.fifo(1)) == truth
        # Its own bytes were there; what has been asked since is the epoch after it.
        assert {(seen.key, seen.range) for seen in stub.seen[asked:]} <= {
            (seen.key, seen.range) for seen in stub.seen[:asked]
        }


async def test_a_plan_without_bytes_gives_empty_epochs(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [0, 0])
    async with run(stub, tmp_path) as running:
        assert await off_loop(read_all, running.fifo(0)) == b""
        assert await off_loop(read_all, running.fifo(1)) == b""
        assert [trailer.state for trailer in running.states] == ["complete", "complete"]


async def test_requests_never_exceed_the_connections(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    truth = fill(stub, [30_000] * 40)
    stub.script(*[stalls(stub)] * 40)
    async with run(stub, tmp_path, requests_in_flight=3) as running:
        await eventually(lambda: stub.requests_in_flight == 3)
        stub.release()
        assert await off_loop(read_all, running.fifo(0)) == truth
    assert stub.most_in_flight == 3


async def test_drain_before_a_reader_came_ends_at_once_and_leaves_nothing(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    fill(stub, SIZES)
    async with run(stub, tmp_path) as running:
        running.channel.drain()
        await running.task
        assert os.listdir(tmp_path) == []


async def test_drain_lets_the_running_epoch_finish(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    truth = fill(stub, [MORE_THAN_A_FIFO])
    async with run(stub, tmp_path, part_size=1_000_000) as running:
        with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb", buffering=0) as reader:
            first = await off_loop(reader.read, 1000)
            running.channel.drain()
            rest = await off_loop(reader.readall)
        assert first + rest == truth
        await running.task
        assert running.states[-1].state == "complete"
        assert os.listdir(tmp_path) == [".train_0.penstock.json"]


async def test_cancelled_in_mid_epoch_says_stopped(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    """The reader's end of file is then covered by a trailer that denies completeness."""
    fill(stub, [MORE_THAN_A_FIFO])
    async with run(stub, tmp_path, part_size=1_000_000) as running:
        with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb", buffering=0) as reader:
            await off_loop(reader.read, 1000)
            running.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running.task
            await off_loop(reader.readall)
    trailer = published_trailer(tmp_path, "train", 0)
    assert trailer.state == "stopped"
    assert trailer.bytes_total is not None
    assert 1000 <= trailer.bytes_delivered < trailer.bytes_total
    assert os.listdir(tmp_path) == [".train_0.penstock.json"]


async def test_fifo_mode_and_kind(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, SIZES)
    async with run(stub, tmp_path) as running:
        found = os.stat(running.fifo(0))
        assert stat.S_ISFIFO(found.st_mode)
        assert stat.S_IMODE(found.st_mode) == 0o640


async def test_leftovers_of_an_earlier_run_go_and_a_waiting_fifo_stays(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """A reader may already be waiting in FIFO 0 of a sidecar that was restarted: same inode."""
    truth = fill(stub, [1000])
    os.mkfifo(tmp_path / "train_0")
    os.mkfifo(tmp_path / "train_7")
    os.mkfifo(tmp_path / "train_0_0")  # another channel's
    (tmp_path / ".train_7.penstock.json").write_text("{}")
    waiting = asyncio.create_task(off_loop(read_all, tmp_path / "train_0"))
    async with run(stub, tmp_path):
        assert await waiting == truth
        assert not (tmp_path / "train_7").exists()
        assert not (tmp_path / ".train_7.penstock.json").exists()
        assert (tmp_path / "train_0_0").exists()


@pytest.mark.parametrize(
    "make", [os.mkdir, lambda path: path.write_text("x"), lambda path: path.symlink_to("/tmp")]
)
async def test_something_else_of_that_name_is_refused(
    run: RunChannel, stub: S3Stub, tmp_path: Path, make: Callable[..., None] | Callable[[Any], Any]
) -> None:
    """A File channel's directory `train_0`, a file, or a symbolic link that leads elsewhere (§1.1)."""
    fill(stub, SIZES)
    make(tmp_path / "train_0")
    with pytest.raises(SinkError, match="not a FIFO of ours"):
        async with run(stub, tmp_path):
            pass
    assert os.path.lexists(tmp_path / "train_0")


async def test_only_the_last_trailers_are_kept(
    run: RunChannel, stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from streamer.sink import fifo

    monkeypatch.setattr(fifo, "KEPT_TRAILERS", 3)
    truth = fill(stub, [10])
    async with run(stub, tmp_path) as running:
        for epoch in range(6):
            assert await off_loop(read_all, running.fifo(epoch)) == truth
        kept = [epoch for epoch in range(6) if os.path.exists(trailer_path(str(tmp_path), "train", epoch))]
        assert kept == [3, 4, 5]
