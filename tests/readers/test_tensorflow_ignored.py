"""`dataset.ignore_errors()`: a broken stream must not end as a whole one; one corrupt record costs itself."""

from __future__ import annotations

from typing import Any

import pytest

from streamer.formats import tfrecord
from streamer.readers.core.skipping import SkipPolicy
from tests.kit.frames import spoilt
from tests.kit.late import LATE
from tests.readers.feeder import Feeder

if LATE:
    import tensorflow as tf

    from streamer.readers.tensorflow import PipeModeDataset, batches, in_place

SMALL = [b"%06d" % number for number in range(1000)]
LARGE = [b"%d." % number * 20_000 for number in range(200)]
MIXED = SMALL + LARGE + SMALL + LARGE[:77]


def frames(records: list[bytes], bad: set[int]) -> list[bytes]:
    return [(spoilt if n in bad else tfrecord.encode)(each) for n, each in enumerate(records)]


def flat(element: Any) -> list[Any]:
    """The records of a tensor or array: a batch, or one record."""
    return list(tf.reshape(element, [-1]).numpy().tolist())


FORMS: list[tuple[str, dict[str, Any]]] = [
    ("one row", {}),
    ("one row", {"positions": True}),
    ("one row", {"batch_size": 7}),
    ("one row", {"shuffle": 50}),
    ("one row", {"benchmark": True}),
    *[
        (layout, options)
        for layout in ("several rows", "whole", "in place")
        for options in ({"batch_size": 100, "positions": True}, {"batch_size": 211})
    ],
]


@pytest.mark.parametrize(("layout", "options"), FORMS, ids=str)
def test_every_good_record_comes(
    feeder: Feeder, monkeypatch: pytest.MonkeyPatch, layout: str, options: dict[str, Any]
) -> None:
    records = MIXED
    if layout != "one row":
        monkeypatch.setattr(batches, "FEW", 2)
        monkeypatch.setattr(in_place, "LEAST_BYTES", 1 << 20 if layout == "in place" else 1 << 62)
        monkeypatch.setattr(batches, "WHOLE_BYTES" if layout == "whole" else "LARGE_BYTES", 1 << 20)
    bad = {0, 100, 101, 1033, 1100, 1600, len(records) - 1}
    good = [record for number, record in enumerate(records) if number not in bad]
    feeder.feed(0, b"".join(frames(records, bad)))
    dataset = PipeModeDataset("train", "TFRecord", **options)
    iterator = iter(dataset)
    found, errors = list[bytes](), list[str]()
    while True:
        try:
            element = next(iterator)
        except StopIteration:
            break
        except tf.errors.InternalError as error:
            errors.append(str(error))
            continue
        found += flat(element[0] if options.get("positions") else element)
    assert (sorted(found) if "shuffle" in options else found) == (
        sorted(good) if "shuffle" in options else good
    )
    assert len(errors) == len(bad)
    assert all("CorruptRecord: TFRecord at offset" in text for text in errors)
    assert dataset.skipped.records == len(bad)
    assert [offset for _, offset in dataset.skipped.positions] == [
        sum(len(frame) for frame in frames(records[:number], set())) for number in sorted(bad)
    ]


@pytest.mark.parametrize("options", [{}, {"batch_size": 8}, {"shuffle": 10}], ids=str)
def test_keys_are_those_of_the_good_records(feeder: Feeder, options: dict[str, Any]) -> None:
    records, bad = SMALL[:60], {5, 30, 31}
    bodies = frames(records, bad)
    feeder.list_keys(
        [(sum(map(len, bodies[first : first + 20])), f"k{first // 20}") for first in (0, 20, 40)]
    )
    feeder.feed(0, b"".join(bodies))
    iterator = iter(PipeModeDataset("train", "TFRecord", key=True, **options))
    found, errors = list[tuple[bytes, bytes, int]](), list[str]()
    while True:
        try:
            record, key, number, _ = next(iterator)
        except StopIteration:
            break
        except tf.errors.InternalError as error:
            errors.append(str(error))
            continue
        found += zip(*map(flat, (record, key, number)), strict=True)
    assert sorted(found) == [(records[n], b"k%d" % (n // 20), n % 20) for n in range(60) if n not in bad]
    for number, text in zip(sorted(bad), errors, strict=True):
        assert f"it is record {number % 20} of s3://b/k{number // 20}" in text


def test_a_position_after_a_corrupt_record_is_resumed(feeder: Feeder) -> None:
    feeder.feed(0, b"".join(frames(SMALL, {500})))
    iterator = iter(PipeModeDataset("train", "TFRecord", positions=True))
    after = [next(iterator)[1].numpy() for _ in range(500)][-1]
    with pytest.raises(tf.errors.InternalError):
        next(iterator)
    later = [next(iterator)[1].numpy() for _ in range(200)][-1]
    del iterator
    for start, due in ((after, SMALL[501:]), (later, SMALL[701:])):
        feeder.feed(0, b"".join(frames(SMALL, {500})))
        dataset = PipeModeDataset("train", "TFRecord", start=start).ignore_errors()
        assert list(dataset.as_numpy_iterator()) == due


def test_the_usual_pipeline_loses_one_record(feeder: Feeder) -> None:
    feeder.feed(0, b"".join(frames(SMALL[:200], {100})))
    dataset = PipeModeDataset("train", "TFRecord").map(lambda record: record, num_parallel_calls=4)
    assert list(dataset.ignore_errors().as_numpy_iterator()) == SMALL[:100] + SMALL[101:200]


BROKEN: dict[str, tuple[bytes, dict[str, Any], str]] = {
    "cut": (b"".join(frames(SMALL, set())), {"state": "open", "total": 1 << 20}, "TruncatedStream"),
    "failed": (
        b"".join(frames(SMALL, set())),
        {"state": "failed", "error": "503 for s3://b/k", "hold": True},
        "the source failed: 503",
    ),
    "no frame": (b"".join(frames(SMALL, set())) + bytes(64), {}, "CorruptRecord"),
    "cut record": (b"".join(frames(SMALL, set()))[:-1], {}, "the stream ends inside a TFRecord"),
}


@pytest.mark.parametrize(
    ("how", "pipeline"),
    [
        *((how, pipeline) for how in BROKEN for pipeline in ("plain", "parallel")),
        ("cut", "batch_size"),
        ("no frame", "skip"),
    ],
)
def test_a_broken_stream_never_ends_as_a_whole_one(feeder: Feeder, how: str, pipeline: str) -> None:
    data, state, text = BROKEN[how]
    feeder.feed(0, data, **state)
    dataset = PipeModeDataset(
        "train",
        "TFRecord",
        batch_size=50 if pipeline == "batch_size" else None,
        skip=SkipPolicy(records=3) if pipeline == "skip" else None,
    )
    if pipeline == "parallel":
        dataset = dataset.map(lambda record: record, num_parallel_calls=4).batch(50).prefetch(2)
    found = list[bytes]()
    with pytest.raises(tf.errors.CancelledError, match=text):
        for element in dataset.ignore_errors().as_numpy_iterator():
            found += flat(element)
    assert len(found) > 940
    assert found == SMALL[: len(found)]


def test_an_error_that_is_not_penstocks_does_not_end_the_epoch(
    feeder: Feeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        yield SMALL[:3]
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("streamer.readers.tensorflow.bulk.BulkTFRecordReader.batches", broken)
    feeder.feed(0, b"")
    with pytest.raises(tf.errors.CancelledError, match="a bug"):
        list(PipeModeDataset("train", "TFRecord").ignore_errors())
