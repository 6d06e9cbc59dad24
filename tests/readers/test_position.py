"""`state_dict` and `load_state_dict` of `PipeReader`: the rest of the epoch, and nothing twice."""

from __future__ import annotations

import itertools
import json
import os
from typing import Any

import pytest

from streamer.errors import ChannelError
from streamer.readers import PipeReader
from tests.readers.feeder import Feeder
from tests.readers.test_plain import ENCODE, RECORDS, encoded


def read_to(reader: PipeReader, count: int) -> tuple[list[bytes], dict[str, Any]]:
    """The first records of the next epoch, and the state after them."""
    records = list(itertools.islice(iter(reader), count))
    return records, json.loads(json.dumps(reader.state_dict()))


@pytest.mark.parametrize("record_format", list(ENCODE))
@pytest.mark.parametrize("count", [1, 777, len(RECORDS) - 1])
def test_a_state_is_a_position_in_the_records(feeder: Feeder, record_format: str, count: int) -> None:
    """With a FIFO that begins at the epoch's first byte: the bytes before the position are dropped."""
    left = feeder.feed(0, encoded(record_format))
    records, state = read_to(PipeReader("train", record_format), count)
    left.join()
    assert records == RECORDS[:count]
    assert (state["epoch"], state["records"]) == (0, count)
    again = PipeReader("train", record_format)
    again.load_state_dict(state)
    feeder.feed(0, encoded(record_format))
    assert list(again) == RECORDS[count:]
    assert again.state_dict() | {"digest": ""} == PipeReader("train", record_format).state_dict()
    assert feeder.next_epoch() == 1


@pytest.mark.parametrize("record_format", list(ENCODE))
def test_a_fifo_that_begins_where_the_state_says(feeder: Feeder, record_format: str) -> None:
    """A FIFO of `penstock run --resume`; states of the resumed epoch count from the epoch's start."""
    data = encoded(record_format, RECORDS * 20)
    left = feeder.feed(0, data, digest="d")
    _, state = read_to(PipeReader("train", record_format, epoch=0), 25_000)
    assert state["offset"] > 0
    again = PipeReader("train", record_format, epoch=0)
    again.load_state_dict(state)
    left.join()
    feeder.feed(
        0, data[state["offset"] :], total=len(data), digest=state["digest"], bytes_skipped=state["offset"]
    )
    records, later = read_to(again, 5_000)
    assert records == (RECORDS * 20)[25_000:30_000]
    assert later["records"] == 30_000
    assert later["offset"] >= state["offset"]


def test_another_plan_is_refused_unless_told(feeder: Feeder) -> None:
    left = feeder.feed(0, encoded("TFRecord"), digest="one")
    _, state = read_to(PipeReader("train", "TFRecord", epoch=0), 10)
    left.join()
    assert state["digest"] == "one"
    for anyway in (False, True):
        again = PipeReader("train", "TFRecord", epoch=0)
        again.load_state_dict(state, anyway=anyway)
        left = feeder.feed(0, encoded("TFRecord"), digest="two")
        if anyway:
            assert list(again) == RECORDS[10:]
        else:
            with pytest.raises(ChannelError, match="the objects or their order have"):
                next(iter(again))
        left.join()


def test_a_state_of_a_later_epoch_needs_that_epoch(feeder: Feeder) -> None:
    """A FIFO without a trailer is another program's, and no reader leaves it."""
    state = PipeReader("train", "TFRecord").state_dict() | {"epoch": 1}
    os.mkfifo(feeder.path("train", 0))
    again = PipeReader("train", "TFRecord", timeout=0.1)
    again.load_state_dict(state)
    with pytest.raises(ChannelError, match="train_1 did not appear .* has train_0.* with --resume"):
        next(iter(again))


def test_a_fifo_that_begins_after_the_position(feeder: Feeder) -> None:
    feeder.feed(0, encoded("TFRecord"), bytes_skipped=1000)
    reader = PipeReader("train", "TFRecord", epoch=0)
    reader.load_state_dict(reader.state_dict())
    with pytest.raises(ChannelError, match="begins at byte 1000"):
        next(iter(reader))


@pytest.mark.parametrize(
    "change",
    [{"format": 2}, {"channel": "eval"}, {"epoch": -1}, {"offset": True}, {"more": 1}, {"skip": "1"}],
)
def test_what_is_no_state_of_this_channel(
    feeder: Feeder, change: dict[str, int] | dict[str, str] | dict[str, bool]
) -> None:
    reader = PipeReader("train", "TFRecord")
    state = reader.state_dict()
    with pytest.raises(ValueError, match="state|the position is invalid"):
        reader.load_state_dict(state | change)


def test_a_state_whose_epoch_another_reader_has_taken_leaves_the_next_epoch_whole(feeder: Feeder) -> None:
    """The position is one of its own epoch: no other epoch is read from there."""
    left = feeder.feed(0, encoded("TFRecord"))
    _, state = read_to(PipeReader("train", "TFRecord"), 10)
    left.join()
    late, other = PipeReader("train", "TFRecord"), PipeReader("train", "TFRecord")
    late.load_state_dict(state)
    for epoch in range(2):
        feeder.feed(epoch, encoded("TFRecord"))
    assert list(other) == RECORDS
    assert read_to(late, 3) == (RECORDS[:3], state | {"epoch": 1, "offset": 0, "skip": 3, "records": 3})
