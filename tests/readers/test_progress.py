"""The elements that were received, in any order, and the elements that are left, without any process."""

from __future__ import annotations

import itertools
import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.readers.core.position import ReaderPosition
from streamer.readers.core.read_loop import missing
from streamer.readers.core.shuffle import NumberedRecords
from tests.kit.late import LATE

if LATE:
    from streamer.readers.torch.progress import (
        ChannelProgress,
        ElementOrigin,
        Progress,
        RecordGrouper,
        RecordRange,
        parse_state,
    )


def whole_epoch(epoch: int) -> ChannelProgress:
    return ChannelProgress(ReaderPosition("train", epoch))


def read(
    progress: ChannelProgress, batches: list[list[bytes]], unit: int
) -> list[tuple[list[bytes], RecordRange]]:
    """Elements of a stream of `batches` and their record ranges, as a reader of `progress` makes them."""
    units, number, offset = RecordGrouper(unit), 0, 0
    elements: list[tuple[list[bytes], RecordRange]] = []
    received = [(0, progress.position.records), *(each[:2] for each in progress.ahead)]
    for batch in batches:
        if offset >= progress.position.offset:
            block = NumberedRecords(batch, number, offset, 0)
            for begin, end in missing(number, len(batch), received):
                elements += units.add(block.part(begin, end))
        number += len(batch)
        offset += sum(map(len, batch))
    last = units.finish()
    return [*elements, last] if last else elements


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.integers(1, 9),
    st.lists(st.integers(0, 30), max_size=3),
    st.randoms(use_true_random=False),
)
def test_the_rest_is_what_was_not_received(
    sizes: list[int], unit: int, stops: list[int], random: Random
) -> None:
    """Over several interruptions: every record once, and elements of the same records as without them."""
    numbers = iter(range(sum(sizes)))
    batches = [[b"%04d" % next(numbers) for _ in range(size)] for size in sizes]
    whole = [records for records, _ in read(whole_epoch(3), batches, unit)]
    progress, received = Progress([whole_epoch(3)], unit), []
    for stop in [*stops, None]:
        state = json.loads(json.dumps(progress.state()))
        start = parse_state(state, unit, ["train"], anyway=False)["train"]
        progress = Progress([start], unit)
        elements = read(start, batches, unit)
        random.shuffle(elements)
        for records, cut in itertools.islice(elements, stop):
            received.append(records)
            progress.add(ElementOrigin("train", 3, "d", cut))
    assert sorted(received) == whole
    state = progress.state()
    assert state["ahead"] == {}
    assert state["channels"][0]["records"] == sum(sizes)
    progress.end_epochs()
    assert progress.state()["channels"] == [ReaderPosition("train", 4, digest="d").state()]


def test_gaps_need_the_unit_that_they_were_cut_with() -> None:
    progress = Progress([whole_epoch(0)], 2)
    (_, first), (_, second) = read(whole_epoch(0), [[b"1", b"2"], [b"3", b"4"]], 2)
    progress.add(ElementOrigin("train", 0, "", second))
    with pytest.raises(ValueError, match="gaps of 2 records, and an element has 3 now"):
        parse_state(progress.state(), 3, ["train"], anyway=False)
    progress.add(ElementOrigin("train", 0, "", first))
    assert parse_state(progress.state(), 3, ["train"], anyway=False)["train"].position.records == 4


def test_ranges_that_touch_are_one() -> None:
    """So a state does not grow with the epoch while one worker is slow."""
    progress = Progress([whole_epoch(0)], 1)
    elements = read(whole_epoch(0), [[b"%d" % number for number in range(100)]], 1)
    for _, numbers in elements[1:]:
        progress.add(ElementOrigin("train", 0, "", numbers))
    assert progress.state()["ahead"] == {"train": [[1, 100, 0, 100]]}


@pytest.mark.parametrize("change", [{"format": 2}, {"more": 1}, {"channels": [{"channel": "train"}]}])
def test_what_is_no_state(change: dict[str, int] | dict[str, list[dict[str, str]]]) -> None:
    state = Progress([whole_epoch(0)], 1).state()
    with pytest.raises(ValueError, match="the state is not what"):
        parse_state(state | change, 1, ["train"], anyway=False)
