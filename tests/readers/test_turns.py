"""Workers that take turns at one FIFO, each step in a chosen order; PyTorch's own are in test_torch."""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from streamer.errors import ChannelError, CorruptRecord, TruncatedStream
from streamer.formats.tfrecord import encode
from streamer.readers.core.config import directories
from streamer.readers.core.record_spec import RecordSpec
from tests.kit.late import LATE
from tests.readers.feeder import Feeder

if LATE:
    from streamer.readers.torch.workers import WorkerGroup, WorkerGroupReader

RECORDS = [b"record %d " % number * (number % 50) for number in range(16_000)]
"""Four megabytes, so several turns."""


def member(
    feeder: Feeder,
    index: int,
    *,
    name: str = "seed-1",
    size: int = 2,
    kind: str = "TFRecord",
    unit: int = 1,
    timeout: float = 300,
    key: bool = False,
) -> Any:
    group = WorkerGroup(name, index, size)
    reader = WorkerGroupReader(
        "train",
        directories(**feeder_directories(feeder)),
        group,
        RecordSpec(kind, key),
        unit=unit,
        timeout=timeout,
    )
    return ([record for block in blocks for record in block.records] for _, blocks in reader)


def feeder_directories(feeder: Feeder) -> dict[Any, Any]:
    return {"pipe": feeder.pipe_dir, "config": feeder.config_dir, "state": feeder.state_dir}


def cursor_files(feeder: Feeder) -> list[Any]:
    return glob.glob(os.path.join(feeder.state_dir, ".train-pipe_mode-pass-*"))


def alternate(*members: Any) -> list[list[list[bytes]]]:
    """One turn each, until all have ended; what each got."""
    got: list[list[list[bytes]]] = [[] for _ in members]
    left = dict(enumerate(members))
    while left:
        for index in list(left):
            units = next(left[index], None)
            if units is None:
                del left[index]
            else:
                got[index].append(units)
    return got


def flat(got: Any) -> list[Any]:
    return [record for units in got for record in units]


@pytest.mark.parametrize("unit", [1, 7, 3000])
def test_turns_give_the_stream_in_order(feeder: Feeder, unit: int) -> None:
    feeder.feed(0, b"".join(map(encode, RECORDS)))
    first, second = member(feeder, 0, unit=unit), member(feeder, 1, unit=unit)
    order = []
    turn = 0
    ended: set[int] = set()
    while len(ended) < 2:
        units = next((first, second)[turn % 2], None)
        if units is None:
            ended.add(turn % 2)
        else:
            order.append((turn % 2, units))
        turn += 1
    assert flat([units for _, units in order]) == RECORDS
    assert {index for index, _ in order} == {0, 1}
    assert [len(units) % unit for _, units in order[:-1]] == [0] * (len(order) - 1)
    assert cursor_files(feeder) == []
    assert feeder.next_epoch() == 1


@pytest.mark.parametrize("unit", [1, 7, 3000])
def test_keys_go_from_turn_to_turn(feeder: Feeder, unit: int) -> None:
    """Each object has 300 records; most turns end inside one, and inside a unit."""
    objects = [RECORDS[first : first + 300] for first in range(0, len(RECORDS), 300)]
    feeder.list_keys(
        [(sum(len(encode(each)) for each in records), f"k{n}") for n, records in enumerate(objects)]
    )
    feeder.feed(0, b"".join(map(encode, RECORDS)))
    members = [member(feeder, index, unit=unit, key=True) for index in range(2)]
    got: list[list[Any]] = alternate(*members)
    found = {(each.key, each.number): each.record for units in got for block in units for each in block}
    assert found == {
        (f"k{n}", number): record
        for n, records in enumerate(objects)
        for number, record in enumerate(records)
    }
    assert all(got)


def test_nobody_waits_for_a_turn_of_somebody_else(feeder: Feeder) -> None:
    feeder.feed(0, b"".join(map(encode, RECORDS)))
    idle, busy = member(feeder, 0), member(feeder, 1)
    got = [next(idle)]
    got += busy
    assert flat(got) == RECORDS
    assert list(idle) == []
    assert cursor_files(feeder) == []


