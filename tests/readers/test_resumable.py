"""`state_dict` in PyTorch: what the trainer has had is had, and the resumed run gives exactly the rest."""

from __future__ import annotations

import gc
import itertools
import json
from typing import Any

import pytest

from streamer.errors import ChannelError
from streamer.readers.core.state import EpochState
from tests.kit.late import LATE
from tests.readers import test_torch
from tests.readers.feeder import Feeder
from tests.readers.test_torch import ENCODE, FOUR
from tests.unit.test_tar import archive

if LATE:
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    from streamer.readers.loader import ResumableLoader
    from streamer.readers.torch import PipeIterableDataset
    from tests.readers import decoders

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("workers_of_torch"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata calls it
]

RECORDS = [b"record %d " % number * (number % 50) for number in range(8000)]
"""Two megabytes, and enough batches for a state in each of several loops."""


def encoded(record_format: str, records: list[bytes] = RECORDS) -> bytes:
    return test_torch.encoded(record_format, records)


def resumable(dataset: PipeIterableDataset, workers: int, **options: Any) -> ResumableLoader:
    if workers:
        options |= {"multiprocessing_context": "forkserver"}
    return ResumableLoader(dataset, num_workers=workers, **options)


def had(loader: ResumableLoader, count: int) -> tuple[list[Any], dict[str, Any]]:
    """The first elements of a loop, and the state after them as a file has it."""
    elements = list(itertools.islice(loader, count))
    return elements, json.loads(json.dumps(loader.state_dict()))


def flat(batches: Any) -> list[Any]:
    return [record for batch in batches for record in batch]


@pytest.mark.parametrize("record_format", list(ENCODE))
@pytest.mark.parametrize("count", [1, 700, len(RECORDS) - 1])
def test_a_dataset_alone(feeder: Feeder, record_format: str, count: int) -> None:
    left = feeder.feed(0, encoded(record_format))
    dataset = PipeIterableDataset("train", record_format)
    passing = iter(dataset)
    assert list(itertools.islice(passing, count)) == RECORDS[:count]
    state = json.loads(json.dumps(dataset.state_dict()))
    del passing
    left.join()
    again = PipeIterableDataset("train", record_format)
    again.load_state_dict(state)
    assert again.state_dict() == state
    for epoch in range(2):
        feeder.feed(epoch, encoded(record_format))
    assert list(again) == RECORDS[count:]
    assert again.state_dict()["channels"][0]["epoch"] == 1
    assert list(again) == RECORDS


@pytest.mark.parametrize("workers", [0, 2])
def test_keys_of_the_records_that_are_left(feeder: Feeder, workers: int) -> None:
    """The state says how many records of its object are before it; corrupt ones count."""
    objects = [RECORDS[first : first + 64] for first in range(0, len(RECORDS), 64)]
    sizes = [(sum(map(len, map(ENCODE["TFRecord"], each))), f"k{n}") for n, each in enumerate(objects)]
    due = [
        (record, f"k{n}", number, "b")
        for n, records in enumerate(objects)
        for number, record in enumerate(records)
    ]
    feeder.list_keys(sizes)
    left = feeder.feed(0, encoded("TFRecord"))

    def made() -> ResumableLoader:
        dataset = PipeIterableDataset("train", "TFRecord", batch_size=10, key=True)
        return resumable(dataset, workers)

    loader = made()
    first, state = had(loader, 7)
    assert sorted(map(tuple, flat(first)))[:1] == sorted(due)[:1]
    del loader
    gc.collect()
    left.join()
    again = made()
    again.load_state_dict(state)
    feeder.list_keys(sizes)
    feeder.feed(0, encoded("TFRecord"))
    rest = flat(again)
    assert sorted(map(tuple, flat(first) + rest)) == sorted(due)


def test_samples_of_tar_files(feeder: Feeder) -> None:
    members = [(f"{number:05}.bin", b"x" * (number * 7 % 3000)) for number in range(1500)]
    data = archive(members)
    left = feeder.feed(0, data)
    dataset = PipeIterableDataset("train", "WebDataset", batch_size=7)
    passing = iter(dataset)
    first = list(itertools.islice(passing, 150))
    state = dataset.state_dict()
    del passing
    left.join()
    offset = state["channels"][0]["offset"]
    assert offset > 0
    feeder.feed(0, data[offset:], total=len(data), bytes_skipped=offset)
    dataset.load_state_dict(state)
    assert [each["__key__"] for each in flat(first + list(dataset))] == [name[:5] for name, _ in members]


