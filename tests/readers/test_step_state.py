"""The state of a job whose ranks share a channel by record, in PyTorch and TensorFlow."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamer.errors import ChannelError
from streamer.formats import tfrecord
from streamer.formats.tfrecord import TFRecordReader
from streamer.readers import PipeReader, SkipPolicy, load_state, open_channel, rank_channels, save_state
from streamer.readers.core.position import RankSteps, ReaderPosition
from streamer.readers.core.read_loop import ReadLoop
from streamer.readers.core.record_spec import RecordSpec
from streamer.readers.core.start import reach_start
from streamer.step_state import StepState
from tests.kit.late import LATE
from tests.kit.processes import sidecar
from tests.kit.stub import S3Stub
from tests.readers.feeder import Feeder
from tests.sidecar.test_elastic import Elastic
from tests.sidecar.test_record_ranks import GLOBAL

if LATE:
    import torch.distributed.checkpoint as dcp
    from torch.utils.data import DataLoader
    from torchdata.stateful_dataloader import StatefulDataLoader

    from streamer.readers.checkpoint import CheckpointedLoader
    from streamer.readers.loader import ResumableLoader
    from streamer.readers.tensorflow import PipeModeDataset
    from streamer.readers.torch import PipeIterableDataset
    from streamer.readers.torch.progress import ChannelProgress, ElementOrigin, Progress, RecordRange

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("workers_of_torch"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata calls it
]


@pytest.fixture
def elastic(stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Elastic:
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path / "ml"))
    return Elastic(stub, tmp_path)


@contextmanager
def serving(path: str, state: Any = None) -> Iterator[None]:
    with sidecar(path, *(() if state is None else ("--resume", json.dumps(state)))) as running:
        running.wait_for("ready")
        yield
        running.process.kill()


def loader(workers: int, **options: Any) -> ResumableLoader:
    """A loader of the only process, which returns the global batches."""
    chosen: dict[str, Any] = {"channel": rank_channels("train"), "batch_size": GLOBAL} | options
    dataset = PipeIterableDataset(record_format="TFRecord", **chosen)
    context = "forkserver" if workers else None
    return ResumableLoader(dataset, num_workers=workers, multiprocessing_context=context)


def named(elements: Any, epoch: int = 0, first: int = 0) -> list[tuple[int, int, list[str]]]:
    names = [[record.rstrip(b"\0").decode() for record in element] for element in elements]
    return [(epoch, first + number, step) for number, step in enumerate(names)]


def test_pytorch_goes_on_with_another_number_of_workers(elastic: Elastic) -> None:
    """In every worker's turn; of the four workers three have no step left in the epoch."""
    found: list[Any] = []
    state: Any = None
    for workers, limit in ((2, 3), (2, 2), (4, None), (0, 1), (3, 3), (2, None)):
        epoch, step = (0, 0) if state is None else (state["epoch"], state["step"])
        with serving(elastic.job(1, Workers=max(1, workers)), state):
            again = loader(workers)
            if state is not None:
                again.load_state_dict(json.loads(json.dumps(state)))
                assert again.state_dict() == state
            found += named(itertools.islice(again, limit), epoch, step)
            state = again.state_dict()
    assert found == elastic.due
    assert (state["channel"], state["epoch"], state["step"]) == ("train", 2, 0)


def test_a_loader_begins_with_worker_0_in_the_pass_after_a_resumed_one(elastic: Elastic) -> None:
    """The state is loaded into the data set, from which a loader of torch takes it again in each pass."""
    with serving(elastic.job(1, Workers=2)):
        first = loader(2)
        found = named(itertools.islice(first, 3))
        state = first.state_dict()
    with serving(elastic.job(1, Workers=2), state):
        dataset = PipeIterableDataset(rank_channels("train"), "TFRecord", batch_size=GLOBAL)
        dataset.load_state_dict(state)
        again = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="forkserver")
        assert found + named(again, 0, 3) + named(again, 1) == elastic.due


@pytest.mark.parametrize(
    ("ranks", "workers", "options", "error"),
    [
        ((1, 2), 2, {"batch_size": 6}, "has 6 records of train, where a rank has 12 in a global batch"),
        ((1, 2), 2, {"shuffle": GLOBAL}, "shuffle would mix the global batches of train"),
        ((1, 2), 2, {"channel": ["train-1", "train-0"]}, "not the turn of FIFO 1 of the 2 of a rank of"),
        ((1, 2), 0, {}, "1 process of a DataLoader would read 2 FIFOs of train, of which each rank has 2"),
        ((1, 2), 3, {}, "3 processes of a DataLoader would read 2 FIFOs of train, of which each rank has 2"),
        ((2, 1), 2, {}, "2 processes of a DataLoader would read 2 FIFOs of train, of which each rank has 1"),
    ],
)
def test_a_loader_that_would_mix_global_batches_is_refused(
    elastic: Elastic, ranks: tuple[int, int], workers: int, options: dict[str, Any], error: str
) -> None:
    """Also where it would wait for ever: the FIFOs of a stream are read at the same time."""
    path = elastic.job(ranks[0], Workers=ranks[1], Fetch="auto")
    with serving(path), pytest.raises(ChannelError, match=error):
        list(loader(workers, **options))


