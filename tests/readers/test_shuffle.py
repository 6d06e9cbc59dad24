"""`shuffle=`: a permutation in each window, the same after a resume, in every reader that has it."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sidecar.job.resume import parse_saved
from streamer.errors import ChannelError
from streamer.formats import tfrecord
from streamer.readers import PipeReader
from streamer.readers.core.shuffle import permute
from streamer.step_state import StepState
from tests.readers.feeder import Feed, Feeder

RECORDS = [b"%d/" % number * (1 + number * 7 % 40) for number in range(600)]
ORDER = {"digest": "d"}


def encoded(records: list[bytes]) -> bytes:
    return b"".join(map(tfrecord.encode, records))


def made(**arguments: Any) -> PipeReader:
    return PipeReader("train", "TFRecord", **({"seed": 3, "shuffle": 50, "epoch": 0} | arguments))


@given(
    sizes=st.lists(st.integers(0, 400), min_size=1, max_size=60),
    window=st.integers(1, 70),
    stops=st.sets(st.integers(1, 60), max_size=3),
    seed=st.integers(),
)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_resume_goes_on_in_the_same_order(
    feeder: Feeder, sizes: list[int], window: int, stops: set[int], seed: int
) -> None:
    """Left and resumed at any records, by the state as a file has it; each window is a permutation.

    The FIFO begins at its first byte, or where the sidecar begins with the state.
    """
    records = [b"%d/" % number + bytes(size) for number, size in enumerate(sizes)]
    data = encoded(records)

    def taken(state: Any, count: int | None) -> tuple[list[bytes], Any]:
        """Return records of a new reader that begins at `state`, and the state after them."""
        offset = 0 if state is None or seed % 2 else state["offset"]
        feed = feeder.feed(0, data[offset:], total=len(data), bytes_skipped=offset)
        reader = made(seed=seed, shuffle=window)
        if state is not None:
            reader.load_state_dict(json.loads(json.dumps(state)))
            assert reader.state_dict() == state
        rest = iter(reader)
        found, state = list(islice(rest, count)), reader.state_dict()
        del rest
        feed.join()
        return found, state

    due, state = taken(None, None)
    assert state["epoch"] == 1
    at, state, found = 0, None, []
    for stop in sorted(each for each in stops if each < len(records)):
        more, state = taken(state, stop - at)
        found += more
        at = stop
        assert parse_saved(json.dumps(state))["train"].offset == state["offset"]  # type: ignore[union-attr]
    assert found + taken(state, None)[0] == due
    permuted: list[bytes] = []
    for first in range(0, len(records), window):
        each = records[first : first + window]
        permute(each, seed, 0, first)
        permuted += each
    assert due == permuted


def test_another_epoch_has_another_order(feeder: Feeder) -> None:
    reader = made()
    orders = []
    for epoch in range(2):
        feeder.feed(epoch, encoded(RECORDS))
        orders.append([record for batch in reader.batches() for record in batch])
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(RECORDS)


def ranked(feeder: Feeder, records: list[bytes], steps: int, first: int = 0) -> Feed:
    """Offer the epoch of a rank from step `first` on."""
    per = len(records) // steps
    data, skipped = encoded(records), len(encoded(records[: first * per]))
    return feeder.feed(
        0,
        data[skipped:],
        channel="train-0",
        total=len(data),
        bytes_skipped=skipped,
        records_skipped=first * per,
        records=len(records),
        steps=steps,
        order=ORDER,
    )


def test_ranks_by_record_have_windows_of_steps(feeder: Feeder) -> None:
    """The state is that of the whole job; a sidecar with it begins at the window's first step."""
    feeder.configure({"train-0": "Pipe"})

    def taken(
        records: list[bytes], state: Any = None, count: int | None = None, shuffle: int = 47
    ) -> tuple[list[bytes], Any]:
        first = 0
        if state is not None:
            resumed = parse_saved(json.dumps([state, state]))["train"]
            assert isinstance(resumed, StepState)
            first = resumed.begin
        feed = ranked(feeder, records, 60, first)
        reader = PipeReader("train-0", "TFRecord", epoch=0, seed=1, shuffle=shuffle)
        if state is not None:
            reader.load_state_dict(state)
            assert reader.state_dict() == state
        rest = iter(reader)
        try:
            return list(islice(rest, count)), reader.state_dict()
        finally:
            del rest
            feed.join()

    due, state = taken(RECORDS)
    assert (state["epoch"], state["step"]) == (1, 0)
    for first in range(0, 600, 40):
        assert sorted(due[first : first + 40]) == sorted(RECORDS[first : first + 40])
    found, state = taken(RECORDS, count=95)
    assert found == due[:95]
    assert (state["step"], state["shuffle"]) == (9, {"records": 47, "seed": 1, "begin": 8, "batch": 10})
    assert taken(RECORDS, state)[0] == due[90:]
    found, again = taken(RECORDS, state, count=20)
    assert (found, again["step"]) == (due[90:110], 11)
    # At half as many ranks the window has records that this state has no count of.
    with pytest.raises(ChannelError, match="only the same number of ranks"):
        taken(RECORDS * 2, state)
    whole = taken(RECORDS, count=80)[1]
    assert whole.keys() == StepState("train", 0, 8, ORDER).document().keys()
    assert sorted(taken(RECORDS * 2, whole)[0]) == sorted((RECORDS * 2)[160:])
    # A window has one step at least.
    single, state = taken(RECORDS, count=15, shuffle=3)
    assert sorted(single[:10]) == sorted(RECORDS[:10])
    assert state == StepState("train", 0, 1, ORDER).document()


def test_states_of_another_shuffle_are_refused(feeder: Feeder) -> None:
    """Inside a window; after one, the records that were returned are the same in any order."""
    feeder.feed(0, encoded(RECORDS))
    reader = made()
    records = iter(reader)
    for _ in range(50):
        next(records)
    whole = reader.state_dict()
    next(records)
    state = reader.state_dict()
    assert state.keys() - whole.keys() == {"shuffle"}
    for other in ({"seed": 4}, {"shuffle": 60}):
        with pytest.raises(ValueError, match="and this reader has"):
            made(**other).load_state_dict(state)
        made(**other).load_state_dict(whole)
    with pytest.raises(ValueError, match="shuffle=50 and seed=3"):
        PipeReader("train", "TFRecord").load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"shuffle": 0}, "1 or more"), ({"shuffle": None}, "without shuffle"), ({"seed": "1"}, "an integer")],
)
def test_arguments_that_are_none(feeder: Feeder, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        made(**arguments)


@pytest.mark.parametrize("padding", [0, 3])
def test_shuffled_padding_is_an_error(feeder: Feeder, padding: int) -> None:
    feeder.feed(0, encoded(RECORDS[:20]), records=20, steps=2, padding=padding)
    reader = made()
    if padding:
        with pytest.raises(TypeError, match="read an evaluation without shuffle"):
            _ = reader.padding
    else:
        assert reader.padding == 0
    assert sorted(reader) == sorted(RECORDS[:20])
