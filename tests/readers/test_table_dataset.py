"""`TableIterableDataset`: the state inside an object, and objects that are left out, in workers too."""

from __future__ import annotations

import gc
import json
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from sidecar.job.resume import parse_saved
from streamer.errors import CorruptRecord
from streamer.readers import SkipPolicy
from streamer.readers.core.state import EpochState
from tests.kit.late import LATE
from tests.readers.marks import WITH_WORKERS
from tests.readers.test_skipping import lines
from tests.readers.test_table_reader import wrapped
from tests.readers.test_table_skipping import BAD, feed, numbers, plain, table

if LATE:
    from streamer.readers.loader import ResumableLoader
    from streamer.readers.table_dataset import TableIterableDataset
    from streamer.readers.torch import PipeIterableDataset
    from tests.readers.decoders import as_it_is

if TYPE_CHECKING:
    from pathlib import Path

    from tests.readers.feeder import Feeder

pytestmark = WITH_WORKERS
EMPTY = plain(table(0, 0))
OBJECTS = [plain(table(0)), EMPTY, plain(table(100)), plain(table(200)), EMPTY, plain(table(300))]


@pytest.mark.parametrize(("fifos", "workers"), [(1, 0), (2, 2), (1, 2)])
@pytest.mark.parametrize("damaged", [False, True])
def test_the_rest_of_the_rows_follows(
    feeder: Feeder, tmp_path: Path, fifos: int, workers: int, damaged: bool
) -> None:
    """The batches stay and keep their order, unless workers share a FIFO; then each row comes once."""
    names = ["train-0", "train-1"][:fifos]
    feeder.configure(dict.fromkeys(names, "Pipe"))
    objects = {
        name: [BAD, *OBJECTS[index::2], BAD] if damaged else OBJECTS[index::fifos]
        for index, name in enumerate(names)
    }
    skip = SkipPolicy(objects=2, quarantine=tmp_path / "bad") if damaged else None

    def run(state: Any, count: int | None) -> tuple[list[Any], dict[str, Any]]:
        for name in names:
            EpochState(feeder.state_dir, name).put(0)
            at = parse_saved(json.dumps(state))[name].offset if state else 0  # type: ignore[union-attr]
            data = wrapped(*objects[name])
            feeder.list_keys(
                [(len(wrapped(each)), f"k{number}") for number, each in enumerate(objects[name])],
                channel=name,
            )
            feeder.feed(0, data[at:], channel=name, total=len(data), bytes_skipped=at)
        dataset = TableIterableDataset(names, batch_rows=30, skip=skip)
        context = "forkserver" if workers else None
        loader = ResumableLoader(
            dataset, num_workers=workers, multiprocessing_context=context, collate_fn=as_it_is
        )
        if state is not None:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
        batches = list(islice(loader, count))
        state = json.loads(json.dumps(loader.state_dict()))
        del loader, dataset
        gc.collect()
        feeder.close()
        return batches, state

    if damaged and workers > fifos:
        with pytest.raises(ValueError, match="skip needs one worker for each FIFO"):
            run(None, None)
        return
    due, _ = run(None, None)
    first, state = run(None, 3)
    assert state["rows"], "the state is inside an object"
    second, state = run(state, 2)
    rest, state = run(state, None)
    assert "rows" not in state
    assert all(saved["epoch"] == 1 for saved in state["channels"])
    if workers == fifos or not workers:
        assert [batch.to_pylist() for batch in first + second + rest] == [batch.to_pylist() for batch in due]
    every = [
        each for name in names for content in objects[name] if content != BAD for each in rows_of(content)
    ]
    assert sorted(numbers(first + second + rest)) == sorted(every)
    if damaged:
        assert {line["record"] for line in lines(tmp_path / "bad")} >= {0}


def rows_of(content: bytes) -> list[int]:
    return [*pa.parquet.read_table(pa.BufferReader(content))["n"].to_pylist()]


def test_errors_of_tables(feeder: Feeder) -> None:
    feed(feeder, OBJECTS[0], BAD, keys=False)
    dataset = TableIterableDataset("train", batch_rows=30)
    batches = iter(dataset)
    assert numbers(islice(batches, 1)) == list(range(30))
    with pytest.raises(ValueError, match="load it into a TableIterableDataset"):
        PipeIterableDataset("train", "RecordIO").load_state_dict(dataset.state_dict())
    with pytest.raises(CorruptRecord, match="object 1 of epoch 0 of channel train"):
        list(batches)
    with pytest.raises(TypeError, match="number of batches of tables is unknown"):
        len(dataset)
    with pytest.raises(ValueError, match="give objects only"):
        TableIterableDataset("train", skip=SkipPolicy(records=1))
    with pytest.raises(ValueError, match="must be 1 or more"):
        TableIterableDataset("train", max_object_bytes=0)
