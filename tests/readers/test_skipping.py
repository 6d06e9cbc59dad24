"""Corrupt records and objects are skipped within a budget, listed, and counted as consumed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import struct
import threading
from typing import TYPE_CHECKING, Any

import pytest

from streamer.errors import ChannelError, CorruptRecord, CutRecord
from streamer.formats import recordio, tfrecord
from streamer.readers import PipeReader, SkipPolicy
from streamer.readers.core.epoch_skips import EpochSkips
from streamer.readers.core.record_keys import RecordKeys
from streamer.readers.core.shuffle import NumberedRecords
from streamer.readers.core.skipping import Replacements, SkipCounts, SkippedRecord
from streamer.readers.core.stream import PipeStream
from streamer.step_state import StepState
from tests.readers.test_record_keys import damaged, objects
from tests.readers.test_step_state import RANK

if TYPE_CHECKING:
    from pathlib import Path

    from tests.readers.feeder import Feeder

RECORDS = [b"%03d" % number * 30 for number in range(100)]
FRAMES = [tfrecord.encode(record) for record in RECORDS]
ORDER: dict[str, Any] = {"records": 8, "steps": 2, "order": RANK.order}


def spoilt(numbers: dict[int, bool], frames: list[bytes] = FRAMES) -> list[bytes]:
    """Frames, the ones of these numbers damaged: in their header, or in their data."""
    return [damaged(frame, header=numbers[at]) if at in numbers else frame for at, frame in enumerate(frames)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_corrupt_records_are_left_out_counted_and_listed(
    feeder: Feeder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frames = spoilt({0: False, 7: False, 99: False})
    data, keys = objects(frames[:40], frames[40:])
    feeder.list_keys(keys)
    feeder.feed(0, data)
    quarantine = tmp_path / "bad.jsonl"
    reader = PipeReader("train", "TFRecord", skip=SkipPolicy(records=3, quarantine=quarantine))
    assert quarantine.read_text() == ""
    assert list(reader) == [*RECORDS[1:7], *RECORDS[8:99]]
    assert (reader.skipped.records, reader.skipped.objects) == (3, 0)
    assert repr(reader) == "<PipeReader train [TFRecord: skipped 3 records, 0 objects]>"
    reason = "CRC check on data failed"
    assert lines(quarantine) == [
        {
            "channel": "train", "epoch": 0, "skipped": "record", "bucket": "b", "key": key, "record": record,
            "offset": number * len(FRAMES[0]), "reason": reason,
        }
        for number, key, record in [(0, "k0", 0), (7, "k0", 7), (99, "k1", 59)]
    ]  # fmt: skip
    assert "skipped: record 59 of s3://b/k1 at offset" in caplog.text


def test_every_record_of_an_epoch_may_be_corrupt(feeder: Feeder) -> None:
    feeder.feed(0, b"".join(spoilt(dict.fromkeys(range(100), False))))
    reader = PipeReader("train", "TFRecord", skip=SkipPolicy(records=100))
    assert list(reader) == []
    assert reader.skipped.records == 100


def test_an_empty_epoch_skips_nothing(feeder: Feeder) -> None:
    feeder.list_keys([])
    feeder.feed(0, b"")
    assert list(PipeReader("train", "TFRecord", skip=SkipPolicy(objects=1))) == []


def test_over_the_budget_the_error_names_the_last_records(feeder: Feeder) -> None:
    frames = spoilt({3: False, 5: False, 9: False})
    data, keys = objects(frames)
    feeder.list_keys(keys)
    feeder.feed(0, data)
    reader = PipeReader("train", "TFRecord", skip=SkipPolicy(records=2, objects=7))
    got: list[bytes] = []
    with pytest.raises(CorruptRecord) as raised:
        got.extend(reader)
    assert str(raised.value) == (
        "record 9 of s3://b/k0 at offset 954: CRC check on data failed; epoch 0 of train has more corrupt "
        "records than skip allows; skipped before: 2 of 2 records and 0 of 7 objects, the last ones: "
        "record 3 of s3://b/k0 at offset 318: CRC check on data failed; "
        "record 5 of s3://b/k0 at offset 530: CRC check on data failed"
    )
    for record in got:
        assert record in RECORDS
    assert reader.skipped.records == 2


def test_records_before_the_one_over_the_budget_are_returned(feeder: Feeder) -> None:
    feeder.feed(0, b"".join(spoilt({3: False, 9: False})))
    got: list[bytes] = []
    with pytest.raises(CorruptRecord, match="more corrupt records than skip allows"):
        for record in PipeReader("train", "TFRecord", skip=SkipPolicy(records=1)):
            got.append(record)
    assert got == [*RECORDS[:3], *RECORDS[4:9]]


def test_the_budget_is_of_each_epoch(feeder: Feeder) -> None:
    reader = PipeReader("train", "TFRecord", skip=SkipPolicy(records=1))
    for epoch in range(3):
        feeder.feed(epoch, b"".join(spoilt({epoch: False})))
        assert len(list(reader)) == 99
    assert reader.skipped.records == 3


@pytest.mark.parametrize("key", [False, True])
@pytest.mark.parametrize("large", [False, True])
def test_the_rest_of_an_object_is_skipped_up_to_the_next_one(
    feeder: Feeder, tmp_path: Path, *, key: bool, large: bool
) -> None:
    """A large object's rest is in several windows."""
    frames = FRAMES * 300 if large else FRAMES
    data, keys = objects(FRAMES[:40], spoilt({10: True}, frames), FRAMES[50:])
    feeder.list_keys(keys)
    feeder.feed(0, data)
    quarantine = tmp_path / "bad"
    skip = SkipPolicy(objects=1, quarantine=quarantine)
    reader = PipeReader("train", "TFRecord", skip=skip, key=key)
    records = list(reader)
    if key:
        assert [each[1:3] for each in records[-51:]] == [("k1", 9), *(("k2", n) for n in range(50))]
        records = [each.record for each in records]
    assert records == [*RECORDS[:40], *RECORDS[:10], *RECORDS[50:]]
    (line,) = lines(quarantine)
    assert (line["skipped"], line["key"], line["record"]) == ("object", "k1", 10)
    assert "CRC check on header failed" in line["reason"]
    assert reader.skipped.objects == 1


