"""Limits that may change while a job runs: bandwidth, requests in flight, memory.

    GET /limits     what holds now
    PATCH /limits   changes what is named; needs the admin token, and is refused if the job file names none

All is checked before anything is changed. A change holds until the process ends: the job file stays as it is.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ByteSize, ConfigDict, Field, ValidationError

from sidecar.config.job import explain
from sidecar.config.model import Model
from streamer.errors import ConfigError
from streamer.units import human_bytes

if TYPE_CHECKING:
    from sidecar.observe.state import JobState

Rate = Annotated[ByteSize, Field(gt=0)]


class Change(Model):
    """What `PATCH /limits` may say. None lifts a limit, or lets it adapt; what is left out stays."""

    model_config = ConfigDict(alias_generator=None)

    bandwidth: Rate | None = None
    requests_in_flight: Annotated[int, Field(ge=1, le=1024)] | None = None
    memory_budget: Annotated[ByteSize, Field(gt=0)] | None = None
    channel_bandwidth: dict[str, Rate | None] = {}  # noqa: RUF012 - pydantic copies defaults


def shown(state: JobState) -> dict[str, Any]:
    """The limits as they are."""
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
    """Carry a change out, and return what then holds. Raises ConfigError, having changed nothing."""
    try:
        asked = Change.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"limits: {explain(error)}") from None
    memory_budget, now = state.memory_budget, time.monotonic()
    if memory_budget is None:
        raise ConfigError("the job has not started yet; try again when it is ready")
    if unknown := asked.channel_bandwidth.keys() - state.bandwidth.keys():
        known = ", ".join(state.bandwidth)
        raise ConfigError(f"no Pipe channel is called {min(unknown)!r}; there are {known}")
    named = asked.model_fields_set
    budget = asked.memory_budget
    if "memory_budget" in named and budget is None:
        raise ConfigError("memory_budget must be a size, such as 512MiB")
    if budget is not None and budget < memory_budget.least_budget:
        raise ConfigError(
            f"memory_budget {human_bytes(budget)} may not hold the parts under way; "
            f"the least is {human_bytes(memory_budget.least_budget)}"
        )
    if budget is not None:
        memory_budget.change_budget(int(budget))
    if "requests_in_flight" in named:
        memory_budget.change_requests(asked.requests_in_flight)
    if "bandwidth" in named:
        memory_budget.bandwidth.change(asked.bandwidth, now)
    for name, limit in asked.channel_bandwidth.items():
        state.bandwidth[name].change(limit, now)
    return shown(state)
