"""Every metric, in one table: name, type, labels, meaning. `collector` exports them.

Names have the prefix `penstock_` and base units. Labels are bounded: channel, and the fixed sets below.
Tests compare the table with docs/reference/metrics.md, with the dashboards, and with a sidecar's exports.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from streamer.relay.statistics import CAUSES, RESUMED, STATES
from streamer.s3.checksums import OUTCOMES as CHECKED

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.observe.state import DownloadStatistics
    from streamer.relay.statistics import ChannelStatistics

OUTCOMES = (
    "ok", "transient", "throttled", "truncated", "expired", "skewed", "denied", "missing", "changed",
    "barred", "bad_answer", "cancelled",
)  # fmt: skip
RETRIED = ("transient", "throttled", "truncated", "expired", "skewed", "barred", "bad_answer")
HEDGES = ("issued", "won", "lost")
TRAILER_STATES = ("complete", "abandoned", "failed", "stopped")
ERRORS = (
    "denied", "missing", "changed", "barred", "bad_answer", "refused", "corrupt", "mismatch", "gave_up",
    "local",
)  # fmt: skip
"""Kinds of the errors that are not retried and make a channel fail."""
LEARNT = ("learnt", "refused")
UPLOADED = ("uploaded", *RETRIED, "denied", "missing", "changed", "gave_up", "local")
UPLOAD_PHASES = ("waiting", "running", "complete", "incomplete")
OPERATIONS = ("ListObjectsV2", "HeadObject", "GetObject")
"""S3's names of the requests for planning; GetObject reads manifests."""


class Spec(NamedTuple):
    """Definition of a metric, for its export, the documentation and the tests of the dashboards."""

    kind: str
    labels: tuple[str, ...]
    help: str
    read: str | Callable[[Any], Any] = ""
    """Name of a channel's value in its statistics, or a function of them; empty if `collector` reads it."""
    values: tuple[str, ...] = ()
    """All values of the second label; a name in `read` is then one of `counts`."""

    def value(self, statistics: ChannelStatistics | DownloadStatistics) -> Any:
        """Return a number, None for none, numbers by the values of the label, or a histogram."""
        if callable(self.read):
            return self.read(statistics)
        return statistics.counts[self.read] if self.values else getattr(statistics, self.read)


def _of_channel(
    kind: str, meaning: str, read: str | Callable[[ChannelStatistics], Any], /, **label: tuple[str, ...]
) -> Spec:
    """Return the definition of a metric of each channel. `label`: the second label, and all its values."""
    return Spec(kind, ("channel", *label), meaning, read, *label.values())


