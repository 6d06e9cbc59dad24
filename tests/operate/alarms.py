"""Cases for promtool: what was scraped, and whether an alert fires on it.

Series are in promtool's notation, a sample a minute: `0+60x20` counts 60 a minute for 20 minutes, `_` is a
scrape that failed, `stale` a target that was given up. A case without labels is one in which the alert must
stay silent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HERE = {"job": "penstock", "instance": "a:9781"}
TRAIN = HERE | {"channel": "train"}


def selector(labels: dict[str, str]) -> str:
    """Labels as promtool writes them."""
    return "{" + ", ".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


def one(metric: str, values: str, labels: dict[str, str] | None = None, **more: str) -> dict[str, str]:
    """One series of this sidecar, or of what `labels` say."""
    every = (HERE if labels is None else labels) | more
    return {"series": metric + selector(every), "values": values}


def of_train(metric: str, values: str, **more: str) -> dict[str, str]:
    return one(metric, values, TRAIN, **more)


def seconds(**each: int) -> list[dict[str, str]]:
    """Seconds of each minute in each state."""
    states = dict.fromkeys(("idle", "blocked", "starved", "limited", "moving"), 0) | each
    return [of_train("penstock_channel_seconds_total", f"0+{n}x90", state=name) for name, n in states.items()]


def causes(**each: int) -> list[dict[str, str]]:
    return [of_train("penstock_starved_seconds_total", f"0+{n}x90", cause=name) for name, n in each.items()]


def requests(**each: int) -> list[dict[str, str]]:
    """Requests a minute by outcome."""
    return [of_train("penstock_requests_total", f"0+{n}x90", outcome=name) for name, n in each.items()]


@dataclass(frozen=True)
class Case:
    alert: str
    what: str
    series: list[dict[str, str]]
    at: str
    labels: dict[str, str] | None = None
    """Labels of the alert that fires, without its severity; None: it does not."""
    value: str = ""
    """What the texts make of the value."""
    causes: str = ""
    """What they make of the causes of starvation."""
    others: tuple[dict[str, str], ...] = ()
    """Labels of further alerts that fire."""

    def __str__(self) -> str:
        return f"{self.alert}: {self.what}"


MIB = 1 << 20
NODE = {"job": "node", "instance": "n:9100"}
OTHER = {"job": "digits", "instance": "b:9781"}
POD = {
    "job": "ml/penstock",
    "instance": "10.0.0.1:9781",
    "container": "penstock",
    "pod": "digits-0",
    "namespace": "ml",
}
BUSY = [
    of_train("penstock_channel_failed", "0x90"),
    of_train("penstock_fifo_written_bytes_total", "0+1000000x90"),
]
STILL = [of_train("penstock_channel_failed", "0x90"), of_train("penstock_fifo_written_bytes_total", "5+0x90")]


def lag(fast: int, middle: int, slow: int) -> list[dict[str, str]]:
    """Beats a minute that are less than 0.1 s late, less than 0.25 s and less than 0.5 s."""
    counts = {"0.1": fast, "0.25": fast + middle, "0.5": fast + middle + slow, "+Inf": fast + middle + slow}
    return [one("penstock_loop_lag_seconds_bucket", f"0+{n}x90", le=bound) for bound, n in counts.items()]


def ordered(job: str, host: str, digest: str) -> dict[str, str]:
    """Labels of the order of a host of a job."""
    own = {"instance": f"{host}:9781", "training_job": job, "whole": "train", "order": digest}
    return {"job": "penstock"} | own


def order(job: str, host: str, digest: str, values: str, **more: str) -> dict[str, str]:
    """The order of a host, in samples of the job's number of hosts."""
    return one("penstock_order_hosts", values, ordered(job, host, digest), **more)


