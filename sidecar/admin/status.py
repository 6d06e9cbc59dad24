"""What people are shown of a running sidecar: `/status` for scripts, and `view` for page and terminal.

Both are read from snapshots and change nothing. No secret is in them; errors name object keys.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sidecar.admin.limits import shown
from sidecar.observe.collector import request_cost
from streamer import __version__

if TYPE_CHECKING:
    from sidecar.observe.state import JobState
    from streamer.relay.statistics import ChannelStatistics

_FOR_METRICS = ("first_byte", "part", "head_wait")


def status(state: JobState) -> dict[str, Any]:
    """The document of `/status`: everything that is known."""
    return {
        "version": __version__,
        "ready": state.ready,
        "transport": state.transport,
        "process": _process(),
        "limits": shown(state),
        "channels": {
            name: {field: value for field, value in asdict(statistics).items() if field not in _FOR_METRICS}
            | {"bottleneck": asdict(state.history.bottleneck(name))}
            for name, statistics in state.statistics().items()
        },
    }


def view(state: JobState) -> dict[str, Any]:
    """One event of `/events`: what fits on a page, with the last minute's rates."""
    channels = state.statistics()
    return {
        "version": __version__,
        "at": time.time(),
        "ready": state.ready,
        "why": "" if state.ready else state.why_not_ready(),
        "transport": state.transport,
        "reason": state.reason,
        "host": {"name": state.hosts.current, "of": len(state.hosts.names)},
        "process": _process(),
        "requests": {
            "planning": sum(state.asked.values()),
            "parts": sum(sum(each.requests.values()) for each in channels.values()),
            "dollars": request_cost(state, channels),
        },
        "limits": shown(state),
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
        "bottleneck": asdict(history.bottleneck(name)),
        "shares": history.shares(name),
        "epoch": now.epoch,
        "epochs": now.epochs,
        "objects": now.objects,
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
        "retries": sum(now.retries.values()),
        "errors": [asdict(note) for note in reversed(now.errors)],
    }


def _process() -> dict[str, Any]:
    return {
        "cpu_seconds": time.process_time(),
        "rss_bytes": _resident(),
        "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _resident() -> int:
    """Bytes of this process in memory (proc(5), statm)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
