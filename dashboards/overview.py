"""What `Penstock / Overview` shows: rows from the bottleneck down to the process.

The order is that of the questions an operator asks: is it well, how fast is it, who holds it up, what
does storage do, does it stay in its budget, how far is the epoch, what does it cost. Widths of a line
add up to 24; a metric that the sidecar exports is in a panel or in `NOT_GRAPHED` with the reason
(tests/operate/test_dashboards.py).
"""

from __future__ import annotations

from dashboards import queries as q
from dashboards.panels import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Mapping, Page, Panel, graph, stat

NOT_GRAPHED: dict[str, str] = {
    "penstock_epoch_objects": "the epoch's bytes are graphed",
    "penstock_epoch_eta_seconds": "the time left is worked out for several sidecars together",
    "penstock_reader_connects_total": "epochs ended show the same",
    "penstock_reader_disconnects_total": "likewise, as abandoned",
    "penstock_reader_end_disconnects_total": "the log says which reader, and what to do",
    "penstock_channel_unjoined": "known at the start; the log and doctor say what to do",
    "penstock_channel_failures_total": "failed channels are counted; the log says why",
    "penstock_records_total": "of wrapped channels alone, and a step at each epoch's end",
    "penstock_resumes_total": "retries by kind show the same as a rate",
    "penstock_fifo_unread_bytes": "changes faster than it is scraped",
    "penstock_channel_bandwidth_limit_bytes": "time limited is graphed",
    "penstock_requests_in_flight_limit": "the channels' limits are graphed",
    "penstock_bandwidth_limit_bytes": "time limited is graphed",
    "penstock_control_requests_total": "made at the start alone",
    "penstock_request_cost_dollars_total": "a sum for the end of a job",
    "penstock_planning_seconds": "one number of the start",
}
"""Metrics of the sidecar that no panel of either page shows, and why."""

_GLANCE = (
    stat(
        "Ready",
        "Whether every selected sidecar is ready: all FIFOs on offer, no channel failed.",
        "short",
        (f"min({q.sidecar('penstock_ready')})", "ready"),
        thresholds=((None, RED), (1, GREEN)),
        mappings=(
            Mapping(low=0, high=0.99, text="Not ready", color=RED),
            Mapping(low=1, high=None, text="Ready", color=GREEN),
        ),
        no_value="No sidecar",
    ),
    stat(
        "Delivered now",
        "Bytes per second that the FIFOs of all selected channels accept.",
        "binBps",
        (f"sum({q.WRITTEN})", "delivered"),
        no_value="No sidecar",
    ),
    stat(
        "Slower side",
        "Time blocked on the trainer less time starved by storage, as a share of the time with a reader. "
        "Above +10 % the trainer is the slower side, below -10 % storage is.",
        "percentunit",
        (q.SLOWER_SIDE, "blocked - starved"),
        low=-1,
        high=1,
        mappings=(
            Mapping(low=None, high=-0.1, text="Storage", color=PURPLE),
            Mapping(low=-0.1, high=0.1, text="Balanced", color=GREEN),
            Mapping(low=0.1, high=None, text="Trainer", color=ORANGE),
        ),
        no_value="No reader",
    ),
    stat(
        "Request errors",
        "Share of the S3 requests that did not end well; those that the sidecar cancelled do not count.",
        "percentunit",
        (q.ERROR_RATIO, "errors"),
        high=1,
        decimals=1,
        thresholds=((None, GREEN), (0.01, ORANGE), (0.05, RED)),
        no_value="No requests",
    ),
    stat(
        "Failed channels",
        "Channels that failed for good; /status and the log name object and S3 request id.",
        "short",
        (f"sum({q.channel('penstock_channel_failed')})", "failed"),
        thresholds=((None, GREEN), (1, RED)),
        no_value="No sidecar",
    ),
    Panel(
        title="Epoch progress",
        description="Share of the current epoch delivered; of several sidecars the slowest.",
        unit="percentunit",
        targets=((f"min by (channel) ({q.PROGRESS})", "{{channel}}"),),
        kind="bargauge",
        width=4,
        height=4,
        high=1,
        thresholds=((None, BLUE),),
        no_value="No sidecar",
    ),
)

_DELIVERY = (
    graph(
        "Delivered by channel",
        "Bytes per second accepted by the FIFOs. This is what the trainer gets.",
        "binBps",
        (f"sum by (channel) ({q.WRITTEN})", "{{channel}}"),
    ),
    graph(
        "Received against delivered",
        "Bytes per second from S3 and into the FIFOs. Received stays above delivered while read-ahead "
        "fills, and for good only when bytes are fetched twice.",
        "binBps",
        (f"sum({q.RECEIVED})", "received"),
        (f"sum({q.WRITTEN})", "delivered"),
        colors={"received": BLUE, "delivered": GREEN},
    ),
    graph(
        "Objects completed",
        "Objects delivered to their last byte, per second.",
        "ops",
        (f"sum by (channel) ({q.rate(q.channel('penstock_objects_completed_total'))})", "{{channel}}"),
    ),
)

