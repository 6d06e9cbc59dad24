"""What `Penstock / Overview` shows: rows from the bottleneck down to the process.

The order is that of the questions an operator asks: is it well, how fast is it, who holds it up, what
does storage do, does it stay in its budget, how far is the epoch, what does it cost. Widths of a line
add up to 24; a metric that the sidecar exports is in a panel or in `NOT_GRAPHED` with the reason
(tests/operate/test_dashboards.py).
"""

from __future__ import annotations

from dashboards import queries as q
from dashboards.panels import (
    BLUE,
    GREEN,
    GREY,
    IDLE,
    LIMIT,
    MOVING,
    ORANGE,
    OTHER_FIFO,
    RED,
    STORAGE,
    TRAINER,
    Mapping,
    Page,
    graph,
    stat,
)

NOT_GRAPHED: dict[str, str] = {
    "penstock_order_hosts": "an alert compares the hosts",
    "penstock_epoch_objects": "the epoch's bytes are graphed",
    "penstock_epoch_eta_seconds": "the time left is worked out for several sidecars together",
    "penstock_reader_connects_total": "epochs ended show the same",
    "penstock_reader_disconnects_total": "likewise, as abandoned",
    "penstock_reader_end_disconnects_total": "the log says which reader, and what to do",
    "penstock_channel_unjoined": "known at the start; the log and doctor say what to do",
    "penstock_channel_failures_total": "failed channels are counted; the log says why",
    "penstock_records_total": "of wrapped channels alone, and a step at each epoch's end",
    "penstock_resumes_total": "retries by kind show the same as a rate",
    "penstock_fifo_untaken_seconds": "an alert compares it with GiveUpAfter; the page and top show it",
    "penstock_give_up_after_seconds": "for that alert",
    "penstock_fifo_unread_bytes": "changes faster than it is scraped",
    "penstock_channel_bandwidth_limit_bytes": "time limited is graphed",
    "penstock_requests_in_flight_limit": "the channels' limits are graphed",
    "penstock_bandwidth_limit_bytes": "time limited is graphed",
    "penstock_index_objects_total": "of the first epoch alone; the log says what became of each object",
    "penstock_control_requests_total": "made at the start alone",
    "penstock_download_written_bytes_total": "files are downloaded at the start alone",
    "penstock_download_files_total": "likewise",
    "penstock_download_progress_ratio": "likewise; /readyz and the log say how far it is",
    "penstock_download_requests_total": "likewise",
    "penstock_request_cost_dollars_total": "a sum for the end of a job",
    "penstock_channel_listing": "time starved is graphed by cause, the listing too",
    "penstock_planning_seconds": "one number of the start",
}
"""Metrics of the sidecar that no panel of either page shows, and why."""

# fmt: off
_GLANCE = (
    stat("Ready", "short", (f"min({q.sidecar('penstock_ready')})", "ready"),
        thresholds=((None, RED), (1, GREEN)),
        mappings=(Mapping(0, 0.99, "Not ready", RED), Mapping(1, None, "Ready", GREEN)),
        about="Whether every selected sidecar is ready: all FIFOs on offer, no channel failed."),
    stat("Delivered now", "binBps", (f"sum({q.WRITTEN})", "delivered"),
        about="Bytes per second that the FIFOs of all selected channels accept."),
    stat("Slower side", "percentunit", (q.SLOWER_SIDE, "blocked - starved"), low=-1, high=1,
        mappings=(Mapping(None, -0.1, "Storage", STORAGE), Mapping(-0.1, 0.1, "Balanced", MOVING),
                  Mapping(0.1, None, "Trainer", TRAINER)),
        no_value="No reader",
        about="Time blocked on the trainer less time starved by storage, as a share of the time with a "
              "reader. Above +10 % the trainer is the slower side, which is healthy. Below -10 % storage "
              "is the slower side."),
    stat("Request errors", "percentunit", (q.ERROR_RATIO, "errors"), high=1, decimals=1,
        thresholds=((None, GREEN), (0.01, ORANGE), (0.05, RED)), no_value="No requests",
        about="Share of the S3 requests that did not end well; those that the sidecar cancelled do not "
              "count."),
    stat("Failed channels", "short", (f"sum({q.channel('penstock_channel_failed')})", "failed"),
        thresholds=((None, GREEN), (1, RED)),
        about="Channels that failed for good; /status and the log name object and S3 request id."),
    graph("Epoch progress", "percentunit", q.least_by("channel", q.PROGRESS, "min"), kind="bargauge", width=4,
        height=4, high=1, thresholds=((None, BLUE),), no_value="No sidecar",
        about="Share of the current epoch delivered; of several sidecars the slowest."),
)

