"""Wrappers that divide records among all processes, around data sets that have one process's part already."""

from __future__ import annotations

import itertools
import json
import os
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from streamer.errors import ChannelError
from streamer.formats import tfrecord
from streamer.readers import PipeReader
from tests.kit.late import LATE
from tests.readers.feeder import Feeder
from tests.readers.marks import WITH_WORKERS

if LATE:
    import torch.utils.data
    import webdataset
    from torch.utils.data import DataLoader, IterableDataset
    from torch.utils.data.datapipes.iter import IterableWrapper

    from streamer.readers.loader import ResumableLoader
    from streamer.readers.torch import PipeIterableDataset

pytestmark = WITH_WORKERS
RANKS = ["train-0", "train-1"]
RECORDS = [b"%06d" % number for number in range(400)]


@pytest.fixture
def ranks(feeder: Feeder) -> Feeder:
    """Two rank FIFOs and one plain channel, each offered once."""
    feeder.configure(dict.fromkeys([*RANKS, "plain"], "Pipe"))
    for channel, part in (("train-0", RECORDS[::2]), ("train-1", RECORDS[1::2]), ("plain", RECORDS)):
        feeder.feed(0, b"".join(map(tfrecord.encode, part)), channel=channel)
    return feeder


def standing(name: str, **fields: Any) -> Any:
    """Return what wraps a loader and has the name of a class of accelerate or datasets."""
    module, _, kind = name.rpartition(".")

    space: dict[str, Any] = {"__name__": module}
    exec("def over(self, inner):\n    yield from inner", space)
    return type(kind, (), {"__module__": module, "__qualname__": kind, "over": space["over"]} | fields)()


def dispatcher(index: int, processes: int = 2) -> Any:
    state = SimpleNamespace(num_processes=processes, process_index=index)
    return standing("accelerate.data_loader.DataLoaderDispatcher", state=state)


SHARDS = {
    "accelerate": ("accelerate.data_loader.IterableDatasetShard", {"num_processes": 2}, "dispatch_batches"),
    "transformers": (
        "transformers.trainer_pt_utils.IterableDatasetShard",
        {"num_processes": 2},
        "get_train_dataloader",
    ),
    "datasets": ("datasets.iterable_dataset.StepExamplesIterable", {"step": 2}, "split_dataset_by_node"),
}


@pytest.mark.parametrize("name", SHARDS)
@pytest.mark.usefixtures("ranks")
def test_what_shards_a_rank_again_is_refused(name: str) -> None:
    kind, fields, remedy = SHARDS[name]
    dataset = PipeIterableDataset(RANKS, "TFRecord", share=(0, 2))
    for inner in (
        dataset,
        DataLoader(dataset, batch_size=None),
        ResumableLoader(dataset),
        PipeReader("train-1", "TFRecord"),
        PipeIterableDataset("train-1", "TFRecord", share=(0, 1)),
    ):
        with pytest.raises(ChannelError, match=r"train-\d has this process's part of the records") as caught:
            list(standing(kind, **fields).over(inner))
        assert remedy in str(caught.value)
    assert list(standing(kind, **dict.fromkeys(fields, 1)).over(dataset)) == RECORDS[::2]
    assert list(standing(kind, **fields).over(PipeReader("plain", "TFRecord"))) == RECORDS


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.usefixtures("ranks")
def test_a_worker_is_refused_however_it_is_started(method: str) -> None:
    dataset = PipeIterableDataset(RANKS, "TFRecord", share=(1, 2))
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=method)
    kind, fields, _ = SHARDS["accelerate"]
    with pytest.raises(ChannelError, match="IterableDatasetShard would divide it among 2 processes"):
        list(standing(kind, **fields).over(loader))


@pytest.mark.usefixtures("ranks")
def test_torch_s_sharding_filter_is_refused() -> None:
    pipe = IterableWrapper(
        PipeIterableDataset(RANKS, "TFRecord", share=(0, 2)), deepcopy=False
    ).sharding_filter()
    torch.utils.data.graph_settings.apply_sharding(pipe, 2, 1)
    with pytest.raises(ChannelError, match="leave out sharding_filter"):
        list(pipe)


@pytest.mark.usefixtures("ranks")
def test_webdataset_s_split_by_node_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ChannelError, match="leave out split_by_node"):
        list(webdataset.split_by_node(iter(PipeReader("train-1", "TFRecord"))))


