"""What was had, in whatever order, and its complement: the marks of elements without any process."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.readers.core.position import ReaderPosition
from streamer.readers.torch.progress import Mark, Progress, RecordGrouper, Start, starts_of


def passed(start, batches, unit):
    """Elements and their spans of a stream of `batches`, read as a reader does it that begins at `start`."""
    units, number, offset, found = RecordGrouper(unit), 0, 0, []
    for batch in batches:
        if offset >= start.place.offset:
            for block in start.blocks(batch, number, offset):
                found += units.add(block)
        number += len(batch)
        offset += sum(map(len, batch))
    last = units.finish()
    return [*found, last] if last else found


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.integers(1, 9),
    st.lists(st.integers(0, 30), max_size=3),
    st.randoms(use_true_random=False),
)
def test_whatever_was_had_the_rest_is_the_rest(sizes, unit, stops, random):
    """Over several interruptions: every record once, and elements of the same records as without them."""
    numbers = iter(range(sum(sizes)))
    batches = [[b"%04d" % next(numbers) for _ in range(size)] for size in sizes]
    whole = [records for records, _ in passed(Start(ReaderPosition("train", 3)), batches, unit)]
    progress, had = Progress([Start(ReaderPosition("train", 3))], unit), []
    for stop in [*stops, None]:
        state = json.loads(json.dumps(progress.state()))
        start = starts_of(state, unit, anyway=False)["train"]
        progress = Progress([start], unit)
        elements = passed(start, batches, unit)
        random.shuffle(elements)
        for records, span in itertools.islice(elements, stop):
            had.append(records)
            progress.note(Mark("train", 3, "d", span))
    assert sorted(had) == whole
    state = progress.state()
    assert state["ahead"] == {}
    assert state["channels"][0]["records"] == sum(sizes)
    progress.all_ended()
    assert progress.state()["channels"] == [ReaderPosition("train", 4, digest="d").state()]


def test_gaps_need_the_unit_that_they_were_cut_with():
    progress = Progress([Start(ReaderPosition("train", 0))], 2)
    (_, first), (_, second) = passed(Start(ReaderPosition("train", 0)), [[b"1", b"2"], [b"3", b"4"]], 2)
    progress.note(Mark("train", 0, "", second))
    with pytest.raises(ValueError, match="gaps of 2 records, and elements are of 3 now"):
        starts_of(progress.state(), 3, anyway=False)
    progress.note(Mark("train", 0, "", first))
    assert starts_of(progress.state(), 3, anyway=False)["train"].place.records == 4


def test_spans_that_touch_are_one():
    """So a state does not grow with the epoch while one worker is slow."""
    progress = Progress([Start(ReaderPosition("train", 0))], 1)
    elements = passed(Start(ReaderPosition("train", 0)), [[b"%d" % number for number in range(100)]], 1)
    for _, span in elements[1:]:
        progress.note(Mark("train", 0, "", span))
    assert progress.state()["ahead"] == {"train": [[1, 100, 0, 100]]}


@pytest.mark.parametrize("change", [{"format": 2}, {"more": 1}, {"channels": [{"channel": "train"}]}])
def test_what_is_no_state(change):
    state = Progress([Start(ReaderPosition("train", 0))], 1).state()
    with pytest.raises(ValueError, match="not what state_dict"):
        starts_of(state | change, 1, anyway=False)
