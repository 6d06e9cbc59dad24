"""The PromQL of the dashboards, by name.

Rules that the tests hold (tests/operate/test_dashboards.py): every selector names `$job` and
`$instance`, and one of a channel's metric `$channel` too; a counter stands only in `rate` or `increase`
over `$__rate_interval`; a graph has at most `SERIES` series. A share whose whole may be zero divides by
`(… > 0)`, so that the answer is empty, which a panel can put in words, and not NaN. No query needs the
recording rules of `dashboards.rules`: the pages work in a Prometheus that has only scraped. The pages need
Prometheus 2.33 or newer, which has the modifier `@`.
"""

from __future__ import annotations

VARIABLES = (
    ("job", "Job", "label_values(penstock_ready, job)"),
    ("instance", "Sidecar", 'label_values(penstock_ready{job=~"$job"}, instance)'),
    (
        "channel",
        "Channel",
        'label_values(penstock_channel_failed{job=~"$job", instance=~"$instance"}, channel)',
    ),
)
"""(name, label, query) of the choices at the top of the page."""


SERIES = 8
"""Most series of a graph: more names than that nobody tells apart."""
_SHOWN = "[$__range:$__interval] @ end()"
"""The time that a graph shows, as the range of a subquery."""


def sidecar(metric: str, *matchers: str) -> str:
    """Selector of a metric of the selected sidecars."""
    every = ('job=~"$job"', 'instance=~"$instance"', *matchers)
    return f"{metric}{{{', '.join(every)}}}"


def channel(metric: str, *matchers: str) -> str:
    """Selector of a metric of the selected channels."""
    every = ('job=~"$job"', 'instance=~"$instance"', 'channel=~"$channel"', *matchers)
    return f"{metric}{{{', '.join(every)}}}"


def rate(selector: str) -> str:
    """Per-second rate of a counter."""
    return f"rate({selector}[$__rate_interval])"


def seconds(*matchers: str) -> str:
    """Seconds per second that channels spend in the states that match."""
    return rate(channel("penstock_channel_seconds_total", *matchers))


def requests(*matchers: str) -> str:
    """Requests per second with the outcomes that match."""
    return rate(channel("penstock_requests_total", *matchers))


def by_sidecar(expression: str) -> str:
    """The sum over whatever there is besides the sidecar."""
    return f"sum by ({SIDECAR}) ({expression})"


def by(label: str, expression: str, function: str = "sum") -> tuple[str, str]:
    """A target with a series for each value of `label`, which is its legend too."""
    return f"{function} by ({label}) ({expression})", f"{{{{{label}}}}}"


def most(expression: str, count: int = SERIES) -> str:
    """The `count` series that are the largest in the time shown; at all times the same ones.

    `topk` alone chooses again for every point, so that a legend may have any number of series.
    """
    return f"({expression}) and topk({count}, max_over_time(({expression}){_SHOWN}))"


def least(expression: str, count: int = SERIES) -> str:
    """The `count` series that are the smallest on average in the time shown."""
    return f"({expression}) and bottomk({count}, avg_over_time(({expression}){_SHOWN}))"


def most_by(label: str, expression: str, function: str = "sum", *, count: int = SERIES) -> tuple[str, str]:
    """A target as `by`, of the largest values of `label`."""
    every, legend = by(label, expression, function)
    return most(every, count), legend


def least_by(label: str, expression: str, function: str = "sum") -> tuple[str, str]:
    """A target as `by`, of the smallest values of `label`."""
    every, legend = by(label, expression, function)
    return least(every), legend


def of_ranks(function: str, metric: str) -> str:
    """`function` over the ranks of each channel of each sidecar that is dealt over several FIFOs."""
    ranks = channel("penstock_channel_info", 'rank!=""')
    return (
        f"{function} by (instance, whole) ({metric} * on (job, instance, channel) group_left (whole) {ranks})"
    )


def of_read_channels(metric: str) -> str:
    """By sidecar, the least of the channels with a reader. Without any reader, the largest of all channels.

    A channel that nobody reads stays at 0, and is no sign that the sidecar is slow.
    """
    reader = f"{channel('penstock_reader_connected')} == 1"
    return (
        f"min by ({SIDECAR}) ({metric} and on (job, instance, channel) ({reader})) "
        f"or max by ({SIDECAR}) ({metric})"
    )


def quantiles(histogram: str) -> tuple[tuple[str, str], ...]:
    """Targets for median, 95th and 99th percentile of a channel's histogram."""
    buckets = f"sum by (le) ({rate(channel(f'{histogram}_bucket'))})"
    return tuple((f"histogram_quantile({q}, {buckets})", f"p{round(q * 100)}") for q in (0.5, 0.95, 0.99))


SIDECAR = "job, instance, pod"
"""Labels of one sidecar. Outside Kubernetes there is no pod, and the label is as if it were not named."""

WRITTEN = rate(channel("penstock_fifo_written_bytes_total"))
RECEIVED = rate(channel("penstock_received_bytes_total"))
PROGRESS = channel("penstock_epoch_progress_ratio")
SIZE = channel("penstock_epoch_size_bytes")
PROCESSOR = rate(sidecar("process_cpu_seconds_total"))
"""Cores of a sidecar."""
BLOCKED = seconds('state="blocked"')
STARVED = seconds('state="starved"')
STARVED_BY = rate(channel("penstock_starved_seconds_total"))
CONNECTED = seconds('state!="idle"')