_WAITING = (
    graph(
        "Where the time goes",
        "Shares of the channels' time. blocked: the FIFO is full, the trainer is slower. starved: storage "
        "is slower. limited: a bandwidth limit holds. moving: bytes are being copied. idle: no reader.",
        "percentunit",
        (q.STATE_SHARES, "{{state}}"),
        width=12,
        high=1,
        stacked=True,
        colors={"idle": GREY, "blocked": ORANGE, "starved": PURPLE, "limited": BLUE, "moving": GREEN},
    ),
    graph(
        "Blocked on the trainer, starved by storage",
        "Seconds waited per second, by channel and sidecar. Blocked is what one wants: storage keeps up. "
        "Starved: raise RequestsInFlight, and look at first byte and retries below.",
        "percentunit",
        (f"sum by (channel, instance) ({q.BLOCKED})", "{{channel}} {{instance}} blocked"),
        (f"sum by (channel, instance) ({q.STARVED})", "{{channel}} {{instance}} starved"),
        width=12,
        high=1,
    ),
    graph(
        "Starved, by cause",
        "Seconds waited for storage per second, by what the part waited for was at. first_byte: latency; "
        "body: bandwidth; throttled: S3 asks for less; queued: connections or memory are short.",
        "percentunit",
        (f"sum by (cause) ({q.STARVED_BY})", "{{cause}}"),
        width=12,
        stacked=True,
    ),
    graph(
        "Wait for the next part",
        "How long delivery waited each time that the part due next had no byte.",
        "s",
        *q.quantiles("penstock_head_wait_seconds"),
        width=12,
    ),
)

_S3 = (
    graph(
        "Requests by outcome",
        "S3 requests ended per second. throttled: the endpoint asks for fewer. truncated: a body broke "
        "off. denied, missing and changed fail the channel; bad_answer does the third time in a row.",
        "reqps",
        (f"sum by (outcome) ({q.requests()})", "{{outcome}}"),
        colors={"ok": GREEN, "throttled": ORANGE, "denied": RED, "missing": RED, "changed": RED},
    ),
    graph(
        "Retries by kind",
        "Requests asked again per second, by what went wrong. With a healthy endpoint all stay at zero.",
        "reqps",
        (f"sum by (kind) ({q.rate(q.channel('penstock_retries_total'))})", "{{kind}}"),
    ),
    graph(
        "Requests in flight",
        "Requests open now, and the most that are allowed. At the limit while starved: raise "
        "RequestsInFlight.",
        "short",
        (f"sum({q.channel('penstock_requests_in_flight')})", "in flight"),
        (f"sum({q.channel('penstock_channel_requests_in_flight_limit')})", "limit"),
        colors={"in flight": BLUE, "limit": RED},
    ),
    graph(
        "Time to first byte",
        "From the request to the head of its answer. It is latency, which more connections hide.",
        "s",
        *q.quantiles("penstock_first_byte_seconds"),
        width=12,
    ),
    graph(
        "Time per part",
        "From the request to its last byte. Far above time to first byte: bandwidth is short.",
        "s",
        *q.quantiles("penstock_part_seconds"),
        width=12,
    ),
    graph(
        "Second requests",
        "Parts asked for a second time per second, since the first request was late and delivery waited. "
        "won: the second brought the bytes; lost: the first did after all.",
        "reqps",
        (f"sum by (fate) ({q.HEDGES})", "{{fate}}"),
        width=6,
        colors={"issued": BLUE, "won": GREEN, "lost": ORANGE},
    ),
    graph(
        "Bytes thrown away",
        "Bytes per second fetched for nothing: their epoch was left early, their object was replaced, or "
        "both of two requests brought them.",
        "binBps",
        (f"sum by (channel) ({q.WASTED})", "{{channel}}"),
        width=6,
    ),
    graph(
        "Objects changed",
        "Objects that were not as listed, and what WhenChanged did: failed, refetched or skipped. Whoever "
        "writes into a data set that is read must stop.",
        "short",
        (q.CHANGED, "{{done}}"),
        width=6,
        bars=True,
        stacked=True,
        colors={"failed": RED, "refetched": ORANGE, "skipped": GREY},
    ),
    graph(
        "Objects checked",
        "Whole objects compared with the checksums that S3 keeps, where Integrity asks for it. unverifiable: "
        "S3 keeps none of the whole. mismatch fails the epoch.",
        "short",
        (q.CHECKED, "{{result}}"),
        width=6,
        bars=True,
        stacked=True,
        colors={"verified": GREEN, "unverifiable": ORANGE, "mismatch": RED},
    ),
)

