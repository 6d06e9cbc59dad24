"""The alerting rules; docs/how-to/runbook.md has an entry for each.

    critical  a training has stopped, or soon will: page somebody
    warning   the training continues, but slower or at a higher cost: look at it during the day

A trainer that is slower than storage is normal, so `blocked` is never an alert, and neither is a budget in
full use. Something that retries correct is an alert only if it lasts. Alerts keep the labels of the metric;
no rule names a job, since a sidecar is recognised by its metrics.
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
        """Anchor of its entry in the runbook."""
        return self.name.lower()

    def rule(self, runbook: str) -> dict[str, Any]:
        """The alert in the form that Prometheus takes."""
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

_JOB = "job, cluster, namespace, training_job, whole"
"""Labels of a channel of one job, as far as a scraper puts them on; the same on all of its hosts."""

# fmt: off
ALIVE = (
    Alert("PenstockDown", "2m", "critical",
        # By name of job or container too: what has never answered has exported nothing.
        expression="up == 0\n"
                   "and on (job, instance) last_over_time(penstock_ready[6h])\n"
                   'or up{job="penstock"} == 0\n'
                   'or up{container="penstock"} == 0',
        summary=f"Sidecar {_WHERE} does not answer.",
        description="Prometheus has it as a target and cannot scrape it: the process has ended or hangs, "
                    "or the network is cut."),
    Alert("PenstockGone", "5m", "warning",
        # The last scrapes had a reader and minutes to go; those of a sidecar that ended with its job do not.
        expression="last_over_time(penstock_epoch_eta_seconds[30m]) > 300\n"
                   "and last_over_time(penstock_reader_connected[30m]) == 1\n"
                   "unless on (job, instance) up",
        summary=f"Sidecar {_WHERE} disappeared in the middle of an epoch.",
        description="It is not a target any more. At its last scrape a reader of channel "
                    "{{ $labels.channel }} had {{ $value | humanizeDuration }} of its epoch left. A trainer "
                    "that ended early by itself looks the same."),
    Alert("PenstockNotReady", "15m", "warning",
        expression="penstock_ready == 0\nunless on (job, instance) (penstock_channel_failed == 1)",
        summary=f"Sidecar {_WHERE} has not been ready for 15 minutes.",
        description="It still lists or downloads, drains, or waits for this machine; the body of /readyz "
                    "says which."),
    Alert("PenstockRestarting", "0m", "warning",
        expression="changes(process_start_time_seconds[1h]) >= 2\n"
                   "and on (job, instance) last_over_time(penstock_ready[15m])",
        summary=f"Sidecar {_WHERE} has started again {{{{ $value }}}} times within an hour.",
        description="Each start lists the objects again. Without a keeper each restart breaks off the "
                    "epoch."),
)

STREAM = (
    Alert("PenstockChannelFailed", "0m", "critical",
        expression="penstock_channel_failures_total > 0",
        summary=f"{_CHANNEL} has failed for good: {{{{ $labels.error }}}}.",
        description="Only a restart changes that. Unless WhenFailed says otherwise its FIFO stays open, "
                    "and a reader that is not Penstock's waits forever."),
    Alert("PenstockEpochFailed", "0m", "warning",
        expression='increase(penstock_epochs_total{trailer_state="failed"}[1h]) > 0\n'
                   "unless ignoring (trailer_state) (penstock_channel_failed == 1)",
        summary=f"{_CHANNEL} had a failed epoch within the last hour.",
        description="The channel has recovered, or the sidecar was started again. The trainer did not get "
                    "all bytes of that epoch."),
    Alert("PenstockNoProgress", "1m", "critical",
        # Sooner than GiveUpAfter, so not of what is recorded over five minutes.
        expression="rate(penstock_fifo_written_bytes_total[2m]) == 0\n"
                   'and ignoring (state) rate(penstock_channel_seconds_total{state="starved"}[2m]) > 0.95\n'
                   "unless (penstock_channel_failed == 1)",
        summary=f"{_CHANNEL} has delivered nothing for 3 minutes while its reader waits.",
        description=f"The sidecar waited for storage all of that time:{_CAUSES}."),
    Alert("PenstockMachineRefuses", "0m", "critical",
        # Sooner than GiveUpAfter, as above.
        expression='rate(penstock_channel_seconds_total{state="refused"}[2m]) > 0.5\n'
                   "unless ignoring (state) (penstock_channel_failed == 1)",
        summary=f"{_CHANNEL} waits for this machine, which refuses a step of the sidecar.",
        description="Most often the disk of the FIFOs is full, and a trailer cannot be written. The reader "
                    "waits; after GiveUpAfter the channel fails. /readyz has the error."),
    Alert("PenstockTrainerStuck", "0m", "warning",
        expression="penstock_fifo_untaken_seconds\n"
                   "> on (job, instance) group_left () penstock_give_up_after_seconds",
        summary=f"{_CHANNEL}: its trainer has taken no byte for {{{{ $value | humanizeDuration }}}}.",
        description="The FIFO has bytes for it, so the trainer saves, evaluates or hangs. A job whose "
                    "trainer may pause longer has a larger GiveUpAfter."),
    Alert("PenstockStarved", "15m", "warning",
        expression='channel:penstock_channel_seconds:share5m{state="starved"} > 0.5',
        summary=f"{_CHANNEL} delivers too slowly: its trainer waits for storage.",
        description=f"The trainer waits for storage {_PERCENT} of the time with a reader:{_CAUSES}."),
    Alert("PenstockHeldBack", "15m", "warning",
        expression="rate(penstock_fifo_written_bytes_total[2m]) == 0\n"
                   'and ignoring (state) rate(penstock_channel_seconds_total{state="held_back"}[2m]) > 0.95\n'
                   "and penstock_fifo_unread_bytes == 0",
        summary=f"The reader of {_CHANNEL} waits for another FIFO.",
        description="FIFOs of one stream are filled in turn, and another one is full or has no reader: "
                    "`held_back_by` of /status names it."),
    Alert("PenstockOrdersDiffer", "10m", "critical",
        # The labels of a job are listed: whatever tells its hosts apart must go.
        expression="penstock_order_hosts > 1\n"
                   f"and on ({_JOB}) (\n"
                   f"  count(group(penstock_order_hosts > 1) by ({_JOB}, order)) by ({_JOB}) > 1\n"
                   ")",
        summary="Hosts of {{ $labels.training_job }} read channel {{ $labels.whole }} in different orders.",
        description=f"{_WHERE} has the order {{{{ $labels.order }}}}, and another host has another. "
                    "Their ranks take batches of different orders, so records are read twice or not at all."),
    Alert("PenstockChecksumMismatch", "0m", "critical",
        expression='increase(penstock_objects_checked_total{result="mismatch"}[1h]) > 0',
        summary=f"{_CHANNEL} has read bytes that differ from the checksum that S3 keeps.",
        description="The epoch fails. The log names the object and both sums."),
)

STORAGE = (
    Alert("PenstockStorageFailing", "5m", "critical",
        expression='sum without (outcome) (channel:penstock_requests:share5m{outcome!="ok"}) > 0.5',
        summary=f"{_PERCENT} of the S3 requests of channel {{{{ $labels.channel }}}} of {_WHERE} fail.",
        description="The sidecar repeats them until GiveUpAfter (default: 5 minutes) passes without a "
                    "byte; then the channel fails."),
    Alert("PenstockThrottled", "15m", "warning",
        expression='channel:penstock_requests:share5m{outcome="throttled"} > 0.05',
        summary=f"S3 throttles channel {{{{ $labels.channel }}}} of {_WHERE}.",
        description=f"S3 has answered {_PERCENT} of its requests with SlowDown for 15 minutes."),
    Alert("PenstockRetries", "15m", "warning",
        expression='channel:penstock_retries:ratio5m{kind!="throttled"} > 0.05',
        summary=f"{_CHANNEL} repeats many requests: {{{{ $labels.kind }}}}.",
        description=f"{_PERCENT} of its requests, for 15 minutes. No byte is lost, but each retry costs "
                    "time and a request."),
    Alert("PenstockWaste", "15m", "warning",
        expression="sidecar:penstock_wasted_bytes:ratio30m > 0.2\n"
                   "and sum without (channel) (increase(penstock_wasted_bytes_total[30m])) > 1e9",
        summary=f"Sidecar {_WHERE} discards {_PERCENT} of the bytes that it fetches.",
        description="Possible causes are epochs that the trainer leaves early, replaced objects, and "
                    "hedges."),
)

UPLOADS = (
    Alert("PenstockCheckpointOld", "30m", "warning",
        # A job that writes one in six hours has nothing waiting in between.
        expression="penstock_upload_waiting_bytes > 0\n"
                   "unless (time() - penstock_checkpoint_timestamp_seconds <= 900)",
        summary=f"Checkpoints of {_WHERE} have waited for S3 for half an hour.",
        description=f"{_SIZE} wait, and S3 has no complete checkpoint of that time. The training "
                    "continues; after a crash it would start from an older one."),
    Alert("PenstockOutputIncomplete", "0m", "critical",
        # One scrape has to do: the sidecar ends soon after.
        expression='max_over_time(penstock_upload_phase{phase="incomplete"}[1h]) == 1',
        summary=f"The trainer of {_WHERE} has ended, and its results are not all in S3.",
        description="What is not in S3 is on that host's disk or volume, and goes with its pod. The log "
                    "has its path and the command that uploads it."),
)

HOST = (
    Alert("PenstockMemoryNearLimit", "5m", "critical",
        expression="sidecar:process_resident_memory_bytes:limit_ratio > 0.9",
        summary=f"Sidecar {_WHERE} is about to be killed by the kernel for lack of memory.",
        description=f"It uses {_PERCENT} of the memory that its cgroup allows."),
    Alert("PenstockMemoryBeyondBudget", "15m", "warning",
        # The process without a budget takes some 100 MiB; manifests give 256 MiB and more beside it.
        expression="process_resident_memory_bytes - penstock_memory_budget_bytes > 256 * 1024 * 1024",
        summary=f"Sidecar {_WHERE} uses more memory than its budget accounts for.",
        description=f"{_SIZE} more than MemoryBudget. About 100 MiB are usual; a leak is a bug."),
    Alert("PenstockBudgetExceeded", "10m", "warning",
        expression="sidecar:penstock_reserved_bytes:budget_ratio > 1.1",
        summary=f"Sidecar {_WHERE} reserves more memory for parts than its MemoryBudget.",
        description=f"{_PERCENT} of the budget. After `penstock set` lowered the budget this lasts until "
                    "those parts are delivered."),
    Alert("PenstockLoopLag", "10m", "warning",
        expression="sidecar:penstock_loop_lag_seconds:p99_5m > 0.25",
        summary=f"Sidecar {_WHERE} does not get enough processor time.",
        description="In one of a hundred measurements its event loop runs a timer "
                    "{{ $value | humanizeDuration }} late; no bytes move meanwhile."),
)
# fmt: on

GROUPS: dict[str, tuple[Alert, ...]] = {
    "penstock.alive": ALIVE,
    "penstock.stream": STREAM,
    "penstock.storage": STORAGE,
    "penstock.uploads": UPLOADS,
    "penstock.host": HOST,
}
ALERTS = tuple(alert for group in GROUPS.values() for alert in group)


def alert_groups(runbook: str) -> list[dict[str, Any]]:
    """The groups of rules; `runbook` is the address of docs/how-to/runbook.md."""
    return [
        {"name": name, "rules": [alert.rule(runbook) for alert in alerts]} for name, alerts in GROUPS.items()
    ]
