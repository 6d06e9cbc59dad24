"""Exports the metrics of `metrics.METRICS` in Prometheus' text format.

The data path does not use Prometheus: a scrape takes one snapshot of each channel and writes its lines. Every
possible label value is exported from the start, as zero, so that the rate of the first retry or the first
failed epoch is not missing.

This module writes the lines itself, because with prometheus_client a scrape took ten times as long. It writes
them in slices, between which the event loop moves bytes.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate, islice
from typing import TYPE_CHECKING

from sidecar.observe.metrics import (
    ERRORS,
    HEDGES,
    LEARNT,
    METRICS,
    OPERATIONS,
    OUTCOMES,
    RETRIED,
    TRAILER_STATES,
)
from streamer import __version__
from streamer.relay.statistics import CAUSES, RESUMED, STATES, ChannelStatistics, DurationsSnapshot
from streamer.s3.checksums import OUTCOMES as CHECKED
from streamer.units import human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from sidecar.observe.state import DownloadStatistics, JobState
    from streamer.schedule.budget import MemoryBudget

SLICE = 1000
"""Lines that are written at once: some 3 ms. A scrape of 512 FIFOs has 67,000 lines."""


def _progress(consumed: int, total: int | None) -> float | None:
    """Return the delivered part of the epoch; None while objects are being listed."""
    if total is None:
        return None
    return consumed / total if total else 0.0


_BY_CHANNEL: dict[str, Callable[[ChannelStatistics], float | None]] = {
    "penstock_fifo_written_bytes_total": lambda s: s.written_bytes,
    "penstock_received_bytes_total": lambda s: s.received_bytes,
    "penstock_wasted_bytes_total": lambda s: s.wasted_bytes,
    "penstock_objects_completed_total": lambda s: s.objects_completed,
    "penstock_records_total": lambda s: s.records,
    "penstock_reader_connects_total": lambda s: s.readers_come,
    "penstock_reader_disconnects_total": lambda s: s.readers_gone,
    "penstock_reader_end_disconnects_total": lambda s: s.readers_at_ends,
    "penstock_epoch": lambda s: s.epoch,
    "penstock_epoch_progress_ratio": lambda s: _progress(s.bytes_consumed, s.bytes_total),
    "penstock_epoch_size_bytes": lambda s: s.bytes_total,
    "penstock_epoch_objects": lambda s: s.objects,
    "penstock_channel_listing": lambda s: s.listing,
    "penstock_reader_connected": lambda s: s.reader_connected,
    "penstock_channel_failed": lambda s: s.error is not None,
    "penstock_fifo_capacity_bytes": lambda s: s.fifo_capacity,
    "penstock_fifo_unread_bytes": lambda s: s.fifo_bytes,
    "penstock_reserved_bytes": lambda s: s.reserved_bytes,
    "penstock_channel_quota_bytes": lambda s: s.quota_bytes,
    "penstock_requests_in_flight": lambda s: s.requests_in_flight,
    "penstock_channel_requests_in_flight_limit": lambda s: s.requests_in_flight_limit,
    "penstock_channel_bandwidth_limit_bytes": lambda s: s.bandwidth_limit or math.inf,
}
_LABELLED: dict[str, tuple[tuple[str, ...], Callable[[ChannelStatistics], Mapping[str, float]]]] = {
    "penstock_epochs_total": (TRAILER_STATES, lambda s: s.epochs),
    "penstock_channel_seconds_total": (STATES, lambda s: s.seconds),
    "penstock_starved_seconds_total": (CAUSES, lambda s: s.starved),
    "penstock_channel_failures_total": (ERRORS, lambda s: {s.error_kind: 1} if s.error_kind else {}),
    "penstock_requests_total": (OUTCOMES, lambda s: s.requests),
    "penstock_retries_total": (RETRIED, lambda s: s.retries),
    "penstock_resumes_total": (RESUMED, lambda s: s.resumes),
    "penstock_hedges_total": (HEDGES, lambda s: s.hedges),
    "penstock_objects_checked_total": (CHECKED, lambda s: s.checked),
}
_HISTOGRAMS: dict[str, Callable[[ChannelStatistics], DurationsSnapshot]] = {
    "penstock_head_wait_seconds": lambda s: s.head_wait,
    "penstock_first_byte_seconds": lambda s: s.first_byte,
    "penstock_part_seconds": lambda s: s.part,
}


def exposition(state: JobState) -> Iterator[bytes]:
    """Yield all metrics of a job and its channels, in Prometheus' text format, in slices of `SLICE` lines.

    All channels are those of the first slice's moment.
    """
    lines = _lines(state, state.statistics(), state.download_statistics())
    while text := "".join(islice(lines, SLICE)):
        yield text.encode()


def _lines(
    state: JobState, channels: dict[str, ChannelStatistics], downloads: dict[str, DownloadStatistics]
) -> Iterator[str]:
    for name, spec in METRICS.items():
        yield _comments(name, spec.kind)
        if name in _HISTOGRAMS:
            for channel, statistics in channels.items():
                yield from _histogram(name, f'channel="{channel}"', _HISTOGRAMS[name](statistics))
        elif name in _LABELLED:
            values, read_all = _LABELLED[name]
            label = spec.labels[1]
            for channel, statistics in channels.items():
                numbers = read_all(statistics)
                for value in values:
                    number = _number(numbers.get(value, 0))
                    yield f'{name}{{channel="{channel}",{label}="{value}"}} {number}\n'
        elif name in _BY_CHANNEL:
            read = _BY_CHANNEL[name]
            for channel, statistics in channels.items():
                if (current := read(statistics)) is not None:
                    yield f'{name}{{channel="{channel}"}} {_number(current)}\n'
        elif name.startswith("penstock_download_"):
            for channel, download in downloads.items():
                yield from _download(name, channel, download)
        else:
            yield from _process(name, state, channels)


def _process(name: str, state: JobState, channels: dict[str, ChannelStatistics]) -> Iterator[str]:
    """Yield the lines of a metric of the process or the job."""
    if name in _INFO:
        yield from (_info(name, **labels) for labels in _INFO[name](state))
    elif name in _OF_JOB:
        yield f"{name} {_number(_OF_JOB[name](state, channels))}\n"
    elif name in _OF_BUDGET:
        if state.memory_budget is not None:
            yield f"{name} {_number(_OF_BUDGET[name](state.memory_budget))}\n"
    elif name in _OF_JOB_BY_CHANNEL:
        for channel in channels:
            yield f'{name}{{channel="{channel}"}} {_number(_OF_JOB_BY_CHANNEL[name](state, channel))}\n'
    elif name in _COUNTED:
        for labels, number in _COUNTED[name](state):
            yield f"{name}{{{labels}}} {_number(number)}\n"
    elif name == "penstock_loop_lag_seconds":
        yield from _histogram(name, "", state.history.lag.snapshot())


def _download(name: str, channel: str, download: DownloadStatistics) -> Iterator[str]:
    """Yield the lines of a metric of a File channel."""
    if name in _OF_DOWNLOAD:
        yield f'{name}{{channel="{channel}"}} {_number(_OF_DOWNLOAD[name](download))}\n'
        return
    for outcome in OUTCOMES:
        number = _number(download.requests.get(outcome, 0))
        yield f'{name}{{channel="{channel}",outcome="{outcome}"}} {number}\n'


def _config_info(state: JobState) -> Iterator[dict[str, str]]:
    penstock = state.job.penstock
    yield {
        "memory_budget": _size(penstock.memory_budget, "auto"),
        "part_size": _size(penstock.part_size, "auto"),
        "requests_in_flight": str(penstock.requests_in_flight or "auto"),
        "bandwidth": _size(penstock.bandwidth, "none"),
    }


def _channel_info(state: JobState) -> Iterator[dict[str, str]]:
    for config in state.job.channels("Pipe"):
        ranks = config.penstock.ranks
        for number, channel in enumerate(state.job.fifos(config)):
            rank = "" if ranks is None else str(number // ranks.copies)
            yield {"channel": channel, "whole": config.channel_name, "rank": rank}


def _order_hosts(state: JobState) -> Iterator[tuple[str, float]]:
    for channel, ranks in state.host_ranks().items():
        job, order, deal = _quoted(state.job.training_job_name), ranks.order_digest[:16], ranks.deal
        yield f'whole="{channel}",training_job={job},order="{order}"', deal.ranks / (deal.end - deal.first)


def _eta(state: JobState, channel: str) -> float:
    seconds = state.history.eta(channel)
    return math.nan if seconds is None else seconds


def request_cost(state: JobState, channels: dict[str, ChannelStatistics]) -> float:
    """Return the cost of all ended requests in dollars, at the prices of the job file."""
    prices, requests = state.job.penstock.request_prices, state.control_requests
    gets = sum(sum(statistics.requests.values()) for statistics in channels.values())
    gets += sum(sum(download.requests.values()) for download in state.download_statistics().values())
    gets += requests["GetObject"] + requests["HeadObject"]
    return (gets * prices.get + requests["ListObjectsV2"] * prices.list) / 1000


_INFO: dict[str, Callable[[JobState], Iterable[dict[str, str]]]] = {
    "penstock_build_info": lambda _: [{"version": __version__}],
    "penstock_transport_info": lambda state: [{"transport": state.transport}],
    "penstock_config_info": _config_info,
    "penstock_channel_info": _channel_info,
}
_OF_JOB: dict[str, Callable[[JobState, dict[str, ChannelStatistics]], float]] = {
    "penstock_memory_limit_bytes": lambda state, _: state.memory_limit,
    "penstock_ready": lambda state, _: state.ready,
    "penstock_planning_seconds": lambda state, _: state.planning_seconds,
    "penstock_request_cost_dollars_total": request_cost,
}
_COUNTED: dict[str, Callable[[JobState], Iterable[tuple[str, float]]]] = {
    "penstock_control_requests_total": lambda state: (
        (f'operation="{operation}"', state.control_requests[operation]) for operation in OPERATIONS
    ),
    "penstock_index_objects_total": lambda state: (
        (f'channel="{channel}",row="{row}"', outcomes.get(row, 0))
        for channel, outcomes in list(state.learnt.items())  # it may grow between two slices
        for row in LEARNT
    ),
    "penstock_order_hosts": _order_hosts,
}
"""Labels and values of counters that the job keeps itself."""
_OF_BUDGET: dict[str, Callable[[MemoryBudget], float]] = {
    "penstock_memory_budget_bytes": lambda budget: budget.budget,
    "penstock_requests_in_flight_limit": lambda budget: budget.concurrency.limit,
    "penstock_bandwidth_limit_bytes": lambda budget: budget.bandwidth.limit or math.inf,
}
"""Values of the memory budget's metrics, which exist once the transport is open."""
_OF_JOB_BY_CHANNEL: dict[str, Callable[[JobState, str], float]] = {
    "penstock_channel_unjoined": lambda state, channel: channel in state.unjoined,
    "penstock_epoch_eta_seconds": _eta,
}

