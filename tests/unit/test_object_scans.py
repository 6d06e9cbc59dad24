"""Rows of objects whose bytes pass in parts and pieces; and of those that do not pass whole."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from sidecar.index import scans as object_scans
from sidecar.index.scans import ObjectScans
from streamer.formats.borders import BadRecord
from streamer.formats.record_format import RecordFormat
from streamer.formats.record_index import IndexedObject, object_version
from streamer.plan import ObjectRef, Part, Segment, cut
from streamer.plan.validators import modified
from streamer.relay.staging.buffers import BufferPool, BufferStage, BufferStages, TappedStages
from streamer.relay.statistics import ChannelCounters
from streamer.schedule.budget import MemoryBudget
from streamer.schedule.concurrency import ConcurrencyController
from streamer.units import MIB
from tests.kit.bodies import Arriving
from tests.unit.test_borders import made, naive

PAYLOADS = [bytes([number % 256]) * (number * 37 % 900) for number in range(300)]


class Rows:
    """The rows that a learner finds, and the objects that it refuses."""

    def __init__(self, kind: str = "TFRecord") -> None:
        self.kind = RecordFormat.parse(kind)
        self.rows: list[IndexedObject] = []
        self.refused: dict[str, str] = {}
        self.added: list[int] = []
        self.refusals: list[int] = []

    def lacks(self, _: int, version: int) -> bool:
        return version not in self.added and version not in self.refusals

    def scans(self) -> ObjectScans:
        """A scan like that of a FIFO whose channel learns its index."""
        return ObjectScans(self.kind, on_row=self.add, on_bad=self.refuse, lacks=self.lacks, limited=True)

    def add(self, _: ObjectRef, row: IndexedObject) -> None:
        self.rows.append(row)
        self.added.append(row.version)

    def refuse(self, ref: ObjectRef, version: int, error: BadRecord) -> None:
        self.refused[ref.key] = str(error)
        self.refusals.append(version)


def refs(objects: dict[str, bytes]) -> list[ObjectRef]:
    return [ObjectRef("b", key, len(data), f"etag of {key}") for key, data in objects.items()]


def parts_of(objects: dict[str, bytes], size: int, epoch: int = 0) -> list[Segment]:
    """The ranges of the parts."""
    segments = [Segment(ref, 0, ref.size) for ref in refs(objects)]
    parts = cut(segments, part_size=lambda: size, epoch=epoch)
    return [item for part in parts for item in part.items if isinstance(item, Segment)]


def show(learner: ObjectScans, objects: dict[str, bytes], parts: list[Segment], step: int) -> None:
    """Show the bytes of the ranges, `step` at a time."""
    for part in parts:
        data = objects[part.object.key][part.start : part.end]
        for at in range(0, len(data), step):
            learner.see(part, memoryview(data)[at : at + step])


def offsets(rows: Rows) -> list[list[int]]:
    return [list(row.offsets) for row in rows.rows]


@pytest.mark.parametrize("kind", ["TFRecord", "RecordIO", "lines", "tar"])
@pytest.mark.parametrize("size", [7, 4096, 1 << 20])
def test_parts_and_pieces_of_any_size(kind: str, size: int) -> None:
    payloads = PAYLOADS[11:131]  # without one of many line ends, whose lines would be too short
    objects = {str(number): made(kind, payloads[number * 30 : number * 30 + 30]) for number in range(4)}
    rows = Rows(kind)
    learner = rows.scans()
    show(learner, objects, parts_of(objects, size), step=size // 3)
    assert offsets(rows) == [naive(kind, data) for data in objects.values()]
    assert learner.outcomes == {"learnt": 4}
    assert not any(map(learner.wants, refs(objects))), "nothing is learnt again"


def test_only_objects_whose_bytes_all_pass_have_a_row() -> None:
    """Any parts may be missing, as after a resume or a reader that leaves; the next epoch has all."""
    objects = {str(number): made("TFRecord", PAYLOADS[:40]) for number in range(30)}
    parts, source = parts_of(objects, 2000), random.Random(5)
    seen = [part for part in parts if source.random() < 0.9]
    whole = {
        ref.key for ref in refs(objects) if all(part in seen for part in parts if part.object.key == ref.key)
    }
    assert 0 < len(whole) < 30
    rows = Rows()
    learner = rows.scans()
    show(learner, objects, seen, step=500)
    versions = {
        ref.key: object_version("b", ref.key, size=ref.size, etag=ref.etag, version=None)
        for ref in refs(objects)
    }
    assert {row.version for row in rows.rows} == {versions[key] for key in whole}
    show(learner, objects, parts_of(objects, 3000, epoch=1), step=1 << 20)
    assert sorted(offsets(rows)) == sorted(naive("TFRecord", data) for data in objects.values())
    assert not rows.refused


def test_an_object_that_begins_again() -> None:
    """Its reader left in the first part, whose rest never came."""
    objects = {"0": made("TFRecord", PAYLOADS)}
    first, again = parts_of(objects, 1 << 20), parts_of(objects, 1 << 20, epoch=1)
    rows = Rows()
    learner = rows.scans()
    learner.see(first[0], memoryview(objects["0"])[:5000])
    show(learner, objects, again, step=5000)
    assert offsets(rows) == [naive("TFRecord", objects["0"])]


@pytest.mark.parametrize("limit", ["SHORTEST_MEAN", "MOST_OFFSETS"])
def test_objects_with_too_many_records(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """They are refused once, and the next object is learnt."""
    monkeypatch.setattr(object_scans, "JUDGED_AFTER", 40)
    monkeypatch.setattr(object_scans, "MOST_OFFSETS", 10_000 if limit == "SHORTEST_MEAN" else 100)
    few = [b"x" * 20] * 900 if limit == "SHORTEST_MEAN" else [b"x" * 300] * 900
    objects = {"0": made("TFRecord", few), "1": made("TFRecord", PAYLOADS[:50])}
    rows = Rows()
    learner = rows.scans()
    for epoch in range(2):
        show(learner, objects, parts_of(objects, 4000, epoch), step=1000)
    assert offsets(rows) == [naive("TFRecord", objects["1"])]
    assert list(rows.refused) == ["0"]
    assert learner.outcomes == {"learnt": 1, "refused": 1}


@pytest.mark.parametrize("step", [1, 1000, 1 << 16])
def test_a_small_object_of_short_records_is_learnt_in_whatever_pieces(step: int) -> None:
    objects = {"0": made("TFRecord", [b"x"] * 3800)}
    assert 60_000 < len(objects["0"]) < object_scans.JUDGED_AFTER * object_scans.SHORTEST_MEAN
    rows = Rows()
    show(rows.scans(), objects, parts_of(objects, 1 << 20), step=step)
    assert offsets(rows) == [naive("TFRecord", objects["0"])]


@pytest.mark.parametrize("step", [1, 13, 100_000])
def test_the_objects_of_a_part_are_told_apart(step: int) -> None:
    """Its literals, which are among its bytes, are no object's."""
    objects = {str(number): made("TFRecord", PAYLOADS[number : number + 3]) for number in range(9)}
    items: list[Segment | bytes] = []
    for ref in refs(objects):
        items += [b"before", Segment(ref, 0, ref.size)]
    part = Part.of(0, 0, [*items, b"end"])
    data = b"".join(item if isinstance(item, bytes) else objects[item.object.key] for item in part.items)
    rows, counters = Rows(), ChannelCounters()
    stages = BufferStages(MemoryBudget(MIB, ConcurrencyController(4, MIB)).quota(), BufferPool())
    stage = TappedStages(stages, stages, rows.scans()).make(part, on_change=lambda: None, counters=counters)
    assert isinstance(stage, BufferStage)
    body = Arriving(data)
    stage.attach(body)
    taken = 0
    while taken < len(data):
        body.arrive(min(step, len(data) - body.arrived))
        taken += len(stage.take(step))
    stage.discard()
    assert offsets(rows) == [naive("TFRecord", each) for each in objects.values()]


@pytest.mark.parametrize("last", [b"", b"x"])
def test_two_fifos_inside_one_object(last: bytes) -> None:
    """One of them adds its row, or refuses it."""
    objects = {"0": made("TFRecord", PAYLOADS[:50]) + last}
    rows = Rows()
    learners = [rows.scans() for _ in range(2)]
    parts = parts_of(objects, 1 << 20)
    for part in parts:
        for at in range(0, len(objects["0"]), 1000):
            for learner in learners:
                learner.see(part, memoryview(objects["0"])[at : at + 1000])
    assert (len(rows.added), len(rows.refusals)) == ((1, 0), (0, 1))[len(last)]
    assert sum((learner.outcomes for learner in learners), Counter()) == {("learnt", "refused")[len(last)]: 1}


def test_an_object_without_an_etag_has_no_row() -> None:
    """A row would hold for every version of it."""
    data = made("TFRecord", PAYLOADS[:9])
    ref = ObjectRef("b", "0", len(data), modified("2026-01-01T00:00:00.000Z"))
    rows = Rows()
    learner = rows.scans()
    assert not learner.wants(ref)
    learner.see(Segment(ref, 0, ref.size), memoryview(data))
    assert not len(rows.rows)
