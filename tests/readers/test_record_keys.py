"""Keys of records in a reader: errors and skips name them, and no number is guessed."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest

from streamer.errors import ChannelError, CorruptRecord, StreamError
from streamer.formats import tfrecord
from streamer.readers import PipeReader, SkipPolicy
from tests.readers.feeder import Feeder

FRAMES = [tfrecord.encode(b"%d" % number * 90) for number in range(100)]
BAD = bytes(10)


def objects(*frames: list[bytes]) -> tuple[bytes, list[tuple[int, str]]]:
    """Return the stream and the key list of objects of these frames."""
    data = [b"".join(each) for each in frames]
    return b"".join(data), [(len(each), f"k{number}") for number, each in enumerate(data)]


def damaged(frame: bytes, *, header: bool = False) -> bytes:
    """A frame whose data, or header, does not match its checksum."""
    at = 9 if header else 14
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]


def test_records_that_are_left_out_count_and_are_named(
    feeder: Feeder, caplog: pytest.LogCaptureFixture
) -> None:
    """One whole object is bad, so that a list has only records that are left out."""
    frames = FRAMES.copy()
    for number in (0, 5, *range(40, 60)):
        frames[number] = damaged(frames[number])
    data, keys = objects(frames[:40], frames[40:60], frames[60:])
    feeder.list_keys(keys)
    feeder.feed(0, data)
    reader = PipeReader("train", "TFRecord", key=True, skip=SkipPolicy(records=50))
    found = [(each.key, each.number) for each in reader]
    assert found == [("k0", n) for n in range(40) if n not in (0, 5)] + [("k2", n) for n in range(40)]
    names = re.findall(r"skipped: record (\d+) of s3://b/(k\d)", caplog.text)
    assert names == [("0", "k0"), ("5", "k0")] + [(str(number), "k1") for number in range(20)]


def test_an_error_names_the_record(feeder: Feeder) -> None:
    data, keys = objects(FRAMES[:40], [*FRAMES[40:50], damaged(FRAMES[50], header=True)])
    feeder.list_keys(keys)
    feeder.feed(0, data)
    with pytest.raises(CorruptRecord, match=r"header failed; it is record 10 of s3://b/k1$"):
        list(PipeReader("train", "TFRecord", key=True))


def test_a_number_is_never_guessed(feeder: Feeder) -> None:
    """A state that was saved without keys, inside an object."""
    data, keys = objects(FRAMES[:40], FRAMES[40:])
    first = feeder.feed(0, data * 2000)
    reader = PipeReader("train", "TFRecord")
    taken = iter(reader.batches())
    next(taken)
    next(taken)
    state = reader.state_dict()
    del taken
    first.join()
    feeder.list_keys([(size, f"{key}/{turn}") for turn in range(2000) for size, key in keys])
    feeder.feed(0, data * 2000)
    again = PipeReader("train", "TFRecord", key=True)
    again.load_state_dict(state)
    with pytest.raises(ChannelError, match="save states with key=True"):
        next(iter(again))


def test_a_list_of_another_run_is_refused(feeder: Feeder) -> None:
    data, keys = objects(FRAMES)
    feeder.list_keys(keys)
    feeder.feed(0, data, run="later")
    with pytest.raises(StreamError, match="is of another run of the sidecar"):
        list(islice(PipeReader("train", "TFRecord", key=True), 1))


def test_records_of_many_objects_in_one_list(feeder: Feeder) -> None:
    """Objects of one record, of several, and of none; and the last record is in the last object."""
    sizes = [1, 0, 0, 3, 1, 1, 20, 0, 1, 73, 0]
    rest = iter(FRAMES)
    data, keys = objects(*(list(islice(rest, size)) for size in sizes))
    feeder.list_keys(keys)
    feeder.feed(0, data)
    found = [(each.key, each.number) for each in PipeReader("train", "TFRecord", key=True)]
    assert found == [(f"k{index}", n) for index, size in enumerate(sizes) for n in range(size)]


def test_a_fifo_that_nobody_writes_is_not_one_without_keys(feeder: Feeder) -> None:
    feeder.publish(0, "open")
    os.mkfifo(feeder.path("train", 0))
    with pytest.raises(ChannelError, match="no process opened"):
        list(PipeReader("train", "TFRecord", key=True, timeout=0.2))


def test_a_channel_without_a_list_is_refused_at_its_first_record(feeder: Feeder) -> None:
    feeder.feed(0, b"".join(FRAMES))
    with pytest.raises(ChannelError, match="set RecordKeys: true in the Penstock section"):
        next(iter(PipeReader("train", "TFRecord", key=True)))


TEXTS: list[list[bytes]] = [[b"a", b"b"], [], [b"c"], [b"", b"d"], [b"e\r", b""], [b"f"], [b"g" * 5000]]


@pytest.mark.parametrize("shuffle", [None, 4])
@pytest.mark.parametrize("ended", [(), (0, 5), range(7)], ids=str)
def test_an_object_s_border_is_a_line_s(feeder: Feeder, ended: Sequence[int], shuffle: int | None) -> None:
    """The last line of an object ends there, with a line feed after it or without."""
    data = [b"\n".join(lines) + b"\n" * (i in ended and bool(lines)) for i, lines in enumerate(TEXTS)]
    feeder.list_keys([(len(each), f"k{index}") for index, each in enumerate(data)])
    feeder.feed(0, b"".join(data))
    due = [
        (line, f"k{index}", number)
        for index, each in enumerate(data)
        for number, line in enumerate(each.removesuffix(b"\n").split(b"\n"))
        if each
    ]
    reader = PipeReader("train", "TextLine", key=True, shuffle=shuffle)
    found = [(line, key, number) for line, key, number, _ in reader]
    assert (sorted(found) if shuffle else found) == (sorted(due) if shuffle else due)


@pytest.mark.parametrize("taken", [1, 2, 3, 4, 75, 149])
def test_a_state_between_two_lines_that_were_glued(feeder: Feeder, taken: int) -> None:
    data = [b"\n".join(b"%d %d" % (k, n) for n in range(3)) for k in range(50)]
    due = [(b"%d %d" % (k, n), f"k{k}", n) for k in range(50) for n in range(3)]

    def reader() -> PipeReader:
        feeder.list_keys([(len(each), f"k{index}") for index, each in enumerate(data)])
        feeder.feed(0, b"".join(data))
        return PipeReader("train", "TextLine", key=True, epoch=0)

    first = reader()
    records: Any = iter(first)
    assert [next(records)[:3] for _ in range(taken)] == due[:taken]
    state = first.state_dict()
    records.close()
    feeder.feeds[-1][1].join()  # its FIFO is gone: the next one has the same name
    again = reader()
    again.load_state_dict(state)
    assert [each[:3] for each in again] == due[taken:]
