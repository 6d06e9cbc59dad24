"""What a part costs its share where bodies wait in pipes: its bytes, or its pipe where pipes are scarce."""

from __future__ import annotations

import pytest

from streamer.linux import PIPE_SIZE
from streamer.plan import ObjectRef, Part, Segment
from streamer.plan.parts import RANGE_COST
from streamer.relay.staging.pipes import PIPE_COST, SMALLEST_PIPE, PipePool, PipeStages
from streamer.schedule.budget import MemoryBudget
from streamer.schedule.concurrency import ConcurrencyController
from streamer.units import MIB


def stages(budget: int, pipes: int) -> PipeStages:
    return PipeStages(
        MemoryBudget(budget, ConcurrencyController(4, 4 * MIB)).quota(), PipePool(pipes, most=10_000)
    )


def part(size: int) -> Part:
    return Part.of(0, 0, [Segment(ObjectRef("b", "k", size, "e"), 0, size)])


@pytest.mark.parametrize(("size", "more"), [(1, RANGE_COST + PIPE_COST), (100_000, 0), (4 * MIB, 0)])
def test_where_pipes_abound_a_part_costs_its_bytes(size: int, more: int) -> None:
    assert stages(64 * MIB, 1024 * MIB).reserved_bytes(part(size)) == size + more


@pytest.mark.parametrize(
    ("size", "pipe"),
    [(1, SMALLEST_PIPE), (100_000, 128 * 1024), (PIPE_SIZE, PIPE_SIZE), (2 * MIB, PIPE_SIZE)],
)
def test_where_pipes_are_scarce_a_pipe_costs_its_part_of_all_pipes(size: int, pipe: int) -> None:
    """256 MiB in flight but 64 MiB of pipes: each byte of a pipe counts for four."""
    assert stages(256 * MIB, 64 * MIB).reserved_bytes(part(size)) == 4 * pipe


def test_the_share_bounds_both_bytes_and_pipes() -> None:
    supply = stages(256 * MIB, 64 * MIB)
    for size in (100_000, 4 * MIB, 8 * MIB):
        room = supply.reserved_bytes(part(size))
        fitting = 256 * MIB // room
        assert fitting * size <= 256 * MIB
        assert fitting * supply.pipe_size(part(size)) <= 64 * MIB
