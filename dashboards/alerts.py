"""What an operator is told of, and how soon; docs/how-to/runbook.md has an entry for each.

    critical  a training stands still or is about to: somebody is woken
    warning   it goes on, slower or at a greater price: to be looked at in the day

A trainer that is slower than storage is how it should be, so `blocked` is never an alert, and neither is a
budget in full use. What restarts mend, such as a request that is repeated, is one only if it lasts. Alerts
keep the labels of the metric; none names a job, since a sidecar is known by what it exports.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

RUNBOOK = "docs/how-to/runbook.md"
"""Where the entries are; `python -m dashboards.build --runbook` and the chart's value put another address."""

_WHERE = "{{ $labels.instance }}"
_CHANNEL = f"Channel {{{{ $labels.channel }}}} of {_WHERE}"
_PERCENT = "{{ $value | humanizePercentage }}"
_SIZE = "{{ $value | humanize1024 }}B"


@dataclass(frozen=True, slots=True)
class Alert:
    """One alerting rule; `lasting` is how long `expression` holds before it fires, as `15m`."""

    name: str
    lasting: str
    severity: Literal["critical", "warning"]
    _: KW_ONLY
    expression: str
    summary: str
    description: str

    @property
    def anchor(self) -> str:
        """Of its entry in the runbook."""
        return self.name.lower()

    def rule(self, runbook: str) -> dict[str, Any]:
        """As Prometheus takes it."""
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.lasting,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{runbook}#{self.anchor}",
            },
        }


_CAUSES = (
    "{{ range printf `sort_desc(channel:penstock_starved_seconds:share5m"
    '{job="%s", instance="%s", channel="%s"} >= 0.05)` '
    "$labels.job $labels.instance $labels.channel | query }}"
    " {{ .Labels.cause }} {{ .Value | humanizePercentage }}{{ end }}"
)
"""Not a label: which cause is the largest may change while the alert waits, and it would begin anew."""

# fmt: off
ALIVE = (
    Alert("PenstockDown", "2m", "critical",
        # By name of job or container too: what has never answered has exported nothing.
        expression="up == 0\n"
                   "and on (job, instance) last_over_time(penstock_ready[6h])\n"
                   'or up{job="penstock"} == 0\n'
                   'or up{container="penstock"} == 0',
        summary=f"Sidecar {_WHERE} does not answer.",
        description="It is listed as a target and cannot be scraped: the process has died, hangs, or the "
                    "network is cut."),
    Alert("PenstockGone", "5m", "warning",
        # Of the last scrapes: a reader, and minutes to go. Whatever ended with its job does not look so.
        expression="last_over_time(penstock_epoch_eta_seconds[30m]) > 300\n"
                   "and last_over_time(penstock_reader_connected[30m]) == 1\n"
                   "unless on (job, instance) up",
        summary=f"Sidecar {_WHERE} is gone, in the middle of an epoch.",
        description="It is no target any more. At its last scrape channel {{ $labels.channel }} was "
                    "being read, with {{ $value | humanizeDuration }} of its epoch to go. A trainer that "
                    "ended early by itself looks the same."),
    Alert("PenstockNotReady", "15m", "warning",
        expression="penstock_ready == 0\nunless on (job, instance) (penstock_channel_failed == 1)",
        summary=f"Sidecar {_WHERE} has not been ready for 15 minutes.",
        description="It lists or downloads still, or drains; the body of /readyz says what."),
    Alert("PenstockRestarting", "0m", "warning",
        expression="changes(process_start_time_seconds[1h]) >= 2\n"
                   "and on (job, instance) last_over_time(penstock_ready[15m])",
        summary=f"Sidecar {_WHERE} has started {{{{ $value }}}} times again within an hour.",
        description="Each start lists anew, and without a keeper it breaks the trainer's epoch off."),
)