@pytest.mark.parametrize("record_format", ["TFRecord", "RecordIO", "fixed:90"])
@pytest.mark.parametrize("cut", [1, 3, 50, 93])
@pytest.mark.parametrize("last", [False, True])
def test_an_object_that_is_cut_off_costs_no_record_of_the_next_one(
    feeder: Feeder, record_format: str, cut: int, *, last: bool
) -> None:
    encoders = {"TFRecord": tfrecord.encode, "RecordIO": recordio.encode}
    encode = encoders.get(record_format, bytes)
    frames = [encode(record) for record in RECORDS]
    first = b"".join(frames[:40])[:-cut]
    lost = 1 + (cut > len(frames[0]))
    second = b"" if last else b"".join(frames[40:])
    feeder.list_keys([(len(first), "a"), (0, "nothing")] + ([(len(second), "b")] if second else []))
    feeder.feed(0, first + second)
    reader = PipeReader("train", record_format, skip=SkipPolicy(objects=1), key=True)
    found = list(reader)
    assert [each.record for each in found] == RECORDS[: 40 - lost] + ([] if last else RECORDS[40:])
    (bad,) = reader.skipped.last
    assert (bad.kind, bad.key, bad.number) == ("object", "a", 40 - lost)


def test_a_wrong_length_of_recordio_ends_with_its_object(feeder: Feeder) -> None:
    """RecordIO has no checksum of its length, which may be of 512 MiB."""
    frames = [recordio.encode(record) for record in RECORDS]
    frames[10] = struct.pack("<II", recordio.MAGIC, recordio.MAX_PAYLOAD) + frames[10][8:]
    data, keys = objects(frames[:40], frames[40:] * 600)
    feeder.list_keys(keys)
    feeder.feed(0, data)
    reader = PipeReader("train", "RecordIO", skip=SkipPolicy(objects=1))
    assert list(reader) == RECORDS[:10] + RECORDS[40:] * 600