CASES = (
    Case(
        "PenstockDown",
        "a sidecar of any job that stops to answer",
        [one("up", "1x5 0x20", OTHER), one("penstock_ready", "1x5 stale", OTHER)],
        "8m",
        OTHER,
    ),
    Case("PenstockDown", "a target of that job that never answered", [one("up", "0x20")], "3m", HERE),
    Case("PenstockDown", "a container of that name that never answered", [one("up", "0x20", POD)], "3m", POD),
    Case(
        "PenstockDown",
        "a restart within a minute",
        [one("up", "1x5 0 1x20"), one("penstock_ready", "1x5 _ 1x20")],
        "7m",
    ),
    Case("PenstockDown", "another program", [one("up", "0x20", NODE)], "10m"),
    Case("PenstockDown", "it answers", [one("up", "1x20"), one("penstock_ready", "1x20")], "20m"),
    Case(
        "PenstockGone",
        "a pod that is evicted in mid-epoch",
        [
            one("up", "1x5 stale", POD),
            one("penstock_epoch_eta_seconds", "900-60x5 stale", POD, channel="train"),
            one("penstock_reader_connected", "1x5 stale", POD, channel="train"),
        ],
        "12m",
        POD | {"channel": "train"},
        value="10m 0s",
    ),
    Case(
        "PenstockGone",
        "a job that ends at the end of an epoch",
        [
            one("up", "1x5 stale"),
            of_train("penstock_epoch_eta_seconds", "360-60x5 stale"),
            of_train("penstock_reader_connected", "1x5 stale"),
        ],
        "12m",
    ),
    Case(
        "PenstockGone",
        "a job whose reader had left",
        [
            one("up", "1x5 stale"),
            of_train("penstock_epoch_eta_seconds", "900x5 stale"),
            of_train("penstock_reader_connected", "1x4 0 stale"),
        ],
        "12m",
    ),
    Case(
        "PenstockGone",
        "the target is there and down",
        [
            one("up", "1x5 0x20"),
            of_train("penstock_epoch_eta_seconds", "900x5 stale"),
            of_train("penstock_reader_connected", "1x5 stale"),
        ],
        "12m",
    ),
    Case("PenstockNotReady", "a listing without end", [one("penstock_ready", "0x30")], "16m", HERE),
    Case("PenstockNotReady", "a long listing", [one("penstock_ready", "0x12 1x30")], "16m"),
    Case(
        "PenstockNotReady",
        "a failed channel, which has its own",
        [one("penstock_ready", "0x30"), of_train("penstock_channel_failed", "1x30")],
        "16m",
    ),
    Case(
        "PenstockRestarting",
        "two restarts",
        [one("process_start_time_seconds", "100x10 700x10 1300x20"), one("penstock_ready", "1x40")],
        "25m",
        HERE,
        value="2",
    ),
    Case(
        "PenstockRestarting",
        "one restart",
        [one("process_start_time_seconds", "100x10 700x30"), one("penstock_ready", "1x40")],
        "25m",
    ),
    Case(
        "PenstockRestarting",
        "another program's",
        [one("process_start_time_seconds", "100x10 700x10 1300x20", NODE)],
        "25m",
    ),
    Case(
        "PenstockChannelFailed",
        "it gave up",
        [
            of_train("penstock_channel_failures_total", "0x3 1x20", error="gave_up"),
            of_train("penstock_channel_failures_total", "0x25", error="denied"),
        ],
        "4m",
        TRAIN | {"error": "gave_up"},
    ),
    Case(
        "PenstockChannelFailed",
        "none has",
        [of_train("penstock_channel_failures_total", "0x25", error="gave_up")],
        "20m",
    ),
    Case(
        "PenstockEpochFailed",
        "an epoch of a channel that goes on",
        [
            of_train("penstock_epochs_total", "0x5 1x30", trailer_state="failed"),
            of_train("penstock_channel_failed", "0x35"),
        ],
        "10m",
        TRAIN | {"trailer_state": "failed"},
    ),
    Case(
        "PenstockEpochFailed",
        "a failed channel, which has its own",
        [
            of_train("penstock_epochs_total", "0x5 1x30", trailer_state="failed"),
            of_train("penstock_channel_failed", "0x5 1x30"),
        ],
        "10m",
    ),
    Case(
        "PenstockEpochFailed",
        "other ends of epochs",
        [
            of_train("penstock_epochs_total", "0+1x30", trailer_state=name)
            for name in ("complete", "abandoned", "stopped")
        ],
        "10m",
    ),
    Case(
        "PenstockNoProgress",
        "a reader that waits for a first byte",
        [*STILL, *seconds(starved=60), *causes(first_byte=60, body=0)],
        "5m",
        TRAIN,
        causes=" first_byte 100%",
    ),
    Case(
        "PenstockNoProgress",
        "a trainer that does not read",
        [*STILL, *seconds(blocked=60), *causes(body=0)],
        "30m",
    ),
    Case(
        "PenstockNoProgress",
        "a reader that comes and goes",
        [*STILL, *seconds(idle=15, starved=45), *causes(body=45)],
        "30m",
    ),
    Case("PenstockNoProgress", "no reader", [*STILL, *seconds(idle=60), *causes(body=0)], "30m"),
    Case(
        "PenstockNoProgress", "bytes that come slowly", [*BUSY, *seconds(starved=60), *causes(body=60)], "30m"
    ),
    Case(
        "PenstockNoProgress",
        "a failed channel, which has its own",
        [STILL[1], *seconds(starved=60), of_train("penstock_channel_failed", "1x90")],
        "30m",
    ),
    Case(
        "PenstockStarved",
        "two thirds of the time",
        [*BUSY, *seconds(starved=40, moving=20), *causes(body=30, throttled=9, retry=1)],
        "25m",
        TRAIN | {"state": "starved"},
        value="66.67%",
        causes=" body 50% throttled 15%",
    ),
    Case(
        "PenstockStarved",
        "the trainer is the slower side",
        [*BUSY, *seconds(blocked=50, starved=5, moving=5), *causes(body=5)],
        "60m",
    ),
    Case("PenstockStarved", "four tenths", [*BUSY, *seconds(starved=24, moving=36), *causes(body=24)], "60m"),
    Case(
        "PenstockStarved",
        "starved while somebody reads, which is seldom",
        [*BUSY, *seconds(idle=57, starved=1, blocked=2), *causes(body=1)],
        "60m",
    ),
    Case("PenstockStarved", "for ten minutes", [*BUSY, *seconds(starved=60), *causes(body=60)], "10m"),
    Case(
        "PenstockMachineRefuses",
        "a full disk at the end of an epoch",
        [*STILL, *seconds(refused=60)],
        "3m",
        TRAIN | {"state": "refused"},
    ),
    Case("PenstockMachineRefuses", "one refusal that passes", [*STILL, *seconds(refused=6)], "60m"),
    Case(
        "PenstockMachineRefuses",
        "the channel has failed meanwhile",
        [of_train("penstock_channel_failed", "1x90"), *seconds(refused=60)],
        "60m",
    ),
    Case(
        "PenstockTrainerStuck",
        "a trainer that hangs",
        [
            of_train("penstock_fifo_untaken_seconds", "0+60x90"),
            one("penstock_give_up_after_seconds", "300x90"),
        ],
        "10m",
        TRAIN,
        value="10m 0s",
    ),
    Case(
        "PenstockTrainerStuck",
        "a job that allows an hour",
        [
            of_train("penstock_fifo_untaken_seconds", "0+60x90"),
            one("penstock_give_up_after_seconds", "3600x90"),
        ],
        "10m",
    ),
    Case(
        "PenstockHeldBack",
        "a rank that nobody reads",
        [*STILL, *seconds(held_back=60), of_train("penstock_fifo_unread_bytes", "0x90")],
        "25m",
        TRAIN,
    ),
    Case(
        "PenstockHeldBack",
        "a pause of all ranks, whose FIFOs have bytes",
        [*STILL, *seconds(held_back=60), of_train("penstock_fifo_unread_bytes", "4096x90")],
        "60m",
    ),
    Case(
        "PenstockHeldBack",
        "ranks that wait for each other, and go on",
        [*BUSY, *seconds(held_back=60), of_train("penstock_fifo_unread_bytes", "0x90")],
        "60m",
    ),
    Case(
        "PenstockOrdersDiffer",
        "two hosts of a job, of which one has other weights",
        [order("one", "a", "11", "2x60"), order("one", "b", "22", "2x60")],
        "12m",
        ordered("one", "a", "11"),
        others=(ordered("one", "b", "22"),),
    ),
    Case(
        "PenstockOrdersDiffer",
        "one host is restarted with other weights minutes after the other",
        [
            order("two", "a", "11", "2x5 stale"),
            order("two", "a", "22", "_x5 2x60"),
            order("two", "b", "11", "2x12 stale"),
            order("two", "b", "22", "_x12 2x60"),
        ],
        "30m",
    ),
    Case(
        "PenstockOrdersDiffer",
        "other jobs and channels, and hosts that share nothing",
        [
            order("three", "a", "11", "2x60"),
            order("four", "b", "22", "2x60"),
            order("three", "b", "33", "2x60", whole="eval"),
            order("three", "c", "44", "1x60"),
        ],
        "30m",
    ),
    Case(
        "PenstockChecksumMismatch",
        "one object",
        [of_train("penstock_objects_checked_total", "0x5 1x30", result="mismatch")],
        "10m",
        TRAIN | {"result": "mismatch"},
    ),
    Case(
        "PenstockChecksumMismatch",
        "objects that are right, or cannot be compared",
        [
            of_train("penstock_objects_checked_total", "0+5x30", result="verified"),
            of_train("penstock_objects_checked_total", "0+5x30", result="unverifiable"),
            of_train("penstock_objects_checked_total", "0x30", result="mismatch"),
        ],
        "20m",
    ),
    Case(
        "PenstockStorageFailing",
        "seven of ten, of several kinds",
        requests(ok=30, transient=40, throttled=30),
        "12m",
        TRAIN,
        value="70%",
    ),
    Case("PenstockStorageFailing", "three of ten", requests(ok=70, transient=30), "60m"),
    Case(
        "PenstockStorageFailing",
        "cancelled ones do not count",
        requests(ok=10, transient=1, cancelled=90),
        "60m",
    ),
    Case(
        "PenstockThrottled",
        "one of ten",
        requests(ok=90, throttled=10),
        "25m",
        TRAIN | {"outcome": "throttled"},
        value="10%",
    ),
    Case("PenstockThrottled", "one of twenty-five", requests(ok=96, throttled=4), "60m"),
    Case("PenstockThrottled", "for ten minutes", requests(ok=50, throttled=50), "12m"),
    Case(
        "PenstockRetries",
        "bodies that are cut off",
        [*requests(ok=90, truncated=10), of_train("penstock_retries_total", "0+10x90", kind="truncated")],
        "25m",
        TRAIN | {"kind": "truncated"},
        value="10%",
    ),
    Case(
        "PenstockRetries",
        "throttling, which has its own",
        [*requests(ok=90, throttled=10), of_train("penstock_retries_total", "0+10x90", kind="throttled")],
        "60m",
    ),
    Case(
        "PenstockRetries",
        "a few",
        [*requests(ok=96, transient=4), of_train("penstock_retries_total", "0+4x90", kind="transient")],
        "60m",
    ),
    Case(
        "PenstockWaste",
        "half of much",
        [
            of_train("penstock_wasted_bytes_total", "0+500000000x90"),
            of_train("penstock_received_bytes_total", "0+1000000000x90"),
        ],
        "40m",
        HERE,
        value="50%",
    ),
    Case(
        "PenstockWaste",
        "half of little",
        [
            of_train("penstock_wasted_bytes_total", "0+5000000x90"),
            of_train("penstock_received_bytes_total", "0+10000000x90"),
        ],
        "60m",
    ),
    Case(
        "PenstockWaste",
        "a seventh of much",
        [
            of_train("penstock_wasted_bytes_total", "0+150000000x90"),
            of_train("penstock_received_bytes_total", "0+1000000000x90"),
        ],
        "60m",
    ),
    Case(
        "PenstockCheckpointOld",
        "S3 takes none any more",
        [
            one("penstock_upload_waiting_bytes", f"0x9 {3 * MIB}x60"),
            one("penstock_checkpoint_timestamp_seconds", "0+60x9 540x60"),
        ],
        "55m",
        HERE,
        value="3Mi",
    ),
    Case(
        "PenstockCheckpointOld",
        "S3 has never taken one",
        [one("penstock_upload_waiting_bytes", f"0x5 {MIB}+{MIB}x60")],
        "36m",
        HERE,
        value="31Mi",
    ),
    Case(
        "PenstockCheckpointOld",
        "one checkpoint in six hours, which takes twenty minutes",
        [
            one("penstock_upload_waiting_bytes", f"0x359 {MIB}x20 0x340 {MIB}x20 0x20"),
            one("penstock_checkpoint_timestamp_seconds", "_x379 21600x360 43200x20"),
        ],
        "739m",
    ),
    Case(
        "PenstockCheckpointOld",
        "some bytes wait at every scrape, and a complete checkpoint comes every ten minutes",
        [
            one("penstock_upload_waiting_bytes", f"{MIB}x90"),
            one(
                "penstock_checkpoint_timestamp_seconds",
                " ".join(f"{600 * number}x9" for number in range(9)),
            ),
        ],
        "89m",
    ),
    Case(
        "PenstockOutputIncomplete",
        "a scrape before the sidecar ended",
        [
            one("penstock_upload_phase", "0x5 0x1 1 stale", phase="incomplete"),
            one("penstock_upload_phase", "0x5 1x1 0 stale", phase="running"),
        ],
        "30m",
        HERE | {"phase": "incomplete"},
    ),
    Case(
        "PenstockOutputIncomplete",
        "all is in S3",
        [
            one("penstock_upload_phase", "0x20", phase="incomplete"),
            one("penstock_upload_phase", "0x5 1x15", phase="complete"),
        ],
        "15m",
    ),
    Case(
        "PenstockMemoryNearLimit",
        "95 %",
        [one("process_resident_memory_bytes", "950x30"), one("penstock_memory_limit_bytes", "1000x30")],
        "10m",
        HERE,
        value="95%",
    ),
    Case(
        "PenstockMemoryNearLimit",
        "85 %",
        [one("process_resident_memory_bytes", "850x30"), one("penstock_memory_limit_bytes", "1000x30")],
        "30m",
    ),
    Case(
        "PenstockMemoryBeyondBudget",
        "300 MiB more",
        [
            one("process_resident_memory_bytes", f"{556 * MIB}x30"),
            one("penstock_memory_budget_bytes", f"{256 * MIB}x30"),
        ],
        "20m",
        HERE,
        value="300Mi",
    ),
    Case(
        "PenstockMemoryBeyondBudget",
        "250 MiB more",
        [
            one("process_resident_memory_bytes", f"{506 * MIB}x30"),
            one("penstock_memory_budget_bytes", f"{256 * MIB}x30"),
        ],
        "30m",
    ),
    Case(
        "PenstockBudgetExceeded",
        "two channels together",
        [
            of_train("penstock_reserved_bytes", "60x30"),
            one("penstock_reserved_bytes", "60x30", channel="eval"),
            one("penstock_memory_budget_bytes", "100x30"),
        ],
        "15m",
        HERE,
        value="120%",
    ),
    Case(
        "PenstockBudgetExceeded",
        "a budget in full use",
        [
            of_train("penstock_reserved_bytes", "50x30"),
            one("penstock_reserved_bytes", "50x30", channel="eval"),
            one("penstock_memory_budget_bytes", "100x30"),
        ],
        "30m",
    ),
    Case("PenstockLoopLag", "one beat in ten", lag(900, 0, 100), "20m", HERE, value="475ms"),
    Case("PenstockLoopLag", "one beat in ten, less", lag(900, 100, 0), "60m"),
)

