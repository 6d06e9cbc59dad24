"""What `Penstock / Fleet` shows: many sidecars, so that the one that is not like the others stands out.

The overview adds sidecars up; here every line and every row is one of them. The table comes first, the
sidecar that waits longest for storage on top, and a click on it opens its overview. Graphs show the eight
largest (or slowest), since nobody tells five hundred lines apart.
"""

from __future__ import annotations

from dashboards import queries as q
from dashboards.panels import (
    BLUE,
    GREEN,
    ORANGE,
    RED,
    STORAGE,
    TRAINER,
    Column,
    Mapping,
    Page,
    Target,
    graph,
    stat,
    table,
)

_WHO = "{{instance}} {{pod}}"
_OVERVIEW = (
    "/d/penstock-overview?var-datasource=${datasource}&var-job=${__data.fields.Job}"
    "&var-instance=${__data.fields.Sidecar}&${__url_time_range}"
)
_STARVED = ((None, GREEN), (0.2, STORAGE))
_BLOCKED = ((None, "transparent"), (0.2, TRAINER))
_NO_ERRORS = ((None, GREEN), (0.01, ORANGE), (0.05, RED))
_MEMORY = ((None, GREEN), (0.75, ORANGE), (0.9, RED))
_YES_NO = (
    Mapping(0, 0.99, "no", RED),
    Mapping(1, None, "yes", GREEN),
)


def _largest(expression: str) -> Target:
    """The largest of a query with a value for each sidecar."""
    return q.most(expression), _WHO


# fmt: off
_GLANCE = (
    stat("Scraped", "short", (f"count({q.sidecar('penstock_ready')})", "sidecars"), no_value="None",
        about="Sidecars that answer Prometheus now."),
    stat("Not ready", "short", (f"sum(1 - {q.sidecar('penstock_ready')})", "not ready"),
        thresholds=((None, GREEN), (1, RED)),
        about="Sidecars that list and plan still, that drain, or that have a failed channel."),
    stat("Channels failed for good", "short", (f"sum({q.channel('penstock_channel_failed')})", "failed"),
        thresholds=((None, GREEN), (1, RED)),
        about="Each holds its trainer up until the sidecar is started again; the table says where."),
    stat("Starved sidecars", "short", (q.STARVED_SIDECARS, "starved"),
        thresholds=((None, GREEN), (1, STORAGE)), no_value="No reader",
        about="Sidecars that wait for storage for more than half of the time in which a reader is there."),
    stat("Request errors", "percentunit", (q.ERROR_RATIO, "errors"), high=1, decimals=1,
        thresholds=_NO_ERRORS, no_value="No requests",
        about="Share of all sidecars' S3 requests that did not end well."),
    stat("Delivered", "binBps", (f"sum({q.WRITTEN})", "delivered"),
        about="Bytes per second that all FIFOs accept."),
)

_TABLE = (
    table("Every sidecar", sort="Starved", width=24, height=12,
        about="One row each, by starved. Starved and blocked are shares of the time in which a reader was "
              "there: starved waits for storage, blocked for the trainer. Epoch and progress are the least "
              "of the channels with a reader. A click on a sidecar opens its overview.",
        columns=(
            Column("Job", label="job"), Column("Sidecar", label="instance", link=_OVERVIEW),
            Column("Pod", label="pod"), Column("Version", label="version"),
            Column("Ready", q.READY_BY, mappings=_YES_NO),
            Column("Failed", q.FAILED_BY, thresholds=((None, GREEN), (1, RED))),
            Column("Starved", q.STARVED_SHARE_BY, unit="percentunit", decimals=0, thresholds=_STARVED),
            Column("Blocked", q.BLOCKED_SHARE_BY, unit="percentunit", decimals=0, thresholds=_BLOCKED),
            Column("Delivered", q.DELIVERED_BY, unit="binBps"),
            Column("Errors", q.ERRORS_BY, unit="percentunit", decimals=1, thresholds=_NO_ERRORS),
            Column("Throttled", q.THROTTLED_BY, unit="reqps", thresholds=((None, GREEN), (0.1, ORANGE))),
            Column("First byte p99", q.FIRST_BYTE_BY, unit="s"), Column("Epoch", q.EPOCH_BY, decimals=0),
            Column("Progress", q.PROGRESS_BY, unit="percentunit", decimals=0),
            Column("Staged", q.RESERVED_SHARE_BY, unit="percentunit", decimals=0),
            Column("Memory", q.RESIDENT_SHARE_BY, unit="percentunit", decimals=0, thresholds=_MEMORY),
            Column("Cores", q.PROCESSOR_BY, decimals=2), Column("Build", q.VERSION_BY, hidden=True),
        )),
)