class Pieces(io.RawIOBase):
    """A stream whose reads return one piece each."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = [*pieces, b""]

    def readinto(self, buffer: Any) -> int:
        piece = self._pieces.pop(0)
        buffer[: len(piece)] = piece
        return len(piece)


@pytest.mark.parametrize("parts", [False, True])
def test_a_bad_record_alone_in_a_block_ends_with_its_object(feeder: Feeder, *, parts: bool) -> None:
    """The border is seen in the block in which it arrives, also if no record is complete there.

    A record of several parts, which is cut off inside a part, takes no bytes of the next object.
    """
    flag = 1 if parts else 0
    good = recordio.encode(b"good")
    wrong = struct.pack("<II", recordio.MAGIC, flag << 29 | (4 if parts else recordio.MAX_PAYLOAD)) + b"part"
    if parts:
        wrong += struct.pack("<II", recordio.MAGIC, 3 << 29 | 20) + b"cut"
    feeder.list_keys([(len(wrong), "bad"), (2 * len(good), "good")])
    feeder.feed(0, b"")
    source = Pieces(wrong[:10], wrong[10:], good[:9], good[9:], good)
    with contextlib.closing(PipeStream(feeder.path("train", 0))) as stream:
        stream.begin()
        keys = RecordKeys(stream, offset=0)
        skips = EpochSkips(SkipPolicy(objects=1), "train", 0, SkipCounts())
        reader = recordio.RecordIOReader(source)
        found: list[Any] = []
        with contextlib.closing(keys):
            for batch, _ in skips.lists(reader, keys, 0, proven=True):
                found += batch
                if len(found) == 1:
                    assert reader.arrived <= len(wrong) + 9
    assert [each for each in found if isinstance(each, bytes)] == [b"good", b"good"]
    (bad,) = [each for each in found if isinstance(each, SkippedRecord)]
    assert (bad.kind, bad.key, bad.number, bad.offset) == ("object", "bad", 0, 0)


def test_an_end_that_nothing_proves_is_not_skipped(feeder: Feeder) -> None:
    """The writer may have died, with more bytes to come."""
    data = b"".join(FRAMES)[:-3]
    feeder.feed(0, data, proof=False)
    got: list[bytes] = []
    with pytest.raises(CutRecord, match="nothing proves that the stream ends here"):
        for record in PipeReader("train", "TFRecord", epoch=0, skip=SkipPolicy(objects=1)):
            got.append(record)
    assert got == RECORDS[:99]
    feeder.feed(0, data)
    reader = PipeReader("train", "TFRecord", epoch=0, skip=SkipPolicy(objects=1))
    assert list(reader) == RECORDS[:99]
    assert reader.skipped.objects == 1


def test_parts_that_do_not_end_are_skipped_from_the_first_one(feeder: Feeder) -> None:
    part = struct.pack("<II", recordio.MAGIC, 1 << 29 | 4) + b"part"
    whole = recordio.encode(b"good")
    data = [whole + part, whole, part]
    feeder.list_keys([(len(each), f"k{number}") for number, each in enumerate(data)])
    feeder.feed(0, b"".join(data))
    reader = PipeReader("train", "RecordIO", skip=SkipPolicy(objects=2))
    assert list(reader) == [b"good", b"good"]
    assert [(bad.key, bad.number) for bad in reader.skipped.last] == [("k0", 1), ("k2", 0)]


def test_without_a_key_list_the_next_record_cannot_be_found(feeder: Feeder) -> None:
    feeder.feed(0, b"".join(spoilt({5: True})))
    got: list[bytes] = []
    with pytest.raises(CorruptRecord, match="set RecordKeys: true in the Penstock section"):
        for record in PipeReader("train", "TFRecord", skip=SkipPolicy(records=9, objects=9)):
            got.append(record)
    assert got == RECORDS[:5]


def test_objects_have_a_budget_of_their_own(feeder: Feeder) -> None:
    data, keys = objects(*(spoilt({0: True}, FRAMES[at : at + 10]) for at in range(0, 100, 10)))
    feeder.list_keys(keys)
    feeder.feed(0, data)
    with pytest.raises(CorruptRecord, match=r"0 of 5 records and 2 of 2 objects.*object from record 0"):
        list(PipeReader("train", "TFRecord", skip=SkipPolicy(records=5, objects=2)))


@pytest.mark.parametrize("key", [False, True])
def test_any_state_leaves_the_rest_of_the_records(feeder: Feeder, tmp_path: Path, *, key: bool) -> None:
    """A state after each record of two windows, with bad records at the start, the end, and side by side."""
    frames = FRAMES * 150
    bad = {0: False, 1: False, 4000: False, 4001: False, 9000: True, len(frames) - 1: False}
    data, keys = objects(*(spoilt(bad, frames)[at : at + 5000] for at in (0, 5000, 10000)))
    good = [RECORDS[n % 100] for n in range(len(frames)) if n not in bad and not 9000 <= n < 10000]
    feeder.list_keys(keys)
    feeder.list_keys(keys, epoch=1)
    skip = SkipPolicy(records=10, objects=1, quarantine=tmp_path / "bad")

    def records(reader: PipeReader) -> Any:
        return (each.record if key else each for each in reader)

    for count in (1, 2, 3998, 3999, 8993, 8994, 8995, 9900, 12000, len(good) - 1):
        feeder.feed(0, data)
        reader = PipeReader("train", "TFRecord", epoch=0, skip=skip, key=key)
        taken = records(reader)
        assert [next(taken) for _ in range(count)] == good[:count]
        state = json.loads(json.dumps(reader.state_dict()))
        assert list(taken) == good[count:]
        feeder.feed(0, data)
        again = PipeReader("train", "TFRecord", epoch=0, skip=skip, key=key)
        again.load_state_dict(state)
        assert list(records(again)) == good[count:]
        total = (reader.skipped.records, reader.skipped.objects)
        assert total == (5, 1)
        before = (2 if count < 4000 - 2 else 4) if count > 0 else 0
        if count == 12000:
            assert (again.skipped.records, again.skipped.objects) == (5 - before, 0)


def test_a_corrupt_record_of_a_rank_is_replaced(feeder: Feeder) -> None:
    """So all ranks have the same steps, and a state counts them."""
    feeder.configure({"train-0": "Pipe"})
    data = b"".join(spoilt({0: False, 3: False, 4: False, 7: False}, FRAMES[:8]))
    places = [1, 1, 2, 2, 2, 5, 6, 6]
    feeder.feed(0, data, channel="train-0", **ORDER)
    reader = PipeReader("train-0", "TFRecord", skip=SkipPolicy(records=4))
    records = iter(reader)
    assert [next(records) for _ in range(4)] == [RECORDS[at] for at in places[:4]]
    state = reader.state_dict()
    assert (state["epoch"], state["step"]) == (0, 1)
    assert len(reader) == 8
    assert list(records) == [RECORDS[at] for at in places[4:]]
    assert (reader.state_dict()["epoch"], reader.state_dict()["step"]) == (1, 0)
    feeder.feed(0, data, channel="train-0", **ORDER)
    again = PipeReader("train-0", "TFRecord", skip=SkipPolicy(records=4))
    again.load_state_dict(StepState("train", 0, 1, ORDER["order"]).document())
    assert list(again) == [RECORDS[at] for at in places[4:]]
    assert again.skipped.records == 2


def test_a_rank_cannot_skip_an_unknown_number_of_records(feeder: Feeder) -> None:
    feeder.configure({"train-0": "Pipe"})
    data, keys = objects(spoilt({3: True}, FRAMES[:8]))
    feeder.list_keys(keys, channel="train-0")
    feeder.feed(0, data, channel="train-0", **ORDER)
    with pytest.raises(CorruptRecord, match="the ranks would have unequal steps"):
        list(PipeReader("train-0", "TFRecord", skip=SkipPolicy(objects=1)))


def test_a_rank_without_a_good_record_fails(feeder: Feeder) -> None:
    feeder.configure({"train-0": "Pipe"})
    feeder.feed(0, b"".join(map(damaged, FRAMES[:8])), channel="train-0", **ORDER)
    with pytest.raises(CorruptRecord, match="all 8 records of train-0 are corrupt"):
        list(PipeReader("train-0", "TFRecord", skip=SkipPolicy(records=8)))


def test_a_shuffled_reader_skips_too(feeder: Feeder) -> None:
    data = b"".join(spoilt({0: False, 50: False}))
    skip = SkipPolicy(records=2)
    good = sorted(RECORDS[1:50] + RECORDS[51:])

    def shuffled() -> PipeReader:
        feeder.feed(0, data)
        return PipeReader("train", "TFRecord", seed=1, shuffle=30, epoch=0, skip=skip)

    reader = shuffled()
    order = list(reader)
    assert sorted(order) == good
    for count in (1, 25, 60, 97):
        reader = shuffled()
        records = iter(reader)
        assert [next(records) for _ in range(count)] == order[:count]
        state = reader.state_dict()
        list(records)
        again = shuffled()
        again.load_state_dict(state)
        assert list(again) == order[count:]


def test_a_good_record_takes_the_places_of_corrupt_ones_and_numbers_stay() -> None:
    """Also where records between two blocks were received before."""
    places, bad = Replacements("train"), SkippedRecord(0, "damaged")

    def filled(records: list[Any], first: int) -> list[tuple[list[Any], int]]:
        blocks = places.filled(NumberedRecords(records, first, 0, 0))
        return [(block.records, block.first) for block in blocks]

    assert filled([bad, bad], 4) == []
    assert filled([bad, b"a", bad], 9) == [([b"a", b"a"], 4), ([b"a", b"a", b"a"], 9)]
    places.pass_over([b"b", bad])
    assert filled([bad, b"c"], 14) == [([b"b", b"c"], 14)]
    with pytest.raises(CorruptRecord, match="an unknown number of them"):
        filled([SkippedRecord(0, "damaged", "object")], 16)


def test_several_processes_may_share_the_list(tmp_path: Path) -> None:
    """Lines of any length stay whole, because each is one write with O_APPEND."""
    path = tmp_path / "bad"

    def write(channel: str) -> None:
        skips = EpochSkips(SkipPolicy(records=200, quarantine=path), channel, 0, SkipCounts())
        bad = [SkippedRecord(number, "x" * (number * 50), "record", "k") for number in range(200)]
        assert skips.admit(bad) == 200

    threads = [threading.Thread(target=write, args=(f"c{each}",)) for each in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = lines(path)
    assert len(found) == 800
    for channel in range(4):
        assert [each["offset"] for each in found if each["channel"] == f"c{channel}"] == list(range(200))


def test_a_reader_with_a_policy_can_be_pickled(feeder: Feeder) -> None:
    feeder.feed(0, b"".join(spoilt({1: False})))
    reader = pickle.loads(pickle.dumps(PipeReader("train", "TFRecord", skip=SkipPolicy(records=1))))
    assert len(list(reader)) == 99


def test_argument_errors(feeder: Feeder, tmp_path: Path) -> None:
    wrongs: list[dict[str, Any]] = [
        {}, {"records": -1}, {"records": 1, "objects": -1}, {"quarantine": "x"}, {"records": float("nan")},
        {"records": True}, {"objects": 1.5}, {"objects": "1"},
    ]  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(ValueError, match="skip has records"):
            SkipPolicy(**wrong)
    with pytest.raises(ValueError, match="skip has no meaning for TextLine"):
        PipeReader("train", "TextLine", skip=SkipPolicy(records=1))
    with pytest.raises(ChannelError, match=r"cannot write the quarantine list .*no/file: No such file"):
        PipeReader("train", "TFRecord", skip=SkipPolicy(records=1, quarantine=tmp_path / "no" / "file"))


def test_a_fifo_without_a_reader_is_no_quarantine_list(tmp_path: Path) -> None:
    """The constructor does not wait for a reader of the FIFO."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ChannelError, match="cannot write the quarantine list"):
        PipeReader("train", "TFRecord", skip=SkipPolicy(records=1, quarantine=tmp_path / "fifo"))


