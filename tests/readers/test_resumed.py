"""A resumed training from end to end: state, file, `penstock run --resume`, reader; in each framework."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamer.errors import ChannelError
from streamer.formats.tfrecord import encode
from streamer.readers.core.shuffle import permute
from tests.kit.late import LATE
from tests.kit.processes import Sidecar, job, penstock, write_job
from tests.kit.stub import S3Stub
from tests.kit.trailers import published_trailer

if LATE:
    import tensorflow as tf

    from streamer.readers.loader import ResumableLoader
    from streamer.readers.tensorflow import PipeModeDataset
    from streamer.readers.torch import PipeIterableDataset

RECORDS = [b"%d " % number * (number % 300) for number in range(8_000)]
"""Five megabytes, in three objects."""
SEEN = 6_000

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("workers_of_torch")]


class Begun:
    """Starts the sidecar of the job at `path`, with other credentials each time."""

    def __init__(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.started: list[Sidecar] = []
        self._monkeypatch = monkeypatch

    def __call__(self, *options: str) -> Sidecar:
        self._monkeypatch.setenv("AWS_ACCESS_KEY_ID", f"AKIASIDECAR{len(self.started)}")
        self.started.append(Sidecar(self.path, *options))
        self.started[-1].wait_for("ready")
        return self.started[-1]


@pytest.fixture
def begun(stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begun]:
    """Starts the sidecar of one job, again and again, killed at the test's end."""
    for part in range(3):
        stub.objects[f"b/train/{part}"] = b"".join(map(encode, RECORDS[part::3]))
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path / "ml"))
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/", PartSize="64KiB"))
    begin = Begun(path, monkeypatch)
    yield begin
    for each in begin.started:
        if each.process.poll() is None:
            each.process.kill()
        each.wait()


ORDER = [record for part in range(3) for record in RECORDS[part::3]]


def resume(begun: Begun, tmp_path: Path, state: dict[str, Any]) -> Sidecar:
    """A sidecar that goes on at a state saved in a file; it must ask for nothing before that position."""
    (tmp_path / "state.json").write_text(json.dumps(state))
    return begun("--resume", str(tmp_path / "state.json"))


def first_fetched(stub: S3Stub) -> int:
    """The byte of the epoch with which the first request of the second sidecar begins."""
    sizes = [len(stub.objects[f"b/train/{part}"]) for part in range(3)]
    get = next(get for get in stub.seen if "AKIASIDECAR1/" in (get.authorization or ""))
    return sum(sizes[: int(get.key[-1])]) + int(get.range[6:].split("-")[0])


def test_pytorch_with_two_workers(stub: S3Stub, begun: Begun, tmp_path: Path) -> None:
    def loader() -> ResumableLoader:
        dataset = PipeIterableDataset("train", "TFRecord", batch_size=50)
        return ResumableLoader(dataset, num_workers=2, multiprocessing_context="forkserver")

    started = begun()
    first = loader()
    batches = list(itertools.islice(first, SEEN // 50))
    state = first.state_dict()
    assert started.end() == 0
    started = resume(begun, tmp_path, state)
    again = loader()
    again.load_state_dict(json.loads((tmp_path / "state.json").read_text()))
    batches += again
    assert sorted(record for batch in batches for record in batch) == sorted(RECORDS)
    (position,) = state["channels"]
    trailer = published_trailer(tmp_path / "ml" / "input" / "data", "train", 0)
    assert (trailer.state, trailer.bytes_skipped) == ("complete", position["offset"])
    assert position["offset"] > 1_000_000
    assert first_fetched(stub) >= position["offset"]
    assert sorted(record for batch in again for record in batch) == sorted(RECORDS)
    assert started.end() == 0


@pytest.mark.parametrize("window", [None, 2050])
def test_tensorflow_with_a_checkpoint(stub: S3Stub, begun: Begun, tmp_path: Path, window: int | None) -> None:
    """The sidecar is killed; a shuffled epoch is left inside a window."""
    shuffle: dict[str, Any] = {} if window is None else {"shuffle": window, "seed": 5}

    def dataset(start: Any) -> Any:
        options: dict[str, Any] = {"batch_size": 100, "positions": True, "start": start}
        return PipeModeDataset("train", "TFRecord", **options, **shuffle).prefetch(8)

    def due(epoch: int) -> list[bytes]:
        windows = [ORDER[first : first + (window or 1)] for first in range(0, len(ORDER), window or 1)]
        for number, each in enumerate(windows):
            permute(each, 5, epoch, number * (window or 1))
        return list(itertools.chain.from_iterable(windows))

    started = begun()
    position = tf.Variable("", dtype=tf.string)
    got = []
    for records, after in dataset(position).take(SEEN // 100):
        got += records.numpy().tolist()
        position.assign(after)
    saved = tf.train.Checkpoint(position=position).save(str(tmp_path / "checkpoint"))
    started.process.kill()
    started.wait()

    restored = tf.Variable("", dtype=tf.string)
    tf.train.Checkpoint(position=restored).restore(saved)
    state = json.loads(restored.numpy())
    started = resume(begun, tmp_path, state)
    rest = dataset(restored)
    got += [record for records, _ in rest.as_numpy_iterator() for record in records]
    assert got == due(0)
    assert ("shuffle" in state) == (window is not None)
    assert first_fetched(stub) >= state["offset"] > 1_000_000
    assert [record for records, _ in rest.as_numpy_iterator() for record in records] == due(1)
    assert started.end() == 0


@pytest.mark.parametrize("anyway", [False, True])
def test_objects_that_have_changed_since(stub: S3Stub, begun: Begun, tmp_path: Path, anyway: bool) -> None:
    """Refused by the sidecar as it starts; if it is told, the reader must be told too."""
    started = begun()
    loader = ResumableLoader(PipeIterableDataset("train", "TFRecord", batch_size=50))
    list(itertools.islice(loader, 10))
    state = loader.state_dict()
    assert started.end() == 0
    stub.objects["b/train/3"] = encode(b"new")
    done = penstock("run", "-c", begun.path, "--resume", json.dumps(state))
    assert done.returncode == 2
    assert "saved under a plan" in done.stderr
    begun("--resume", json.dumps(state), "--resume-anyway")
    loader = ResumableLoader(PipeIterableDataset("train", "TFRecord", batch_size=50))
    loader.load_state_dict(state, anyway=anyway)
    if anyway:
        assert [record for batch in loader for record in batch] == [*ORDER[500:], b"new"]
    else:
        with pytest.raises(ChannelError, match="the objects or their order have"):
            list(loader)
