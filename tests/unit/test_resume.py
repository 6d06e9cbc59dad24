"""Continuing at an exact byte: what is cut from there, and where a channel begins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.job.resume import load_saved, parse_saved, start_positions
from streamer.errors import ConfigError, SourceChanged
from streamer.helpers.keeper_client import Held
from streamer.plan import NOWHERE, Literal, ObjectRef, Plan, Position, ResumePoint, Segment, cut
from streamer.plan.parts import Part, rest
from streamer.readers.core.position import ReaderPosition
from streamer.readers.core.position import StartPosition as ReaderStart
from streamer.readers.torch.progress import Progress, RemainingRecords
from streamer.relay.channel_spec import StartPosition

CONTENTS = {"": b"", "a": bytes(range(200)), "b": b"", "c": b"xyz" * 40, "d": b"q"}


def bytes_of(items: list[Literal | Segment] | Iterator[Segment | Literal]) -> bytes:
    """What segments or literals stream."""
    return b"".join(
        item.data if isinstance(item, Literal) else CONTENTS[item.object.key][item.start : item.end]
        for item in items
    )


def bytes_of_parts(parts: list[Part]) -> bytes:
    return b"".join(
        part.leading + CONTENTS[part.object.key][part.start : part.end] + part.trailing for part in parts
    )


objects = {key: ObjectRef("b", key, len(data), "e") for key, data in CONTENTS.items() if key}
ranges = st.sampled_from([objects["a"], objects["c"], objects["d"]]).flatmap(
    lambda ref: st.tuples(st.integers(0, ref.size), st.integers(0, ref.size)).map(
        lambda pair: Segment(ref, min(pair), max(pair))
    )
)
segments = st.lists(st.builds(Literal, st.binary(max_size=30)) | ranges, max_size=12)


@given(segments, st.integers(0, 700), st.integers(1, 60))
def test_cut_from_any_byte_gives_the_rest_of_the_stream(
    found: list[Literal | Segment], start: int, part_size: int
) -> None:
    """Whatever is resumed is the reference stream from there on, and every part knows its place."""
    whole = bytes_of(found)
    assert bytes_of(rest(found, start)) == whole[start:]
    parts = list(cut(found, part_size=lambda: part_size, epoch=3, skip=start))
    place = start
    for part in parts:
        assert (part.epoch, part.offset) == (3, place)
        place += len(part)
    assert bytes_of_parts(parts) == whole[start:]


PLAN = Plan.of([objects["a"], objects["c"]])
STATE = ReaderPosition("train", 2, offset=70, skip=3, records=11, digest=PLAN.digest).state()


def held(**fields: Any) -> dict[Any, Any]:
    account: dict[str, Any] = {"epoch": 1, "state": "open", "accepted": 50, "skipped": 0, "mark": None}
    return {"train": Held(**account | {"digest": PLAN.digest} | fields)}


def test_what_a_reader_saves_is_what_resume_takes(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps([STATE]))
    assert load_saved(str(tmp_path / "state.json")) == parse_saved(json.dumps(STATE))
    begin = start_positions({"train": PLAN}, {}, parse_saved(json.dumps(STATE)), anyway=False)["train"]
    assert begin == StartPosition(Position(2, 70, skipped=70))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ('{"epoch": 1}', "state_dict"),
        (json.dumps(STATE | {"format": 2}), "state_dict"),
        (json.dumps(STATE | {"epoch": -1}), "from 0 on"),
        (json.dumps(STATE | {"offset": "7"}), "from 0 on"),
        (json.dumps([STATE, STATE]), "two states"),
    ],
)
def test_a_state_that_is_none_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_saved(text)


def test_a_state_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read --resume"):
        load_saved(str(tmp_path / "none"))


def test_a_state_of_several_channels_is_one_of_each() -> None:
    positions = [ReaderPosition.of(STATE, "train"), ReaderPosition("eval", 1, offset=5)]
    starts = [RemainingRecords(ReaderStart(position)) for position in positions]
    state = json.dumps(Progress(starts, 7).state())
    other = json.dumps(ReaderPosition("test", 0).state())
    assert parse_saved(state) == parse_saved(json.dumps([STATE, ReaderPosition("eval", 1, offset=5).state()]))
    assert parse_saved(f"[{state}, {other}]").keys() == {"train", "eval", "test"}
    with pytest.raises(ConfigError, match="two states of channel train"):
        parse_saved(f"[{state}, {json.dumps(STATE)}]")


def test_a_state_of_another_plan_is_refused_unless_told() -> None:
    saved = parse_saved(json.dumps(STATE | {"digest": "0" * 64}))
    with pytest.raises(ConfigError, match="--resume-anyway"):
        start_positions({"train": PLAN}, {}, saved, anyway=False)
    assert start_positions({"train": PLAN}, {}, saved, anyway=True)["train"].position.offset == 70


def test_a_state_behind_the_end_is_refused_even_so() -> None:
    saved = parse_saved(json.dumps(STATE | {"offset": PLAN.total_bytes(2) + 1}))
    with pytest.raises(ConfigError, match="the position is byte 321"):
        start_positions({"train": PLAN}, {}, saved, anyway=True)


def test_what_a_keeper_holds_goes_before_a_state() -> None:
    begin = start_positions({"train": PLAN}, held(skipped=20), parse_saved(json.dumps(STATE)), anyway=False)[
        "train"
    ]
    assert begin == StartPosition(Position(1, 70, skipped=20), held=True)


def test_a_held_fifo_of_another_plan_fails_by_name() -> None:
    begin = start_positions({"train": PLAN}, held(digest="0" * 64), {}, anyway=False)["train"]
    assert isinstance(begin.refused, SourceChanged)
    assert "byte 50" in str(begin.refused)
    assert start_positions({"train": PLAN}, held(digest="0" * 64), {}, anyway=True)["train"].refused is None


@pytest.mark.parametrize("anyway", [False, True])
def test_what_left_its_plan_is_not_continued(anyway: bool) -> None:
    """Bytes of a refetched object, or none of a skipped one: the plan does not say which byte is next."""
    begin = start_positions({"train": PLAN}, held(mark=[NOWHERE, 30]), {}, anyway=anyway)["train"]
    assert isinstance(begin.refused, SourceChanged)
    assert "refetched or skipped" in str(begin.refused)


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
