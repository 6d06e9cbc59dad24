"""Limits that may change while a job runs: bandwidth, requests in flight, memory.

    GET /limits     returns the current limits
    PATCH /limits   changes the named limits; needs the admin token, and is refused if the job file names none

A request with an error changes nothing. A change lasts until the process ends: the job file stays as it is.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, ValidationError

from sidecar.config.mistakes import explain
from sidecar.config.model import Model, Size
from streamer.errors import ConfigError
from streamer.units import MIB, human_bytes

if TYPE_CHECKING:
    from sidecar.observe.state import JobState

Rate = Annotated[Size, Field(gt=0)]


class Change(Model):
    """Body of `PATCH /limits`. None lifts a limit, or lets it adapt; a limit that is left out stays."""

    model_config = ConfigDict(alias_generator=None)

    bandwidth: Rate | None = None
    requests_in_flight: Annotated[int, Field(ge=1, le=1024)] | None = None
    memory_budget: Annotated[Size, Field(gt=0)] | None = None
    channel_bandwidth: dict[str, Rate | None] = {}  # noqa: RUF012 - pydantic copies defaults


def current(state: JobState) -> dict[str, Any]:
    """Return the current limits; an empty document before the job has started."""
    memory_budget = state.memory_budget
    if memory_budget is None:
        return {}
    return {
        "bandwidth": memory_budget.bandwidth.limit,
        "requests_in_flight": memory_budget.concurrency.limit,
        "requests_in_flight_adapt": not memory_budget.concurrency.fixed,
        "memory_budget": memory_budget.budget,
        "channel_bandwidth": {name: each.limit for name, each in state.bandwidth.items()},
    }


def change(state: JobState, document: object) -> dict[str, Any]:
    """Apply a change and return the limits after it. Raises ConfigError, and then changes nothing."""
    try:
        wanted = Change.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"limits: {explain(error, Change)}") from None
    memory_budget, now = state.memory_budget, time.monotonic()
    if memory_budget is None:
        raise ConfigError("the job has not started yet; try again when it is ready")
    if unknown := wanted.channel_bandwidth.keys() - state.bandwidth.keys():
        raise ConfigError(
            f"no Pipe channel is called {min(unknown)!r}; there are {', '.join(state.bandwidth)}"
        )
    fields = wanted.model_fields_set
    budget = wanted.memory_budget
    if "memory_budget" in fields and budget is None:
        raise ConfigError("memory_budget must be a size, such as 512MiB")
    if budget is not None and budget < memory_budget.least_budget:
        raise ConfigError(
            f"memory_budget {human_bytes(budget)} may not hold the parts under way; "
            f"the least is {human_bytes(memory_budget.least_budget)}"
        )
    if budget is not None and budget > memory_budget.budget:
        largest = state.job.footprint(state.transport or None).largest_budget(state.memory_limit)
        if budget > largest:
            raise ConfigError(
                f"memory_budget {human_bytes(budget)} is more than the memory limit of "
                f"{human_bytes(state.memory_limit)} leaves; the most is {largest // MIB}MiB"
            )
    if budget is not None:
        memory_budget.change_budget(int(budget))
    if "requests_in_flight" in fields:
        memory_budget.change_requests(wanted.requests_in_flight)
    if "bandwidth" in fields:
        memory_budget.bandwidth.change(wanted.bandwidth, now)
    for name, limit in wanted.channel_bandwidth.items():
        state.bandwidth[name].change(limit, now)
    return current(state)