_SLOW = (
    graph("Starved most", "percentunit", _largest(q.STARVED_SHARE_BY), width=12, high=1,
        about="Share of the time with a reader spent waiting for storage, by sidecar; the eight largest. One "
              "alone: its host or network. All: the bucket or the endpoint."),
    graph("Blocked most", "percentunit", _largest(q.BLOCKED_SHARE_BY), width=12, high=1,
        about="Share of the time with a reader spent waiting for the trainer; the eight largest. In "
              "data-parallel training all wait for the slowest rank: it is the one that is blocked least."),
    graph("Slowest", "binBps", (q.least(q.DELIVERED_BY), _WHO), width=12,
        about="Bytes per second of the eight sidecars that deliver least."),
    graph("Spread of delivery", "binBps", (f"min({q.DELIVERED_BY})", "slowest"),
        (f"quantile(0.5, {q.DELIVERED_BY})", "median"), (f"max({q.DELIVERED_BY})", "fastest"), width=12,
        colors={"slowest": RED, "median": BLUE, "fastest": GREEN},
        about="Bytes per second of the slowest, the middle and the fastest sidecar. Far apart: hosts or "
              "shards are not equal."),
    graph("Starved by sidecar and cause", "short",
        (q.most(q.STARVED_CAUSES_BY), "{{instance}} {{pod}} {{cause}}"), width=12,
        about="Seconds per second that a sidecar waits for storage, by what for; the eight largest."),
    graph("Starved by job", "percentunit", (q.most(q.STARVED_SHARE_BY_JOB), "{{job}}"), width=12, high=1,
        about="Share of the time with a reader that all sidecars of a job together wait for storage."),
)

_S3 = (
    graph("Errors by sidecar", "percentunit", _largest(q.ERRORS_BY), width=12, high=1,
        about="Share of the requests that did not end well; the eight largest."),
    graph("Throttled by sidecar", "reqps", _largest(q.THROTTLED_BY), width=12,
        about="Requests per second that the endpoint answers with SlowDown; the eight largest. Many at once: "
              "their data lies under one prefix."),
    graph("Retries by sidecar", "reqps", _largest(q.RETRIES_BY), width=12,
        about="Requests repeated per second; the eight largest."),
    graph("First byte by sidecar", "s", _largest(q.FIRST_BYTE_BY), width=12,
        about="Time to the head of the answer that one request in a hundred exceeds; the eight largest."),
)

_HOSTS = (
    graph("Memory against limit", "percentunit", _largest(q.RESIDENT_SHARE_BY), high=1,
        about="Resident memory of the process, of what its cgroup or the machine allows; the eight largest. "
              "At 1 the kernel ends it."),
    graph("Staged of the budget", "percentunit", _largest(q.RESERVED_SHARE_BY), high=1,
        about="Bytes requested and not delivered, of Penstock.MemoryBudget; the eight largest. Near 1 while "
              "the trainer is the slower side is how it should be."),
    graph("Cores by sidecar", "short", _largest(q.PROCESSOR_BY),
        about="Cores that a sidecar keeps busy; the eight largest."),
    graph("Loop lag by sidecar", "s", _largest(q.LAG_BY),
        about="How late the event loop is, but for one time in a hundred; the eight largest. Above 0.1 s the "
              "host has no processor to spare."),
    graph("Restarts by sidecar", "short", (q.most(q.RESTARTS_BY), _WHO), bars=True,
        about="Starts of the sidecar since the scrapes before. More than one in a row: see its log."),
    graph("Bytes thrown away by sidecar", "binBps", _largest(q.WASTED_BY),
        about="Bytes per second fetched for nothing; the eight largest."),
)

_SPREAD = (
    graph("Hosts apart", "short", (q.most(q.EPOCHS_APART), "{{job}} {{channel}}"), steps=True, decimals=0,
        about="Epochs between the first and the last sidecar of a job. Data-parallel training keeps it at "
              "0 or 1."),
    stat("Versions", "short", (q.VERSIONS, "{{version}} {{transport}}"), width=4, height=8, show_name=True,
        about="Releases and ways to move bytes that are in use. More than one: a roll-out is under way, or "
              "some hosts cannot splice."),
    table("Settings", sort="Sidecars", width=12,
        about="What the sidecars' job files ask for, and how many ask for it. One row is as it should be.",
        columns=(
            Column("Sidecars", q.SETTINGS, decimals=0), Column("Memory budget", label="memory_budget"),
            Column("Part size", label="part_size"), Column("Requests in flight", label="requests_in_flight"),
            Column("Bandwidth", label="bandwidth"),
        )),
)

# fmt: on

FLEET = Page(
    uid="penstock-fleet",
    title="Penstock / Fleet",
    description=(
        "Many sidecars side by side: which host is slow, starved, blocked, throttled, or unlike the others."
    ),
    refresh="30s",
    rows=(
        ("At a glance", _GLANCE),
        ("Sidecars", _TABLE),
        ("Who is slow", _SLOW),
        ("S3 requests", _S3),
        ("Hosts", _HOSTS),
        ("Spread", _SPREAD),
    ),
)
