"""What people are shown of a running sidecar: `/status` for scripts, and `view` for page and terminal.

Both are read from snapshots and change nothing. No secret is in them; errors name object keys.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sidecar.collector import request_cost
from sidecar.limits import shown
from streamer import __version__

if TYPE_CHECKING:
    from sidecar.supervisor import Supervisor
    from streamer.relay.statistics import ChannelStatistics

_FOR_METRICS = ("first_byte", "part", "head_wait")


def status(supervisor: Supervisor) -> dict[str, Any]:
    """The document of `/status`: everything that is known."""
    return {
        "version": __version__,
        "ready": supervisor.ready,
        "transport": supervisor.transport,
        "process": _process(),
        "limits": shown(supervisor),
        "channels": {
            name: {field: value for field, value in asdict(statistics).items() if field not in _FOR_METRICS}
            | {"verdict": asdict(supervisor.pulse.verdict(name))}
            for name, statistics in supervisor.statistics().items()
        },
    }


def view(supervisor: Supervisor) -> dict[str, Any]:
    """One event of `/events`: what fits on a page, with the last minute's rates."""
    channels = supervisor.statistics()
    return {
        "version": __version__,
        "at": time.time(),
        "ready": supervisor.ready,
        "why": "" if supervisor.ready else supervisor.why_not_ready(),
        "transport": supervisor.transport,
        "reason": supervisor.reason,
        "host": {"name": supervisor.hosts.current, "of": len(supervisor.hosts.names)},
        "process": _process(),
        "requests": {
            "planning": sum(supervisor.asked.values()),
            "parts": sum(sum(each.requests.values()) for each in channels.values()),
            "dollars": request_cost(supervisor, channels),
        },
        "limits": shown(supervisor),
        "channels": [_channel(supervisor, name, each) for name, each in channels.items()],
    }


def _channel(supervisor: Supervisor, name: str, now: ChannelStatistics) -> dict[str, Any]:
    pulse = supervisor.pulse
    rates = pulse.rates(name)
    return {
        "name": name,
        "source": supervisor.sources.get(name, ""),
        "state": now.state,
        "reader": now.reader_connected,
        "verdict": asdict(pulse.verdict(name)),
        "shares": pulse.shares(name),
        "epoch": now.epoch,
        "epochs": now.epochs,
        "objects": now.objects,
        "bytes": now.bytes_total,
        "consumed": now.bytes_consumed,
        "eta": pulse.eta(name),
        "rates": [round(rate) for rate in rates],
        "written": now.written_bytes,
        "wasted": now.wasted_bytes,
        "lanes": now.inflight,
        "lanes_limit": now.limit,
        "staged": now.staged_bytes,
        "budget": now.budget_bytes,
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
