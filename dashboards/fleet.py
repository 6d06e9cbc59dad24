"""What `Penstock / Fleet` shows: many sidecars, so that the one that is not like the others stands out.

The overview adds sidecars up; here every line and every row is one of them. The table comes first, the
sidecar that waits longest for storage on top, and a click on it opens its overview. Graphs show the ten
largest (or slowest), since nobody reads five hundred lines.
"""

from __future__ import annotations

from dashboards import queries as q
from dashboards.panels import BLUE, GREEN, ORANGE, RED, Column, Mapping, Page, graph, stat, table

_WHO = "{{instance}} {{pod}}"
_OVERVIEW = (
    "/d/penstock-overview?var-datasource=${datasource}&var-job=${__data.fields.Job}"
    "&var-instance=${__data.fields.Sidecar}&${__url_time_range}"
)
_LOW_IS_GOOD = ((None, GREEN), (0.2, ORANGE), (0.5, RED))
_NO_ERRORS = ((None, GREEN), (0.01, ORANGE), (0.05, RED))
_MEMORY = ((None, GREEN), (0.75, ORANGE), (0.9, RED))
_YES_NO = (
    Mapping(low=0, high=0.99, text="no", color=RED),
    Mapping(low=1, high=None, text="yes", color=GREEN),
)

_GLANCE = (
    stat(
        "Scraped",
        "Sidecars that answer Prometheus now.",
        "short",
        (f"count({q.sidecar('penstock_ready')})", "sidecars"),
        no_value="None",
    ),
    stat(
        "Not ready",
        "Sidecars that list and plan still, that drain, or that have a failed channel.",
        "short",
        (f"sum(1 - {q.sidecar('penstock_ready')})", "not ready"),
        thresholds=((None, GREEN), (1, RED)),
        no_value="No sidecar",
    ),
    stat(
        "Channels failed for good",
        "Each holds its trainer up until the sidecar is started again; the table says where.",
        "short",
        (f"sum({q.channel('penstock_channel_failed')})", "failed"),
        thresholds=((None, GREEN), (1, RED)),
        no_value="No sidecar",
    ),
    stat(
        "Starved sidecars",
        "Sidecars that wait for storage for more than half of the time in which a reader is there.",
        "short",
        (q.STARVED_SIDECARS, "starved"),
        thresholds=((None, GREEN), (1, ORANGE)),
        no_value="No reader",
    ),
    stat(
        "Request errors",
        "Share of all sidecars' S3 requests that did not end well.",
        "percentunit",
        (q.ERROR_RATIO, "errors"),
        high=1,
        decimals=1,
        thresholds=_NO_ERRORS,
        no_value="No requests",
    ),
    stat(
        "Delivered",
        "Bytes per second that all FIFOs accept.",
        "binBps",
        (f"sum({q.WRITTEN})", "delivered"),
        no_value="No sidecar",
    ),
)

_TABLE = (
    table(
        "Every sidecar",
        "One row each, by starved. Starved and blocked are shares of the time in which a reader was there: "
        "starved waits for storage, blocked for the trainer. A click on a sidecar opens its overview.",
        Column(title="Job", label="job"),
        Column(title="Sidecar", label="instance", link=_OVERVIEW),
        Column(title="Pod", label="pod"),
        Column(title="Version", label="version"),
        Column(title="Ready", expression=q.READY_BY, mappings=_YES_NO),
        Column(title="Failed", expression=q.FAILED_BY, thresholds=((None, GREEN), (1, RED))),
        Column(
            title="Starved",
            expression=q.STARVED_SHARE_BY,
            unit="percentunit",
            decimals=0,
            thresholds=_LOW_IS_GOOD,
        ),
        Column(title="Blocked", expression=q.BLOCKED_SHARE_BY, unit="percentunit", decimals=0),
        Column(title="Delivered", expression=q.DELIVERED_BY, unit="binBps"),
        Column(title="Errors", expression=q.ERRORS_BY, unit="percentunit", decimals=1, thresholds=_NO_ERRORS),
        Column(
            title="Throttled",
            expression=q.THROTTLED_BY,
            unit="reqps",
            thresholds=((None, GREEN), (0.1, ORANGE)),
        ),
        Column(title="First byte p99", expression=q.FIRST_BYTE_BY, unit="s"),
        Column(title="Epoch", expression=q.EPOCH_BY, decimals=0),
        Column(title="Progress", expression=q.PROGRESS_BY, unit="percentunit", decimals=0),
        Column(title="Staged", expression=q.RESERVED_SHARE_BY, unit="percentunit", decimals=0),
        Column(
            title="Memory", expression=q.RESIDENT_SHARE_BY, unit="percentunit", decimals=0, thresholds=_MEMORY
        ),
        Column(title="Cores", expression=q.PROCESSOR_BY, decimals=2),
        Column(title="Build", expression=q.VERSION_BY, hidden=True),
        sort="Starved",
        width=24,
        height=12,
    ),
)