def test_who_comes_late_has_nothing_to_read(feeder: Feeder) -> None:
    feed = feeder.feed(0, b"".join(map(encode, RECORDS[:5])))
    first = member(feeder, 0, size=3, unit=5)
    got = [next(first)]
    feed.join()  # the FIFO is gone, and the end is not known yet
    assert list(member(feeder, 1, size=3)) == []
    got += first
    assert flat(got) == RECORDS[:5]
    assert len(cursor_files(feeder)) == 1
    assert list(member(feeder, 2, size=3)) == []
    assert cursor_files(feeder) == []
    assert feeder.next_epoch() == 1


def test_a_pass_of_the_same_name_is_another_once_its_members_come_again(feeder: Feeder) -> None:
    """A loader whose seed is set by hand."""
    for epoch in range(2):
        feeder.feed(epoch, b"".join(map(encode, RECORDS)))
        assert sorted(flat(flat(alternate(member(feeder, 0), member(feeder, 1))))) == sorted(RECORDS)
    feeder.feed(2, b"".join(map(encode, RECORDS)))
    next(member(feeder, 0))  # left at once, and its book stays
    assert len(cursor_files(feeder)) == 1
    feeder.feed(3, b"".join(map(encode, RECORDS)))
    assert sorted(flat(flat(alternate(member(feeder, 0), member(feeder, 1))))) == sorted(RECORDS)


def test_two_passes_at_once_have_an_epoch_each(feeder: Feeder) -> None:
    for epoch in range(2):
        feeder.feed(epoch, b"".join(encode(b"%d %s" % (epoch, record)) for record in RECORDS))
    members = [member(feeder, index, name=name) for name in ("a", "b") for index in range(2)]
    got = [{record[:1] for record in flat(units)} for units in alternate(*members)]
    assert got == [{b"0"}, {b"0"}, {b"1"}, {b"1"}]


def test_a_turn_that_was_begun_and_not_ended_is_an_error(feeder: Feeder) -> None:
    """The state in which the kernel leaves it when a worker is killed: begun, the lock free."""
    feeder.feed(0, b"".join(map(encode, RECORDS)))
    first, second = member(feeder, 0), member(feeder, 1)
    received = len(flat([next(first)]))
    next(second)
    (book,) = cursor_files(feeder)
    with open(book, "r+b") as file:
        file.write(b"R")
    for each in (first, second, member(feeder, 2, size=3)):
        with pytest.raises(
            TruncatedStream, match=r"a worker died while it read train, after byte [1-9]\d+ of the"
        ):
            next(each)
    assert received


