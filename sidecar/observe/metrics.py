"""Every metric, in one table: name, type, labels, meaning. `collector` exports them.

Names have the prefix `penstock_` and base units. Labels are bounded: channel, and the fixed sets below.
Tests compare the table with docs/reference/metrics.md, with the dashboards, and with a sidecar's exports.
"""

from __future__ import annotations

from typing import NamedTuple

OUTCOMES = (
    "ok", "transient", "throttled", "truncated", "expired", "skewed", "denied", "missing", "changed",
    "bad_answer", "cancelled",
)  # fmt: skip
RETRIED = ("transient", "throttled", "truncated", "expired", "skewed", "bad_answer")
HEDGES = ("issued", "won", "lost")
TRAILER_STATES = ("complete", "abandoned", "failed", "stopped")
ERRORS = ("denied", "missing", "changed", "bad_answer", "refused", "corrupt", "mismatch", "gave_up")
"""Kinds of the errors that are not retried and make a channel fail."""
LEARNT = ("learnt", "refused")
OPERATIONS = ("ListObjectsV2", "HeadObject", "GetObject")
"""S3's names of the requests for planning; GetObject reads manifests."""


class Spec(NamedTuple):
    """Definition of a metric, for its export, the documentation and the tests of the dashboards."""

    kind: str
    labels: tuple[str, ...]
    help: str


