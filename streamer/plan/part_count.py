"""How many parts a plan has, without making them: a report of a million objects needs only their number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamer.plan.parts import cut
from streamer.plan.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Iterable


def number_of_parts(plan: Plan, epoch: int, part_size: int) -> int:
    """Return the number of parts of at most `part_size` bytes in one epoch of `plan`, as `cut` makes them."""
    if (
        type(plan) is not Plan or not plan.entries.plain
    ):  # a subclass streams other segments than whole objects
        return sum(1 for _ in cut(plan.segments(epoch), part_size=lambda: part_size, epoch=epoch))
    sizes: Iterable[int] = plan.entries.sizes
    if plan.shard.count > 1:
        sizes = map(plan.entries.sizes.__getitem__, plan.order(epoch))
    return sum(-(-size // part_size) for size in sizes)
