"""Status documents of a running sidecar: `status` for scripts, `view` for the status page and `penstock top`.

Both read snapshots and change nothing. They contain no secret; their error texts contain object keys.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from sidecar.admin.limits import current
from sidecar.observe.bottleneck import Bottleneck, stopped
from sidecar.observe.collector import request_cost
from sidecar.observe.metrics import COUNTS
from streamer import __version__
from streamer.relay.statistics import Durations
from streamer.trailer import fifo_path

if TYPE_CHECKING:
    from sidecar.observe.state import JobState
    from streamer.relay.statistics import ChannelStatistics


def status(state: JobState) -> dict[str, Any]:
    """Return the document of `/status`: all statistics but the histograms."""
    return {
        "version": __version__,
        "ready": state.ready,
        "transport": state.transport,
        "process": _process(),
        "limits": current(state),
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
        "limits": current(state),
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
    """Return the bottleneck of the last minute. Without a reader, its remedy is the FIFO to open."""
    if now.state == "stopped":
        return stopped(now.counts["epochs"])
    found = state.history.bottleneck(name)
    if found.kind == "idle" and now.state == "waiting":
        return replace(found, remedy=f"Open {fifo_path(state.directory, name, now.epoch)} for reading.")
    return found


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