@pytest.mark.parametrize(("workers", "later"), [(0, 0), (2, 2), (3, 1), (1, 3)])
@pytest.mark.parametrize("from_there", [False, True], ids=["whole", "--resume"])
def test_workers_that_share_a_channel(feeder: Feeder, workers: int, later: int, from_there: bool) -> None:
    """However far they had read ahead, and with another number of them; whole batches, each once."""
    data = encoded("TFRecord")
    left = feeder.feed(0, data, digest="d")
    dataset = PipeIterableDataset("train", "TFRecord", batch_size=30)
    first, state = had(resumable(dataset, workers), 150)
    left.join()
    (position,) = state["channels"]
    assert position["digest"] == "d"
    offset = position["offset"] if from_there else 0
    feeder.feed(0, data[offset:], total=len(data), bytes_skipped=offset, digest="d")
    loader = resumable(PipeIterableDataset("train", "TFRecord", batch_size=30), later)
    loader.load_state_dict(state)
    rest = list(loader)
    assert sorted(flat(first + rest)) == sorted(RECORDS)
    assert sorted(map(len, first + rest)) == [len(RECORDS) % 30, *[30] * (len(RECORDS) // 30)]
    assert loader.state_dict()["channels"][0]["epoch"] == 1
    assert feeder.next_epoch() == 1


def test_one_interruption_after_the_other(feeder: Feeder) -> None:
    """A state of a resumed loop is one of the epoch, gaps and all."""
    found, state = [], None
    for _ in range(4):
        left = feeder.feed(0, encoded("TFRecord"))
        loader = resumable(PipeIterableDataset("train", "TFRecord", batch_size=10), 3)
        if state is not None:
            loader.load_state_dict(state)
        elements, state = had(loader, 150)
        found += elements
        left.join()
    feeder.feed(0, encoded("TFRecord"))
    loader = resumable(PipeIterableDataset("train", "TFRecord", batch_size=10), 2)
    assert state is not None
    loader.load_state_dict(state)
    assert sorted(flat(found + list(loader))) == sorted(RECORDS)


def test_more_channels_than_workers(four: Feeder) -> None:
    for channel in FOUR:
        lines = [b"%s %d" % (channel.encode(), number) for number in range(2000)]
        four.feed(0, encoded("TextLine", lines), channel=channel)
    loader = resumable(PipeIterableDataset(FOUR, "TextLine"), 2)
    first, state = had(loader, 3001)
    four.close()
    for channel in FOUR:
        lines = [b"%s %d" % (channel.encode(), number) for number in range(2000)]
        four.feed(0, encoded("TextLine", lines), channel=channel)
    again = resumable(PipeIterableDataset(FOUR, "TextLine"), 2)
    again.load_state_dict(state)
    assert sorted(first + list(again)) == sorted(
        b"%s %d" % (channel.encode(), number) for channel in FOUR for number in range(2000)
    )


def test_workers_that_stay(feeder: Feeder) -> None:
    """The state is used up by the first loop; between loops it is the next epoch's begin."""
    left = feeder.feed(0, encoded("TFRecord"))
    first, state = had(resumable(PipeIterableDataset("train", "TFRecord", batch_size=50), 2), 40)
    left.join()
    for epoch in range(2):
        feeder.feed(epoch, encoded("TFRecord"))
    loader = resumable(PipeIterableDataset("train", "TFRecord", batch_size=50), 2, persistent_workers=True)
    loader.load_state_dict(state)
    assert sorted(flat(first + list(loader))) == sorted(RECORDS)
    with pytest.raises(ValueError, match="persistent workers have already started"):
        loader.load_state_dict(state)
    assert sorted(flat(loader)) == sorted(RECORDS)
    assert loader.state_dict()["channels"][0]["epoch"] == 2


def test_batches_that_the_loader_makes(feeder: Feeder) -> None:
    left = feeder.feed(0, encoded("TFRecord"))
    dataset = PipeIterableDataset("train", "TFRecord", decode=decoders.length)
    first, state = had(resumable(dataset, 2, batch_size=25), 100)
    left.join()
    assert first[0].shape == (25,)
    feeder.feed(0, encoded("TFRecord"))
    loader = resumable(dataset, 2, batch_size=25)
    loader.load_state_dict(state)
    assert sorted(torch.cat(first + list(loader)).tolist()) == sorted(map(len, RECORDS))


def test_before_the_first_loop_the_state_is_the_next_epoch(feeder: Feeder) -> None:
    loader = resumable(PipeIterableDataset("train", "TFRecord"), 2)
    assert loader.state_dict()["channels"][0]["records"] == 0
    loader.load_state_dict(loader.state_dict())
    feeder.feed(0, encoded("TFRecord"))
    assert sorted(loader) == sorted(RECORDS)


@pytest.mark.parametrize("workers", [0, 2])
def test_another_plan_is_refused_unless_told(feeder: Feeder, workers: int) -> None:
    left = feeder.feed(0, encoded("TFRecord"), digest="one")
    first, state = had(resumable(PipeIterableDataset("train", "TFRecord", batch_size=9), workers), 20)
    left.join()
    left = feeder.feed(0, encoded("TFRecord"), digest="two")
    loader = resumable(PipeIterableDataset("train", "TFRecord", batch_size=9), workers)
    loader.load_state_dict(state)
    with pytest.raises(ChannelError, match="the objects or their order have"):
        list(loader)
    del loader
    gc.collect()  # the error's traceback holds its workers
    left.join()
    feeder.feed(0, encoded("TFRecord"), digest="two")
    loader = resumable(PipeIterableDataset("train", "TFRecord", batch_size=9), workers)
    loader.load_state_dict(state, anyway=True)
    assert sorted(flat(first + list(loader))) == sorted(RECORDS)


def test_what_a_dataset_cannot_tell(feeder: Feeder) -> None:
    """Its workers read, and not it; a state that says otherwise would lose what they hold."""
    dataset = PipeIterableDataset("train", "TFRecord")
    with pytest.raises(ChannelError, match="has not been iterated in this process"):
        dataset.state_dict()
    with pytest.raises(ValueError, match="the state is of channels validation, not train"):
        dataset.load_state_dict(ResumableLoader(PipeIterableDataset("validation", "RecordIO")).state_dict())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_torchdata(four: Feeder, workers: int) -> None:
    """It asks each worker for its state after every element, and gives each its own again."""

    def feed() -> None:
        for channel in FOUR:
            four.feed(0, encoded("TFRecord", RECORDS[:2000]), channel=channel)

    options: dict[str, Any] = {"batch_size": None, "num_workers": workers}
    if workers:
        options |= {"multiprocessing_context": "forkserver"}
    feed()
    loader = StatefulDataLoader(PipeIterableDataset(FOUR, "TFRecord", batch_size=10), **options)
    passing = iter(loader)
    first = list(itertools.islice(passing, 333))
    state = loader.state_dict()
    del passing, loader  # it keeps its iterator, whose workers keep the FIFOs
    gc.collect()
    four.close()
    feed()
    again = StatefulDataLoader(PipeIterableDataset(FOUR, "TFRecord", batch_size=10), **options)
    again.load_state_dict(state)
    assert sorted(flat(first + list(again))) == sorted(RECORDS[:2000] * 4)


def test_a_loader_of_torchdata_whose_workers_share_a_channel(feeder: Feeder) -> None:
    feeder.feed(0, encoded("TFRecord"))
    loader = StatefulDataLoader(
        PipeIterableDataset("train", "TFRecord"),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="forkserver",
    )
    with pytest.raises(ChannelError, match="use ResumableLoader"):
        list(loader)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [None, 600])
def test_the_same_batches_follow(feeder: Feeder, workers: int, shuffle: int | None) -> None:
    """Each worker with a FIFO, in another process later; in windows of shuffled records too."""
    names = ["train-0", "train-1"][: workers or 1]
    feeder.configure(dict.fromkeys(names, "Pipe"))
    data = {name: encoded("TFRecord", RECORDS[index::2]) for index, name in enumerate(names)}

    def run(state: Any, count: int | None) -> tuple[list[Any], dict[str, Any]]:
        feeds = []
        for name in names:
            EpochState(feeder.state_dir, name).put(0)
            at = 0
            for saved in state["channels"] if state else ():
                at = saved["offset"] if saved["channel"] == name else at
            total = len(data[name])
            feeds.append(feeder.feed(0, data[name][at:], channel=name, total=total, bytes_skipped=at))
        dataset = PipeIterableDataset(names, "TFRecord", batch_size=30, shuffle=shuffle)
        loader = resumable(dataset, workers)
        if state is not None:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
        elements, state = had(loader, count)  # type: ignore[arg-type] # None is all
        del loader, dataset
        gc.collect()
        for feed in feeds:
            feed.join()
        return elements, state

    due, _ = run(None, None)
    assert sorted(flat(due)) == sorted(record for index in range(len(names)) for record in RECORDS[index::2])
    found, state = run(None, 61)
    more, state = run(state, 20)
    assert found + more + run(state, None)[0] == due


def test_options_that_a_shuffle_excludes(feeder: Feeder) -> None:
    for options in ({"attributes": 2}, {"padding": True}):
        with pytest.raises(ValueError, match="shuffle"):
            PipeIterableDataset("train", "TFRecord", shuffle=9, **options)
    left = feeder.feed(0, encoded("TFRecord"))
    _, state = had(resumable(PipeIterableDataset("train", "TFRecord", batch_size=30), 2), 99)
    left.join()
    shuffled = PipeIterableDataset("train", "TFRecord", batch_size=30, shuffle=9)
    if state["ahead"]:  # which worker was first depends on timing
        with pytest.raises(ValueError, match="go on without shuffle"):
            shuffled.load_state_dict(state)
    with pytest.raises(ValueError, match="shuffle needs one worker for each FIFO"):
        list(resumable(shuffled, 2))