_DELIVERY = (
    graph("Delivered by channel", "binBps", q.most_by("channel", q.WRITTEN),
        about="Bytes per second accepted by the FIFOs. This is what the trainer gets."),
    graph("Received against delivered", "binBps", (f"sum({q.RECEIVED})", "received"),
        (f"sum({q.WRITTEN})", "delivered"), colors={"received": BLUE, "delivered": GREEN},
        about="Bytes per second from S3 and into the FIFOs. Received stays above delivered while "
              "read-ahead fills, and for good only when bytes are fetched twice."),
    graph("Objects completed", "ops",
        q.most_by("channel", q.rate(q.channel("penstock_objects_completed_total"))),
        about="Objects delivered to their last byte, per second."),
)

_WAITING = (
    graph("Where the time goes", "percentunit", (q.STATE_SHARES, "{{state}}"), width=12, high=1,
        stacked=True,
        colors={"idle": IDLE, "blocked": TRAINER, "held_back": OTHER_FIFO, "starved": STORAGE,
                "limited": LIMIT, "moving": MOVING, "refused": RED},
        about="Shares of the channels' time. blocked: the FIFO is full, the trainer is slower. starved: "
              "storage is slower. held_back: another FIFO of the channel is full, or has no reader. "
              "limited: a bandwidth limit holds. moving: bytes are being copied. idle: "
              "no reader. refused: this machine refuses a step, such as a trailer on a full disk."),
    graph("Blocked on the trainer, starved by storage", "percentunit",
        (q.most(f"sum by (channel, instance) ({q.BLOCKED})", 4), "{{channel}} {{instance}} blocked"),
        (q.most(f"sum by (channel, instance) ({q.STARVED})", 4), "{{channel}} {{instance}} starved"),
        width=12, high=1, colors={"/ blocked$/": TRAINER, "/ starved$/": STORAGE},
        about="Seconds waited per second, by channel and sidecar. Blocked is what one wants: storage keeps "
              "up. Starved: raise RequestsInFlight, and look at first byte and retries below."),
    graph("Starved, by cause", "percentunit", q.most_by("cause", q.STARVED_BY), width=12, stacked=True,
        about="Seconds waited for storage per second, by what the part waited for was at. first_byte: "
              "latency; body: bandwidth; throttled: S3 asks for less; queued: connections or memory are "
              "short; listing: further objects are being listed."),
    graph("Wait for the next part", "s", *q.quantiles("penstock_head_wait_seconds"), width=12,
        about="How long delivery waited each time that the part due next had no byte."),
)

