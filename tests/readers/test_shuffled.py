"""`ShuffledReader`: a permutation in each window, the same after a resume, and bounded memory."""

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
from streamer.readers import PipeReader, ShuffledReader
from streamer.readers.core.shuffled import RECORD_COST, permute
from streamer.step_state import StepState
from tests.readers.feeder import Feed, Feeder

RECORDS = [b"%d/" % number * (1 + number * 7 % 40) for number in range(600)]
ORDER = {"digest": "d"}


def encoded(records: list[bytes]) -> bytes:
    return b"".join(map(tfrecord.encode, records))


def made(feeder: Feeder, **arguments: Any) -> ShuffledReader:
    return ShuffledReader("train", "TFRecord", **({"seed": 3, "window": 5000, "epoch": 0} | arguments))


@given(
    sizes=st.lists(st.integers(0, 400), min_size=1, max_size=60),
    window=st.integers(1, 3000),
    stops=st.sets(st.integers(1, 60), max_size=3),
    seed=st.integers(),
)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_resume_goes_on_in_the_same_order(
    feeder: Feeder, sizes: list[int], window: int, stops: set[int], seed: int
) -> None:
    """Left and resumed at any records, by the state as a file has it; each window is a permutation."""
    records = [b"%d/" % number + bytes(size) for number, size in enumerate(sizes)]

    def taken(state: Any, count: int | None) -> tuple[list[bytes], Any]:
        """Return records of a new reader that begins at `state`, and the state after them."""
        feed = feeder.feed(0, encoded(records))
        reader = made(feeder, seed=seed, window=window)
        if state is not None:
            reader.load_state_dict(json.loads(json.dumps(state)))
            assert reader.state_dict() == state
        rest = iter(reader)
        found, state = list(islice(rest, count)), reader.state_dict()
        del rest
        feed.join()
        return found, state

    due, state = taken(None, None)
    assert state["channels"][0]["epoch"] == 1
    at, state, found = 0, None, []
    for stop in sorted(each for each in stops if each < len(records)):
        more, state = taken(state, stop - at)
        found += more
        at = stop
    assert found + taken(state, None)[0] == due
    windows: list[list[bytes]] = [[]]
    for record in records:
        windows[-1].append(record)
        if sum(RECORD_COST + len(each) for each in windows[-1]) >= window:
            windows.append([])
    permuted: list[bytes] = []
    for each in windows:
        first = len(permuted)
        permute(each, seed, 0, first)
        permuted += each[::-1]
    assert due == permuted


def test_another_epoch_has_another_order(feeder: Feeder) -> None:
    reader = made(feeder)
    orders = []
    for epoch in range(2):
        feeder.feed(epoch, encoded(RECORDS))
        orders.append(list(reader))
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(RECORDS)


def ranked(feeder: Feeder, records: list[bytes], steps: int) -> Feed:
    return feeder.feed(0, encoded(records), channel="train-0", records=len(records), steps=steps, order=ORDER)


def test_ranks_by_record_have_windows_of_steps(feeder: Feeder) -> None:
    """The state is that of the whole job at the window's first step, and of so many records after it."""
    feeder.configure({"train-0": "Pipe"})

    def taken(records: list[bytes], state: Any = None, count: int | None = None) -> tuple[list[bytes], Any]:
        feed = ranked(feeder, records, 60)
        reader = ShuffledReader("train-0", "TFRecord", seed=1, steps=4, epoch=0)
        if state is not None:
            reader.load_state_dict(state)
        rest = iter(reader)
        try:
            return list(islice(rest, count)), reader.state_dict()
        finally:
            del rest
            feed.join()

    due, _ = taken(RECORDS)
    for first in range(0, 600, 40):
        assert sorted(due[first : first + 40]) == sorted(RECORDS[first : first + 40])
    found, state = taken(RECORDS, count=95)
    assert found == due[:95]
    assert (state["channels"][0]["step"], state["shuffle"]["returned"]) == (8, 15)
    assert taken(RECORDS, state)[0] == due[95:]
    resumed = parse_saved(json.dumps([state, state]))["train"]
    assert isinstance(resumed, StepState)
    assert resumed.step == 8
    # At half as many ranks the window has records that this state does not know of.
    with pytest.raises(ChannelError, match="only the same number of ranks"):
        taken(RECORDS * 2, state)
    whole = taken(RECORDS, count=80)[1]
    assert whole["shuffle"]["returned"] == 0
    assert sorted(taken(RECORDS * 2, whole)[0]) == sorted((RECORDS * 2)[160:])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({}, "give steps"), ({"steps": 60, "window": 1000}, "has more than 1000 bytes; lower steps")],
)
def test_windows_of_ranks_are_bounded(feeder: Feeder, arguments: dict[str, Any], text: str) -> None:
    feeder.configure({"train-0": "Pipe"})
    ranked(feeder, RECORDS, 60)
    with pytest.raises(ChannelError, match=text):
        list(ShuffledReader("train-0", "TFRecord", seed=1, epoch=0, **arguments))


def test_steps_are_for_ranks(feeder: Feeder) -> None:
    feeder.feed(0, encoded(RECORDS))
    with pytest.raises(ChannelError, match="leave steps out"):
        list(made(feeder, steps=2))


def test_states_of_other_arguments_are_refused(feeder: Feeder) -> None:
    feeder.feed(0, encoded(RECORDS))
    reader = made(feeder)
    next(iter(reader))
    state = reader.state_dict()
    with pytest.raises(TypeError, match="one by one"):
        reader.batches()
    for other in ({"seed": 4}, {"window": 6000}):
        with pytest.raises(ValueError, match="and this reader has"):
            made(feeder, **other).load_state_dict(state)
    with pytest.raises(ValueError, match="is not what PipeReader"):
        PipeReader("train", "TFRecord").load_state_dict(state)


@pytest.mark.parametrize("padding", [0, 3])
def test_shuffled_padding_is_an_error(feeder: Feeder, padding: int) -> None:
    feeder.feed(0, encoded(RECORDS[:20]), records=20, steps=2, padding=padding)
    reader = made(feeder)
    if padding:
        with pytest.raises(TypeError, match="read an evaluation by a PipeReader"):
            _ = reader.padding
    else:
        assert reader.padding == 0
    assert sorted(reader) == sorted(RECORDS[:20])