HEALTHY = [
    one("up", "1x90"),
    order("digits", "a", "11", "2x90"),
    order("digits", "b", "11", "2x90"),
    one("penstock_ready", "1x90"),
    one("process_start_time_seconds", "100x90"),
    one("penstock_give_up_after_seconds", "300x90"),
    of_train("penstock_fifo_untaken_seconds", "2x90"),
    one("process_resident_memory_bytes", f"{300 * MIB}x90"),
    one("penstock_memory_budget_bytes", f"{256 * MIB}x90"),
    one("penstock_memory_limit_bytes", f"{768 * MIB}x90"),
    of_train("penstock_reserved_bytes", f"{256 * MIB}x90"),
    *BUSY,
    *seconds(blocked=58, moving=2),
    *causes(body=0),
    *requests(ok=600, transient=1, throttled=3, cancelled=9),
    of_train("penstock_retries_total", "0+1x90", kind="transient"),
    of_train("penstock_epochs_total", "0+1x90", trailer_state="complete"),
    of_train("penstock_epochs_total", "0x90", trailer_state="failed"),
    of_train("penstock_received_bytes_total", "0+1000000000x90"),
    of_train("penstock_wasted_bytes_total", "0+10000000x90"),
    of_train("penstock_channel_failures_total", "0x90", error="gave_up"),
    of_train("penstock_reader_connected", "1x90"),
    of_train("penstock_objects_checked_total", "0x90", result="mismatch"),
    of_train("penstock_fifo_unread_bytes", f"{MIB}x90"),
    *lag(1000, 0, 0),
    of_train("penstock_epoch_eta_seconds", "900x90"),
    one("penstock_upload_waiting_bytes", f"0x9 {MIB}x2 0x78"),
    one("penstock_checkpoint_timestamp_seconds", "0x11 540x78"),
    one("penstock_upload_phase", "0x90", phase="incomplete"),
]
"""A job whose trainer is the slower side."""

