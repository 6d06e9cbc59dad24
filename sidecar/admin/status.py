"""Documents of a running sidecar: `status` for scripts, `view` for the status page and `penstock top`.

Both read snapshots and change nothing. They contain no secret; their error texts contain object keys.

Limits may change while a job runs: bandwidth, requests in flight, memory. A change lasts until the process
ends: the job file stays as it is.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, ValidationError

from sidecar.config.mistakes import explain
from sidecar.config.model import Model, Size
from sidecar.observe.bottleneck import Bottleneck, stopped
from sidecar.observe.collector import request_cost
from sidecar.observe.metrics import COUNTS
from streamer import __version__
from streamer.errors import ConfigError
from streamer.relay.statistics import Durations
from streamer.trailer import fifo_path
from streamer.units import MIB, human_bytes

if TYPE_CHECKING:
    from sidecar.observe.state import JobState
    from streamer.relay.statistics import ChannelStatistics
Rate = Annotated[Size, Field(gt=0)]


def status(state: JobState) -> dict[str, Any]:
    """Return the document of `/status`: all statistics but the histograms."""
    return {
        "version": __version__,
        "ready": state.ready,
        "transport": state.transport,
        "process": _process(),
        "limits": limits(state),
        "uploads": _uploads(state),
        "channels": {
            name: _shown(statistics) | {"bottleneck": asdict(_bottleneck(state, name, statistics))}
            for name, statistics in state.statistics().items()
        },
    }


def _shown(now: ChannelStatistics) -> dict[str, Any]:
    """Return all statistics of a channel but the histograms, which only `/metrics` exports."""
    shown = {name: value for name, value in vars(now).items() if not isinstance(value, Durations)}
    counts = shown.pop("counts")
    return shown | {name: counts[name] for name in COUNTS} | {"errors": [asdict(each) for each in now.errors]}


def view(state: JobState, *, ended: bool = False) -> dict[str, Any]:
    """Return one event of `/events`: the figures of the status page, with the rates of the last minute.

    `ended`: whether this is the last event before the admin server closes.
    """
    channels = state.statistics()
    return {
        "version": __version__,
        "at": time.time(),
        "phase": "ended" if ended else state.phase,
        "ready": state.ready,
        "why": "" if state.ready else state.why_not_ready(),
        "transport": state.transport,
        "reason": state.reason,
        "host": {"name": state.hosts.current, "of": len(state.hosts.names)},
        "process": _process(),
        "requests": {
            "planning": sum(state.control_requests.values()),
            "parts": sum(each.counts["requests"].total() for each in channels.values()),
            "dollars": request_cost(state, channels),
        },
        "limits": limits(state),
        "uploads": _uploads(state),
        "sources": state.sources,
        "channels": [_channel(state, name, each) for name, each in channels.items()],
    }


def _channel(state: JobState, name: str, now: ChannelStatistics) -> dict[str, Any]:
    history = state.history
    rates = history.rates(name)
    return {
        "name": name,
        "source": state.sources.get(name, ""),
        "state": now.state,
        "reader": now.reader_connected,
        "bottleneck": asdict(_bottleneck(state, name, now)),
        "shares": history.shares(name),
        "epoch": now.epoch,
        "epochs": now.counts["epochs"],
        "objects": now.objects,
        "listing": now.listing,
        "bytes": now.bytes_total,
        "consumed": now.bytes_consumed,
        "eta": history.eta(name),
        "rates": [round(rate) for rate in rates],
        "written": now.written_bytes,
        "wasted": now.wasted_bytes,
        "requests_in_flight": now.requests_in_flight,
        "requests_in_flight_limit": now.requests_in_flight_limit,
        "reserved": now.reserved_bytes,
        "quota": now.quota_bytes,
        "fifo": now.fifo_bytes,
        "fifo_size": now.fifo_capacity,
        "retries": now.counts["retries"].total(),
        "errors": [asdict(note) for note in reversed(now.errors)],
    }


def _bottleneck(state: JobState, name: str, now: ChannelStatistics) -> Bottleneck:
    """Return the bottleneck of the last minute, with the FIFO to open, or the remedy of the log."""
    if now.state == "stopped":
        return stopped(now.counts["epochs"])
    found = state.history.bottleneck(name)
    if found.kind == "failed":
        return replace(found, remedy=state.advice(state.channels[name]))
    if found.kind == "idle" and now.state == "waiting":
        return replace(found, remedy=f"Open {fifo_path(state.directory, name, now.epoch)} for reading.")
    return found


def _uploads(state: JobState) -> dict[str, Any] | None:
    """Return the uploader's figures; None if the job uploads nothing."""
    return None if state.uploads is None else asdict(state.uploads())


def _process() -> dict[str, Any]:
    return {
        "cpu_seconds": time.process_time(),
        "rss_bytes": _resident(),
        "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _resident() -> int:
    """Return the resident set size of this process in bytes (proc(5), statm)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Change(Model):
    """Body of `PATCH /limits`. None lifts a limit, or lets it adapt; a limit that is left out stays.

    A request with an error changes nothing.
    """

    model_config = ConfigDict(alias_generator=None)

    bandwidth: Rate | None = None
    requests_in_flight: Annotated[int, Field(ge=1, le=1024)] | None = None
    memory_budget: Annotated[Size, Field(gt=0)] | None = None
    channel_bandwidth: dict[str, Rate | None] = {}  # noqa: RUF012 - pydantic copies defaults


def limits(state: JobState) -> dict[str, Any]:
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


def change_limits(state: JobState, document: object) -> dict[str, Any]:
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
    return limits(state)
