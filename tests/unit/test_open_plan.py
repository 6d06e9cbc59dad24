"""Plans that grow: whatever the runs, the plan is that of the whole listing, and its digests tell how far."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors import SourceError
from streamer.plan import (
    Arrangement,
    Entries,
    Growth,
    ObjectRef,
    Part,
    Plan,
    Position,
    ResumePoint,
    Shard,
    cut,
)
from streamer.plan import growth as growing
from streamer.plan.digest import parse_partial
from streamer.relay.fetch.prefetcher import all_epochs

sizes = st.lists(st.sampled_from([0, 1, 5, 12, 100]), max_size=12)
arrangements = st.builds(
    Arrangement,
    wrap=st.booleans(),
    shard=st.sampled_from([Shard(), Shard(0, 2), Shard(1, 2), Shard(2, 5)]),
)


def refs(found: list[int], *, tag: str = "e") -> list[ObjectRef]:
    return [ObjectRef("b", f"{number:03}", size, tag) for number, size in enumerate(found)]


def grow(growth: Growth, arrangement: Arrangement, found: list[ObjectRef]) -> None:
    run = arrangement.entries()
    for ref in found:
        run.add(ref)
    for _ in growth.add(run):
        pass


def opened(arrangement: Arrangement) -> tuple[Plan, Growth]:
    entries = arrangement.entries()
    growth = Growth(entries)
    return Plan(entries, arrangement, growth=growth), growth


@given(sizes, st.lists(st.integers(0, 12)), arrangements, st.integers(1, 3), st.integers(1, 40))
def test_any_runs_make_the_plan_of_the_whole_listing(
    found: list[int], borders: list[int], arrangement: Arrangement, ranks: int, part: int
) -> None:
    objects = refs(found)
    whole = Plan.of(objects, arrangement)
    plan, growth = opened(arrangement)
    plans = {plan: whole} | dict(zip(plan.ranks(ranks), whole.ranks(ranks), strict=True))
    batches: list[str] = []
    parts = {each: all_epochs(each, lambda: part, on_batch=lambda: batches.append("")) for each in plans}
    got: dict[Plan, list[Part]] = {each: [] for each in plans}

    def draw() -> None:
        for each, known in parts.items():
            while (drawn := next(known, None)) is not None and drawn.epoch == 0:
                got[each].append(drawn)

    at = 0
    for border in sorted(borders):
        grow(growth, arrangement, objects[at:border])
        at = max(at, min(border, len(objects)))
        draw()
        assert plan.open
        for each in plans:
            covered = parse_partial(each.digest)
            assert covered is not None
            assert covered[0] == at
            begun = Plan.of(objects[:at], arrangement)
            due = dict(zip(plans, [begun, *begun.ranks(ranks)], strict=True))[each].digest
            assert covered[1] == due
            with pytest.raises(ValueError, match="open"):
                each.total_bytes(0)
    grow(growth, arrangement, objects[at:])
    growth.close()
    draw()
    for each, same in plans.items():
        assert (each.digest, each.total_bytes(0), each.objects(0)) == (
            same.digest,
            same.total_bytes(0),
            same.objects(0),
        )
        assert list(each.segments(1)) == list(same.segments(1))
        assert "".join(map(_text, got[each])) == "".join(
            map(_text, cut(same.segments(0), part_size=lambda: part, epoch=0))
        )
        offset = 0
        for drawn in got[each]:
            assert drawn.offset == offset
            offset += drawn.size


def _text(part: Part) -> str:
    """The bytes of a part, whatever its borders."""
    return "".join(
        item.hex()
        if isinstance(item, bytes)
        else "".join(f"[{item.object.key}@{at}]" for at in range(item.start, item.end))
        for item in part.items
    )


def test_nothing_is_streamed_before_its_digest_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run becomes known in steps, and every observer finds the digest over what is known."""
    monkeypatch.setattr(growing, "HASHED_AT_ONCE", 2)
    arrangement, objects = Arrangement(), refs([1] * 7)
    plan, growth = opened(arrangement)
    seen: list[int] = []

    def watch() -> None:
        covered = parse_partial(plan.digest)
        assert covered is not None
        assert covered == (plan.known, Plan.of(objects[: plan.known]).digest)
        seen.append(plan.known)

    growth.watch(watch)
    grow(growth, arrangement, objects)
    assert seen == [2, 4, 6, 7]