SLOWER_SIDE = f"(sum({BLOCKED}) - sum({STARVED})) / (sum({CONNECTED}) > 0)"
FAILED_REQUESTS = requests('outcome!~"ok|cancelled"')
ENDED_REQUESTS = requests('outcome!="cancelled"')
ERROR_RATIO = f"sum({FAILED_REQUESTS}) / (sum({ENDED_REQUESTS}) > 0)"
STATE_SHARES = f"sum by (state) ({seconds()}) / on () group_left () (sum({seconds()}) > 0)"
EPOCHS_ENDED = f"sum by (trailer_state) (increase({channel('penstock_epochs_total')}[$__rate_interval]))"
TIME_LEFT = f"sum by (channel) ((1 - {PROGRESS}) * {SIZE}) / (sum by (channel) ({WRITTEN}) > 0)"
HEDGES = rate(channel("penstock_hedges_total"))
WASTED = rate(channel("penstock_wasted_bytes_total"))
CHECKED = f"sum by (result) (increase({channel('penstock_objects_checked_total')}[$__rate_interval]))"
VERSIONS = (
    f"count by (version, transport) ({sidecar('penstock_build_info')} "
    f"* on (job, instance) group_left (transport) {sidecar('penstock_transport_info')})"
)
RANKS_APART = f"{of_ranks('max', channel('penstock_epoch'))} - {of_ranks('min', channel('penstock_epoch'))}"
RANKS_IDLE = of_ranks("max", seconds('state="idle"'))
RANK_BYTES = of_ranks("sum", WRITTEN)
CHECKPOINT_AGE = f"time() - {sidecar('penstock_checkpoint_timestamp_seconds')}"
UPLOAD_FAILURES = rate(sidecar("penstock_upload_files_total", 'upload!="uploaded"'))
SECONDS_PER_GB = f"1e9 * sum({PROCESSOR}) / (sum({WRITTEN}) > 0)"

ANNOTATIONS = (
    (
        "Sidecar restarts",
        f"changes({sidecar('process_start_time_seconds')}[$__rate_interval]) > 0",
        "red",
    ),
    ("New epochs", f"changes({channel('penstock_epoch')}[$__rate_interval]) > 0", "blue"),
    (
        "Alerts",
        'ALERTS{job=~"$job", instance=~"$instance", alertname=~"Penstock.+", alertstate="firing"}',
        "orange",
    ),
)
"""(name, query, colour) of the vertical lines drawn over the graphs."""

# By sidecar, for the fleet.

DELIVERED_BY = by_sidecar(WRITTEN)
STARVED_SHARE_BY = f"{by_sidecar(STARVED)} / ({by_sidecar(CONNECTED)} > 0)"
BLOCKED_SHARE_BY = f"{by_sidecar(BLOCKED)} / ({by_sidecar(CONNECTED)} > 0)"
STARVED_SIDECARS = f"sum(({STARVED_SHARE_BY}) > bool 0.5)"
STARVED_SHARE_BY_JOB = f"sum by (job) ({STARVED}) / (sum by (job) ({CONNECTED}) > 0)"
STARVED_CAUSES_BY = f"sum by ({SIDECAR}, cause) ({STARVED_BY})"
ERRORS_BY = f"{by_sidecar(FAILED_REQUESTS)} / ({by_sidecar(ENDED_REQUESTS)} > 0)"
THROTTLED_BY = by_sidecar(requests('outcome="throttled"'))
RETRIES_BY = by_sidecar(rate(channel("penstock_retries_total")))
WASTED_BY = by_sidecar(WASTED)
FIRST_BYTE_BY = (
    f"histogram_quantile(0.99, sum by ({SIDECAR}, le) "
    f"({rate(channel('penstock_first_byte_seconds_bucket'))}))"
)
LAG_BY = (
    f"histogram_quantile(0.99, sum by ({SIDECAR}, le) ({rate(sidecar('penstock_loop_lag_seconds_bucket'))}))"
)
READY_BY = f"min by ({SIDECAR}) ({sidecar('penstock_ready')})"
FAILED_BY = by_sidecar(channel("penstock_channel_failed"))
PROGRESS_BY = of_read_channels(PROGRESS)
EPOCH_BY = of_read_channels(channel("penstock_epoch"))
RESIDENT_BY = by_sidecar(sidecar("process_resident_memory_bytes"))
RESIDENT_SHARE_BY = f"{RESIDENT_BY} / {by_sidecar(sidecar('penstock_memory_limit_bytes'))}"
RESERVED_BY = by_sidecar(channel("penstock_reserved_bytes"))
RESERVED_SHARE_BY = f"{RESERVED_BY} / {by_sidecar(sidecar('penstock_memory_budget_bytes'))}"
PROCESSOR_BY = by_sidecar(PROCESSOR)
RESTARTS_BY = by_sidecar(
    f"changes({sidecar('process_start_time_seconds')}[$__rate_interval]) "
    f"and on (job, instance) {sidecar('penstock_ready')}"
)
VERSION_BY = f"max by ({SIDECAR}, version) ({sidecar('penstock_build_info')})"
EPOCHS_APART = (
    f"max by (job, channel) ({channel('penstock_epoch')}) - min by (job, channel) "
    f"({channel('penstock_epoch')})"
)
SETTINGS = (
    f"count by (memory_budget, part_size, requests_in_flight, bandwidth) ({sidecar('penstock_config_info')})"
)
