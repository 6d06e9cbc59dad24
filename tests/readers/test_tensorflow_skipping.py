"""`skip` of `PipeModeDataset`: as that of `PipeReader`, in every form of element, and from every position."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from streamer.errors import ChannelError
from streamer.formats import recordio
from streamer.readers import SkipPolicy
from streamer.step_state import StepState
from tests.kit.late import LATE
from tests.readers.test_record_keys import objects
from tests.readers.test_skipping import FRAMES, ORDER, RECORDS, lines, spoilt

if LATE:
    import tensorflow as tf

    from streamer.readers.tensorflow import PipeModeDataset

if TYPE_CHECKING:
    from pathlib import Path

    from tests.readers.feeder import Feeder

BAD = {0: False, 7: False, 8: False, 45: True, 99: False}
"""The records whose data are damaged, and the first one of which the length is: the rest of its object."""
BORDER = 60
"""First record of the second object."""
GOOD = [number for number in range(100) if number not in BAD and not 45 <= number < BORDER]
POLICY = SkipPolicy(records=4, objects=1)


def offer(feeder: Feeder) -> None:
    frames = spoilt(BAD)
    data, keys = objects(frames[:BORDER], frames[BORDER:])
    feeder.list_keys(keys)
    feeder.feed(0, data)


def flat(elements: Any, batch_size: int | None) -> list[Any]:
    return list(elements) if batch_size is None else [each for batch in elements for each in batch]


@pytest.mark.parametrize("key", [False, True])
@pytest.mark.parametrize("batch_size", [None, 7, 70])
def test_bad_records_are_left_out_counted_and_listed(
    feeder: Feeder, tmp_path: Path, batch_size: int | None, *, key: bool
) -> None:
    offer(feeder)
    policy = SkipPolicy(records=4, objects=1, quarantine=tmp_path / "bad")
    dataset = PipeModeDataset("train", "TFRecord", batch_size=batch_size, key=key, skip=policy)
    found = list(dataset.as_numpy_iterator())
    assert flat([each.record if key else each for each in found], batch_size) == [RECORDS[n] for n in GOOD]
    if key:
        names = [b"k0" if n < BORDER else b"k1" for n in GOOD]
        assert flat([each.key for each in found], batch_size) == names
        numbers = [n if n < BORDER else n - BORDER for n in GOOD]
        assert flat([each.number for each in found], batch_size) == numbers
    assert (dataset.skipped.records, dataset.skipped.objects) == (4, 1)
    listed = [(line["skipped"], line["key"], line["record"]) for line in lines(tmp_path / "bad")]
    records = [("record", "k0", 0), ("record", "k0", 7), ("record", "k0", 8)]
    assert listed == [*records, ("object", "k0", 45), ("record", "k1", 39)]


@pytest.mark.parametrize("batch_size", [None, 6])
def test_every_position_leaves_exactly_the_good_rest(feeder: Feeder, batch_size: int | None) -> None:
    offer(feeder)
    dataset = PipeModeDataset("train", "TFRecord", batch_size=batch_size, positions=True, skip=POLICY)
    found = list(dataset.as_numpy_iterator())
    size = batch_size or 1
    for number in range(0, len(found) - 1, 3 if batch_size else 11):
        offer(feeder)
        start = json.loads(found[number][1])
        rest = PipeModeDataset("train", "TFRecord", start=start, skip=POLICY)
        assert list(rest.as_numpy_iterator()) == [RECORDS[n] for n in GOOD[(number + 1) * size :]]
    assert json.loads(found[-1][1])["epoch"] == 1


def test_a_corrupt_record_of_a_rank_is_replaced(feeder: Feeder) -> None:
    """So a step has all its records, the length is known, and a state of steps is, too."""
    feeder.configure({"train-0": "Pipe"})
    data = b"".join(spoilt({0: False, 3: False, 4: False, 7: False}, FRAMES[:8]))
    places = [1, 1, 2, 2, 2, 5, 6, 6]
    feeder.feed(0, data, channel="train-0", **ORDER)
    options: dict[str, Any] = {"rank": 0, "batch_size": 4, "skip": SkipPolicy(records=4)}
    dataset = PipeModeDataset("train", "TFRecord", cardinality=True, positions=True, **options)
    assert len(dataset) == 2
    found = list(dataset.as_numpy_iterator())
    assert [each for batch, _ in found for each in batch] == [RECORDS[at] for at in places]
    state = json.loads(found[0][1])
    assert (state["epoch"], state["step"]) == (0, 1)
    feeder.feed(0, data, channel="train-0", **ORDER)
    start = StepState("train", 0, 1, ORDER["order"]).document()
    again = PipeModeDataset("train", "TFRecord", start=start, **options)
    assert flat(again.as_numpy_iterator(), 4) == [RECORDS[at] for at in places[4:]]


def test_over_the_budget_the_records_before_come_first(feeder: Feeder) -> None:
    offer(feeder)
    dataset = PipeModeDataset("train", "TFRecord", skip=SkipPolicy(records=2, objects=1))
    found: list[bytes] = []
    with pytest.raises(tf.errors.InternalError, match="more corrupt records than skip allows"):
        found.extend(dataset.as_numpy_iterator())
    assert found == [RECORDS[n] for n in range(1, 7)]


def test_a_recordio_object_is_left_at_its_border(feeder: Feeder) -> None:
    """The incumbent's skip is for TFRecord alone."""
    frames = [recordio.encode(record) for record in RECORDS]
    frames[3] = b"\0" * len(frames[3])
    data, keys = objects(frames[:10], frames[10:])
    feeder.list_keys(keys)
    feeder.feed(0, data)
    dataset = PipeModeDataset("train", "RecordIO", batch_size=50, skip=SkipPolicy(objects=1))
    assert flat(dataset.as_numpy_iterator(), 50) == RECORDS[:3] + RECORDS[10:]


def test_arguments_that_exclude_each_other(feeder: Feeder) -> None:
    feeder.configure({"train": "Pipe"})
    with pytest.raises(ValueError, match="skip has no meaning for TextLine"):
        PipeModeDataset("train", "TextLine", skip=POLICY)
    with pytest.raises(ChannelError, match="exclude each other"):
        PipeModeDataset("train", "TFRecord", max_corrupted_records_to_skip=1, skip=POLICY)