def test_a_host_s_part_is_divided_too(ranks: Feeder) -> None:
    path = os.path.join(ranks.config_dir, "inputdataconfig.json")
    with open(path) as file:
        channels = json.load(file)
    channels["plain"]["S3DistributionType"] = "ShardedByS3Key"
    with open(path, "w") as file:
        json.dump(channels, file)
    with open(os.path.join(ranks.config_dir, "resourceconfig.json"), "w") as file:
        json.dump({"current_host": "a", "hosts": ["a", "b"]}, file)
    with pytest.raises(ChannelError, match="DataLoaderDispatcher would divide it"):
        list(dispatcher(0).over(PipeIterableDataset("plain", "TFRecord", share=(0, 1))))


# Process 0 reads for all


@pytest.mark.parametrize(("method", "workers"), [(None, 0), ("fork", 2), ("spawn", 1)])
@pytest.mark.usefixtures("ranks")
def test_process_0_reads_the_fifos_of_all(method: str | None, workers: int) -> None:
    """And no other process opens one, in a worker neither."""
    options = {} if method is None else {"multiprocessing_context": method, "num_workers": workers}
    loaders = [
        DataLoader(PipeIterableDataset(RANKS, "TFRecord", share=(index, 2)), batch_size=None, **options)
        for index in range(2)
    ]
    assert list(dispatcher(1).over(loaders[1])) == []
    assert sorted(dispatcher(0).over(loaders[0])) == RECORDS


@pytest.mark.usefixtures("ranks")
def test_one_channel_is_read_by_process_0_alone() -> None:
    dataset = PipeIterableDataset("plain", "TFRecord", share=(0, 1))
    assert list(dispatcher(1).over(DataLoader(dataset, batch_size=None, num_workers=1))) == []
    assert list(dispatcher(0).over(DataLoader(dataset, batch_size=None, num_workers=1))) == RECORDS


@pytest.mark.usefixtures("ranks")
def test_ranks_of_other_hosts_cannot_be_read() -> None:
    with pytest.raises(ChannelError, match="among 4 processes"):
        list(dispatcher(0, 4).over(PipeIterableDataset(RANKS, "TFRecord", share=(0, 2))))
    with pytest.raises(ChannelError, match="train-0 has this process's part"):
        list(dispatcher(0).over(PipeIterableDataset("train-0", "TFRecord", share=(0, 1))))


def test_ranks_by_record_are_not_mixed(feeder: Feeder) -> None:
    """Their global batches have an order, which reading one FIFO after the other would change."""
    feeder.configure(dict.fromkeys(RANKS, "Pipe"))
    for channel in RANKS:
        feeder.feed(0, b"".join(map(tfrecord.encode, RECORDS)), channel=channel, records=400, steps=50)
    with pytest.raises(ChannelError, match="DataLoaderDispatcher would divide it"):
        list(dispatcher(0).over(PipeIterableDataset(RANKS, "TFRecord", share=(0, 2))))


@pytest.mark.usefixtures("ranks")
def test_a_pass_keeps_no_name_of_its_callers() -> None:
    """A frame asked for its names keeps a copy of them, with what its function deletes later."""

    class Held:
        pass

    held = Held()
    gone = weakref.ref(held)
    assert len(list(itertools.islice(PipeReader("plain", "TFRecord"), 3))) == 3
    assert len(list(itertools.islice(PipeIterableDataset(RANKS, "TFRecord", share=(0, 2)), 3))) == 3
    del held
    assert gone() is None


# Batches of batches


@pytest.mark.usefixtures("ranks")
def test_a_loader_that_makes_batches_of_batches_is_refused() -> None:
    dataset = PipeIterableDataset("plain", "TFRecord", batch_size=8)
    with pytest.raises(ValueError, match="give DataLoader batch_size=None"):
        list(DataLoader(dataset))
    with pytest.raises(ValueError, match="give DataLoader batch_size=None"):
        list(DataLoader(dataset, batch_size=4, num_workers=1))
    with pytest.raises(ValueError, match="give DataLoader batch_size=None"):
        ResumableLoader(dataset, batch_size=4)
    assert len(list(DataLoader(dataset, batch_size=2, collate_fn=list))) == 25


@pytest.mark.usefixtures("ranks")
def test_a_data_set_around_it_may_be_batched() -> None:
    class Flat(IterableDataset):  # type: ignore[misc] # torch is not followed by the checker
        def __iter__(self) -> Iterator[int]:
            for batch in PipeIterableDataset("plain", "TFRecord", batch_size=8):
                yield from map(int, batch)

    assert torch.cat(list(DataLoader(Flat(), batch_size=50))).tolist() == list(range(400))