@pytest.mark.parametrize("fetch", ["auto", "separately"])
def test_a_worker_without_a_step_has_an_empty_fifo(elastic: Elastic, fetch: str) -> None:
    """Two steps and three workers, in two epochs; the state goes on in the middle of the second one."""
    keys = {"GlobalBatch": 3 * GLOBAL, "Workers": 3, "Fetch": fetch}
    with serving(elastic.job(1, **keys)):
        again = loader(3, batch_size=3 * GLOBAL)
        found = [*named(again), *named(itertools.islice(again, 1), 1)]
        state = again.state_dict()
    assert (state["epoch"], state["step"]) == (1, 1)
    with serving(elastic.job(1, **keys), state):
        again = loader(3, batch_size=3 * GLOBAL)
        again.load_state_dict(state)
        found += named(again, 1, 1)
    assert [name for *_, step in found for name in step] == [
        name for *_, step in elastic.due for name in step
    ]


@pytest.mark.parametrize("taken", [3, 5])
def test_the_workers_of_torchdata_s_loader_go_on_after_their_last_steps(elastic: Elastic, taken: int) -> None:
    """Each worker has a state of its own, and the loader the worker whose turn it is."""

    def stateful() -> StatefulDataLoader:
        dataset = PipeIterableDataset(rank_channels("train"), "TFRecord", batch_size=GLOBAL)
        context = "forkserver"
        return StatefulDataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=context)

    with serving(elastic.job(1, Workers=2)):
        first = stateful()
        found = named(itertools.islice(first, taken))
        state = first.state_dict()
    with serving(elastic.job(1, Workers=2)):
        again = stateful()
        again.load_state_dict(state)
        found += named(again, 0, taken)
    assert found == [each for each in elastic.due if each[0] == 0]


def test_workers_go_on_in_turn_where_a_resumed_sidecar_does(elastic: Elastic) -> None:
    """They load no state."""
    with serving(elastic.job(1)):
        first = loader(0)
        found = named(itertools.islice(first, 3))
        state = first.state_dict()
    with serving(elastic.job(1, Workers=2), state):
        again = loader(2)
        assert found + named(again, 0, 3) + named(again, 1) == elastic.due


def test_workers_that_share_a_fifo_load_a_state_of_steps(elastic: Elastic) -> None:
    """Their own state is one of bytes, for the same ranks."""
    with serving(elastic.job(2)):
        readers = [PipeReader(name, "TFRecord") for name in rank_channels("train")]
        for reader in readers:
            list(itertools.islice(reader, 6 * 2 + 5))
        states = [reader.state_dict() for reader in readers]
    assert states[0] == states[1]
    rest = [name for epoch, step, names in elastic.due if epoch == 0 and step >= 2 for name in names]
    with serving(elastic.job(1), states[0]):
        again = loader(2)
        again.load_state_dict(states[0])
        elements = iter(again)
        found = named(itertools.islice(elements, 1))
        state = again.state_dict()
        assert state["channels"][0].keys() >= {"offset", "digest"}
        found += named(elements)
    assert sorted(name for _, _, names in found for name in names) == sorted(rest)


def test_tensorflow_goes_on_at_another_number_of_ranks(elastic: Elastic) -> None:
    def dataset(name: str, size: int, start: Any = None) -> Any:
        return PipeModeDataset(name, "TFRecord", batch_size=size, positions=True, start=start)

    found, position = [], ""
    with serving(elastic.job(2)):
        ranks = zip(*(dataset(name, 6) for name in rank_channels("train")), strict=True)
        for shares in itertools.islice(ranks, 4):
            found.append([record for records, _ in shares for record in records.numpy()])
            (position,) = {after.numpy() for _, after in shares}
    state = json.loads(position)
    with serving(elastic.job(1), state):
        for records, after in dataset("train-0", 4, position):
            found.append(records.numpy().tolist())
            position = after.numpy()
    assert json.loads(position) == state | {"epoch": 1, "step": 0}
    names = [record.rstrip(b"\0").decode() for records in found for record in records]
    assert names == [name for epoch, _, batch in elastic.due if epoch == 0 for name in batch]


