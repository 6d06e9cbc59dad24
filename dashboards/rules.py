"""Recording rules: the shares and ratios that alerts look at, worked out once.

Names are level:metric:operation. The level `channel` has a series for each FIFO of each sidecar, `sidecar`
one for each sidecar. Labels are taken away (`without`), never listed, so that what a scraper adds (namespace,
pod, cluster) stays on every alert. A share whose whole is zero has no series: nothing is known then, and no
alert fires. Five minutes are long enough for scrapes a minute apart.
"""

from __future__ import annotations

from typing import Any

WINDOW = "5m"


def rate(selector: str, window: str = WINDOW) -> str:
    """Per-second rate of a counter."""
    return f"rate({selector}[{window}])"


def _share(part: str, whole: str, *, over: str) -> str:
    """`part` of the sum of `whole` over the label `over`, which `part` has too."""
    return f"{part}\n/ ignoring ({over}) group_left ()\n(sum without ({over}) ({whole}) > 0)"


_CONNECTED = rate('penstock_channel_seconds_total{state!="idle"}')
_STARVED = rate("penstock_starved_seconds_total")
_ENDED = rate('penstock_requests_total{outcome!="cancelled"}')
_WHOLE_CONNECTED = f"(sum without (state) ({_CONNECTED}) > 0)"

RECORDED: dict[str, str] = {
    # Shares of the time with a reader, by state of the channel.
    "channel:penstock_channel_seconds:share5m": _share(_CONNECTED, _CONNECTED, over="state"),
    # Starved shares of the same time, by cause.
    "channel:penstock_starved_seconds:share5m": (
        f"{_STARVED}\n/ ignoring (cause) group_left ()\n{_WHOLE_CONNECTED}"
    ),
    # Shares of the requests that ended, by outcome.
    "channel:penstock_requests:share5m": _share(_ENDED, _ENDED, over="outcome"),
    "channel:penstock_retries:ratio5m": (
        f"{rate('penstock_retries_total')}\n/ ignoring (kind) group_left ()\n"
        f"(sum without (outcome) ({_ENDED}) > 0)"
    ),
    "channel:penstock_fifo_written_bytes:rate5m": rate("penstock_fifo_written_bytes_total"),
    "sidecar:penstock_fifo_written_bytes:rate5m": (
        f"sum without (channel) ({rate('penstock_fifo_written_bytes_total')})"
    ),
    # Over longer: what an abandoned epoch throws away comes all at once.
    "sidecar:penstock_wasted_bytes:ratio30m": (
        f"sum without (channel) ({rate('penstock_wasted_bytes_total', '30m')})\n"
        f"/ (sum without (channel) ({rate('penstock_received_bytes_total', '30m')}) > 0)"
    ),
    "sidecar:penstock_reserved_bytes:budget_ratio": (
        "sum without (channel) (penstock_reserved_bytes) / penstock_memory_budget_bytes"
    ),
    "sidecar:process_resident_memory_bytes:limit_ratio": (
        "process_resident_memory_bytes / penstock_memory_limit_bytes"
    ),
    "sidecar:penstock_loop_lag_seconds:p99_5m": (
        f"histogram_quantile(0.99, {rate('penstock_loop_lag_seconds_bucket')})"
    ),
    "channel:penstock_first_byte_seconds:p99_5m": (
        f"histogram_quantile(0.99, {rate('penstock_first_byte_seconds_bucket')})"
    ),
}
"""Name and query."""


def recording_groups() -> list[dict[str, Any]]:
    """The group of rules that comes before the alerts'."""
    rules = [{"record": name, "expr": expression} for name, expression in RECORDED.items()]
    return [{"name": "penstock.recorded", "rules": rules}]
