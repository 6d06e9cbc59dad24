"""What a stage says of its bytes when the descriptor takes its literals and then refuses the rest."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import pytest

from streamer.plan import ObjectRef, Part
from streamer.relay.staging.buffers import BufferPool, BufferStage, BufferStages
from streamer.relay.staging.pipes import PipePool, PipeStages
from streamer.relay.staging.stage import Stages
from streamer.relay.statistics import ChannelCounters
from streamer.schedule.budget import MemoryBudget
from streamer.schedule.concurrency import ConcurrencyController
from streamer.units import MIB
from tests.kit.bodies import Arrived, Arriving

HEAD, BODY, TAIL = b"a header", b"a body of some bytes", b"pad"


def supplies() -> list[Stages]:
    shares = [MemoryBudget(64 * MIB, ConcurrencyController(4, 4 * MIB)).quota() for _ in range(2)]
    return [BufferStages(shares[0], BufferPool()), PipeStages(shares[1], PipePool(64 * MIB, most=16))]


@pytest.fixture
def narrow() -> Iterator[int]:
    """A file that takes the header, and then nothing but EPERM: it is sealed at that size."""
    fd = os.memfd_create("narrow", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, len(HEAD))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("supply", supplies(), ids=["memory", "pipes"])
def test_what_was_taken_before_an_error_is_counted(supply: Stages, narrow: int) -> None:
    """A delivery that did not know of the header waited for its eight bytes for ever."""
    part = Part(0, ObjectRef("b", "k", len(BODY), "e"), 0, len(BODY), 0, HEAD, TAIL)
    stage = supply.make(part, on_change=lambda: None, counters=ChannelCounters())
    stage.attach(Arrived(BODY))
    counts = [stage.drain_into(narrow)]
    with pytest.raises(PermissionError):
        stage.drain_into(narrow)
    wide = os.memfd_create("wide")
    while stage.staged:
        counts.append(stage.drain_into(wide))
    rest = os.pread(wide, 1000, 0)
    os.close(wide)
    stage.discard()
    assert os.pread(narrow, 1000, 0) + rest == HEAD + BODY + TAIL
    assert counts[0] == len(HEAD)
    assert sum(counts) == len(part)


def test_delivery_looks_for_what_came_after_a_full_socket_was_emptied() -> None:
    """The body is parked again then, and calls nobody for the few bytes that are still to come."""
    data, changes = bytes(3 * MIB), []
    part = Part(0, ObjectRef("b", "k", len(data), "e"), 0, len(data), 0)
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
    part = Part(0, ObjectRef("b", "k", len(data), "e"), 0, len(data), 0, HEAD, TAIL)
    counters = ChannelCounters()
    stage = BufferStage(part, BufferPool(len(data)), on_change=lambda: None, counters=counters)
    body, seen = Arriving(data), bytearray()
    stage.observe(seen.extend)
    stage.attach(body)
    body.arrive(MIB)
    if full:
        body.fill()
    taken, sizes = bytearray(), []
    while len(taken) < len(part):
        if piece := stage.take(300_001):
            taken += piece
            sizes.append(len(piece))
        else:
            assert not stage.ready
            body.arrive(min(500_000, len(data) - body.arrived))
            assert stage.ready
    assert taken == HEAD + data + TAIL
    assert seen == data
    assert max(sizes) == 300_001
    assert counters.received_bytes == len(data)
    assert not stage.ready
    stage.discard()
