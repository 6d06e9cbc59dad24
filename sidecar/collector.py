"""The metrics of `metrics.METRICS`, exported from the channels' statistics at scrape time.

Nothing on the data path touches Prometheus: a scrape takes one snapshot per channel and turns it into
samples. Every label value that can occur is exported from the start, as zero, so that a rate over the
first retry or the first failed epoch is not missing.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from sidecar.metrics import ERRORS, METRICS, OPERATIONS, OUTCOMES, RETRIED, VERDICTS
from streamer import __version__
from streamer.relay.statistics import CAUSES, STATES, ChannelStatistics, DurationsSnapshot
from streamer.units import human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from sidecar.supervisor import Supervisor

_COUNTERS: dict[str, Callable[[ChannelStatistics], float]] = {
    "penstock_fifo_written_bytes_total": lambda s: s.written_bytes,
    "penstock_received_bytes_total": lambda s: s.received_bytes,
    "penstock_wasted_bytes_total": lambda s: s.wasted_bytes,
    "penstock_objects_completed_total": lambda s: s.objects_completed,
    "penstock_reader_connects_total": lambda s: s.readers_come,
    "penstock_reader_disconnects_total": lambda s: s.readers_gone,
}
_LABELLED: dict[str, tuple[tuple[str, ...], Callable[[ChannelStatistics], Mapping[str, float]]]] = {
    "penstock_epochs_total": (VERDICTS, lambda s: s.epochs),
    "penstock_channel_seconds_total": (STATES, lambda s: s.seconds),
    "penstock_starved_seconds_total": (CAUSES, lambda s: s.starved),
    "penstock_channel_failures_total": (ERRORS, lambda s: {s.error_kind: 1} if s.error_kind else {}),
    "penstock_requests_total": (OUTCOMES, lambda s: s.requests),
    "penstock_retries_total": (RETRIED, lambda s: s.retries),
}
_GAUGES: dict[str, Callable[[ChannelStatistics], float]] = {
    "penstock_epoch": lambda s: s.epoch,
    "penstock_epoch_progress_ratio": lambda s: s.bytes_consumed / s.bytes_total if s.bytes_total else 0.0,
    "penstock_epoch_size_bytes": lambda s: s.bytes_total,
    "penstock_epoch_objects": lambda s: s.objects,
    "penstock_reader_connected": lambda s: s.reader_connected,
    "penstock_channel_failed": lambda s: s.error is not None,
    "penstock_fifo_capacity_bytes": lambda s: s.fifo_capacity,
    "penstock_fifo_unread_bytes": lambda s: s.fifo_bytes,
    "penstock_staged_bytes": lambda s: s.staged_bytes,
    "penstock_budget_bytes": lambda s: s.budget_bytes,
    "penstock_requests_in_flight": lambda s: s.inflight,
    "penstock_requests_limit": lambda s: s.limit,
    "penstock_channel_bandwidth_limit_bytes": lambda s: s.bandwidth_limit or math.inf,
}
_HISTOGRAMS: dict[str, Callable[[ChannelStatistics], DurationsSnapshot]] = {
    "penstock_head_wait_seconds": lambda s: s.head_wait,
    "penstock_first_byte_seconds": lambda s: s.first_byte,
    "penstock_part_seconds": lambda s: s.part,
}


class ChannelCollector(Collector):
    """Samples of one supervisor and its channels."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def collect(self) -> Iterator[Metric]:
        channels = self._supervisor.statistics()
        yield from self._process(channels)
        for name, read in _COUNTERS.items():
            counter = _counter(name)
            for channel, statistics in channels.items():
                counter.add_metric([channel], read(statistics))
            yield counter
        for name, (values, read_all) in _LABELLED.items():
            counter = _counter(name)
            for channel, statistics in channels.items():
                found = read_all(statistics)
                for value in values:
                    counter.add_metric([channel, value], found.get(value, 0))
            yield counter
        for name, read in _GAUGES.items():
            gauge = _gauge(name)
            for channel, statistics in channels.items():
                gauge.add_metric([channel], read(statistics))
            yield gauge
        left = _gauge("penstock_epoch_eta_seconds")
        for channel in channels:
            seconds = self._supervisor.pulse.eta(channel)
            left.add_metric([channel], math.nan if seconds is None else seconds)
        yield left
        for name, durations in _HISTOGRAMS.items():
            histogram = _histogram(name)
            for channel, statistics in channels.items():
                _fill(histogram, [channel], durations(statistics))
            yield histogram

    def _process(self, channels: dict[str, ChannelStatistics]) -> Iterator[Metric]:
        """What is of the process, not of a channel."""
        supervisor, penstock = self._supervisor, self._supervisor.job.penstock
        yield _info("penstock_build_info", version=__version__)
        yield _info("penstock_transport_info", transport=supervisor.transport)
        yield _info(
            "penstock_config_info",
            memory_budget=_size(penstock.memory_budget, "auto"),
            part_size=_size(penstock.part_size, "auto"),
            connections=str(penstock.connections or "auto"),
            bandwidth=_size(penstock.bandwidth, "none"),
        )
        allotment = supervisor.allotment
        if allotment is not None:
            for name, value in (
                ("penstock_memory_budget_bytes", allotment.budget),
                ("penstock_lanes_limit", allotment.pace.lanes),
                ("penstock_bandwidth_limit_bytes", allotment.bandwidth.limit or math.inf),
            ):
                yield GaugeMetricFamily(name, METRICS[name].help, value)
        for name, value in (
            ("penstock_ready", supervisor.ready),
            ("penstock_planning_seconds", supervisor.planning_seconds),
        ):
            yield GaugeMetricFamily(name, METRICS[name].help, value)
        operations = _counter("penstock_control_requests_total")
        for operation in OPERATIONS:
            operations.add_metric([operation], supervisor.asked[operation])
        yield operations
        name = "penstock_request_cost_dollars_total"
        yield CounterMetricFamily(name, METRICS[name].help, request_cost(supervisor, channels))
        lag = _histogram("penstock_loop_lag_seconds")
        _fill(lag, [], supervisor.pulse.lag.snapshot())
        yield lag


def request_cost(supervisor: Supervisor, channels: dict[str, ChannelStatistics]) -> float:
    """Dollars for all requests so far, as the job file has their prices; those in flight do not count yet."""
    prices, asked = supervisor.job.penstock.request_prices, supervisor.asked
    gets = sum(sum(statistics.requests.values()) for statistics in channels.values())
    gets += asked["GetObject"] + asked["HeadObject"]
    return (gets * prices.get + asked["ListObjectsV2"] * prices.list) / 1000


def _size(value: int | None, otherwise: str) -> str:
    return otherwise if value is None else human_bytes(value)


def _info(name: str, **labels: str) -> Metric:
    return InfoMetricFamily(name.removesuffix("_info"), METRICS[name].help, labels)


def _counter(name: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, METRICS[name].help, labels=METRICS[name].labels)


def _gauge(name: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, METRICS[name].help, labels=METRICS[name].labels)


def _histogram(name: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, METRICS[name].help, labels=METRICS[name].labels)


def _fill(histogram: HistogramMetricFamily, labels: list[str], snapshot: DurationsSnapshot) -> None:
    bounds = [*map(str, snapshot.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(snapshot.counts), strict=True))
    histogram.add_metric(labels, buckets, snapshot.sum)