_RANKS = (
    graph(
        "Delivered by channels with rank FIFOs",
        "Bytes per second that all rank FIFOs of a channel deliver together. Each has its own line above, as "
        "train-0, train-1 ...",
        "binBps",
        (q.RANK_BYTES, "{{whole}} {{instance}}"),
    ),
    graph(
        "Ranks apart",
        "Epochs between the first and the last rank FIFO of a channel. Above 1: one of the trainer's "
        "processes reads slower, or does not read.",
        "short",
        (q.RANKS_APART, "{{whole}} {{instance}}"),
        steps=True,
        decimals=0,
    ),
    graph(
        "Idlest rank FIFO",
        "Seconds per second without a reader, of the rank FIFO with the most of them. Near 1: a process of "
        "the trainer does not read its FIFO.",
        "percentunit",
        (q.RANKS_IDLE, "{{whole}} {{instance}}"),
        high=1,
    ),
)

_MEMORY = (
    graph(
        "Staged against budget",
        "Bytes of parts requested and not yet delivered, and the most that are allowed.",
        "bytes",
        (f"sum({q.channel('penstock_reserved_bytes')})", "staged"),
        (f"sum({q.channel('penstock_channel_quota_bytes')})", "budget"),
        colors={"staged": BLUE, "budget": RED},
    ),
    graph(
        "Resident memory",
        "Memory of the sidecar process as the kernel counts it, and what its cgroup or the machine allows.",
        "bytes",
        (f"sum by (instance) ({q.sidecar('process_resident_memory_bytes')})", "{{instance}}"),
        (f"min({q.sidecar('penstock_memory_limit_bytes')})", "limit"),
        colors={"limit": RED},
    ),
    graph(
        "FIFO capacity",
        "What the kernel buffers in each FIFO. Far below 1 MiB: the user's pipe pages are used up, and "
        "trainer and sidecar wake each other more often.",
        "bytes",
        (f"min by (channel) ({q.channel('penstock_fifo_capacity_bytes')})", "{{channel}}"),
        steps=True,
    ),
)

_EPOCHS = (
    graph(
        "Epochs ended by state",
        "complete: every byte delivered. abandoned: the reader closed early, which is legal. failed: the "
        "source failed for good. stopped: the sidecar was told to stop.",
        "short",
        (q.EPOCHS_ENDED, "{{trailer_state}}"),
        bars=True,
        stacked=True,
        colors={"complete": GREEN, "abandoned": ORANGE, "failed": RED, "stopped": GREY},
    ),
    graph(
        "Progress",
        "Share of the current epoch delivered; of several sidecars the slowest.",
        "percentunit",
        (f"min by (channel) ({q.PROGRESS})", "{{channel}}"),
        high=1,
    ),
    graph(
        "Time left in the epoch",
        "What is left of the epoch at the present rate; of several sidecars together.",
        "s",
        (q.TIME_LEFT, "{{channel}}"),
    ),
    graph(
        "Epoch",
        "Number of the epoch on offer; the first is 0. Of several sidecars the last to get there.",
        "short",
        (f"min by (channel) ({q.channel('penstock_epoch')})", "{{channel}}"),
        steps=True,
        decimals=0,
    ),
    graph(
        "Epoch size",
        "Bytes of one whole epoch. A change means that the listing changed.",
        "bytes",
        (f"max by (channel) ({q.SIZE})", "{{channel}}"),
        steps=True,
    ),
    graph(
        "Reader connected",
        "Whether a reader holds the FIFO open. Without one the channel's time counts as idle.",
        "bool_yes_no",
        (f"min by (channel) ({q.channel('penstock_reader_connected')})", "{{channel}}"),
        high=1,
        steps=True,
    ),
)

_PROCESS = (
    stat(
        "Version and transport",
        "Release of the sidecars, and how their bytes move from socket to FIFO.",
        "short",
        (q.VERSIONS, "{{version}} {{transport}}"),
        width=6,
        height=8,
        show_name=True,
        no_value="No sidecar",
    ),
    graph(
        "Processor",
        "Cores that the sidecar keeps busy. They are taken from the trainer.",
        "short",
        (f"sum by (instance) ({q.PROCESSOR})", "{{instance}}"),
        width=6,
    ),
    graph(
        "Processor time per GB",
        "CPU-seconds per 10^9 bytes delivered: what a byte costs the training node.",
        "s",
        (q.SECONDS_PER_GB, "per GB"),
        width=6,
    ),
    graph(
        "Open descriptors",
        "Sockets and FIFOs open in the sidecar. It must not grow from epoch to epoch.",
        "short",
        (f"sum by (instance) ({q.sidecar('process_open_fds')})", "{{instance}}"),
        width=6,
    ),
)

OVERVIEW = Page(
    uid="penstock-overview",
    title="Penstock / Overview",
    description="Streaming of S3 objects into FIFOs: rates, who waits for whom, requests, epochs, cost.",
    refresh="5s",
    rows=(
        ("At a glance", _GLANCE),
        ("Delivery", _DELIVERY),
        ("Who is waiting", _WAITING),
        ("S3 requests", _S3),
        ("Memory", _MEMORY),
        ("Epochs", _EPOCHS),
        ("Ranks", _RANKS),
        ("Process", _PROCESS),
    ),
)
