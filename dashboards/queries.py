"""The PromQL of `Penstock / Overview`, by name.

Rules that the tests hold (tests/operate/test_dashboards.py): every selector names `$job` and
`$instance`, and one of a channel's metric `$channel` too; a counter stands only in `rate` or `increase`
over `$__rate_interval`. A share whose whole may be zero divides by `(… > 0)`, so that the answer is
empty, which a panel can put in words, and not NaN.
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


def sidecar(metric: str) -> str:
    """Selector of a metric of the selected sidecars."""
    return f'{metric}{{job=~"$job", instance=~"$instance"}}'


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


def quantiles(histogram: str) -> tuple[tuple[str, str], ...]:
    """Targets for median, 95th and 99th percentile of a channel's histogram."""
    buckets = f"sum by (le) ({rate(channel(f'{histogram}_bucket'))})"
    return tuple((f"histogram_quantile({q}, {buckets})", f"p{round(q * 100)}") for q in (0.5, 0.95, 0.99))


WRITTEN = rate(channel("penstock_fifo_written_bytes_total"))
RECEIVED = rate(channel("penstock_received_bytes_total"))
PROGRESS = channel("penstock_epoch_progress_ratio")
SIZE = channel("penstock_epoch_size_bytes")
PROCESSOR = rate(sidecar("process_cpu_seconds_total"))
BLOCKED = seconds('state="blocked"')
STARVED = seconds('state="starved"')
STARVED_BY = rate(channel("penstock_starved_seconds_total"))
CONNECTED = seconds('state!="idle"')

SLOWER_SIDE = f"(sum({BLOCKED}) - sum({STARVED})) / (sum({CONNECTED}) > 0)"
FAILED_REQUESTS = requests('outcome!~"ok|cancelled"')
ENDED_REQUESTS = requests('outcome!="cancelled"')
ERROR_RATIO = f"sum({FAILED_REQUESTS}) / (sum({ENDED_REQUESTS}) > 0)"
STATE_SHARES = f"sum by (state) ({seconds()}) / on () group_left () (sum({seconds()}) > 0)"
EPOCHS_ENDED = f"sum by (verdict) (increase({channel('penstock_epochs_total')}[$__rate_interval]))"
TIME_LEFT = f"sum by (channel) ((1 - {PROGRESS}) * {SIZE}) / (sum by (channel) ({WRITTEN}) > 0)"
HEDGES = rate(channel("penstock_hedges_total"))
WASTED = rate(channel("penstock_wasted_bytes_total"))
CHANGED = f"sum by (done) (increase({channel('penstock_source_changed_total')}[$__rate_interval]))"
CHECKED = f"sum by (result) (increase({channel('penstock_objects_checked_total')}[$__rate_interval]))"
VERSIONS = (
    f"count by (version, transport) ({sidecar('penstock_build_info')} "
    f"* on (job, instance) group_left (transport) {sidecar('penstock_transport_info')})"
)
SECONDS_PER_GB = f"1e9 * sum({PROCESSOR}) / (sum({WRITTEN}) > 0)"

ANNOTATIONS = (
    (
        "Sidecar restarts",
        f"changes({sidecar('process_start_time_seconds')}[$__rate_interval]) > 0",
        "red",
    ),
    ("New epochs", f"changes({channel('penstock_epoch')}[$__rate_interval]) > 0", "blue"),
)
"""(name, query, colour) of the vertical lines drawn over the graphs."""