METRICS: dict[str, Spec] = {
    "penstock_build_info": Spec("info", ("version",), "Version of Penstock."),
    "penstock_transport_info": Spec("info", ("transport",), "Transport that fetches the bodies."),
    "penstock_config_info": Spec(
        "info",
        ("memory_budget", "part_size", "requests_in_flight", "bandwidth"),
        "Settings of the job file; `auto` or `none` for those that it leaves out.",
    ),
    "penstock_channel_info": Spec(
        "info",
        ("channel", "whole", "rank"),
        "The job file's channel whose bytes are in this FIFO, and the FIFO's rank; no rank without `Ranks`.",
    ),
    "penstock_order_hosts": Spec(
        "gauge",
        ("training_job", "whole", "order"),
        "Hosts of the job that share the channel by record; `order` is the digest of its record order.",
    ),
    "penstock_ready": Spec("gauge", (), "1 while every channel offers its FIFO and none has failed."),
    "penstock_fifo_written_bytes_total": Spec("counter", ("channel",), "Bytes that the FIFOs accepted."),
    "penstock_received_bytes_total": Spec("counter", ("channel",), "Body bytes received from S3."),
    "penstock_wasted_bytes_total": Spec(
        "counter",
        ("channel",),
        "Bytes discarded: of epochs left early, received twice because of a hedge, or repeated after a "
        "response that broke off.",
    ),
    "penstock_objects_completed_total": Spec(
        "counter", ("channel",), "Objects delivered completely, counted again in every epoch."
    ),
    "penstock_records_total": Spec(
        "counter", ("channel",), "Records of complete epochs, if `RecordWrapperType` makes records."
    ),
    "penstock_epochs_total": Spec("counter", ("channel", "trailer_state"), "Epochs ended, by trailer state."),
    "penstock_epoch": Spec("gauge", ("channel",), "The epoch being offered or streamed, from 0."),
    "penstock_epoch_progress_ratio": Spec(
        "gauge", ("channel",), "Delivered share of the current epoch; absent while objects are listed."
    ),
    "penstock_epoch_size_bytes": Spec(
        "gauge", ("channel",), "Bytes of one epoch, before inflation; absent while objects are listed."
    ),
    "penstock_epoch_objects": Spec(
        "gauge", ("channel",), "Objects of one epoch; those listed so far while objects are listed."
    ),
    "penstock_channel_listing": Spec(
        "gauge", ("channel",), "1 while the channel streams objects before its listing has ended."
    ),
    "penstock_epoch_eta_seconds": Spec(
        "gauge",
        ("channel",),
        "Seconds until the epoch is delivered, at the recent rate; NaN while no byte moves.",
    ),
    "penstock_channel_seconds_total": Spec(
        "counter",
        ("channel", "state"),
        "Seconds in each state: idle (no reader), blocked (FIFO full: the trainer is slower), "
        "starved (storage is slower), held_back (another FIFO of a shared stream is full, or has no reader), "
        "limited (by a bandwidth limit), moving.",
    ),
    "penstock_starved_seconds_total": Spec(
        "counter",
        ("channel", "cause"),
        "Seconds starved, by the phase of the request at the head of the line.",
    ),
    "penstock_head_wait_seconds": Spec(
        "histogram", ("channel",), "Seconds of each wait of delivery for bytes at the head of the line."
    ),
    "penstock_reader_connected": Spec("gauge", ("channel",), "1 while a reader holds the FIFO open."),
    "penstock_reader_connects_total": Spec("counter", ("channel",), "Readers that opened a FIFO."),
    "penstock_reader_disconnects_total": Spec(
        "counter", ("channel",), "Readers that closed the FIFO before the sidecar did."
    ),
    "penstock_reader_end_disconnects_total": Spec(
        "counter",
        ("channel",),
        "Readers that closed the FIFO at the end of an object, before the end of the epoch; "
        "usually at an end mark.",
    ),
    "penstock_channel_unjoined": Spec(
        "gauge",
        ("channel",),
        "1 if a program may misread the border between two objects: tar, Arrow, lines without a last line "
        "feed.",
    ),
    "penstock_channel_failed": Spec(
        "gauge", ("channel",), "1 after the channel has failed; it stays failed until a restart."
    ),
    "penstock_channel_failures_total": Spec(
        "counter", ("channel", "error"), "Failures of the channel, by error."
    ),
    "penstock_fifo_capacity_bytes": Spec(
        "gauge", ("channel",), "Capacity of the FIFO, as the kernel granted it."
    ),
    "penstock_fifo_unread_bytes": Spec(
        "gauge",
        ("channel",),
        "Bytes in the FIFO that no reader has taken; with a keeper, bytes in the pipe to the keeper.",
    ),
    "penstock_reserved_bytes": Spec(
        "gauge", ("channel",), "Memory budget reserved by parts that are requested and not delivered."
    ),
    "penstock_channel_quota_bytes": Spec(
        "gauge",
        ("channel",),
        "Channel quota: the most bytes of the memory budget that the channel may reserve now.",
    ),
    "penstock_requests_in_flight": Spec("gauge", ("channel",), "Ranged GETs running."),
    "penstock_channel_requests_in_flight_limit": Spec(
        "gauge", ("channel",), "Ranged GETs that may run at once."
    ),
    "penstock_channel_bandwidth_limit_bytes": Spec(
        "gauge", ("channel",), "Bytes per second that the channel may deliver; +Inf for no limit."
    ),
    "penstock_requests_total": Spec("counter", ("channel", "outcome"), "Ranged GETs ended, by outcome."),
    "penstock_retries_total": Spec("counter", ("channel", "kind"), "Ranged GETs repeated, by what failed."),
    "penstock_resumes_total": Spec(
        "counter",
        ("channel", "of"),
        "Continuations in the middle of a part, or of an epoch that an earlier process began.",
    ),
    "penstock_hedges_total": Spec(
        "counter",
        ("channel", "fate"),
        "Hedges: second requests for a late part at the head of the line, issued, won or lost.",
    ),
    "penstock_objects_checked_total": Spec(
        "counter",
        ("channel", "result"),
        "Objects compared with the checksums that S3 keeps, with `Integrity: checksum`.",
    ),
    "penstock_index_objects_total": Spec(
        "counter",
        ("channel", "row"),
        "Objects whose records `LearnIndex` has found, or that it has refused.",
    ),
    "penstock_first_byte_seconds": Spec(
        "histogram", ("channel",), "Seconds from a request to its response header."
    ),
    "penstock_part_seconds": Spec("histogram", ("channel",), "Seconds from a request to its last byte."),
    "penstock_memory_budget_bytes": Spec("gauge", (), "Memory budget of all channels together."),
    "penstock_memory_limit_bytes": Spec(
        "gauge", (), "Memory that the cgroup, or without one the machine, allows the process."
    ),
    "penstock_requests_in_flight_limit": Spec(
        "gauge", (), "Ranged GETs that may run at once, of all channels together."
    ),
    "penstock_bandwidth_limit_bytes": Spec(
        "gauge", (), "Bytes per second that all channels together may deliver; +Inf for no limit."
    ),
    "penstock_control_requests_total": Spec(
        "counter", ("operation",), "Requests other than ranged GETs for parts: listings, HEADs, manifests."
    ),
    "penstock_request_cost_dollars_total": Spec(
        "counter", (), "Estimated price of all requests, by `Penstock.RequestPrices`."
    ),
    "penstock_planning_seconds": Spec("gauge", (), "Seconds that listing and planning took at the start."),
    "penstock_download_written_bytes_total": Spec(
        "counter", ("channel",), "Bytes that this process has written into the files of a File channel."
    ),
    "penstock_download_files_total": Spec(
        "counter", ("channel",), "Files of a File channel that this process has written to their end."
    ),
    "penstock_download_progress_ratio": Spec(
        "gauge", ("channel",), "Downloaded share of a File channel's bytes, earlier starts included."
    ),
    "penstock_download_requests_total": Spec(
        "counter", ("channel", "outcome"), "Ranged GETs for a File channel ended, by outcome."
    ),
    "penstock_loop_lag_seconds": Spec(
        "histogram", (), "Seconds by which the event loop runs a timer late, measured four times a second."
    ),
}