def test_a_key_cannot_forge_a_line_of_the_log(feeder: Feeder, caplog: pytest.LogCaptureFixture) -> None:
    data, _ = objects(spoilt({1: False}))
    feeder.list_keys([(len(data), "k\n\x1b[2J")])
    feeder.feed(0, data)
    reader = PipeReader("train", "TFRecord", skip=SkipPolicy(records=1))
    assert len(list(reader)) == 99
    assert r"s3://b/k\n\x1b[2J at" in caplog.text
    assert reader.skipped.last[0].key == "k\n\x1b[2J"


def test_a_full_disk_under_the_list_is_an_error(feeder: Feeder) -> None:
    feeder.feed(0, b"".join(spoilt({1: False})))
    reader = PipeReader("train", "TFRecord", skip=SkipPolicy(records=1, quarantine="/dev/full"))
    with pytest.raises(ChannelError, match="No space left on device"):
        list(reader)


def test_the_state_between_the_parts_of_a_record_is_before_it() -> None:
    """A reader that begins there reads the whole record."""
    first = struct.pack("<II", recordio.MAGIC, 1 << 29 | 4) + b"part"
    last = struct.pack("<II", recordio.MAGIC, 3 << 29 | 4) + b"last"
    reader = recordio.RecordIOReader(Pieces(recordio.encode(b"one") + first, last))
    assert [(batch, reader.offset) for batch in reader.batches()] == [([b"one"], 12), ([b"partlast"], 36)]
