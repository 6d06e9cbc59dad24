"""Blocks with a token beyond the vocabulary are replaced by the block before, within a budget."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from streamer.errors import ChannelError, CorruptRecord
from streamer.readers import SkipPolicy
from streamer.readers.token_blocks import ARRAY_BYTES
from streamer.readers.tokens import TokenReader
from tests.readers.test_skipping import lines
from tests.readers.test_tokens import tokens, windows

if TYPE_CHECKING:
    from pathlib import Path

    from tests.readers.feeder import Feeder

LENGTH = 100
WRONG = 60_000


def reader(records: int = 9, **options: Any) -> TokenReader:
    skip = SkipPolicy(records=records, quarantine=options.pop("quarantine", None))
    return TokenReader("train", "uint16", length=LENGTH, vocabulary=50_000, epoch=0, skip=skip, **options)


def rows(arrays: Any) -> list[list[int]]:
    return [row.tolist() for array in arrays for row in np.atleast_2d(array)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("batch_size", [None, 8])
def test_the_block_before_takes_the_place(
    feeder: Feeder, tmp_path: Path, overlap: bool, batch_size: int | None
) -> None:
    """At the start, side by side, at the end, and first in the second array; a state after any array."""
    second = ARRAY_BYTES // (2 * LENGTH * (batch_size or 1)) * (batch_size or 1)
    count = second + 20
    data = tokens(count * LENGTH + overlap)
    bad = [0, 7, 8, second, count - 1]
    expected = windows(data, LENGTH, overlap)
    for place in bad:
        data[place * LENGTH + 50] = WRONG
    for place, source in zip(bad, (1, 6, 6, second - 1, count - 2), strict=True):
        expected[place] = expected[source]
    starts = [0, 3 * LENGTH * 2]
    feeder.list_keys([(starts[1], "a"), (data.nbytes - starts[1], "b")])
    feeder.feed(0, data.tobytes())
    first = reader(overlap=overlap, batch_size=batch_size, quarantine=tmp_path / "bad")
    states, arrays = [], []
    for array in first:
        arrays.append(array)
        states.append(first.state_dict())
    assert all(array.flags.writeable for array in arrays)
    assert rows(arrays) == expected
    assert first.skipped.records == len(bad)
    assert [(line["key"], line["record"], line["offset"]) for line in lines(tmp_path / "bad")] == [
        ("b" if place else "a", place - 3 if place else 0, place * LENGTH * 2) for place in bad
    ]
    step = batch_size or 1
    for at in (0, 8, 9, second // step - 1, second // step):
        if at >= len(states):
            continue
        feeder.feed(0, data.tobytes())
        again = reader(overlap=overlap, batch_size=batch_size)
        again.load_state_dict(json.loads(json.dumps(states[at])))
        begin, due = (at + 1) * step, expected[(at + 1) * step :]
        if begin in bad and due:  # no block before it was read
            due = [expected[begin + 1], *due[1:]]
        assert rows(again) == due


def test_a_token_that_blocks_share_counts_for_both(feeder: Feeder) -> None:
    data = tokens(5 * LENGTH + 1)
    expected = windows(data, LENGTH, 1)
    data[2 * LENGTH] = WRONG
    feeder.feed(0, data.tobytes())
    shared = reader(overlap=True)
    assert rows(shared) == [expected[each] for each in (0, 0, 0, 3, 4)]
    assert shared.skipped.records == 2


def test_over_the_budget_the_blocks_before_are_returned(feeder: Feeder) -> None:
    data = tokens(10 * LENGTH)
    expected = windows(data, LENGTH, 0)
    data[[3 * LENGTH, 6 * LENGTH + 5]] = WRONG
    feeder.feed(0, data.tobytes())
    got: list[Any] = []
    text = rf"token {WRONG} at offset 1210 of .* than skip allows; skipped before: 1 of 1 record"
    with pytest.raises(CorruptRecord, match=text):
        for array in reader(1):
            got.append(array)
    assert rows(got) == [expected[each] for each in (0, 1, 2, 2, 4, 5)]


def test_a_caller_that_writes_into_a_block_does_not_change_a_later_one(feeder: Feeder) -> None:
    count = ARRAY_BYTES // (2 * LENGTH) + 1
    data = tokens(count * LENGTH)
    expected = windows(data, LENGTH, 0)
    data[-1] = WRONG
    feeder.feed(0, data.tobytes())
    last = None
    for array in reader():
        last = array.tolist()
        array[:] = 0
    assert last == expected[-2]


def test_without_a_good_block_there_is_an_error(feeder: Feeder) -> None:
    feeder.feed(0, np.full(3 * LENGTH, WRONG, "uint16").tobytes())
    with pytest.raises(CorruptRecord, match="the 3 blocks since reading began .* so no block can take"):
        list(reader())
    feeder.feed(0, b"")
    assert list(reader()) == []


def test_argument_errors(feeder: Feeder, tmp_path: Path) -> None:
    for vocabulary, skip in ((None, SkipPolicy(records=1)), (9, SkipPolicy(records=1, objects=1))):
        with pytest.raises(ValueError, match="skip of TokenReader replaces blocks"):
            TokenReader("train", "uint16", length=4, vocabulary=vocabulary, skip=skip)
    with pytest.raises(ChannelError, match="cannot write the quarantine list"):
        reader(quarantine=tmp_path / "no" / "file")
