"""`PipeIterableDataset` skips corrupt records: each once, in a worker or without, and after a resume."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest

from streamer.errors import CorruptRecord
from streamer.formats import tfrecord
from streamer.readers import SkipPolicy
from streamer.readers.core.shuffle import NumberedRecords
from streamer.readers.core.skipping import SkippedRecord
from tests.kit.late import LATE
from tests.readers.marks import WITH_WORKERS
from tests.readers.test_record_keys import damaged, objects
from tests.readers.test_skipping import FRAMES, ORDER, RECORDS, lines, spoilt
from tests.unit.test_tar import archive

if LATE:
    from torch.utils.data import DataLoader

    from streamer.readers.loader import ResumableLoader
    from streamer.readers.torch import PipeIterableDataset
    from streamer.readers.torch.progress import RecordGrouper

if TYPE_CHECKING:
    from pathlib import Path

    from tests.readers.feeder import Feeder

pytestmark = WITH_WORKERS

PAYLOADS = [b"%06d" % number * 50 for number in range(20_000)]
"""Six megabytes: several turns of each worker."""
BAD = {0, 1, 2, 3500, 3501, *range(7000, 7060), 19_999}
BROKEN, BORDER = 12_000, 17_000
"""The header that is damaged, and the first record of the next object: its rest has several windows."""
GOOD = [PAYLOADS[n] for n in range(20_000) if n not in BAD and not BROKEN <= n < BORDER]


def offer(feeder: Feeder) -> None:
    frames = [
        damaged(frame, header=number == BROKEN) if number in BAD or number == BROKEN else frame
        for number, frame in enumerate(map(tfrecord.encode, PAYLOADS))
    ]
    data, keys = objects(frames[:5000], frames[5000:BORDER], frames[BORDER:])
    feeder.list_keys(keys)
    feeder.feed(0, data)


def load(dataset: PipeIterableDataset, workers: int) -> Any:
    context = {"multiprocessing_context": "forkserver"} if workers else {}
    return DataLoader(dataset, batch_size=None, num_workers=workers, **context)


def resumable(dataset: PipeIterableDataset, workers: int) -> ResumableLoader:
    context: dict[str, Any] = {"multiprocessing_context": "forkserver"} if workers else {}
    return ResumableLoader(dataset, num_workers=workers, **context)


def flat(batches: Any, *, key: bool = False) -> list[bytes]:
    return [each.record if key else each for batch in batches for each in batch]


@pytest.mark.parametrize("key", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_each_bad_record_is_listed_once_and_batches_are_full(
    feeder: Feeder, tmp_path: Path, workers: int, *, key: bool
) -> None:
    offer(feeder)
    skip = SkipPolicy(records=len(BAD), objects=1, quarantine=tmp_path / "bad")
    dataset = PipeIterableDataset("train", "TFRecord", batch_size=7, skip=skip, key=key)
    batches = list(load(dataset, workers))
    records = flat(batches, key=key)
    assert records == GOOD
    short = [len(batch) for batch in batches if len(batch) != 7]
    assert short == ([len(GOOD) % 7] if len(GOOD) % 7 else [])
    found = lines(tmp_path / "bad")
    assert sorted(each["offset"] for each in found) == sorted(
        number * len(tfrecord.encode(PAYLOADS[0])) for number in {*BAD, BROKEN}
    )
    numbers = {(each["key"], each["record"]) for each in found}
    assert {("k0", 0), ("k0", 3500), ("k1", 2000), ("k1", 7000), ("k2", 2999)} <= numbers


@pytest.mark.parametrize(
    ("workers", "later", "count"),
    [
        *[(0, 0, count) for count in (0, 1, 900, 1500, 2000)],
        *[(1, 1, count) for count in (900, 2000)],
        (1, 0, 1500),
    ],
)
def test_a_resumed_loader_returns_exactly_the_rest(
    feeder: Feeder, workers: int, later: int, count: int
) -> None:
    skip = SkipPolicy(records=len(BAD), objects=1)

    def made(number: int) -> Any:
        offer(feeder)
        return resumable(PipeIterableDataset("train", "TFRecord", batch_size=7, skip=skip), number)

    first = made(workers)
    batches = iter(first)
    before = flat(itertools.islice(batches, count))
    state = json.loads(json.dumps(first.state_dict()))
    flat(batches)
    again = made(later)
    again.load_state_dict(state)
    assert sorted(before + flat(again)) == GOOD


@pytest.mark.parametrize("workers", [0, 1])
def test_the_budget_is_that_of_an_epoch(feeder: Feeder, workers: int) -> None:
    offer(feeder)
    skip = SkipPolicy(records=len(BAD) - 1, objects=1)
    with pytest.raises(CorruptRecord, match="has more corrupt records than skip allows"):
        list(load(PipeIterableDataset("train", "TFRecord", batch_size=7, skip=skip), workers))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_ranks_by_record_have_all_their_steps(feeder: Feeder, workers: int, batch_size: int | None) -> None:
    feeder.configure({"train-0": "Pipe"})
    data = b"".join(spoilt({0: False, 1: False, 5: False}, FRAMES[:8]))
    feeder.feed(0, data, channel="train-0", **ORDER)
    dataset = PipeIterableDataset("train-0", "TFRecord", batch_size=batch_size, skip=SkipPolicy(records=3))
    loader = resumable(dataset, workers)
    elements = list(loader)
    assert len(elements) == len(dataset) == (8 if batch_size is None else 4)
    records = elements if batch_size is None else flat(elements)
    assert sorted(records) == [RECORDS[at] for at in (2, 2, 2, 3, 4, 4, 6, 7)]
    assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == (1, 0)


def test_workers_that_share_a_fifo_are_refused(feeder: Feeder) -> None:
    feeder.feed(0, b"".join(FRAMES[:8]))
    dataset = PipeIterableDataset("train", "TFRecord", skip=SkipPolicy(records=3))
    with pytest.raises(ValueError, match="2 workers share train, and skip needs one worker for each FIFO"):
        list(load(dataset, 2))
    with pytest.raises(ValueError, match="give DataLoader no more workers than channels"):
        list(resumable(dataset, 2))


@pytest.mark.parametrize("short", [True, False])
def test_a_gap_of_a_state_without_skip_may_end_with_a_short_element(*, short: bool) -> None:
    units, bad = RecordGrouper(2, short=short), SkippedRecord(0, "damaged")
    blocks = [NumberedRecords([b"a", bad], 0, 0, 0), NumberedRecords([bad, b"c", b"d", bad], 4, 0, 4)]
    found = [(unit, tuple(at[:2])) for block in blocks for unit, at in units.add(block, skips=True)]
    assert found == [([b"a", bad], (0, 2))] * short + [([bad, b"c", b"d"], (4, 7))]
    assert units.finish(skips=True) is None


def test_a_damaged_archive_is_left_at_its_end(feeder: Feeder) -> None:
    archives = [archive([(f"{each}/{n}.cls", b"%d" % n) for n in range(20)]) for each in "abc"]
    broken = bytearray(archives[1])
    broken[10 * 1024 + 150] ^= 1
    cut = archives[1][: 10 * 1024 + 700]
    for epoch, middle in enumerate((bytes(broken), cut)):
        stream = [archives[0], middle, archives[2]]
        feeder.list_keys([(len(each), f"k{number}") for number, each in enumerate(stream)], epoch=epoch)
        feeder.feed(epoch, b"".join(stream))
        dataset = PipeIterableDataset("train", "WebDataset", skip=SkipPolicy(objects=1), key=True)
        found = [each.record["__key__"] for each in dataset]
        # A sample is whole when the next header has come, so the one before the damage is lost too.
        due = [f"a/{n}" for n in range(20)] + [f"b/{n}" for n in range(9 + epoch)]
        assert found == due + [f"c/{n}" for n in range(20)]


def test_samples_of_several_records_cannot_lose_one(feeder: Feeder) -> None:
    with pytest.raises(ValueError, match="skip cannot be used with attributes"):
        PipeIterableDataset("train", "RecordIO", attributes=2, skip=SkipPolicy(records=1))
