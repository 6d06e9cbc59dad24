"""The plans of one channel: of this host, and of each of its FIFOs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamer.linux import PIPE_SIZE
from streamer.plan.record_plan import RecordPlan

if TYPE_CHECKING:
    from sidecar.config.request import ChannelConfig
    from streamer.plan import Plan

LARGEST_SLICE = PIPE_SIZE
"""Mean bytes of a rank's slice of a global batch up to which `Fetch: auto` fetches the ranks together. A FIFO
holds such a slice, so each rank reads its own while the others read theirs. With larger slices readers take
turns, and requests for each rank are large enough."""


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """A stream that is fetched once for several FIFOs."""

    plan: Plan
    ranks: tuple[dict[str, Plan], ...]
    """Plans of each rank by FIFO name: one for each copy."""

    @property
    def names(self) -> list[str]:
        """Names of its FIFOs."""
        return [name for fifos in self.ranks for name in fifos]


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a channel on this host, and the plans of its FIFOs."""

    whole: Plan
    fifos: dict[str, Plan]
    """Plans by FIFO name; `whole` alone, unless the channel has several rank FIFOs."""
    shared: tuple[SharedPlan, ...] = ()
    """Streams that several of the FIFOs share; no FIFO has two."""

    def fetched(self, name: str) -> Plan | None:
        """Return the plan that is fetched for a FIFO; None if it comes with that of another FIFO."""
        for shared in self.shared:
            if name in shared.names:
                return shared.plan if name == shared.names[0] else None
        return self.fifos[name]

    @classmethod
    def dealt(
        cls, whole: Plan, names: tuple[str, ...], channel: ChannelConfig, *, epochs: int | None
    ) -> Planned:
        """Divide `whole` over the FIFOs of these names: the copies of rank 0, then those of rank 1, …

        `epochs`: number of epochs of each plan; None: no limit.
        """
        ranks = channel.penstock.by_record
        copies = 1 if ranks is None else ranks.copies
        count = len(names) // copies
        plans = (whole,) if count == 1 else whole.ranks(count)
        for plan in (whole, *plans):
            plan.epochs = epochs
        by_rank = tuple(
            dict.fromkeys(names[rank * copies : (rank + 1) * copies], plan) for rank, plan in enumerate(plans)
        )
        fifos = {name: plan for each in by_rank for name, plan in each.items()}
        if (
            ranks is not None
            and channel.may_fetch_together
            and (ranks.fetch == "together" or _slice_bytes(whole) <= LARGEST_SLICE)
        ):
            return cls(whole, fifos, (SharedPlan(whole, by_rank),))
        if copies > 1:
            shared = (SharedPlan(plan, (each,)) for plan, each in zip(plans, by_rank, strict=True))
            return cls(whole, fifos, tuple(shared))
        return cls(whole, fifos)


def _slice_bytes(plan: Plan) -> float:
    """Return the mean bytes of a rank's slice of a global batch."""
    if not isinstance(plan, RecordPlan):
        raise TypeError(f"no slices: {plan!r}")
    return plan.deal.slice * sum(plan.entries.sizes) / max(1, sum(plan.table.counts))


def figures_by_record(plan: Plan) -> dict[str, Any]:
    """Return records, steps, padding, all ranks, and digest of the order; nothing for ranks of objects."""
    if not isinstance(plan, RecordPlan):
        return {}
    return {
        "records": plan.records(0),
        "steps": plan.steps,
        "padding": plan.padding,
        "all_ranks": plan.deal.ranks,
        "order": plan.order_digest[:16],
    }