def test_a_listing_that_failed_leaves_the_plan_open() -> None:
    plan, growth = opened(Arrangement())
    grow(growth, Arrangement(), refs([5]))
    growth.fail(SourceError("gone"))
    assert (plan.open, growth.ended, plan.known_bytes(0)) == (True, True, None)


@pytest.mark.parametrize(
    "arrangement", [Arrangement(seed=1), Arrangement(shard=Shard(0, 2, "bytes"))], ids=str
)
def test_an_order_that_needs_every_entry_cannot_grow(arrangement: Arrangement) -> None:
    assert not arrangement.may_grow
    with pytest.raises(ValueError, match="needs all entries"):
        opened(arrangement)


def test_rank_fifos_that_are_balanced_by_bytes_need_every_entry() -> None:
    plan, growth = opened(Arrangement(shard=Shard(0, 1, "bytes")))
    grow(growth, Arrangement(shard=Shard(0, 1, "bytes")), refs([5]))
    assert plan.ranks(1)[0].objects(0) == 1
    with pytest.raises(ValueError, match="by bytes"):
        plan.ranks(2)


OBJECTS = refs([10, 0, 20, 30])
PARTIAL: Callable[[int], str] = lambda count: f"{count}:{Plan.of(OBJECTS[:count]).digest}"  # noqa: E731


@pytest.mark.parametrize(
    ("digest", "position", "covered"),
    [
        (Plan.of(OBJECTS).digest, Position(3, 7), True),
        (Plan.of(OBJECTS[:3]).digest, Position(0, 7), False),
        (PARTIAL(1), Position(0, 10), True),
        (PARTIAL(1), Position(0, 11), False),
        (PARTIAL(2), Position(0, 10), True),
        (PARTIAL(3), Position(0, 30), True),
        (PARTIAL(3), Position(1, 0), False),
        (PARTIAL(3), Position(1, 5), False),
        (PARTIAL(4), Position(1, 5), True),
        (PARTIAL(4).replace("4:", "5:"), Position(0, 1), False),
        (PARTIAL(1).replace("1:", "3:"), Position(0, 1), False),
        (f"1:{Plan.of(refs([10], tag='f')).digest}", Position(0, 1), False),
        ("1:", Position(0, 1), False),
        ("", Position(0, 0), False),
    ],
)
def test_a_position_is_covered_by_the_digest_of_the_entries_before_it(
    digest: str, position: Position, covered: bool
) -> None:
    assert Plan.of(OBJECTS).covers(digest, position) is covered


def test_of_objects_that_are_rewritten_only_all_are_covered() -> None:
    """Their stream's offsets are not those of the plan, so what lies before one is unknown."""
    arrangement = Arrangement(inflate=True)
    plan = Plan.of(OBJECTS, arrangement)
    position = Position(0, 500, mark=ResumePoint(10, 400))
    for count, covered in ((3, False), (4, True)):
        begun = Plan.of(OBJECTS[:count], arrangement)
        assert plan.covers(f"{count}:{begun.digest}", position) is covered


def test_a_shard_s_position_is_covered_by_its_own_entries() -> None:
    arrangement = Arrangement(shard=Shard(1, 2))
    plan, begun = Plan.of(OBJECTS, arrangement), Plan.of(OBJECTS[:3], arrangement)
    assert plan.covers(f"3:{begun.digest}", Position(0, 0))
    assert not plan.covers(f"3:{begun.digest}", Position(0, 1))


def test_entries_know_their_growth() -> None:
    assert repr(Growth(Entries())) == "<Growth 0 entries, open>"