_SLOW = (
    graph(
        "Starved most",
        "Share of the time with a reader spent waiting for storage, by sidecar; the ten largest. One alone: "
        "its host or network. All: the bucket or the endpoint.",
        "percentunit",
        (q.most(q.STARVED_SHARE_BY), _WHO),
        width=12,
        high=1,
    ),
    graph(
        "Blocked most",
        "Share of the time with a reader spent waiting for the trainer; the ten largest. In data-parallel "
        "training all wait for the slowest rank: it is the one that is blocked least.",
        "percentunit",
        (q.most(q.BLOCKED_SHARE_BY), _WHO),
        width=12,
        high=1,
    ),
    graph(
        "Slowest",
        "Bytes per second of the ten sidecars that deliver least.",
        "binBps",
        (f"bottomk(10, {q.DELIVERED_BY})", _WHO),
        width=12,
    ),
    graph(
        "Spread of delivery",
        "Bytes per second of the slowest, the middle and the fastest sidecar. Far apart: hosts or shards are "
        "not equal.",
        "binBps",
        (f"min({q.DELIVERED_BY})", "slowest"),
        (f"quantile(0.5, {q.DELIVERED_BY})", "median"),
        (f"max({q.DELIVERED_BY})", "fastest"),
        width=12,
        colors={"slowest": RED, "median": BLUE, "fastest": GREEN},
    ),
    graph(
        "Starved by sidecar and cause",
        "Seconds per second that a sidecar waits for storage, by what for; the ten largest.",
        "short",
        (q.most(q.STARVED_CAUSES_BY), "{{instance}} {{pod}} {{cause}}"),
        width=12,
    ),
    graph(
        "Starved by job",
        "Share of the time with a reader that all sidecars of a job together wait for storage.",
        "percentunit",
        (q.STARVED_SHARE_BY_JOB, "{{job}}"),
        width=12,
        high=1,
    ),
)

_S3 = (
    graph(
        "Errors by sidecar",
        "Share of the requests that did not end well; the ten largest.",
        "percentunit",
        (q.most(q.ERRORS_BY), _WHO),
        width=12,
        high=1,
    ),
    graph(
        "Throttled by sidecar",
        "Requests per second that the endpoint answers with SlowDown; the ten largest. Many at once: their "
        "data lies under one prefix.",
        "reqps",
        (q.most(q.THROTTLED_BY), _WHO),
        width=12,
    ),
    graph(
        "Retries by sidecar",
        "Requests repeated per second; the ten largest.",
        "reqps",
        (q.most(q.RETRIES_BY), _WHO),
        width=12,
    ),
    graph(
        "First byte by sidecar",
        "Time to the head of the answer that one request in a hundred exceeds; the ten largest.",
        "s",
        (q.most(q.FIRST_BYTE_BY), _WHO),
        width=12,
    ),
)

_HOSTS = (
    graph(
        "Memory against limit",
        "Resident memory of the process, of what its cgroup or the machine allows; the ten largest. At 1 the "
        "kernel ends it.",
        "percentunit",
        (q.most(q.RESIDENT_SHARE_BY), _WHO),
        high=1,
    ),
    graph(
        "Staged of the budget",
        "Bytes requested and not delivered, of Penstock.MemoryBudget; the ten largest. Near 1 while the "
        "trainer is the slower side is how it should be.",
        "percentunit",
        (q.most(q.RESERVED_SHARE_BY), _WHO),
        high=1,
    ),
    graph(
        "Cores by sidecar",
        "Cores that a sidecar keeps busy; the ten largest.",
        "short",
        (q.most(q.PROCESSOR_BY), _WHO),
    ),
    graph(
        "Loop lag by sidecar",
        "How late the event loop is, but for one time in a hundred; the ten largest. Above 0.1 s the host "
        "has no processor to spare.",
        "s",
        (q.most(q.LAG_BY), _WHO),
    ),
    graph(
        "Restarts by sidecar",
        "Starts of the sidecar since the scrapes before. More than one in a row: see its log.",
        "short",
        (q.RESTARTS_BY, _WHO),
        bars=True,
    ),
    graph(
        "Bytes thrown away by sidecar",
        "Bytes per second fetched for nothing; the ten largest.",
        "binBps",
        (q.most(q.WASTED_BY), _WHO),
    ),
)

_SPREAD = (
    graph(
        "Hosts apart",
        "Epochs between the first and the last sidecar of a job. Data-parallel training keeps it at 0 or 1.",
        "short",
        (q.EPOCHS_APART, "{{job}} {{channel}}"),
        steps=True,
        decimals=0,
    ),
    stat(
        "Versions",
        "Releases and ways to move bytes that are in use. More than one: a roll-out is under way, or some "
        "hosts cannot splice.",
        "short",
        (q.VERSIONS, "{{version}} {{transport}}"),
        width=4,
        height=8,
        show_name=True,
        no_value="No sidecar",
    ),
    table(
        "Settings",
        "What the sidecars' job files ask for, and how many ask for it. One row is as it should be.",
        Column(title="Sidecars", expression=q.SETTINGS, decimals=0),
        Column(title="Memory budget", label="memory_budget"),
        Column(title="Part size", label="part_size"),
        Column(title="Requests in flight", label="requests_in_flight"),
        Column(title="Bandwidth", label="bandwidth"),
        sort="Sidecars",
        width=12,
    ),
)

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