RANK = RankSteps("train", 5, 4, 0, {"digest": "d"})


def received(*records: int, workers: int = 1, start: StepState | None = None) -> Progress:
    """Some rank FIFOs in one process, with the number of records that the trainer has had."""
    names = [f"train-{number}" for number in range(len(records))]
    progress = Progress([ChannelProgress(ReaderPosition(name, 0, start=start)) for name in names], 2)
    for number, (name, count) in enumerate(zip(names, records, strict=True)):
        if count:
            rank = replace(RANK, workers=workers, worker=number % workers)
            first = rank.before(start.step) if start else 0
            progress.add(ElementOrigin(name, 0, "r", RecordRange(first, count, 0, count), rank))
    return progress


@pytest.mark.parametrize(
    ("records", "place"),
    [
        ((4, 4), (0, 1)),
        ((4, 2), (0, 0)),
        ((2, 0), (0, 0)),
        ((8, 4), (0, 1)),
        ((20, 20), (1, 0)),
        ((20, 16), (0, 4)),
    ],
)
def test_the_step_of_a_process_is_that_of_its_last_rank(
    records: tuple[int, ...], place: tuple[int, int]
) -> None:
    assert received(*records).state() == StepState("train", *place, RANK.order).document()


@pytest.mark.parametrize(
    ("records", "place"),
    [
        ((4, 0), (0, 1)),
        ((4, 2), (0, 1)),
        ((6, 4), (0, 2)),
        ((8, 4), (0, 3)),
        ((10, 8), (0, 4)),
        ((12, 8), (1, 0)),
        ((4, 4, 0), (0, 2)),
        ((8, 4, 4), (0, 4)),
        ((8, 8, 4), (1, 0)),
    ],
)
def test_the_workers_of_a_rank_take_turns(records: tuple[int, ...], place: tuple[int, int]) -> None:
    """Five steps; also when a FIFO was not read yet."""
    workers = len(records)
    assert received(*records, workers=workers).state() == StepState("train", *place, RANK.order).document()


def test_the_workers_of_a_rank_go_on_in_turn() -> None:
    """From step 3 on, which FIFO 1 has."""
    start = StepState("train", 0, 3, RANK.order)
    for records, step in (((0, 0), 3), ((0, 8), 4)):
        assert received(*records, workers=2, start=start).state() == replace(start, step=step).document()


@pytest.mark.parametrize("records", [(0, 2), (6, 2), (12, 4)])
def test_workers_out_of_turn_have_no_state(records: tuple[int, ...]) -> None:
    with pytest.raises(ChannelError, match="at different steps, .*so there is no state"):
        received(*records, workers=2).state()


@pytest.mark.parametrize("records", [(6, 0), (10, 4), (20, 12)])
def test_ranks_of_one_process_at_different_steps_have_no_state(records: tuple[int, ...]) -> None:
    with pytest.raises(ChannelError, match="at different steps, .*so there is no state"):
        received(*records).state()


def test_a_fifo_that_begins_at_a_step_counts_from_there() -> None:
    progress = received(0)
    resumed = replace(RANK, first=8)
    progress.add(ElementOrigin("train-0", 0, "r", RecordRange(8, 12, 0, 4), resumed))
    assert progress.state() == StepState("train", 0, 3, RANK.order).document()


def test_a_reader_that_left_out_corrupt_records_has_no_steps(elastic: Elastic, stub: S3Stub) -> None:
    data = bytearray(stub.objects["b/train/2"])
    data[-20] ^= 1
    stub.objects["b/train/2"] = bytes(data)
    with serving(elastic.job(1)), open_channel("train-0") as stream:
        position = reach_start(stream, "train-0")
        reader = TFRecordReader(stream, max_corrupted_records_to_skip=1)
        refused = 0
        for _ in ReadLoop(stream, reader, RecordSpec("TFRecord"), position).lists():
            if position.skipped:
                refused += 1
                with pytest.raises(ChannelError, match="1 corrupt record was left out and its steps"):
                    position.before(0).state()
        assert refused
        assert (position.before(0).state()["epoch"], position.before(0).state()["step"]) == (1, 0)


