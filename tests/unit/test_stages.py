"""What a stage says of its bytes, whatever the body brings and the descriptor takes."""

from __future__ import annotations

import os
from typing import Any

import pytest

from streamer.plan import ObjectRef, Part, Segment
from streamer.relay.staging.buffers import BufferPool, BufferStage, BufferStages
from streamer.relay.staging.pipes import PipePool, PipeStages
from streamer.relay.staging.stage import Stages
from streamer.relay.staging.taps import Tap
from streamer.relay.statistics import ChannelCounters
from streamer.s3.client.doubt import NothingArrived
from streamer.s3.part_body import PartBody
from streamer.s3.ranges import RangeRequest
from streamer.schedule.budget import MemoryBudget
from streamer.schedule.concurrency import ConcurrencyController
from streamer.units import MIB
from tests.kit.bodies import Arrived, Arriving

HEAD, BODY, TAIL = b"a header", b"a body of some bytes", b"pad"


def supplies() -> list[Stages]:
    shares = [MemoryBudget(64 * MIB, ConcurrencyController(4, 4 * MIB)).quota() for _ in range(2)]
    return [BufferStages(shares[0], BufferPool()), PipeStages(shares[1], PipePool(64 * MIB, most=16))]


def part_of(*items: bytes | int) -> Part:
    """A part of literals, and of an object for each number of bytes."""
    made = [
        item if isinstance(item, bytes) else Segment(ObjectRef("b", "k", item, "e"), 0, item)
        for item in items
    ]
    return Part.of(0, 0, made)


@pytest.mark.parametrize("supply", supplies(), ids=["memory", "pipes"])
def test_a_part_is_drained_in_order(supply: Stages) -> None:
    part = part_of(HEAD, len(BODY), TAIL)
    stage = supply.make(part, on_change=lambda: None, counters=ChannelCounters())
    stage.attach(Arrived(HEAD + BODY + TAIL))
    out, counts = os.memfd_create("out"), []
    while stage.staged:
        counts.append(stage.drain_into(out, 7))
    rest = os.pread(out, 1000, 0)
    os.close(out)
    stage.discard()
    assert rest == HEAD + BODY + TAIL
    assert sum(counts) == part.size


async def test_literals_that_were_taken_before_nothing_has_come_are_counted() -> None:
    """A delivery that did not know of the header waited for its eight bytes for ever."""
    gets: Any = None  # nothing is sent
    body = PartBody(RangeRequest(part_of(HEAD, len(BODY), TAIL)), gets, spliceable=True, alone=False)
    out = os.memfd_create("out")
    assert body.splice_into(out, MIB) == len(HEAD)
    assert body.left == len(BODY + TAIL)
    with pytest.raises(NothingArrived):
        body.splice_into(out, MIB)
    assert os.pread(out, 1000, 0) == HEAD
    os.close(out)
    body.close()


@pytest.mark.parametrize("supply", supplies(), ids=["memory", "pipes"])
def test_a_part_of_literals_needs_no_body(supply: Stages) -> None:
    stage = supply.make(part_of(HEAD), on_change=lambda: None, counters=ChannelCounters())
    out = os.memfd_create("out")
    assert stage.ready
    assert stage.drain_into(out) == len(HEAD)
    assert not stage.ready
    assert os.pread(out, 1000, 0) == HEAD
    os.close(out)
    stage.discard()


def test_delivery_looks_for_what_came_after_a_full_socket_was_emptied() -> None:
    """The body is parked again then, and calls nobody for the few bytes that are still to come."""
    data, changes = bytes(3 * MIB), []
    part = part_of(len(data))
    stage = supplies()[0].make(part, on_change=lambda: changes.append("changed"), counters=ChannelCounters())
    body, out = Arriving(data), os.memfd_create("out")
    stage.attach(body)
    body.arrive(MIB)
    assert stage.staged == 0
    body.fill()
    while stage.staged < MIB:
        body.fill()
    body.fill()  # nothing more has come
    body.arrive(2 * MIB)
    count = 0
    while count < len(data):
        if stage.ready:
            count += stage.drain_into(out)
        else:
            stage.awaited = True
            body.arrive(0)
            assert changes, "delivery waits, and nobody wakes it"
    os.close(out)
    stage.discard()


@pytest.mark.parametrize("full", [False, True])
def test_bytes_are_taken_in_order_from_memory_and_from_the_socket(*, full: bool) -> None:
    data = os.urandom(2 * MIB)
    part, whole = part_of(HEAD, len(data), TAIL), HEAD + data + TAIL
    counters = ChannelCounters()
    stage = BufferStage(part, BufferPool(len(whole)), on_change=lambda: None, counters=counters)
    body, seen = Arriving(whole), bytearray()

    class Seen(Tap):
        def see(self, _: Segment, data: memoryview) -> None:
            seen.extend(data)

    stage.taps += (Seen(),)
    stage.attach(body)
    body.arrive(MIB)
    if full:
        body.fill()
    taken, sizes = bytearray(), []
    while len(taken) < part.size:
        if piece := stage.take(300_001):
            taken += piece
            sizes.append(len(piece))
        else:
            assert not stage.ready
            body.arrive(min(500_000, len(whole) - body.arrived))
            assert stage.ready
    assert taken == whole
    assert seen == data
    assert max(sizes) == 300_001
    assert counters.received_bytes == len(whole)
    assert not stage.ready
    stage.discard()
