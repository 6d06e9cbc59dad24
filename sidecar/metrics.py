"""Every metric, in one table, exported from the channels' statistics at scrape time.

Nothing on the data path touches Prometheus: a scrape takes one snapshot per channel and turns it into
samples. Every label value that can occur is exported from the start, as zero, so that a rate over the
first retry or the first failed epoch is not missing. Labels are bounded: channel, and the fixed sets.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from streamer import __version__
from streamer.relay.changes import DONE
from streamer.relay.statistics import STATES, ChannelStatistics, DurationsSnapshot
from streamer.source.integrity import OUTCOMES as CHECKED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sidecar.supervisor import Supervisor

OUTCOMES = (
    "ok", "transient", "throttled", "truncated", "expired", "denied", "missing", "changed", "bad_answer",
    "cancelled",
)  # fmt: skip
RETRIED = ("transient", "throttled", "truncated", "expired", "bad_answer")
HEDGES = ("issued", "won", "lost")
VERDICTS = ("complete", "abandoned", "failed", "stopped")


class Spec(NamedTuple):
    """What a metric is, for documentation and for the tests that compare it with the dashboards."""

    kind: str
    labels: tuple[str, ...]
    help: str


METRICS: dict[str, Spec] = {
    "penstock_build_info": Spec("info", ("version",), "Version of Penstock."),
    "penstock_transport_info": Spec("info", ("transport",), "How bodies are fetched."),
    "penstock_ready": Spec("gauge", (), "1 while every channel offers its FIFO and none has failed."),
    "penstock_fifo_written_bytes_total": Spec("counter", ("channel",), "Bytes that the FIFOs accepted."),
    "penstock_received_bytes_total": Spec("counter", ("channel",), "Body bytes received from S3."),
    "penstock_objects_completed_total": Spec(
        "counter", ("channel",), "Objects delivered to their last byte, counted in every epoch."
    ),
    "penstock_epochs_total": Spec("counter", ("channel", "verdict"), "Epochs ended, by how."),
    "penstock_epoch": Spec("gauge", ("channel",), "The epoch being offered or streamed, from 0."),
    "penstock_epoch_progress_ratio": Spec("gauge", ("channel",), "Delivered share of the current epoch."),
    "penstock_epoch_size_bytes": Spec("gauge", ("channel",), "Bytes of one epoch, before inflation."),
    "penstock_channel_seconds_total": Spec(
        "counter",
        ("channel", "state"),
        "Time: idle (no reader), blocked (FIFO full: trainer slower), starved (storage slower), moving.",
    ),
    "penstock_reader_connected": Spec("gauge", ("channel",), "1 while a reader holds the FIFO open."),
    "penstock_channel_failed": Spec("gauge", ("channel",), "1 once the channel has failed for good."),
    "penstock_fifo_capacity_bytes": Spec("gauge", ("channel",), "Size of the FIFO that the kernel granted."),
    "penstock_staged_bytes": Spec("gauge", ("channel",), "Budget held by parts requested and not delivered."),
    "penstock_budget_bytes": Spec("gauge", ("channel",), "Budget of the channel."),
    "penstock_requests_in_flight": Spec("gauge", ("channel",), "Ranged GETs running."),
    "penstock_requests_limit": Spec("gauge", ("channel",), "Ranged GETs that may run at once."),
    "penstock_requests_total": Spec("counter", ("channel", "outcome"), "Ranged GETs ended, by outcome."),
    "penstock_retries_total": Spec("counter", ("channel", "kind"), "Ranged GETs repeated, by what failed."),
    "penstock_hedges_total": Spec(
        "counter", ("channel", "fate"), "Second requests for a late head of line: issued, and won or lost."
    ),
    "penstock_wasted_bytes_total": Spec("counter", ("channel",), "Bytes that both of two requests brought."),
    "penstock_source_changed_total": Spec(
        "counter", ("channel", "done"), "Objects that were not as listed: failed, refetched or skipped."
    ),
    "penstock_objects_checked_total": Spec(
        "counter",
        ("channel", "result"),
        "Objects compared with the checksums that S3 keeps, where Integrity: checksum asks for it.",
    ),
    "penstock_first_byte_seconds": Spec("histogram", ("channel",), "From request to the head of its answer."),
    "penstock_part_seconds": Spec("histogram", ("channel",), "From request to its last byte."),
}

_COUNTERS: dict[str, Callable[[ChannelStatistics], float]] = {
    "penstock_fifo_written_bytes_total": lambda s: s.written_bytes,
    "penstock_received_bytes_total": lambda s: s.received_bytes,
    "penstock_objects_completed_total": lambda s: s.objects_completed,
    "penstock_wasted_bytes_total": lambda s: s.wasted_bytes,
}
_LABELLED: dict[str, tuple[tuple[str, ...], Callable[[ChannelStatistics], dict[str, float]]]] = {
    "penstock_epochs_total": (VERDICTS, lambda s: dict(s.epochs)),
    "penstock_channel_seconds_total": (STATES, lambda s: dict(s.seconds)),
    "penstock_requests_total": (OUTCOMES, lambda s: dict(s.requests)),
    "penstock_hedges_total": (HEDGES, lambda s: dict(s.hedges)),
    "penstock_source_changed_total": (DONE, lambda s: dict(s.changed)),
    "penstock_objects_checked_total": (CHECKED, lambda s: dict(s.checked)),
    "penstock_retries_total": (RETRIED, lambda s: dict(s.retries)),
}
_GAUGES: dict[str, Callable[[ChannelStatistics], float]] = {
    "penstock_epoch": lambda s: s.epoch,
    "penstock_epoch_progress_ratio": lambda s: s.bytes_consumed / s.bytes_total if s.bytes_total else 0.0,
    "penstock_epoch_size_bytes": lambda s: s.bytes_total,
    "penstock_reader_connected": lambda s: s.reader_connected,
    "penstock_channel_failed": lambda s: s.error is not None,
    "penstock_fifo_capacity_bytes": lambda s: s.fifo_capacity,
    "penstock_staged_bytes": lambda s: s.staged_bytes,
    "penstock_budget_bytes": lambda s: s.budget_bytes,
    "penstock_requests_in_flight": lambda s: s.inflight,
    "penstock_requests_limit": lambda s: s.limit,
}
_HISTOGRAMS: dict[str, Callable[[ChannelStatistics], DurationsSnapshot]] = {
    "penstock_first_byte_seconds": lambda s: s.first_byte,
    "penstock_part_seconds": lambda s: s.part,
}


class ChannelCollector(Collector):
    """Samples of one supervisor's channels."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def collect(self) -> Iterator[Metric]:
        supervisor = self._supervisor
        yield InfoMetricFamily(
            "penstock_build", METRICS["penstock_build_info"].help, {"version": __version__}
        )
        yield InfoMetricFamily(
            "penstock_transport",
            METRICS["penstock_transport_info"].help,
            {"transport": supervisor.transport},
        )
        yield GaugeMetricFamily("penstock_ready", METRICS["penstock_ready"].help, supervisor.ready)
        channels = supervisor.statistics()
        for name, read in _COUNTERS.items():
            counter = CounterMetricFamily(name, METRICS[name].help, labels=METRICS[name].labels)
            for channel, statistics in channels.items():
                counter.add_metric([channel], read(statistics))
            yield counter
        for name, (values, read_all) in _LABELLED.items():
            counter = CounterMetricFamily(name, METRICS[name].help, labels=METRICS[name].labels)
            for channel, statistics in channels.items():
                found = read_all(statistics)
                for value in values:
                    counter.add_metric([channel, value], found.get(value, 0))
            yield counter
        for name, read in _GAUGES.items():
            gauge = GaugeMetricFamily(name, METRICS[name].help, labels=METRICS[name].labels)
            for channel, statistics in channels.items():
                gauge.add_metric([channel], read(statistics))
            yield gauge
        for name, durations in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, METRICS[name].help, labels=METRICS[name].labels)
            for channel, statistics in channels.items():
                snapshot = durations(statistics)
                bounds = [*map(str, snapshot.bounds), "+Inf"]
                buckets = list(zip(bounds, accumulate(snapshot.counts), strict=True))
                histogram.add_metric([channel], buckets, snapshot.sum)
            yield histogram
