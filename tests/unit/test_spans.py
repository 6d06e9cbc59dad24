"""Spans: consecutive parts as one part."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from streamer.plan import Arrangement, ObjectRef, Part, Plan, Span, cut, gathered
from streamer.plan.parts import FEW

PLANS = st.builds(
    lambda sizes, wrap: Plan.of(
        [ObjectRef("b", f"k{number}", size, "e") for number, size in enumerate(sizes)],
        Arrangement(wrap=wrap),
    ),
    st.lists(st.integers(0, 300), min_size=1, max_size=30),
    st.booleans(),
)


def stream(parts: list[Part]) -> list[tuple[str, int] | int]:
    """Every byte of the stream: the object and offset it comes from, or the value of a literal."""
    found: list[tuple[str, int] | int] = []
    for part in parts:
        found += part.leading
        found += [(part.object.key, offset) for offset in range(part.start, part.end)]
        found += part.trailing
    return found


def parts_of(plan: Plan, size: int) -> list[Part]:
    return list(cut(plan.segments(0), part_size=lambda: size, epoch=0))


@given(PLANS, st.integers(1, 200), st.integers(1, 500), st.integers(0, 900), st.data())
def test_spans_have_the_bytes_of_their_parts(
    plan: Plan, size: int, span: int, of_few: int, data: st.DataObject
) -> None:
    parts = parts_of(plan, size)
    found = [part for part in gathered(parts, span, of_few=lambda: of_few) if part is not None]
    assert [len(part) for part in found] == [
        b - a for a, b in pairwise([*(p.offset for p in found), sum(map(len, parts))])
    ]
    flat: list[Part] = []
    for part in found:
        flat += part.parts if isinstance(part, Span) else [part]
    assert flat == parts
    assert stream(flat) == stream(parts)
    for part in found:
        if isinstance(part, Span):
            most = max(span, of_few) if len(part.parts) <= FEW else span
            assert len(part) <= most
            first = data.draw(st.integers(0, len(part)))
            assert stream(part.rest(first)) == stream(list(part.parts))[first:]
            ends = [len(part) - after for after, _ in part.ends()]
            assert ends == [
                sum(map(len, part.parts[: index + 1])) - len(each.trailing)
                for index, each in enumerate(part.parts)
                if each.ends_object
            ]
            for at, byte in enumerate(stream(list(part.parts))):
                ref, offset = part.at(at)
                assert byte == (ref.key, offset) or (isinstance(byte, int) and 0 <= offset <= ref.size)


@given(PLANS, st.integers(1, 200))
def test_a_pause_of_the_plan_is_passed_on(plan: Plan, span: int) -> None:
    parts: list[Part | None] = [*parts_of(plan, 100), None, *parts_of(plan, 100)]
    found = list(gathered(iter(parts), span))
    at = found.index(None)
    assert sum(len(part) for part in found[:at] if part) == sum(len(part) for part in found[at:] if part)
