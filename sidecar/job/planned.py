"""The plans of one channel: of this host, and of each of its FIFOs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamer.plan.record_plan import RecordPlan

if TYPE_CHECKING:
    from streamer.plan import Plan


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a channel on this host, and the plans of its FIFOs."""

    whole: Plan
    fifos: dict[str, Plan]
    """Plans by FIFO name; `whole` alone, unless the channel has several rank FIFOs."""

    @classmethod
    def dealt(cls, whole: Plan, names: tuple[str, ...]) -> Planned:
        """Divide `whole` over the FIFOs of these names."""
        plans = (whole,) if len(names) == 1 else whole.ranks(len(names))
        return cls(whole, dict(zip(names, plans, strict=True)))


def figures_by_record(plan: Plan) -> dict[str, Any]:
    """Return records, steps, ranks of all hosts, and digest of the order; nothing for ranks of objects."""
    if not isinstance(plan, RecordPlan):
        return {}
    return {
        "records": plan.records(0),
        "steps": plan.steps(0),
        "all_ranks": plan.deal.ranks,
        "order": plan.host_ranks.order_digest[:16],
    }