STREAM = (
    Alert("PenstockChannelFailed", "0m", "critical",
        expression="penstock_channel_failures_total > 0",
        summary=f"{_CHANNEL} has failed for good: {{{{ $labels.error }}}}.",
        description="Nothing mends it but a new start. Unless WhenFailed says otherwise its FIFO is held "
                    "open, and a reader that is not Penstock's waits for ever."),
    Alert("PenstockEpochFailed", "0m", "warning",
        expression='increase(penstock_epochs_total{trailer_state="failed"}[1h]) > 0\n'
                   "unless ignoring (trailer_state) (penstock_channel_failed == 1)",
        summary=f"{_CHANNEL} had a failed epoch within the last hour.",
        description="The sidecar has gone on or was started again since; what the trainer had of that "
                    "epoch is not all of it."),
    Alert("PenstockNoProgress", "1m", "critical",
        # Sooner than GiveUpAfter, so not of what is recorded over five minutes.
        expression="rate(penstock_fifo_written_bytes_total[2m]) == 0\n"
                   'and ignoring (state) rate(penstock_channel_seconds_total{state="starved"}[2m]) > 0.95\n'
                   "unless (penstock_channel_failed == 1)",
        summary=f"{_CHANNEL} has delivered nothing for 3 minutes while its reader waits.",
        description=f"All of that time it waited for storage:{_CAUSES}."),
    Alert("PenstockStarved", "15m", "warning",
        expression='channel:penstock_channel_seconds:share5m{state="starved"} > 0.5',
        summary=f"{_CHANNEL} keeps its trainer waiting for storage.",
        description=f"{_PERCENT} of the time with a reader is spent waiting for storage:{_CAUSES}."),
    Alert("PenstockSourceChanged", "0m", "warning",
        expression="increase(penstock_source_changed_total[1h]) > 0",
        summary=f"Objects of channel {{{{ $labels.channel }}}} changed while {_WHERE} read them.",
        description="{{ $value | humanize }} within the last hour, {{ $labels.done }}. Somebody writes "
                    "into the data set."),
    Alert("PenstockChecksumMismatch", "0m", "critical",
        expression='increase(penstock_objects_checked_total{result="mismatch"}[1h]) > 0',
        summary=f"{_CHANNEL} has read bytes that are not those S3 keeps the checksum of.",
        description="The epoch fails. The log names the object and both sums."),
)

STORAGE = (
    Alert("PenstockStorageFailing", "5m", "critical",
        expression='sum without (outcome) (channel:penstock_requests:share5m{outcome!="ok"}) > 0.5',
        summary=f"{_PERCENT} of the S3 requests of channel {{{{ $labels.channel }}}} of {_WHERE} fail.",
        description="They are repeated for GiveUpAfter (5 minutes unless set) without a byte, and then "
                    "the channel fails."),
    Alert("PenstockThrottled", "15m", "warning",
        expression='channel:penstock_requests:share5m{outcome="throttled"} > 0.05',
        summary=f"S3 throttles channel {{{{ $labels.channel }}}} of {_WHERE}.",
        description=f"{_PERCENT} of its requests are answered with SlowDown, and have been for 15 minutes."),
    Alert("PenstockRetries", "15m", "warning",
        expression='channel:penstock_retries:ratio5m{kind!="throttled"} > 0.05',
        summary=f"{_CHANNEL} repeats many requests: {{{{ $labels.kind }}}}.",
        description=f"{_PERCENT} of them, for 15 minutes. No byte is lost, but each costs time and a "
                    "request."),
    Alert("PenstockWaste", "15m", "warning",
        expression="sidecar:penstock_wasted_bytes:ratio30m > 0.2\n"
                   "and sum without (channel) (increase(penstock_wasted_bytes_total[30m])) > 1e9",
        summary=f"{_PERCENT} of what {_WHERE} fetches is thrown away.",
        description="Epochs that are left early, objects that are replaced, or second requests for late "
                    "parts."),
)

HOST = (
    Alert("PenstockMemoryNearLimit", "5m", "critical",
        expression="sidecar:process_resident_memory_bytes:limit_ratio > 0.9",
        summary=f"Sidecar {_WHERE} is about to be ended by the kernel for memory.",
        description=f"It has {_PERCENT} of what its cgroup allows."),
    Alert("PenstockMemoryBeyondBudget", "15m", "warning",
        # The process without a budget takes some 100 MiB; manifests give 256 MiB and more beside it.
        expression="process_resident_memory_bytes - penstock_memory_budget_bytes > 256 * 1024 * 1024",
        summary=f"Sidecar {_WHERE} takes more memory than its budget accounts for.",
        description=f"{_SIZE} more than MemoryBudget. Some 100 MiB are usual; a leak is a bug."),
    Alert("PenstockBudgetExceeded", "10m", "warning",
        expression="sidecar:penstock_reserved_bytes:budget_ratio > 1.1",
        summary=f"Sidecar {_WHERE} holds more parts than its MemoryBudget.",
        description=f"{_PERCENT} of the budget. After a lower budget was set it may last until those "
                    "parts are delivered."),
    Alert("PenstockLoopLag", "10m", "warning",
        expression="sidecar:penstock_loop_lag_seconds:p99_5m > 0.25",
        summary=f"Sidecar {_WHERE} does not get enough processor time.",
        description="Its event loop is {{ $value | humanizeDuration }} late one time in a hundred; bytes "
                    "wait meanwhile."),
)
# fmt: on

GROUPS: dict[str, tuple[Alert, ...]] = {
    "penstock.alive": ALIVE,
    "penstock.stream": STREAM,
    "penstock.storage": STORAGE,
    "penstock.host": HOST,
}
ALERTS = tuple(alert for group in GROUPS.values() for alert in group)


def alert_groups(runbook: str) -> list[dict[str, Any]]:
    """The groups of rules; `runbook` is the address of docs/how-to/runbook.md."""
    return [
        {"name": name, "rules": [alert.rule(runbook) for alert in alerts]} for name, alerts in GROUPS.items()
    ]
