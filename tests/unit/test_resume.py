"""Continuing at an exact byte: what is cut from there, and where a channel begins."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.job.resume import Saved, parse_saved, saved_by_fifo, start_positions
from sidecar.job.state_source import read_states
from streamer.errors import ConfigError, SourceChanged
from streamer.helpers.keeper_client import Held
from streamer.plan import ObjectRef, Plan, Position, ResumePoint, Segment, cut
from streamer.plan.folds import offset_of
from streamer.plan.parts import Part, rest
from streamer.plan.record_order import Deal
from streamer.plan.record_plan import RecordPlan
from streamer.readers.core.position import ReaderPosition
from streamer.relay.channel_spec import StartPosition
from streamer.s3.client.endpoint import Endpoint
from streamer.s3.client.session import open_clients
from streamer.step_state import FILE_NAME, StepState
from tests.kit.late import LATE
from tests.unit.test_record_order import plan_of

if LATE:
    from streamer.readers.torch.progress import ChannelProgress, Progress

CONTENTS = {"": b"", "a": bytes(range(200)), "b": b"", "c": b"xyz" * 40, "d": b"q"}


def bytes_of(items: list[bytes | Segment] | Iterator[Segment | bytes]) -> bytes:
    """What segments or literals stream."""
    return b"".join(
        item if isinstance(item, bytes) else CONTENTS[item.object.key][item.start : item.end]
        for item in items
    )


def bytes_of_parts(parts: list[Part]) -> bytes:
    return b"".join(
        item if isinstance(item, bytes) else CONTENTS[item.object.key][item.start : item.end]
        for part in parts
        for item in part.items
    )


objects = {key: ObjectRef("b", key, len(data), "e") for key, data in CONTENTS.items() if key}
ranges = st.sampled_from([objects["a"], objects["c"], objects["d"]]).flatmap(
    lambda ref: st.tuples(st.integers(0, ref.size), st.integers(0, ref.size)).map(
        lambda pair: Segment(ref, min(pair), max(pair))
    )
)
segments = st.lists(st.binary(max_size=30) | ranges, max_size=12)


@given(segments, st.integers(0, 700), st.integers(1, 60))
def test_cut_from_any_byte_gives_the_rest_of_the_stream(
    found: list[bytes | Segment], start: int, part_size: int
) -> None:
    """Whatever is resumed is the reference stream from there on, and every part knows its place."""
    whole = bytes_of(found)
    assert bytes_of(rest(found, start)) == whole[start:]
    parts = list(cut(found, part_size=lambda: part_size, epoch=3, skip=start))
    place = start
    for part in parts:
        assert (part.epoch, part.offset) == (3, place)
        place += part.size
    assert bytes_of_parts(parts) == whole[start:]


PLAN = Plan.of([objects["a"], objects["c"]])
STATE = ReaderPosition("train", 2, offset=70, skip=3, records=11, digest=PLAN.digest).state()


async def read(value: str) -> str | None:
    async with open_clients(Endpoint(url="http://127.0.0.1:1", anonymous=True), connections=1) as clients:
        return await read_states(value, clients, give_up_after=0)


def positions(text: str) -> dict[str, Saved]:
    """States of bytes, by FIFO."""
    return saved_by_fifo(parse_saved(text), {}, {}, anyway=False)


def held(**fields: Any) -> dict[Any, Any]:
    account: dict[str, Any] = {"epoch": 1, "state": "open", "accepted": 50, "skipped": 0, "mark": None}
    return {"train": Held(**account | {"digest": PLAN.digest} | fields)}


def test_what_a_reader_saves_is_what_resume_takes(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(json.dumps([STATE]))
    for name in (tmp_path, tmp_path / FILE_NAME, f"{tmp_path}/"):
        assert parse_saved(asyncio.run(read(str(name))) or "") == parse_saved(json.dumps(STATE))
    begin = start_positions({"train": PLAN}, {}, positions(json.dumps(STATE)), anyway=False)["train"]
    assert begin == StartPosition(Position(2, 70, skipped=70))


def test_of_states_of_one_second_the_highest_number_is_the_newest(tmp_path: Path) -> None:
    """A restore gives files the times of S3, which has whole seconds."""
    for step in (9, 100, 20):
        place = tmp_path / f"step-{step}" / FILE_NAME
        place.parent.mkdir()
        place.write_text(f"{step}")
        os.utime(place, (7e8, 7e8))
    assert asyncio.run(read(str(tmp_path))) == "100"
    os.utime(tmp_path / "step-9" / FILE_NAME, (8e8, 8e8))
    assert asyncio.run(read(str(tmp_path))) == "9"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ('{"epoch": 1}', "state_dict"),
        (json.dumps(STATE | {"format": 2}), "state_dict"),
        (json.dumps(STATE | {"epoch": -1}), "from 0 on"),
        (json.dumps(STATE | {"offset": "7"}), "from 0 on"),
        (json.dumps(STATE | {"epoch": True}), "from 0 on"),
        (json.dumps(STATE | {"epoch": 10**250}), "channel train has an epoch of 251 digits"),
        (json.dumps(STATE | {"digest": None}), "must be texts"),
        (json.dumps(STATE | {"channel": 7}), "must be texts"),
        (json.dumps([STATE, STATE]), "two states"),
    ],
)
def test_a_state_that_is_none_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_saved(text)


@pytest.mark.parametrize("name", ["state.json", ".", "run/", "run/state.json"])
def test_a_state_that_is_absent_is_the_beginning(tmp_path: Path, name: str) -> None:
    assert asyncio.run(read(str(tmp_path / name) + "/" * name.endswith("/"))) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "--resume is empty"),
        ("file/state.json", "Not a directory"),
        ("raw", "cannot read --resume .*raw"),
    ],
)
def test_a_state_that_cannot_be_read_is_an_error(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "file").write_text("[]")
    (tmp_path / "raw").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=words):
        asyncio.run(read(str(tmp_path / name) if name else name))


@pytest.mark.parametrize("value", ["S3://b/state", "s3:/b/state", "gs://b/state", "https://b.example/state"])
def test_a_state_of_another_kind_of_uri_is_an_error_and_not_the_beginning(value: str) -> None:
    with pytest.raises(ConfigError, match="is not an S3 URI: write s3://"):
        asyncio.run(read(value))


def test_a_state_of_several_channels_is_one_of_each() -> None:
    places = [ReaderPosition.of(STATE, "train"), ReaderPosition("eval", 1, offset=5)]
    starts = [ChannelProgress(position) for position in places]
    state = json.dumps(Progress(starts, 7).state())
    other = json.dumps(ReaderPosition("test", 0).state())
    assert parse_saved(state) == parse_saved(json.dumps([STATE, ReaderPosition("eval", 1, offset=5).state()]))
    assert parse_saved(f"[{state}, {other}]").keys() == {"train", "eval", "test"}
    with pytest.raises(ConfigError, match="two states of channel train"):
        parse_saved(f"[{state}, {json.dumps(STATE)}]")


def test_a_state_of_another_plan_is_refused_unless_told() -> None:
    saved = positions(json.dumps(STATE | {"digest": "0" * 64}))
    with pytest.raises(ConfigError, match="--resume-anyway"):
        start_positions({"train": PLAN}, {}, saved, anyway=False)
    assert start_positions({"train": PLAN}, {}, saved, anyway=True)["train"].position.offset == 70


def test_a_state_behind_the_end_is_refused_even_so() -> None:
    saved = positions(json.dumps(STATE | {"offset": PLAN.total_bytes(2) + 1}))
    with pytest.raises(ConfigError, match="the position is byte 321"):
        start_positions({"train": PLAN}, {}, saved, anyway=True)


def test_what_a_keeper_holds_goes_before_a_state() -> None:
    begin = start_positions({"train": PLAN}, held(skipped=20), positions(json.dumps(STATE)), anyway=False)[
        "train"
    ]
    assert begin == StartPosition(Position(1, 70, skipped=20), held=True)


def test_a_held_fifo_of_another_plan_fails_by_name() -> None:
    begin = start_positions({"train": PLAN}, held(digest="0" * 64), {}, anyway=False)["train"]
    assert isinstance(begin.refused, SourceChanged)
    assert "byte 50" in str(begin.refused)
    assert start_positions({"train": PLAN}, held(digest="0" * 64), {}, anyway=True)["train"].refused is None


def test_a_fifo_that_no_reader_has_opened_takes_any_plan() -> None:
    untouched = held(epoch=0, state="idle", accepted=0, digest="0" * 64)
    assert start_positions({"train": PLAN}, untouched, {}, anyway=False)["train"] == StartPosition()


def test_a_held_channel_that_the_job_has_not() -> None:
    with pytest.raises(ConfigError, match="the keeper holds channel train"):
        start_positions({}, held(), {}, anyway=False)


@pytest.mark.parametrize("fields", [(0, -1), (-1, 0), (0, 3, 4), (0, 3, 0, ResumePoint(9, 4))])
def test_places_that_cannot_be(fields: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="no such position"):
        Position(*fields)


STEPS = plan_of([[7] * 20, [5] * 30], Deal(10, 5, 0, 5), seed=3)
"""Five ranks of one host, and five steps."""
STEP = StepState("train", 1, 3, STEPS.record_order).document()


def by_step(state: dict[str, Any], whole: RecordPlan = STEPS, *, anyway: bool = False) -> dict[str, Saved]:
    ranks = whole.ranks(whole.deal.ranks)
    plans = {"train": {f"train-{rank}": plan for rank, plan in enumerate(ranks)}}
    return saved_by_fifo(parse_saved(json.dumps(state)), plans, {}, anyway=anyway)


@pytest.mark.parametrize("ranks", [1, 2, 5, 10])
def test_a_state_of_steps_is_of_any_number_of_ranks(ranks: int) -> None:
    whole = plan_of([[7] * 20, [5] * 30], Deal(10, ranks, 0, ranks), seed=3)
    saved = by_step(STEP, whole)
    assert saved.keys() == {f"train-{rank}" for rank in range(ranks)}
    plans = dict(zip(saved, whole.ranks(ranks), strict=True))
    assert sum(each.offset for each in saved.values()) == sum(offset_of(p, 1, 3) for p in plans.values())
    starts = start_positions(plans, {}, saved, anyway=False)
    assert {start.records_skipped for start in starts.values()} == {3 * 10 // ranks}


def test_equal_states_of_several_ranks_are_one() -> None:
    assert parse_saved(json.dumps([STEP, STEP])) == parse_saved(json.dumps(STEP))
    with pytest.raises(ConfigError, match="two states of channel train"):
        parse_saved(json.dumps([STEP, STEP | {"step": 4}]))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (plan_of([[7] * 20, [5] * 30], Deal(20, 5, 0, 5), seed=3), "GlobalBatch was 10 and is 20"),
        (plan_of([[7] * 20, [5] * 30], Deal(10, 5, 0, 5), seed=4), "Seed was 3 and is 4"),
        (plan_of([[7] * 20, [5] * 30], Deal(10, 5, 0, 5)), "Seed was 3 and is not set"),
        (plan_of([[7] * 20, [5] * 30], Deal(10, 5, 0, 5), seed=3, block=9), "Block was 500 and is 9"),
        (
            plan_of([[7] * 20, [5] * 30], Deal(10, 5, 0, 5, "repeat"), seed=3),
            "Remainder was drop and is repeat",
        ),
        (
            plan_of([[7] * 20, [5] * 31], Deal(10, 5, 0, 5), seed=3),
            "the objects or their versions have changed",
        ),
        (plan_of([[7] * 20, [5] * 28 + [4, 6]], Deal(10, 5, 0, 5), seed=3), None),
        (
            plan_of([[7] * 20, [5] * 28 + [10]], Deal(10, 5, 0, 5), seed=3),
            "other records of the objects, by the record index or by Limit",
        ),
    ],
)
def test_a_state_of_another_order_is_refused_by_what_differs(other: RecordPlan, words: str | None) -> None:
    if words is None:
        assert by_step(STEP, other), "the digest has the numbers of records, not their sizes"
        return
    with pytest.raises(ConfigError, match=words):
        by_step(STEP, other)
    assert by_step(STEP | {"step": 1}, other, anyway=True)


def test_a_step_after_the_last_is_refused_even_so() -> None:
    with pytest.raises(ConfigError, match="channel train is at step 5, and epoch 1 has 5 steps"):
        by_step(STEP | {"step": 5}, anyway=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"step": -1},
        {"epoch": True},
        {"channel": 3},
        {"order": {}},
        {"order": {"digest": 7}},
    ],
)
def test_a_state_of_steps_that_is_none_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the state of the steps of a job is invalid"):
        parse_saved(json.dumps(STEP | fields))


def test_a_state_of_steps_needs_ranks_by_record() -> None:
    with pytest.raises(ConfigError, match="its ranks do not share it by record"):
        saved_by_fifo(parse_saved(json.dumps(STEP)), {"train": {"train-0": PLAN}}, {}, anyway=True)
    with pytest.raises(ConfigError, match="its ranks do not share it by record"):
        saved_by_fifo(parse_saved(json.dumps(STEP)), {"train": {"train": PLAN}}, {}, anyway=False)
    both = json.dumps([STEP, STATE | {"channel": "train-2"}])
    with pytest.raises(ConfigError, match="states of channel train and of its FIFO train-2"):
        saved_by_fifo(parse_saved(both), {"train": {"train-2": STEPS.ranks(5)[2]}}, {}, anyway=False)


def test_a_state_names_what_the_job_has_now() -> None:
    """A state of one FIFO for a channel with several, and the other way round."""
    ranks = {"train": {"train-0": STEPS.ranks(5)[0]}}
    with pytest.raises(ConfigError, match="channel train is of one FIFO, and the channel has Ranks now"):
        saved_by_fifo(parse_saved(json.dumps(STATE)), ranks, {}, anyway=True)
    of_rank = json.dumps(STEP | {"channel": "train-0"})
    with pytest.raises(ConfigError, match="train-0 has steps, which are those of a whole channel"):
        saved_by_fifo(parse_saved(of_rank), ranks, {}, anyway=True)


def test_a_rank_that_the_keeper_holds_goes_before_a_state_of_steps() -> None:
    """The reader of one rank has begun; another rank, not opened yet, must not begin elsewhere."""
    ranks = dict(zip(("train-0", "train-1"), STEPS.ranks(5), strict=False))
    fifos = {
        "train-0": Held(0, "open", 50, STEPS.ranks(5)[0].digest, 0, None),
        "train-1": Held(0, "idle", 0, STEPS.ranks(5)[1].digest, 0, None),
    }
    assert saved_by_fifo(parse_saved(json.dumps(STEP)), {"train": ranks}, fifos, anyway=False) == {}
    fifos["train-0"] = fifos["train-1"]
    assert len(saved_by_fifo(parse_saved(json.dumps(STEP)), {"train": ranks}, fifos, anyway=False)) == 2


def test_a_rank_that_the_keeper_lacks_begins_at_the_state_of_steps() -> None:
    """The earlier sidecar was killed when one rank's FIFO was open, and before it offered that of another."""
    first, second = STEPS.ranks(5)[:2]
    resumed = offset_of(first, 1, 3)
    fifos = {"train-0": Held(1, "open", 5, first.digest, resumed, None)}
    plans = {"train": {"train-0": first, "train-1": second}}
    saved = saved_by_fifo(parse_saved(json.dumps(STEP)), plans, fifos, anyway=False)
    starts = start_positions(plans["train"], fifos, saved, anyway=False)
    assert starts["train-0"].position == Position(1, resumed + 5, skipped=resumed)
    assert (starts["train-1"].position.epoch, starts["train-1"].records_skipped) == (1, 3 * 2)