def test_a_reader_that_skips_a_corrupt_record_has_all_its_steps(elastic: Elastic, stub: S3Stub) -> None:
    data = bytearray(stub.objects["b/train/2"])
    data[-20] ^= 1
    stub.objects["b/train/2"] = bytes(data)
    with serving(elastic.job(2)):
        for name in rank_channels("train"):
            reader = PipeReader(name, "TFRecord", skip=SkipPolicy(records=1))
            assert len(list(reader)) == len(reader) == 36
            assert (reader.state_dict()["epoch"], reader.state_dict()["step"]) == (1, 0)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_corrupt_record_before_the_step_of_a_state_moves_no_step(feeder: Feeder, resumed: bool) -> None:
    """Such a reader counted on to a later record. With --resume the FIFO begins at the step."""
    records = [tfrecord.encode(b"%d" % number) for number in range(8)]
    records[1] = records[1][:-1] + b"?"
    skipped = 4 if resumed else 0
    order: dict[str, Any] = {"records": 8, "steps": 2, "order": RANK.order, "records_skipped": skipped}
    feeder.configure({"train-0": "Pipe"})
    before, data = b"".join(records[:skipped]), b"".join(records[skipped:])
    total = len(before) + len(data)
    feeder.feed(0, data, channel="train-0", bytes_skipped=len(before), total=total, **order)
    state = StepState("train", 0, 1, RANK.order).document()
    with open_channel("train-0") as stream:
        position = reach_start(stream, "train-0", ReaderPosition.of(state, "train-0"))
        reader = TFRecordReader(stream, max_corrupted_records_to_skip=1)
        batches = ReadLoop(stream, reader, RecordSpec("TFRecord"), position).lists()
        if resumed:
            assert list(itertools.chain.from_iterable(batches)) == [b"4", b"5", b"6", b"7"]
        else:
            with pytest.raises(ChannelError, match="train-0_0 has corrupt records before or near the step"):
                list(batches)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_of_torch_distributed_has_the_state_of_the_job(feeder: Feeder, tmp_path: Path) -> None:
    """Loading is into a loader that has read nothing, before and after its epoch is offered."""
    records = b"".join(tfrecord.encode(b"%d" % number) for number in range(8))
    feeder.configure({"train-0": "Pipe", "train": "Pipe"})
    counts: dict[str, Any] = {"records": 8, "steps": 2, "order": RANK.order}
    feeder.feed(0, records, channel="train-0", **counts)
    saved = ResumableLoader(PipeIterableDataset("train-0", "TFRecord", batch_size=4))
    assert len(saved) == 2
    batches = iter(saved)
    next(batches)
    path = str(tmp_path / "checkpoint")
    dcp.save({"data": CheckpointedLoader(saved)}, checkpoint_id=path)
    assert list(batches) == [[b"4", b"5", b"6", b"7"]]

    feeder.feed(0, records, channel="train-0", **counts)
    loaded = ResumableLoader(PipeIterableDataset("train-0", "TFRecord", batch_size=4))
    dcp.load({"data": CheckpointedLoader(loaded)}, checkpoint_id=path)
    assert loaded.state_dict() == StepState("train", 0, 1, RANK.order).document()
    assert list(loaded) == [[b"4", b"5", b"6", b"7"]]

    feeder.feed(0, records)
    other = ResumableLoader(PipeIterableDataset("train", "TFRecord", batch_size=4))
    with pytest.raises(ChannelError, match="has no state of steps: divide its channel by record"):
        CheckpointedLoader(other).state_dict()


def test_the_file_of_a_state(tmp_path: Path) -> None:
    assert load_state(tmp_path) is None
    save_state(tmp_path, {"epoch": 1})
    save_state(f"{tmp_path}/new.json", {"epoch": 2})
    assert load_state(tmp_path / "penstock-state.json") == {"epoch": 1}
    assert load_state(tmp_path / "new.json") == {"epoch": 2}
    assert sorted(os.listdir(tmp_path)) == ["new.json", "penstock-state.json"]
    (tmp_path / "new.json").write_text("[]")
    with pytest.raises(ValueError, match="new.json has list, not one state"):
        load_state(tmp_path / "new.json")
    (tmp_path / "new.json").write_text("")
    with pytest.raises(ValueError, match="new.json is not JSON"):
        load_state(tmp_path / "new.json")
    with pytest.raises(ValueError, match="s3://b/state.json is no path"):
        save_state("s3://b/state.json", {})


def test_shuffled_batches_go_on_after_a_kill(elastic: Elastic) -> None:
    """Its batches are the same, from the window's first step on."""

    def taken(state: Any, count: int | None) -> tuple[list[Any], Any]:
        with serving(elastic.job(1), state):
            loading = loader(1, batch_size=GLOBAL // 2, shuffle=GLOBAL * 2)
            if state is not None:
                loading.load_state_dict(json.loads(json.dumps(state)))
            return list(itertools.islice(loading, count)), loading.state_dict()

    due, _ = taken(None, None)
    found, state = taken(None, 2 * 5 + 1)  # five steps, and half of one
    assert (state["step"], state["shuffle"]["begin"]) == (5, 4)
    assert found[:10] + taken(state, None)[0] == due