_S3 = (
    graph("Requests by outcome", "reqps", q.most_by("outcome", q.requests()),
        colors={"ok": GREEN, "throttled": ORANGE, "denied": RED, "missing": RED, "changed": RED},
        about="S3 requests ended per second. throttled: the endpoint asks for fewer. truncated: a body "
              "broke off. denied, missing and changed fail the channel; bad_answer does the third time in "
              "a row."),
    graph("Retries by kind", "reqps", q.by("kind", q.rate(q.channel("penstock_retries_total"))),
        about="Requests asked again per second, by what went wrong. With a healthy endpoint all stay at "
              "zero."),
    graph("Requests in flight", "short", (f"sum({q.channel('penstock_requests_in_flight')})", "in flight"),
        (f"sum({q.channel('penstock_channel_requests_in_flight_limit')})", "limit"),
        colors={"in flight": BLUE, "limit": RED},
        about="Requests open now, and the most that are allowed. At the limit while starved: raise "
              "RequestsInFlight."),
    graph("Time to first byte", "s", *q.quantiles("penstock_first_byte_seconds"), width=12,
        about="From the request to the object's first byte. It is latency, which more connections hide."),
    graph("Time per part", "s", *q.quantiles("penstock_part_seconds"), width=12,
        about="From the request to its last byte. Far above time to first byte: bandwidth is short."),
    graph("Hedges", "reqps", q.by("fate", q.HEDGES), width=12,
        colors={"issued": BLUE, "won": GREEN, "lost": ORANGE},
        about="Parts asked for a second time per second, since the first request was late and delivery "
              "waited. won: the second brought the bytes; lost: the first did after all."),
    graph("Bytes thrown away", "binBps", q.most_by("channel", q.WASTED), width=12,
        about="Bytes per second fetched for nothing: their epoch was left early, or both of two requests "
              "brought them."),
)

_CHECKS = (
    graph("Objects checked", "short", (q.CHECKED, "{{result}}"), width=24, bars=True, stacked=True,
        colors={"verified": GREEN, "unverifiable": ORANGE, "mismatch": RED},
        about="Whole objects compared with the checksums that S3 keeps, where Integrity asks for it. "
              "unverifiable: S3 keeps none of the whole. mismatch fails the epoch."),
)

_RANKS = (
    graph("Delivered by channels with rank FIFOs", "binBps", (q.most(q.RANK_BYTES), "{{whole}} {{instance}}"),
        about="Bytes per second that all rank FIFOs of a channel deliver together. Each has its own line "
              "above, as train-0, train-1 ..."),
    graph("Ranks apart", "short", (q.most(q.RANKS_APART), "{{whole}} {{instance}}"), steps=True, decimals=0,
        about="Epochs between the first and the last rank FIFO of a channel. Above 1: one of the trainer's "
              "processes reads slower, or does not read."),
    graph("Idlest rank FIFO", "percentunit", (q.most(q.RANKS_IDLE), "{{whole}} {{instance}}"), high=1,
        about="Seconds per second without a reader, of the rank FIFO with the most of them. Near 1: a "
              "process of the trainer does not read its FIFO."),
)

_MEMORY = (
    graph("Staged against budget", "bytes", (f"sum({q.channel('penstock_reserved_bytes')})", "staged"),
        (f"sum({q.channel('penstock_channel_quota_bytes')})", "budget"),
        colors={"staged": BLUE, "budget": RED},
        about="Bytes of parts requested and not yet delivered, and the most that are allowed."),
    graph("Resident memory", "bytes",
        q.most_by("instance", q.sidecar("process_resident_memory_bytes"), count=7),
        (f"min({q.sidecar('penstock_memory_limit_bytes')})", "limit"), colors={"limit": RED},
        about="Memory of the sidecar process as the kernel counts it, and what its cgroup or the machine "
              "allows."),
    graph("FIFO capacity", "bytes", q.least_by("channel", q.channel("penstock_fifo_capacity_bytes"), "min"),
        steps=True,
        about="What the kernel buffers in each FIFO. Far below 1 MiB: the user's pipe pages are used up, "
              "and trainer and sidecar wake each other more often."),
)