def test_a_worker_that_is_killed_in_its_turn_takes_no_bytes_along(feeder: Feeder) -> None:
    """It dies between two reads: what it has read is lost, and no other worker goes on without it."""
    feed = feeder.feed(0, b"".join(map(encode, RECORDS)), hold=True)
    first = member(feeder, 0)
    assert next(first)
    program = f"""
import os, signal
from streamer.formats.tfrecord import TFRecordReader
from streamer.readers.core.config import directories
from streamer.readers.core.record_spec import RecordSpec
from streamer.readers.torch.workers import WorkerGroup, WorkerGroupReader
class Killed:
    def __init__(self, source):
        self.source = source
    def readinto(self, buffer):
        assert self.source.readinto(buffer)
        os.kill(os.getpid(), signal.SIGKILL)
class Spec(RecordSpec):
    def reader(self, source):
        return TFRecordReader(Killed(source))
paths = directories(**{feeder_directories(feeder)!r})
group = WorkerGroup("seed-1", 1, 2)
list(WorkerGroupReader("train", paths, group, Spec("TFRecord"), timeout=300))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    with pytest.raises(TruncatedStream, match="a worker died while it read train, after byte"):
        list(first)
    feed.release.set()


def test_a_book_that_is_half_written_is_an_error(feeder: Feeder) -> None:
    feeder.feed(0, b"".join(map(encode, RECORDS)))
    first = member(feeder, 0)
    next(first)
    (book,) = cursor_files(feeder)
    os.truncate(book, 9)
    with pytest.raises(TruncatedStream, match="a worker died"):
        next(first)


def test_everybody_learns_of_an_error(feeder: Feeder) -> None:
    data = b"".join(map(encode, RECORDS))
    feeder.feed(0, data + b"\0" * 12)
    members = [member(feeder, 0), member(feeder, 1)]
    got = flat([next(each) for each in members])
    for _ in range(10_000):
        try:
            got += next(members[0])
        except CorruptRecord as error:
            assert str(error).startswith(f"TFRecord at offset {len(data)} of the stream: CRC check on header")  # noqa: PT017
            break
    assert got == RECORDS
    with pytest.raises(CorruptRecord, match=f"offset {len(data)}"):
        next(members[1])


def test_a_fifo_that_does_not_come_is_an_error_for_all(feeder: Feeder) -> None:
    for index in range(2):
        with pytest.raises(ChannelError, match="train_0 did not appear"):
            next(member(feeder, index, timeout=0.1))


def test_who_comes_when_all_others_failed_and_are_gone_takes_no_epoch(feeder: Feeder) -> None:
    """A worker is slow to begin, and the loader is being closed already, for the error of another."""
    script = (
        "import sys\n"
        "from streamer.readers.core.config import directories\n"
        "from streamer.readers.core.record_spec import RecordSpec\n"
        "from streamer.readers.torch.workers import WorkerGroup, WorkerGroupReader\n"
        "pipe, config, state = sys.argv[1:]\n"
        "paths = directories(pipe=pipe, config=config, state=state)\n"
        "spec, group = RecordSpec('TFRecord'), WorkerGroup('seed-1', 0, 2)\n"
        "list(WorkerGroupReader('train', paths, group, spec, timeout=0.1))\n"
    )
    command = [sys.executable, "-c", script, feeder.pipe_dir, feeder.config_dir, feeder.state_dir]
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "train_0 did not appear" in failed.stderr
    feeder.feed(0, b"".join(map(encode, RECORDS)))
    feeder.feed(1, b"".join(map(encode, RECORDS)))
    with pytest.raises(ChannelError, match="train_0 did not appear"):
        next(member(feeder, 1))
    got = alternate(*[member(feeder, index, name="seed-2") for index in range(2)])
    assert sorted(flat(flat(got))) == sorted(RECORDS)


def test_a_state_directory_that_cannot_be_used(feeder: Feeder) -> None:
    with open(feeder.state_dir, "w"):
        pass
    with pytest.raises(ChannelError, match="cannot use .*seed-1"):
        next(member(feeder, 0))


@pytest.mark.parametrize("met", [True, False])
def test_a_worker_whose_parent_died_stops(feeder: Feeder, met: bool) -> None:
    """Else it would hold the FIFO for ever, or take an epoch that nobody reads."""
    if met:
        feeder.feed(0, b"first line\nsecond", state="open", hold=True)
    program = f"""
import os
from streamer.readers.core.config import directories
from streamer.readers.core.record_spec import RecordSpec
from streamer.readers.torch.workers import WorkerGroup, WorkerGroupReader
made, tell = os.pipe()
if os.fork():
    os.read(made, 1)
    os._exit(0)
paths = directories(**{feeder_directories(feeder)!r})
reader = WorkerGroupReader("train", paths, WorkerGroup("x", 0, 2), RecordSpec("TextLine"), timeout=300)
os.write(tell, b"x")
print([block.records for _, blocks in reader for block in blocks])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout == ("[[b'first line']]\n" if met else "[]\n")
    feeder.feed(1 if met else 0, b"next\n")
    assert flat(member(feeder, 0, name="y", kind="TextLine")) == [b"next"]