_OF_DOWNLOAD: dict[str, Callable[[DownloadStatistics], float]] = {
    "penstock_download_written_bytes_total": lambda download: download.written_bytes,
    "penstock_download_files_total": lambda download: download.files,
    "penstock_download_progress_ratio": lambda download: download.progress,
}


@lru_cache
def _comments(name: str, kind: str) -> str:
    """Return the HELP and TYPE lines of a metric."""
    return f"# HELP {name} {METRICS[name].help}\n# TYPE {name} {'gauge' if kind == 'info' else kind}\n"


def _info(name: str, **labels: str) -> str:
    return f"{name}{{{','.join(f'{label}={_quoted(value)}' for label, value in labels.items())}}} 1.0\n"


def _quoted(value: str) -> str:
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'"{escaped}"'


def _number(value: float) -> str:
    value = float(value)
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf"


def _histogram(name: str, labels: str, snapshot: DurationsSnapshot) -> Iterator[str]:
    before_le, in_braces = (f"{labels},", f"{{{labels}}}") if labels else ("", "")
    count = 0
    for bound, count in zip((*snapshot.bounds, "+Inf"), accumulate(snapshot.counts), strict=True):
        yield f'{name}_bucket{{{before_le}le="{bound}"}} {count}.0\n'
    yield f"{name}_count{in_braces} {count}.0\n{name}_sum{in_braces} {snapshot.sum!r}\n"


def _size(value: int | None, otherwise: str) -> str:
    return otherwise if value is None else human_bytes(value)
