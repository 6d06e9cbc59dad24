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

from sidecar.observe.metrics import LEARNT, METRICS, OPERATIONS, UPLOAD_PHASES, UPLOADED
from streamer import __version__
from streamer.units import human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from sidecar.observe.metrics import Spec
    from sidecar.observe.state import DownloadStatistics, JobState
    from sidecar.observe.uploads import UploadFigures
    from streamer.relay.statistics import ChannelStatistics, Durations
    from streamer.schedule.budget import MemoryBudget

    _Read = Callable[[JobState, dict[str, ChannelStatistics]], Iterable[tuple[str, float]]]

PRICE_OF_GET, PRICE_OF_LIST = 0.4e-6, 5e-6
"""Dollars a request: of S3 Standard in us-east-1, where GET and HEAD have one price."""
SLICE = 1000
"""Lines that are written at once: some 3 ms. A scrape of 512 FIFOs has 67,000 lines."""


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
        if spec.read:
            read = downloads if name.startswith("penstock_download_") else channels
            for channel, statistics in read.items():
                yield from _of_channel(name, spec, channel, statistics)
        elif spec.kind == "histogram":
            yield from _histogram(name, "", state.history.lag)
        else:
            for labels, number in _OF_JOB[name](state, channels):
                yield f"{name}{{{labels}}} {_number(number)}\n" if labels else f"{name} {_number(number)}\n"


def _of_channel(
    name: str, spec: Spec, channel: str, statistics: ChannelStatistics | DownloadStatistics
) -> Iterator[str]:
    value = spec.value(statistics)
    if spec.values:
        label = spec.labels[1]
        for each in spec.values:
            yield f'{name}{{channel="{channel}",{label}="{each}"}} {_number(value.get(each, 0))}\n'
    elif spec.kind == "histogram":
        yield from _histogram(name, f'channel="{channel}"', value)
    elif value is not None:
        yield f'{name}{{channel="{channel}"}} {_number(value)}\n'


def _config(state: JobState) -> str:
    penstock = state.job.penstock
    return _labels(
        memory_budget=_size(penstock.memory_budget, "auto"),
        part_size=_size(penstock.part_size, "auto"),
        requests_in_flight=str(penstock.requests_in_flight or "auto"),
        bandwidth=_size(penstock.bandwidth, "none"),
    )


