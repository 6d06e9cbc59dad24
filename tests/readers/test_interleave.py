"""Rank FIFOs and other FIFOs read as one: order, ends, errors, epochs that belong together."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from typing import Any

import pytest

from sidecar.job.resume import Saved, parse_saved
from streamer.errors import ChannelError, CorruptRecord, TruncatedStream
from streamer.formats import tfrecord
from streamer.key_list import key_list_path
from streamer.readers import (
    InterleavedReader,
    PipeModeDatasetException,
    PipeReader,
    rank_channel,
    rank_channels,
)
from streamer.step_state import StepState
from tests.readers.feeder import Feed, Feeder

RANKS = ["train-0", "train-1", "train-2"]
RECORDS = {rank: [b"%s %d" % (rank.encode(), n) for n in range(20 + 7 * i)] for i, rank in enumerate(RANKS)}
ORDERS = pytest.mark.parametrize("block", [1, None], ids=["in turn", "as they arrive"])


def encoded(records: list[bytes]) -> bytes:
    return b"".join(map(tfrecord.encode, records))


@pytest.fixture
def ranks(feeder: Feeder) -> Feeder:
    """A feeder whose channel `train` has three rank FIFOs."""
    feeder.configure(dict.fromkeys([*RANKS, "validation"], "Pipe") | {"plain-0": "File"})
    return feeder


def feed(feeder: Feeder, epoch: int = 0, **options: Any) -> list[Any]:
    """One epoch of every rank FIFO."""
    return [feeder.feed(epoch, encoded(RECORDS[rank]), channel=rank, **options) for rank in RANKS]


def in_turn(block: int) -> list[bytes]:
    """The model: blocks of each rank FIFO round and round, over those that have some left."""
    rest = {rank: list(records) for rank, records in RECORDS.items()}
    found = []
    while any(rest.values()):
        for rank in RANKS:
            found += rest[rank][:block]
            del rest[rank][:block]
    return found


def test_the_names_of_rank_fifos(ranks: Feeder) -> None:
    assert rank_channels("train") == RANKS
    assert rank_channels("validation") == ["validation"]
    assert rank_channels("train", config_dir=ranks.config_dir) == RANKS
    assert rank_channel("train", 2) == "train-2"
    with pytest.raises(ValueError, match="counted from 0"):
        rank_channel("train", -1)
    with pytest.raises(PipeModeDatasetException, match=r"^Channel eval not found in Training Job"):
        rank_channels("eval")
    with pytest.raises(PipeModeDatasetException, match=r"^Channel plain-0 is not a PipeMode channel$"):
        rank_channels("plain")


def test_a_rank_fifo_is_a_channel_to_every_reader(ranks: Feeder) -> None:
    feed(ranks)
    for rank in rank_channels("train"):
        assert list(PipeReader(rank, "TFRecord")) == RECORDS[rank]
        assert ranks.next_epoch(rank) == 1


@pytest.mark.parametrize("block", [1, 2, 10, 1000])
def test_in_turn_the_order_is_always_the_same(ranks: Feeder, block: int) -> None:
    reader = InterleavedReader("train", "TFRecord", block=block)
    for epoch in range(2):
        feed(ranks, epoch)
        assert list(reader) == in_turn(block)
    assert {ranks.next_epoch(rank) for rank in RANKS} == {2}


def test_as_they_arrive_a_rank_fifo_without_bytes_stops_no_other(ranks: Feeder) -> None:
    """The second rank FIFO has half a record, and the third nobody who writes, until the first is read."""
    first, second, third = (encoded(RECORDS[rank]) for rank in RANKS)
    ranks.feed(0, first, channel="train-0")
    late = ranks.feed(0, second[:10], channel="train-1", hold=True, state="open", total=len(second))
    ranks.publish(0, "open", channel="train-2", total=len(third))
    os.mkfifo(ranks.path("train-2", 0))
    records = iter(InterleavedReader("train", "TFRecord", block=None))
    assert list(itertools.islice(records, len(RECORDS["train-0"]))) == RECORDS["train-0"]
    late.opened.wait()
    fd = os.open(ranks.path("train-2", 0), os.O_WRONLY)
    os.write(fd, third)
    ranks.publish(0, "complete", channel="train-2", total=len(third), delivered=len(third))
    os.close(fd)
    assert list(itertools.islice(records, len(RECORDS["train-2"]))) == RECORDS["train-2"]
    late.release.set()
    with pytest.raises(TruncatedStream, match=f"received 10 of {len(second)} bytes of train-1_0"):
        next(records)


def test_as_they_arrive_every_rank_fifo_is_whole_and_in_its_order(ranks: Feeder) -> None:
    feed(ranks)
    batches = list(InterleavedReader("train", "TFRecord", block=None).batches())
    assert all(batches)
    found = list(itertools.chain(*batches))
    for rank in RANKS:
        assert [record for record in found if record.startswith(rank.encode())] == RECORDS[rank]
    assert len(found) == sum(map(len, RECORDS.values()))


def test_other_channels_may_be_at_other_epochs(ranks: Feeder) -> None:
    ranks.feed(0, b"a\nb\n", channel="train-0")
    assert list(PipeReader("train-0", "TextLine")) == [b"a", b"b"]
    ranks.feed(1, b"c\nd\n", channel="train-0")
    ranks.feed(0, b"1\n2\n3\n", channel="validation")
    both = InterleavedReader(["train-0", "validation"], "TextLine")
    assert list(both) == [b"c", b"1", b"d", b"2", b"3"]


@ORDERS
def test_rank_fifos_at_unequal_epochs_are_no_epoch(ranks: Feeder, block: Any) -> None:
    feed(ranks)
    assert list(PipeReader("train-0", "TFRecord")) == RECORDS["train-0"]
    reader = InterleavedReader("train", "TFRecord", block=block)
    with pytest.raises(ChannelError, match=r"next are train-0_1, train-1_0, train-2_0.*one was read alone"):
        list(reader)
    for rank in RANKS[1:]:
        assert list(PipeReader(rank, "TFRecord")) == RECORDS[rank]
    feed(ranks, 1)
    assert sorted(reader) == sorted(itertools.chain(*RECORDS.values()))


def opened(feeds: list[Feed]) -> None:
    """Wait for the writers: one that opens its FIFO after the reader has left waits for another reader."""
    for each in feeds:
        each.opened.wait()


@ORDERS
def test_leaving_a_loop_ends_the_epoch_of_all(ranks: Feeder, block: Any) -> None:
    feeds = feed(ranks)
    large = [ranks.feed(1, encoded([b"x" * 10_000] * 1000), channel=rank) for rank in RANKS]
    reader = InterleavedReader("train", "TFRecord", block=block)
    records = iter(reader)
    next(records)
    opened(feeds)
    records.close()  # type: ignore[attr-defined]  # it is a generator
    for each in feeds:
        each.join()
    for _ in reader:
        opened(large)
        break
    for each in large:
        each.join()
        assert each.reader_gone
    feed(ranks, 2)
    assert sorted(reader) == sorted(itertools.chain(*RECORDS.values()))


@ORDERS
def test_a_given_epoch_leaves_the_state_files_alone(ranks: Feeder, block: Any) -> None:
    feed(ranks, 4)
    feed(ranks, 5)
    reader = pickle.loads(pickle.dumps(InterleavedReader("train", "TFRecord", block=block, epoch=4)))
    for _ in range(2):
        assert sorted(reader) == sorted(itertools.chain(*RECORDS.values()))
    assert not os.path.exists(ranks.state_dir)


@ORDERS
def test_a_failed_rank_fifo_fails_the_whole(ranks: Feeder, block: Any) -> None:
    """Although its FIFO is held open and the others end well."""
    for rank in RANKS[:2]:
        ranks.feed(0, encoded(RECORDS[rank]), channel=rank)
    failed = ranks.feed(
        0,
        encoded(RECORDS["train-2"]),
        channel="train-2",
        total=10**6,
        state="failed",
        error="no",
        hold=True,
    )
    got: list[bytes] = []
    with pytest.raises(TruncatedStream, match="train-2_0: the source failed: no"):
        got.extend(InterleavedReader("train", "TFRecord", block=block))
    assert sorted(got) == sorted(itertools.chain(*RECORDS.values()))
    failed.release.set()


@ORDERS
def test_a_rank_fifo_that_does_not_appear_gives_all_epochs_back(ranks: Feeder, block: Any) -> None:
    for rank in RANKS[:2]:
        ranks.feed(0, encoded(RECORDS[rank]), channel=rank)
    with pytest.raises(ChannelError, match="train-2_0 did not appear"):
        list(InterleavedReader("train", "TFRecord", block=block, timeout=0))
    assert [ranks.next_epoch(rank) for rank in RANKS] == [0, 0, 0]
    ranks.feed(0, encoded(RECORDS["train-2"]), channel="train-2")
    found = list(InterleavedReader("train", "TFRecord", block=block))
    assert sorted(found) == sorted(itertools.chain(*RECORDS.values()))


def list_keys(feeder: Feeder, epoch: int = 0) -> None:
    """Each rank FIFO has objects of 6 records."""
    for rank in RANKS:
        frames = [len(tfrecord.encode(record)) for record in RECORDS[rank]]
        sizes = [sum(frames[start : start + 6]) for start in range(0, len(frames), 6)]
        keys = [(size, f"{rank}/{number}") for number, size in enumerate(sizes)]
        feeder.list_keys(keys, epoch=epoch, channel=rank)


@ORDERS
def test_each_record_has_the_object_of_its_own_fifo(ranks: Feeder, block: Any) -> None:
    due = {
        record: (f"{rank}/{index // 6}", index % 6, "b")
        for rank, records in RECORDS.items()
        for index, record in enumerate(records)
    }
    reader = InterleavedReader("train", "TFRecord", block=block, key=True)
    for epoch in range(2):
        list_keys(ranks, epoch)
        feed(ranks, epoch)
        found = list(reader)
        assert {each.record: (each.key, each.number, each.bucket) for each in found} == due
        assert len(found) == len(due)
        if block:
            assert [each.record for each in found] == in_turn(block)


@ORDERS
def test_a_rank_fifo_without_a_key_list_is_refused(ranks: Feeder, block: Any) -> None:
    list_keys(ranks)
    os.unlink(key_list_path(ranks.pipe_dir, "train-1", 0))
    feed(ranks)
    with pytest.raises(ChannelError, match=r"train-1_0 has no key list.*set RecordKeys: true"):
        list(InterleavedReader("train", "TFRecord", block=block, key=True))


@ORDERS
def test_an_error_names_the_record_of_its_fifo(ranks: Feeder, block: Any) -> None:
    list_keys(ranks)
    for rank in RANKS:
        data = bytearray(encoded(RECORDS[rank]))
        if rank == "train-1":
            data[len(encoded(RECORDS[rank][:8])) + 9] ^= 1  # the header of the third record of an object
        ranks.feed(0, bytes(data), channel=rank)
    with pytest.raises(CorruptRecord, match="it is record 2 of s3://b/train-1/1$"):
        list(InterleavedReader("train", "TFRecord", block=block, key=True))


@pytest.mark.parametrize("key", [False, True])
def test_with_keys_too_a_silent_rank_fifo_stops_no_other(ranks: Feeder, key: bool) -> None:
    """As they arrive; the second FIFO has a writer and no byte, and ends without one."""
    list_keys(ranks)
    for rank in ("train-0", "train-2"):
        ranks.feed(0, encoded(RECORDS[rank]), channel=rank)
    ranks.publish(0, "open", channel="train-1", total=0)
    os.mkfifo(ranks.path("train-1", 0))
    reader = InterleavedReader("train", "TFRecord", block=None, key=key)
    records = iter(reader)
    found = list(itertools.islice(records, len(RECORDS["train-0"]) + len(RECORDS["train-2"])))
    fd = os.open(ranks.path("train-1", 0), os.O_WRONLY)
    ranks.publish(0, "complete", channel="train-1", total=0, delivered=0)
    os.close(fd)
    assert list(records) == []
    plain = [each.record for each in found] if key else found
    assert sorted(plain) == sorted(RECORDS["train-0"] + RECORDS["train-2"])


def test_argument_errors(ranks: Feeder) -> None:
    with pytest.raises(ValueError, match=r"^Invalid record format: CSV$"):
        InterleavedReader("train", "CSV")
    with pytest.raises(ValueError, match="block is 0: it must be 1 or more, or None"):
        InterleavedReader("train", block=0)
    with pytest.raises(PipeModeDatasetException, match="no channel to read"):
        InterleavedReader([])
    with pytest.raises(PipeModeDatasetException, match=r"^Channel train not found"):
        InterleavedReader(["train"])


def test_in_turn_by_tensorflow(ranks: Feeder) -> None:
    """The recipe of docs/how-to/several-ranks.md."""
    tf = pytest.importorskip("tensorflow")
    from streamer.readers.tensorflow import PipeModeDataset

    feed(ranks)
    feed(ranks, 1)
    datasets = [PipeModeDataset(name, "TFRecord") for name in rank_channels("train")]
    turns = tf.data.Dataset.range(len(datasets)).repeat()
    dataset = tf.data.Dataset.choose_from_datasets(datasets, turns, stop_on_empty_dataset=False)
    for _ in range(2):
        assert list(dataset.as_numpy_iterator()) == in_turn(1)


def resumed(
    feeder: Feeder,
    due: dict[str, list[bytes]],
    reader: InterleavedReader,
    count: int | None,
    state: Any,
    **more: Any,
) -> tuple[list[bytes], dict[str, Any]]:
    """Records of a reader from a state on, and the state after them; FIFOs begin where the sidecar would."""
    if state is not None:
        reader.load_state_dict(json.loads(json.dumps(state)))
        assert reader.state_dict() == state
    feeds = []
    for rank, records in due.items():
        data, saved = encoded(records), parse_saved(json.dumps(state)).get(rank) if state else None
        at = saved.offset if isinstance(saved, Saved) and not saved.epoch else 0
        if not (isinstance(saved, Saved) and saved.epoch):
            feeds.append(feeder.feed(0, data[at:], channel=rank, total=len(data), bytes_skipped=at, **more))
    passing = iter(reader)
    found, state = list(itertools.islice(passing, count)), reader.state_dict()
    passing.close()  # type: ignore[attr-defined]
    for each in feeds:
        each.join()
    return found, state


@pytest.mark.parametrize("block", [1, 3, 10, None])
@pytest.mark.parametrize("shuffle", [None, 8])
def test_a_state_of_all_rank_fifos(ranks: Feeder, block: int | None, shuffle: int | None) -> None:
    """Inside a block, after a FIFO has ended, and between two epochs; the same order with a block."""
    if block is None and shuffle:
        with pytest.raises(ValueError, match="shuffle needs a block"):
            InterleavedReader("train", block=None, shuffle=shuffle)
        return

    def reader() -> InterleavedReader:
        return InterleavedReader("train", "TFRecord", block=block, epoch=0, shuffle=shuffle)

    due, after = resumed(ranks, RECORDS, reader(), None, None)
    assert {each["epoch"] for each in after["channels"]} == {1}
    total = len(due)
    for stops in ([7, 31], [1, total - 3], [total - 20, total - 1]):
        found, state, at = list[bytes](), None, 0
        for stop in stops:
            more, state = resumed(ranks, RECORDS, reader(), stop - at, state)
            found, at = found + more, stop
        found += resumed(ranks, RECORDS, reader(), None, state)[0]
        assert sorted(found) == sorted(due)
        assert block is None or found == due
    feed(ranks, 1)
    last = reader()
    last.load_state_dict(after)
    assert sorted(last) == sorted(due)


def test_states_that_are_not_of_these_fifos(ranks: Feeder) -> None:
    _, state = resumed(ranks, RECORDS, InterleavedReader("train", "TFRecord", block=3, epoch=0), 5, None)
    for other, text in (
        (InterleavedReader("train", block=4), "with block=4"),
        (InterleavedReader(RANKS[:2], block=3), "is of channels"),
    ):
        with pytest.raises(ValueError, match=text):
            other.load_state_dict(state)
    for change in ({"turn": 3}, {"returned": 3}, {"turn": None}):
        with pytest.raises(ValueError, match="no turn of these FIFOs"):
            InterleavedReader("train", block=3).load_state_dict(state | change)
    with pytest.raises(ValueError, match="each once"):
        InterleavedReader(["validation", "validation"])


def test_rank_fifos_by_record_have_the_state_of_the_job(ranks: Feeder) -> None:
    """After the last global batch that came whole; a block that mixes two of them has none."""
    due = {rank: [b"%s %d" % (rank.encode(), n) for n in range(24)] for rank in RANKS}
    more: dict[str, Any] = {"records": 24, "steps": 6, "order": {"digest": "d"}}

    def reader(block: int) -> InterleavedReader:
        return InterleavedReader("train", "TFRecord", block=block, epoch=0)

    every, after = resumed(ranks, due, reader(2), None, None, **more)
    assert after == StepState("train", 1, 0, {"digest": "d"}).document()
    found, state = resumed(ranks, due, reader(2), 31, None, **more)
    assert state == StepState("train", 0, 2, {"digest": "d"}).document()
    assert found[:24] + resumed(ranks, due, reader(2), None, state, **more)[0] == every
    with pytest.raises(ChannelError, match="4 records of a step, which is no multiple of block=3"):
        resumed(ranks, due, reader(3), 2, None, **more)
    for rank in RANKS:
        ranks.feed(0, encoded(due[rank]), channel=rank, **more)
    counted = reader(2)
    assert (len(counted), counted.steps_per_epoch) == (72, 6)
    assert list(counted) == every