RECORDED: dict[str, Any] = {
    "channel:penstock_channel_seconds:share5m": [
        (TRAIN | {"state": "starved"}, 1 / 3),
        (TRAIN | {"state": "blocked"}, 2 / 3),
        (TRAIN | {"state": "moving"}, 0),
        (TRAIN | {"state": "limited"}, 0),
    ],
    "channel:penstock_starved_seconds:share5m": [
        (TRAIN | {"cause": "body"}, 1 / 4),
        (TRAIN | {"cause": "queued"}, 1 / 12),
    ],
    "channel:penstock_requests:share5m": [
        (TRAIN | {"outcome": "ok"}, 0.9),
        (TRAIN | {"outcome": "throttled"}, 0.1),
    ],
    "channel:penstock_retries:ratio5m": [(TRAIN | {"kind": "throttled"}, 0.05)],
    "channel:penstock_fifo_written_bytes:rate5m": [(TRAIN, 100), (HERE | {"channel": "eval"}, 50)],
    "sidecar:penstock_fifo_written_bytes:rate5m": [(HERE, 150)],
    "sidecar:penstock_wasted_bytes:ratio30m": [(HERE, 0.25)],
    "sidecar:penstock_reserved_bytes:budget_ratio": [(HERE, 0.75)],
    "sidecar:process_resident_memory_bytes:limit_ratio": [(HERE, 0.5)],
    "sidecar:penstock_loop_lag_seconds:p99_5m": [(HERE, 0.475)],
    "channel:penstock_first_byte_seconds:p99_5m": [(TRAIN, 0.0199)],
}
"""What the rules make of `MEASURED`."""

MEASURED = [
    *seconds(idle=24, starved=12, blocked=24),
    *causes(body=9, queued=3),
    *requests(ok=90, throttled=10, cancelled=50),
    of_train("penstock_retries_total", "0+5x60", kind="throttled"),
    of_train("penstock_fifo_written_bytes_total", "0+6000x60"),
    one("penstock_fifo_written_bytes_total", "0+3000x60", channel="eval"),
    of_train("penstock_wasted_bytes_total", "0+100x60"),
    of_train("penstock_received_bytes_total", "0+400x60"),
    of_train("penstock_reserved_bytes", "50x60"),
    one("penstock_reserved_bytes", "25x60", channel="eval"),
    one("penstock_memory_budget_bytes", "100x60"),
    one("process_resident_memory_bytes", "200x60"),
    one("penstock_memory_limit_bytes", "400x60"),
    *lag(900, 0, 100),
    of_train("penstock_first_byte_seconds_bucket", "0+0x60", le="0.01"),
    of_train("penstock_first_byte_seconds_bucket", "0+100x60", le="0.02"),
    of_train("penstock_first_byte_seconds_bucket", "0+100x60", le="+Inf"),
]