def _progress(channel: ChannelStatistics) -> float | None:
    """Return the delivered part of the epoch; None while objects are being listed."""
    if channel.bytes_total is None:
        return None
    return channel.bytes_consumed / channel.bytes_total if channel.bytes_total else 0.0


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
    "penstock_fifo_written_bytes_total": _of_channel(
        "counter", "Bytes that the FIFOs accepted.", "written_bytes"
    ),
    "penstock_received_bytes_total": _of_channel(
        "counter", "Bytes received from S3, and record headers between them.", "received_bytes"
    ),
    "penstock_wasted_bytes_total": _of_channel(
        "counter",
        "Bytes discarded: of epochs left early, received twice because of a hedge, or repeated after a "
        "response that broke off.",
        "wasted_bytes",
    ),
    "penstock_objects_completed_total": _of_channel(
        "counter", "Objects delivered completely, counted again in every epoch.", "objects_completed"
    ),
    "penstock_records_total": _of_channel(
        "counter", "Records of complete epochs, if `RecordWrapperType` makes records.", "records"
    ),
    "penstock_epochs_total": _of_channel(
        "counter", "Epochs ended, by trailer state.", "epochs", trailer_state=TRAILER_STATES
    ),
    "penstock_epoch": _of_channel("gauge", "The epoch being offered or streamed, from 0.", "epoch"),
    "penstock_epoch_progress_ratio": _of_channel(
        "gauge", "Delivered share of the current epoch; absent while objects are listed.", _progress
    ),
    "penstock_epoch_size_bytes": _of_channel(
        "gauge", "Bytes of one epoch, before inflation; absent while objects are listed.", "bytes_total"
    ),
    "penstock_epoch_objects": _of_channel(
        "gauge", "Objects of one epoch; those listed so far while objects are listed.", "objects"
    ),
    "penstock_channel_listing": _of_channel(
        "gauge", "1 while the channel streams objects before its listing has ended.", "listing"
    ),
    "penstock_epoch_eta_seconds": Spec(
        "gauge",
        ("channel",),
        "Seconds until the epoch is delivered, at the recent rate; NaN while no byte moves.",
    ),
    "penstock_channel_seconds_total": _of_channel(
        "counter",
        "Seconds in each state: idle (no reader), blocked (FIFO full: the trainer is slower), "
        "starved (storage is slower), held_back (another FIFO of a shared stream is full, or has no reader), "
        "limited (by a bandwidth limit), moving, refused (this machine refuses a step, such as a trailer).",
        lambda channel: channel.seconds,
        state=STATES,
    ),
    "penstock_starved_seconds_total": _of_channel(
        "counter",
        "Seconds starved, by the phase of the request at the head of the line.",
        lambda channel: channel.starved,
        cause=CAUSES,
    ),
    "penstock_head_wait_seconds": _of_channel(
        "histogram", "Seconds of each wait of delivery for bytes at the head of the line.", "head_wait"
    ),
    "penstock_reader_connected": _of_channel(
        "gauge", "1 while a reader holds the FIFO open.", "reader_connected"
    ),
    "penstock_reader_connects_total": _of_channel("counter", "Readers that opened a FIFO.", "readers_come"),
    "penstock_reader_disconnects_total": _of_channel(
        "counter", "Readers that closed the FIFO before the sidecar did.", "readers_gone"
    ),
    "penstock_reader_end_disconnects_total": _of_channel(
        "counter",
        "Readers that closed the FIFO at the end of an object, before the end of the epoch; "
        "usually at an end mark.",
        "readers_at_ends",
    ),
    "penstock_channel_unjoined": Spec(
        "gauge",
        ("channel",),
        "1 if a program may misread the border between two objects: tar, Arrow, lines without a last line "
        "feed.",
    ),
    "penstock_channel_failed": _of_channel(
        "gauge",
        "1 after the channel has failed; it stays failed until a restart.",
        lambda channel: channel.error is not None,
    ),
    "penstock_channel_failures_total": _of_channel(
        "counter",
        "Failures of the channel, by error.",
        lambda channel: {channel.error_kind: 1} if channel.error_kind else {},
        error=ERRORS,
    ),
    "penstock_fifo_capacity_bytes": _of_channel(
        "gauge", "Capacity of the FIFO, as the kernel granted it.", "fifo_capacity"
    ),
    "penstock_fifo_unread_bytes": _of_channel(
        "gauge",
        "Bytes in the FIFO that no reader has taken; with a keeper, bytes in the pipe to the keeper.",
        "fifo_bytes",
    ),
    "penstock_fifo_untaken_seconds": Spec(
        "gauge",
        ("channel",),
        "Seconds for which the reader has taken no byte, though the FIFO has some; 0 without a reader.",
    ),
    "penstock_reserved_bytes": _of_channel(
        "gauge", "Memory budget reserved by parts that are requested and not delivered.", "reserved_bytes"
    ),
    "penstock_channel_quota_bytes": _of_channel(
        "gauge",
        "Channel quota: the most bytes of the memory budget that the channel may reserve now.",
        "quota_bytes",
    ),
    "penstock_requests_in_flight": _of_channel("gauge", "Ranged GETs running.", "requests_in_flight"),
    "penstock_channel_requests_in_flight_limit": _of_channel(
        "gauge", "Ranged GETs that may run at once.", "requests_in_flight_limit"
    ),
    "penstock_channel_bandwidth_limit_bytes": _of_channel(
        "gauge",
        "Bytes per second that the channel may deliver; +Inf for no limit.",
        lambda channel: channel.bandwidth_limit or math.inf,
    ),
    "penstock_requests_total": _of_channel(
        "counter", "Ranged GETs ended, by outcome.", "requests", outcome=OUTCOMES
    ),
    "penstock_retries_total": _of_channel(
        "counter", "Ranged GETs repeated, by what failed.", "retries", kind=RETRIED
    ),
    "penstock_resumes_total": _of_channel(
        "counter",
        "Continuations in the middle of a part, or of an epoch that an earlier process began.",
        "resumes",
        of=RESUMED,
    ),
    "penstock_hedges_total": _of_channel(
        "counter",
        "Hedges: second requests for a late part at the head of the line, issued, won or lost.",
        "hedges",
        fate=HEDGES,
    ),
    "penstock_objects_checked_total": _of_channel(
        "counter",
        "Objects compared with the checksums that S3 keeps, with `Integrity: checksum`.",
        "checked",
        result=CHECKED,
    ),
    "penstock_index_objects_total": Spec(
        "counter",
        ("channel", "row"),
        "Objects whose records a channel has found for its index, or that it has refused.",
    ),
    "penstock_first_byte_seconds": _of_channel(
        "histogram", "Seconds from a request to its response header.", "first_byte"
    ),
    "penstock_part_seconds": _of_channel("histogram", "Seconds from a request to its last byte.", "part"),
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
        "counter", (), "Estimated price of all requests, at S3 Standard's prices in us-east-1."
    ),
    "penstock_give_up_after_seconds": Spec("gauge", (), "`GiveUpAfter` of the job."),
    "penstock_planning_seconds": Spec("gauge", (), "Seconds that listing and planning took at the start."),
    "penstock_download_written_bytes_total": _of_channel(
        "counter", "Bytes that this process has written into the files of a File channel.", "written_bytes"
    ),
    "penstock_download_files_total": _of_channel(
        "counter", "Files of a File channel that this process has written to their end.", "files"
    ),
    "penstock_download_progress_ratio": _of_channel(
        "gauge", "Downloaded share of a File channel's bytes, earlier starts included.", "progress"
    ),
    "penstock_download_requests_total": _of_channel(
        "counter", "Ranged GETs for a File channel ended, by outcome.", "requests", outcome=OUTCOMES
    ),
    "penstock_upload_bytes_total": Spec("counter", (), "Bytes of files, whole or not, that S3 has accepted."),
    "penstock_upload_files_total": Spec(
        "counter", ("upload",), "Files uploaded, and attempts that failed, by what failed."
    ),
    "penstock_upload_waiting_bytes": Spec(
        "gauge", (), "Bytes of checkpoints' files that are closed and not in S3 yet."
    ),
    "penstock_upload_phase": Spec(
        "gauge", ("phase",), "1 for the phase of the upload at the trainer's end; absent if nothing uploads."
    ),
    "penstock_checkpoint_timestamp_seconds": Spec(
        "gauge", (), "Unix time of the newest complete checkpoint that is in S3; absent without one."
    ),
    "penstock_checkpoint_upload_seconds": Spec(
        "gauge", (), "Seconds that the newest complete checkpoint took until it was in S3."
    ),
    "penstock_loop_lag_seconds": Spec(
        "histogram", (), "Seconds by which the event loop runs a timer late, measured four times a second."
    ),
}

COUNTS = {spec.read for spec in METRICS.values() if spec.values and isinstance(spec.read, str)}
"""Names in `ChannelStatistics.counts`; `/status` has each of them."""