def _channel_info(state: JobState) -> Iterator[tuple[str, float]]:
    for config in state.job.channels("Pipe"):
        ranks = config.penstock.ranks
        for number, channel in enumerate(state.job.fifos(config)):
            rank = "" if ranks is None else str(number // ranks.copies % ranks.count)
            yield _labels(channel=channel, whole=config.channel_name, rank=rank), 1


def _order_hosts(state: JobState) -> Iterator[tuple[str, float]]:
    for channel, plan in state.record_plans().items():
        order, deal = plan.order_digest[:16], plan.deal
        labels = _labels(whole=channel, training_job=state.job.training_job_name, order=order)
        yield labels, deal.ranks / (deal.end - deal.first)


def _eta(state: JobState, channel: str) -> float:
    seconds = state.history.eta(channel)
    return math.nan if seconds is None else seconds


def _of_budget(read: Callable[[MemoryBudget], float]) -> _Read:
    """Return how to read the memory budget, which exists once the transport is open."""
    return lambda state, _: [] if state.memory_budget is None else [("", read(state.memory_budget))]


def _of_uploads(read: Callable[[UploadFigures], list[tuple[str, float]]]) -> _Read:
    """Return how to read the uploader's figures, or nothing of a job without uploads."""
    return lambda state, _: [] if state.uploads is None else read(state.uploads())


def request_cost(state: JobState, channels: dict[str, ChannelStatistics]) -> float:
    """Return the cost of all ended requests in dollars."""
    requests = state.control_requests
    gets = sum(statistics.counts["requests"].total() for statistics in channels.values())
    gets += sum(download.counts["requests"].total() for download in state.download_statistics().values())
    gets += requests["GetObject"] + requests["HeadObject"]
    return gets * PRICE_OF_GET + requests["ListObjectsV2"] * PRICE_OF_LIST


_OF_JOB: dict[str, _Read] = {
    "penstock_build_info": lambda *_: [(_labels(version=__version__), 1)],
    "penstock_transport_info": lambda state, _: [(_labels(transport=state.transport), 1)],
    "penstock_config_info": lambda state, _: [(_config(state), 1)],
    "penstock_channel_info": lambda state, _: _channel_info(state),
    "penstock_order_hosts": lambda state, _: _order_hosts(state),
    "penstock_ready": lambda state, _: [("", state.ready)],
    "penstock_epoch_eta_seconds": lambda state, channels: (
        (f'channel="{channel}"', _eta(state, channel)) for channel in channels
    ),
    "penstock_fifo_untaken_seconds": lambda state, channels: (
        (f'channel="{channel}"', state.history.untaken(channel)) for channel in channels
    ),
    "penstock_give_up_after_seconds": lambda state, _: [("", state.job.penstock.give_up_after)],
    "penstock_channel_unjoined": lambda state, channels: (
        (f'channel="{channel}"', channel in state.unjoined) for channel in channels
    ),
    "penstock_index_objects_total": lambda state, _: (
        (f'channel="{channel}",row="{row}"', outcomes.get(row, 0))
        for channel, outcomes in list(state.learnt.items())  # it may grow between two slices
        for row in LEARNT
    ),
    "penstock_memory_budget_bytes": _of_budget(lambda budget: budget.budget),
    "penstock_memory_limit_bytes": lambda state, _: [("", state.memory_limit)],
    "penstock_requests_in_flight_limit": _of_budget(lambda budget: budget.concurrency.limit),
    "penstock_bandwidth_limit_bytes": _of_budget(lambda budget: budget.bandwidth.limit or math.inf),
    "penstock_control_requests_total": lambda state, _: (
        (f'operation="{operation}"', state.control_requests[operation]) for operation in OPERATIONS
    ),
    "penstock_request_cost_dollars_total": lambda state, channels: [("", request_cost(state, channels))],
    "penstock_upload_bytes_total": _of_uploads(lambda uploads: [("", uploads.bytes)]),
    "penstock_upload_files_total": _of_uploads(
        lambda uploads: [(f'upload="{each}"', uploads.files.get(each, 0)) for each in UPLOADED]
    ),
    "penstock_upload_waiting_bytes": _of_uploads(lambda uploads: [("", uploads.waiting_bytes)]),
    "penstock_upload_phase": _of_uploads(
        lambda uploads: [(f'phase="{each}"', uploads.output == each) for each in UPLOAD_PHASES]
    ),
    "penstock_checkpoint_timestamp_seconds": _of_uploads(
        lambda uploads: [] if uploads.newest is None else [("", uploads.newest)]
    ),
    "penstock_checkpoint_upload_seconds": _of_uploads(
        lambda uploads: [] if uploads.newest is None else [("", uploads.last_seconds)]
    ),
    "penstock_planning_seconds": lambda state, _: [("", state.planning_seconds)],
}
"""Labels and values of the metrics of the process and the job."""


@lru_cache
def _comments(name: str, kind: str) -> str:
    """Return the HELP and TYPE lines of a metric."""
    return f"# HELP {name} {METRICS[name].help}\n# TYPE {name} {'gauge' if kind == 'info' else kind}\n"


def _labels(**labels: str) -> str:
    return ",".join(f"{label}={_quoted(value)}" for label, value in labels.items())


def _quoted(value: str) -> str:
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'"{escaped}"'


def _number(value: float) -> str:
    value = float(value)
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf"


def _histogram(name: str, labels: str, durations: Durations) -> Iterator[str]:
    before_le, in_braces = (f"{labels},", f"{{{labels}}}") if labels else ("", "")
    count = 0
    for bound, count in zip((*durations.bounds, "+Inf"), accumulate(durations.counts), strict=True):
        yield f'{name}_bucket{{{before_le}le="{bound}"}} {count}.0\n'
    yield f"{name}_count{in_braces} {count}.0\n{name}_sum{in_braces} {durations.sum!r}\n"


def _size(value: int | None, otherwise: str) -> str:
    return otherwise if value is None else human_bytes(value)
