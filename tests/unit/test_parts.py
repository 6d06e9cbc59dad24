"""Parts of several ranges, and what is told of their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from streamer.plan import Arrangement, ObjectRef, Part, Plan, Segment, cut
from streamer.plan.parts import FEW, RANGE_COST

PLANS = st.builds(
    lambda sizes, wrap: Plan.of(
        [ObjectRef("b", f"k{number}", size, "e") for number, size in enumerate(sizes)],
        Arrangement(wrap=wrap),
    ),
    st.lists(st.integers(0, 300), min_size=1, max_size=30),
    st.booleans(),
)


def stream(items: Sequence[Segment | bytes]) -> list[tuple[str, int] | int]:
    """Every byte of the stream: the object and offset it comes from, or the value of a literal."""
    found: list[tuple[str, int] | int] = []
    for item in items:
        if isinstance(item, bytes):
            found += item
        else:
            found += [(item.object.key, offset) for offset in range(item.start, item.end)]
    return found


def whole(parts: Sequence[Part]) -> list[tuple[str, int] | int]:
    return [byte for part in parts for byte in stream(part.items)]


@given(
    PLANS,
    st.integers(1, 200),
    st.tuples(st.integers(0, 900), st.integers(1, 500)),
    st.integers(0, 900),
    st.data(),
)
def test_parts_have_the_bytes_of_their_ranges(
    plan: Plan, size: int, limits: tuple[int, int], skip: int, data: st.DataObject
) -> None:
    due = whole(list(cut(plan.segments(0), part_size=lambda: size, epoch=0)))[skip:]
    few, many = limits[0] + 3 * RANGE_COST, limits[1] + 5 * RANGE_COST
    parts = list(
        cut(plan.segments(0), part_size=lambda: size, epoch=0, skip=skip, together=lambda: (few, many))
    )
    assert whole(parts) == due
    if parts:
        assert [b - a for a, b in pairwise([*(part.offset for part in parts), skip + len(due)])] == [
            part.size for part in parts
        ]
    for part in parts:
        ranges = [item for item in part.items if isinstance(item, Segment)]
        assert (part.requests, part.body) == (len(ranges), sum(map(len, ranges)))
        cost = part.body + part.requests * RANGE_COST
        assert part.requests <= 1 or cost <= (few if part.requests <= FEW else many)
        bytes_of_part = stream(part.items)
        first = data.draw(st.integers(0, part.size))
        assert stream(part.rest(first)) == bytes_of_part[first:]
        ends = [end for end, byte in enumerate(bytes_of_part, 1) if is_last(byte, ranges)]
        assert [end for end, _ in part.ends()] == ends
        for at, byte in enumerate(bytes_of_part):
            ref, offset = part.at(at)
            assert byte == (ref.key, offset) or (isinstance(byte, int) and 0 <= offset <= ref.size)
            item, place = part.item_at(at)
            assert stream([item])[place] == byte


def is_last(byte: tuple[str, int] | int, ranges: list[Segment]) -> bool:
    """Whether the byte is the last one of an object."""
    return any(byte == (each.object.key, each.object.size - 1) for each in ranges)


def test_ranges_share_a_part_up_to_its_limits() -> None:
    refs = [ObjectRef("b", str(number), 100, "e") for number in range(30)]
    segments = [Segment(ref, 0, 100) for ref in refs]
    for few, many, most in ((0, 0, 1), (3, 3, 3), (8, 3, 8), (20, 20, 20), (3, 20, 3)):
        limits = partial(tuple[int, int], (few * (100 + RANGE_COST), many * (100 + RANGE_COST)))
        parts = list(cut(segments, part_size=lambda: 100, epoch=0, together=limits))
        assert parts[0].requests == most
        assert sum(part.requests for part in parts) == 30
