"""Every reader compares the records of a FIFO with those that its trailer promises to ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, product
from typing import Any

import numpy as np
import pytest

from streamer.errors import StreamError
from streamer.formats import recordio, tfrecord
from streamer.readers import PipeReader
from streamer.readers.tokens import TokenReader
from tests.kit.late import LATE
from tests.readers.feeder import Feeder

if LATE:
    import tensorflow as tf
    from torch.utils.data import DataLoader

    from streamer.readers.loader import ResumableLoader
    from streamer.readers.tensorflow import PipeModeDataset
    from streamer.readers.torch import PipeIterableDataset

RECORDS = [b"%06d" % number + bytes(number % 7) for number in range(200)]
LARGE = [record + bytes(120_000) for record in RECORDS]
"""Batches of 70 are made in place."""
BLOCKS = [b"%06d00" % number for number in range(200)]
STEPS = 10
WINDOWS = {"torch, shuffled": 160, "tensorflow, large batches": 100}
"""Records of the whole windows and batches before the surplus record, if they are fewer than promised."""
MORE = "has more than {} records that the sidecar promised: the record index lacks records"
FEWER = "has {} of {} records that the sidecar promised"


def lines(records: list[bytes]) -> bytes:
    return b"".join(record + b"\n" for record in records)


def tfrecords(records: list[bytes]) -> bytes:
    return b"".join(map(tfrecord.encode, records))


def torch(workers: int, **options: Any) -> Iterator[Any]:
    dataset = PipeIterableDataset("train", "TFRecord", batch_size=10, timeout=20, **options)
    return chain.from_iterable(DataLoader(dataset, batch_size=None, num_workers=workers))


def tensorflow(**options: Any) -> Iterator[Any]:
    dataset = PipeModeDataset("train", "TFRecord", timeout=20, **options)
    elements = (each[0] if isinstance(each, tuple) else each for each in dataset.as_numpy_iterator())
    return chain.from_iterable(elements) if "batch_size" in options else elements


READERS: dict[str, tuple[Callable[[], Iterable[Any]], Callable[[list[bytes]], bytes]]] = {
    "plain": (lambda: PipeReader("train", "TFRecord"), tfrecords),
    "lists": (lambda: chain.from_iterable(PipeReader("train", "TFRecord").batches()), tfrecords),
    "lines": (lambda: PipeReader("train", "TextLine"), lines),
    "keys": (lambda: (each.record for each in PipeReader("train", "TFRecord", key=True)), tfrecords),
    "RecordIO": (
        lambda: PipeReader("train", "RecordIO"),
        lambda records: b"".join(map(recordio.encode, records)),
    ),
    "torch": (lambda: torch(0), tfrecords),
    "torch, a worker": (lambda: torch(1), tfrecords),
    "torch, workers that share a FIFO": (lambda: torch(2), tfrecords),
    "torch, shuffled": (lambda: torch(0, shuffle=40), tfrecords),
    "ResumableLoader": (
        lambda: chain.from_iterable(
            ResumableLoader(PipeIterableDataset("train", "TFRecord", batch_size=10), num_workers=2)
        ),
        tfrecords,
    ),
    "tensorflow": (tensorflow, tfrecords),
    "tensorflow, batches": (lambda: tensorflow(batch_size=10), tfrecords),
    "tensorflow, large batches": (lambda: tensorflow(batch_size=100), tfrecords),
    "tensorflow, positions": (lambda: tensorflow(batch_size=10, positions=True), tfrecords),
    "tensorflow, keys": (lambda: tensorflow(key=True), tfrecords),
}


def read(elements: Iterable[Any]) -> tuple[list[bytes], str]:
    """Return the records before the end, and the text of the error; empty without one."""
    found: list[bytes] = []
    try:
        found.extend(map(bytes, elements))
    except (StreamError, tf.errors.DataLossError) as error:
        return found, str(error)
    return found, ""


EQUAL = ["plain", "torch, workers that share a FIFO", "ResumableLoader", "tensorflow, batches"]


@pytest.mark.parametrize(
    ("name", "promised"), [*product(READERS, [190, 210]), *((name, 200) for name in EQUAL)]
)
def test_no_record_beyond_those_that_were_promised(feeder: Feeder, name: str, promised: int) -> None:
    """An index with two records as one promises too few, an index of other objects too many."""
    make, encode = READERS[name]
    feeder.list_keys([(len(encode(RECORDS)), "k")])
    feeder.feed(0, encode(RECORDS), records=promised, steps=STEPS)
    found, error = read(make())
    shuffled = "shuffled" in name
    if promised == 200:
        assert (sorted(found) if shuffled else found, error) == (RECORDS, "")
    elif promised > 200:
        assert FEWER.format(200, promised) in error
        assert len(found) <= 200
    else:
        assert MORE.format(promised) in error
        assert shuffled or found == RECORDS[: len(found)]
        assert WINDOWS.get(name, promised) <= len(found) <= promised


@pytest.mark.parametrize(("promised", "batches"), [(150, 2), (200, 2), (140, 2), (250, 2)])
def test_batches_in_place(feeder: Feeder, promised: int, batches: int) -> None:
    """A batch with a surplus record is left out whole."""
    feeder.feed(0, tfrecords(LARGE), records=promised, steps=STEPS)
    dataset = PipeModeDataset("train", "TFRecord", batch_size=70)
    error, found = "", list[list[bytes]]()
    try:
        found.extend([record[:6] for record in batch] for batch in dataset.as_numpy_iterator())
    except tf.errors.DataLossError as problem:
        error = str(problem)
    names = [record[:6] for record in RECORDS]
    due = [names[:70], names[70:140], names[140:]]
    if promised == 200:
        assert (found, error) == (due, "")
    else:
        assert found == due[: len(found)]
        assert len(found) == batches or (promised > 200 and len(found) == 3)
        assert "records that the sidecar promised" in error


@pytest.mark.parametrize("name", ["plain", "torch", "torch, workers that share a FIFO"])
def test_a_fifo_that_begins_later_has_the_rest(feeder: Feeder, name: str) -> None:
    """A FIFO of `--resume`: the number is that of the epoch."""
    data, before = tfrecords(RECORDS), len(tfrecords(RECORDS[:40]))
    for promised in (200, 190):
        options: dict[str, Any] = {
            "records_skipped": 40,
            "bytes_skipped": before,
            "records": promised,
            "steps": STEPS,
        }
        feeder.feed(0 if promised == 200 else 1, data[before:], total=len(data), **options)
        found, error = read(READERS[name][0]())
        assert found == RECORDS[40 : 40 + len(found)]
        assert (len(found), MORE.format(190) in error) == ((160, False) if promised == 200 else (150, True))


@pytest.mark.parametrize("promised", [190, 210, 200])
def test_blocks_of_tokens(feeder: Feeder, promised: int) -> None:
    feeder.feed(0, b"".join(BLOCKS), records=promised, steps=STEPS)
    blocks = TokenReader("train", "uint16", length=4, batch_size=10)
    found, error = read(chain.from_iterable(blocks))
    assert found == BLOCKS[: min(promised, 200)]
    assert bool(error) == (promised != 200)


def test_records_of_another_format_are_too_many(feeder: Feeder) -> None:
    """Any bytes are lines, so only the number shows that the records are no lines."""
    order = {"digest": "d", "format": "fixed:7"}
    feeder.feed(0, b"ab\ncd\n\n" * 100, records=100, steps=STEPS, order=order)
    with pytest.raises(StreamError, match="this reader's format is not that of fixed:7"):
        list(PipeReader("train", "TextLine"))


def test_a_channel_whose_ranks_share_no_records_has_any_number(feeder: Feeder) -> None:
    feeder.feed(0, tfrecords(RECORDS))
    assert list(PipeReader("train", "TFRecord")) == RECORDS
    feeder.feed(1, np.zeros(30, "<u2").tobytes())
    assert len(list(TokenReader("train", "uint16", length=10))) == 3
