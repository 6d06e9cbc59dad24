"""`shuffle=` of `PipeModeDataset`: PipeReader's windows, and positions from which their order goes on."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from sidecar.job.resume import parse_saved
from streamer.errors import ChannelError
from streamer.formats import tfrecord
from streamer.readers import PipeReader, SkipPolicy, load_state
from streamer.readers.core.state import EpochState
from streamer.step_state import StepState
from tests.kit.late import LATE
from tests.readers.feeder import Feeder

if LATE:
    import tensorflow as tf

    from streamer.readers.tensorflow import PipeModeDataset, PipeModeDatasetException
    from streamer.readers.tensorflow.backup import StepBackup
    from tests.readers.keras_callbacks import Stop

RECORDS = [b"%d/" % number * (1 + number * 7 % 40) for number in range(600)]
LARGE = [b"%d/" % number + bytes(200_000) for number in range(40)]


def encoded(records: list[bytes]) -> bytes:
    return b"".join(map(tfrecord.encode, records))


def flat(records: Any) -> list[bytes]:
    return records.tolist() if hasattr(records, "tolist") else [records]


@pytest.mark.parametrize(
    ("records", "batch_size", "window", "stops"),
    [
        (RECORDS, None, 50, (1, 49, 50, 51, 337, 599)),
        (RECORDS, 7, 50, (1, 8, 50, 71)),
        (RECORDS, 100, 37, (1, 3, 5)),
        (RECORDS, 64, 700, (4, 9)),
        (LARGE, 20, 15, (1,)),
    ],
)
def test_a_position_goes_on_in_the_order_of_a_plain_reader(
    feeder: Feeder, records: list[bytes], batch_size: int | None, window: int, stops: tuple[int, ...]
) -> None:
    """The FIFO begins at its first byte, or where the sidecar begins with the position."""
    data = encoded(records)
    arguments: dict[str, Any] = {"epoch": 0, "shuffle": window, "seed": 3}
    feeder.feed(0, data)
    plain = PipeReader("train", "TFRecord", **arguments)
    due = list(plain)
    assert sorted(due) == sorted(records) != due
    # Killed inside a window and resumed, several times.
    found: list[bytes] = []
    position, before = None, 0
    for number, stop in enumerate((*stops, None)):
        offset = json.loads(position)["offset"] if position is not None and number % 2 else 0
        feed = feeder.feed(0, data[offset:], total=len(data), bytes_skipped=offset)
        first = {"start": position, "shuffle": window, "seed": 3} if position else arguments
        dataset = PipeModeDataset("train", "TFRecord", batch_size=batch_size, positions=True, **first)
        iterator = dataset.as_numpy_iterator()
        for element in itertools.islice(iterator, None if stop is None else stop - before):
            found += flat(element[0])
            position = element[1]
        before = stop or 0
        del iterator
        feed.join()
        saved = parse_saved(position.decode())["train"]  # type: ignore[union-attr] # set by the first element
        assert saved.epoch == (stop is None)
    assert found == due
    assert json.loads(position) == plain.state_dict()  # type: ignore[arg-type]


def test_skips_and_keys_stay_with_their_shuffled_records(feeder: Feeder) -> None:
    """A corrupt record has its place in the window, as in a plain reader."""
    frames = [bytearray(tfrecord.encode(record)) for record in RECORDS]
    half = sum(map(len, frames[:300]))
    feeder.list_keys([(half, "a"), (sum(map(len, frames)) - half, "b")])
    for corrupt in (False, True):
        if corrupt:
            frames[17][-6] ^= 1
        options: dict[str, Any] = {"shuffle": 50, "epoch": 0, "key": True}
        if corrupt:
            options["skip"] = SkipPolicy(records=1)
        data = b"".join(frames)
        feeder.feed(0, data)
        due = [(e.record, e.key.encode(), e.number) for e in PipeReader("train", "TFRecord", **options)]
        assert len(due) == 600 - corrupt
        feeder.feed(0, data)
        dataset = PipeModeDataset("train", "TFRecord", batch_size=70, **options)
        batches = [
            zip(each.record, each.key, each.number.tolist(), strict=True)
            for each in dataset.as_numpy_iterator()
        ]
        assert list(itertools.chain.from_iterable(batches)) == due


STEPS, SIZE = 10, 10
NUMBERS = [b"%d" % number for number in range(STEPS * SIZE)]
WINDOW: dict[str, Any] = {"shuffle": 35, "seed": 1}  # three steps


def serve(feeder: Feeder, epoch: int, step: int = 0) -> None:
    """Offer the epoch of the only rank from a step on."""
    before, data = encoded(NUMBERS[: step * SIZE]), encoded(NUMBERS[step * SIZE :])
    counts: dict[str, Any] = {"records": len(NUMBERS), "steps": STEPS, "records_skipped": step * SIZE}
    feeder.feed(
        epoch, data, channel="train-0", total=len(before) + len(data), bytes_skipped=len(before),
        order={"digest": "d"}, **counts,
    )  # fmt: skip


def test_the_state_of_steps_is_that_of_the_elements(feeder: Feeder) -> None:
    feeder.configure({"train-0": "Pipe"})
    options: dict[str, Any] = {"rank": 0, "batch_size": SIZE, "positions": True} | WINDOW
    serve(feeder, 0)
    late = PipeModeDataset("train", "TFRecord", **options)
    next(late.as_numpy_iterator())
    with pytest.raises(ChannelError, match="call step_state.. once before that"):
        late.step_state(1)
    EpochState(feeder.state_dir, "train-0").put(0)
    serve(feeder, 0)
    dataset = PipeModeDataset("train", "TFRecord", **options)
    assert dataset.step_state() == StepState("train", 0, 0, {"digest": "d"}).document()
    elements = list(dataset.as_numpy_iterator())
    states = [json.loads(position) for _, position in elements]
    assert [dataset.step_state(step + 1) for step in range(STEPS)] == states
    begins = [state.get("shuffle", {}).get("begin") for state in states]
    assert begins == [0, 0, None, 3, 3, None, 6, 6, None, None]
    # From a state inside a window, and from the step of one where no window begins in a whole epoch.
    serve(feeder, 0, 3)
    serve(feeder, 1)
    resumed = PipeModeDataset("train", "TFRecord", start=states[4], **options)
    due = [resumed.step_state(step) for step in range(1, 5 + STEPS + 1)]
    rest = list(itertools.chain(resumed.as_numpy_iterator(), resumed.as_numpy_iterator()))
    assert [batch.tolist() for batch, _ in rest[:5]] == [batch.tolist() for batch, _ in elements[5:]]
    assert due == [json.loads(position) for _, position in rest]
    other = StepState("train", 0, 4, {"digest": "d"}).document()
    serve(feeder, 0, 4)
    resumed = PipeModeDataset("train", "TFRecord", start=other, **options)
    due = [resumed.step_state(step + 1) for step in range(STEPS - 4)]
    assert due == [json.loads(position) for _, position in resumed.as_numpy_iterator()]
    assert [state.get("shuffle", {}).get("begin") for state in due] == [4, 4, None, 7, 7, None]


def parse(records: Any) -> Any:
    numbers = tf.reshape(tf.strings.to_number(records), [-1, 1])
    return numbers, 2 * numbers


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras writes weights
def test_keras_goes_on_inside_a_window(feeder: Feeder, tmp_path: Path) -> None:
    """Killed after batch 5, of which 4 were saved, training ends with the weights of one that was not."""

    def trained(directory: Path, stop_after: int | None = None) -> Any:
        options: dict[str, Any] = {"start": load_state(directory)} | WINDOW
        dataset = PipeModeDataset("train-0", "TFRecord", batch_size=SIZE, **options)
        model = tf.keras.Sequential(
            [tf.keras.Input([1]), tf.keras.layers.Dense(1, kernel_initializer="ones")]
        )
        model.compile(tf.keras.optimizers.SGD(1e-6, momentum=0.9), "mse")
        callbacks = [StepBackup(dataset, str(directory), save_every=2), Stop(stop_after)]
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(dataset.map(parse), callbacks=callbacks, verbose=0, shuffle=False)
        return [variable.numpy().tolist() for variable in model.variables]

    feeder.configure({"train-0": "Pipe"})
    serve(feeder, 0)
    whole = trained(tmp_path / "whole")
    EpochState(feeder.state_dir, "train-0").put(0)
    serve(feeder, 0)
    assert trained(tmp_path / "killed", stop_after=5) != whole
    state = load_state(tmp_path / "killed")
    assert state is not None
    assert (state["step"], state["shuffle"]["begin"]) == (4, 3)
    serve(feeder, 0, 3)
    assert trained(tmp_path / "killed") == whole


def test_arguments_and_positions_of_another_shuffle_are_refused(feeder: Feeder) -> None:
    bad: list[tuple[dict[str, Any], str]] = [({"shuffle": 0}, "1 or more"), ({"seed": 1}, "without shuffle")]
    for arguments, text in bad:
        with pytest.raises(PipeModeDatasetException, match=text):
            PipeModeDataset("train", "TFRecord", **arguments)
    feeder.feed(0, encoded(RECORDS))
    dataset = PipeModeDataset("train", "TFRecord", positions=True, shuffle=50)
    _, position = next(dataset.as_numpy_iterator())
    with pytest.raises(ValueError, match="and this reader has shuffle=51"):
        PipeModeDataset("train", "TFRecord", start=position, shuffle=51)
    with pytest.raises(ValueError, match="does not shuffle"):
        PipeModeDataset("train", "TFRecord", start=position)


def test_shuffled_padding_is_an_error(feeder: Feeder) -> None:
    feeder.feed(0, encoded(RECORDS[:20]), records=20, steps=2, padding=3)
    with pytest.raises(PipeModeDatasetException, match="read an evaluation without shuffle"):
        _ = PipeModeDataset("train", "TFRecord", shuffle=50).padding