_EPOCHS = (
    graph("Epochs ended by state", "short", (q.EPOCHS_ENDED, "{{trailer_state}}"), bars=True, stacked=True,
        colors={"complete": GREEN, "abandoned": ORANGE, "failed": RED, "stopped": GREY},
        about="complete: every byte delivered. abandoned: the reader closed early, which is legal. failed: "
              "the source failed for good. stopped: the sidecar was stopped before the end."),
    graph("Progress", "percentunit", q.least_by("channel", q.PROGRESS, "min"), high=1,
        about="Share of the current epoch delivered; of several sidecars the slowest."),
    graph("Time left in the epoch", "s", (q.most(q.TIME_LEFT), "{{channel}}"),
        about="What is left of the epoch at the present rate; of several sidecars together."),
    graph("Epoch", "short", q.least_by("channel", q.channel("penstock_epoch"), "min"), steps=True, decimals=0,
        about="Number of the epoch on offer; the first is 0. Of several sidecars the last to get there."),
    graph("Epoch size", "bytes", q.most_by("channel", q.SIZE, "max"), steps=True,
        about="Bytes of one whole epoch. A change means that the listing changed."),
    graph("Reader connected", "bool_yes_no",
        q.least_by("channel", q.channel("penstock_reader_connected"), "min"), high=1, steps=True,
        about="Whether a reader holds the FIFO open. Without one the channel's time counts as idle."),
)

_UPLOADS = (
    graph("Uploaded", "binBps",
        q.most_by("instance", q.rate(q.sidecar("penstock_upload_bytes_total"))),
        about="Bytes per second of files that have been uploaded; a file counts when all of it is in S3."),
    graph("Waiting for S3", "bytes", q.most_by("instance", q.sidecar("penstock_upload_waiting_bytes")),
        about="Bytes of checkpoints that are closed and not in S3. Growth without end: S3 takes less than "
              "the trainer writes, or nothing."),
    graph("Age of the newest checkpoint", "s", q.most_by("instance", q.CHECKPOINT_AGE, "max"),
        about="Time since the newest complete checkpoint in S3 was written: what a crash now would cost."),
    graph("Failed uploads by kind", "ops", q.most_by("upload", q.UPLOAD_FAILURES),
        about="Attempts at an upload that failed, per second, by what failed. They are repeated while the "
              "trainer runs."),
    graph("Time to upload a checkpoint", "s",
        q.most_by("instance", q.sidecar("penstock_checkpoint_upload_seconds"), "max"), steps=True,
        about="Seconds from the first closed file of the newest checkpoint until all of it was in S3. The "
              "grace period of a pod must be longer."),
    graph("Results by phase", "short", q.by("phase", q.sidecar("penstock_upload_phase")), steps=True,
        decimals=0, colors={"waiting": GREY, "running": BLUE, "complete": GREEN, "incomplete": RED},
        about="Sidecars by the phase of the upload at the trainer's end. incomplete: the log names what is "
              "not in S3."),
)

_PROCESS = (
    stat("Version and transport", "short", (q.VERSIONS, "{{version}} {{transport}}"), width=6, height=8,
        show_name=True,
        about="Release of the sidecars, and how their bytes move from socket to FIFO."),
    graph("Processor", "short", q.most_by("instance", q.PROCESSOR), width=6,
        about="Cores that the sidecar keeps busy. They are taken from the trainer."),
    graph("Processor time per GB", "s", (q.SECONDS_PER_GB, "per GB"), width=6,
        about="CPU-seconds per 10^9 bytes delivered: what a byte costs the training node."),
    graph("Open descriptors", "short", q.most_by("instance", q.sidecar("process_open_fds")), width=6,
        about="Sockets and FIFOs open in the sidecar. It must not grow from epoch to epoch."),
)

# fmt: on

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
        ("Checked objects", _CHECKS),
        ("Memory", _MEMORY),
        ("Epochs", _EPOCHS),
        ("Ranks", _RANKS),
        ("Uploads", _UPLOADS),
        ("Process", _PROCESS),
    ),
    collapsed=frozenset({"Checked objects", "Ranks", "Uploads"}),
)
