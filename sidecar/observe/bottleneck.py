"""Bottleneck of a channel (storage, trainer or a limit): a pure function of two snapshots.

The status page, `penstock top` and the log line at an epoch's end show its result. Time without a reader does
not count. The side that the channel waited for longest is the bottleneck, if that was at least `MATTERS` of
the time. The trainer waits while the channel waits for storage, so every result contains a wait for storage
of `MATTERS`: as `storage`, as `faults` if requests fail, as `mixed` if the wait for the trainer was longer,
and in the text of `limit`. A FIFO that waits longest for another FIFO of its shared stream is `held_back`.
A step that this machine refuses now, such as the write of a trailer to a full disk, comes before all of that,
and so does a reader that takes no byte of a FIFO that has some for `STUCK_AFTER` seconds (`stuck`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from streamer.relay.statistics import CAUSES, STATES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamer.relay.statistics import ChannelStatistics

Kind = Literal[
    "failed",
    "machine",
    "stuck",
    "idle",
    "trainer",
    "storage",
    "faults",
    "mixed",
    "limit",
    "even",
    "held_back",
]

MATTERS = 0.2
"""Least share of the time with a reader that the channel waited for a side which is called the bottleneck."""
STUCK_AFTER = 10.0
"""Seconds without a byte taken after which a trainer is called stuck, not slow."""
STUCK_REMEDY = "Look at the trainer: it saves, evaluates, or waits for another process."
FAULTY = 0.05
"""Share of failed requests above which storage is called faulty."""
FAILURES = ("transient", "throttled", "truncated", "barred", "bad_answer")

WAITED_FOR = {
    "queued": "for a free connection or memory",
    "credentials": "for credentials",
    "connect": "for new connections",
    "first_byte": "for first bytes",
    "body": "for the bytes of responses",
    "throttled": "because S3 asks for fewer requests",
    "retry": "for requests to be repeated",
    "inflate": "for bytes to be inflated",
    "listing": "for the listing of further objects",
}
REMEDIES = {
    "queued": "Raise MemoryBudget; leave RequestsInFlight unset.",
    "credentials": "The provider of the credentials answers slowly: look at it.",
    "connect": "Look at DNS, the network and the number of new connections.",
    "first_byte": "Let RequestsInFlight adapt, or raise it; join small objects into larger ones.",
    "body": "Bandwidth is short: look at the network, or raise RequestsInFlight.",
    "throttled": "Lower RequestsInFlight, or spread the keys over more prefixes.",
    "retry": "Read the last errors.",
    "inflate": "Inflating is slow: store the objects uncompressed, or with Zstandard.",
    "listing": "S3 lists a thousand keys a request: join small objects into larger ones.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Snapshot of the figures of a channel that `diagnose` compares."""

    at: float
    """Seconds of a monotonic clock."""
    state: str
    connected: bool
    error: str | None
    refused: str | None
    """Error of the step that this machine refuses now."""
    epoch: int
    total: int | None
    """Bytes of the current epoch, as stored; None while objects are being listed."""
    consumed: int
    """Delivered bytes of the current epoch."""
    ever_consumed: int
    """Delivered bytes of all epochs, which never decreases."""
    written: int
    """Bytes that the FIFO has accepted in all epochs."""
    seconds: Mapping[str, float]
    starved: Mapping[str, float]
    held_back_by: tuple[str, ...]
    """FIFOs of a shared stream that this one waits for now."""
    untaken: float
    """Seconds for which the reader has taken no byte, though the FIFO has some."""
    ok: int
    failures: int
    """Requests that ended in one of `FAILURES`."""
    throttled: int

    @classmethod
    def beginning(cls, at: float) -> Sample:
        """Return the snapshot of a channel that has not started."""
        return cls(
            at=at, state="waiting", connected=False, error=None, refused=None, epoch=0, total=0, consumed=0,
            ever_consumed=0, written=0, seconds=dict.fromkeys(STATES, 0.0),
            starved=dict.fromkeys(CAUSES, 0.0), held_back_by=(), untaken=0.0, ok=0, failures=0, throttled=0,
        )  # fmt: skip

    @classmethod
    def of(cls, statistics: ChannelStatistics, at: float, *, untaken: float = 0.0) -> Sample:
        """Return the snapshot of a channel with these statistics."""
        requests = statistics.counts["requests"]
        return cls(
            at=at,
            state=statistics.state,
            connected=statistics.reader_connected,
            error=statistics.error,
            refused=statistics.refused,
            epoch=statistics.epoch,
            total=statistics.bytes_total,
            consumed=statistics.bytes_consumed,
            ever_consumed=statistics.consumed_bytes,
            written=statistics.written_bytes,
            seconds=statistics.seconds,
            starved=statistics.starved,
            held_back_by=statistics.held_back_by,
            untaken=untaken,
            ok=requests["ok"],
            failures=sum(requests[kind] for kind in FAILURES),
            throttled=requests["throttled"],
        )


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The bottleneck: `text` for people, `kind` for programs, `remedy` if there is one."""

    kind: Kind
    text: str
    remedy: str = ""


def rate(before: Sample, after: Sample) -> float:
    """Return the bytes per second into the FIFO; 0 if no time has passed."""
    seconds = after.at - before.at
    return (after.written - before.written) / seconds if seconds > 0 else 0.0


def eta(before: Sample, after: Sample) -> float | None:
    """Return the seconds until the end of the epoch at the rate between the two.

    None if no byte moved, or while objects are being listed.
    """
    seconds, moved = after.at - before.at, after.ever_consumed - before.ever_consumed
    if after.state != "streaming" or after.total is None or seconds <= 0 or moved <= 0:
        return None
    return (after.total - after.consumed) * seconds / moved


def shares(before: Sample, after: Sample) -> dict[str, float]:
    """Return the share of the time between the two that the channel spent in each state."""
    spent = {state: after.seconds[state] - before.seconds[state] for state in after.seconds}
    total = sum(spent.values())
    return {state: seconds / total if total > 0 else 0.0 for state, seconds in spent.items()}


def diagnose(before: Sample, after: Sample, *, when: str | None = None) -> Bottleneck:
    """Return the bottleneck between the two snapshots.

    `when`: words for the time, in which a reader was there, if only briefly; None for its length.
    """
    if (urgent := _urgent(after)) is not None:
        return urgent
    spent = shares(before, after)
    connected = 1 - spent["idle"]
    if connected <= (0.02 if when is None else 0.0) or after.at <= before.at:
        return _idle(after)
    when = when or _when(after.at - before.at)
    blocked, starved, limited = (spent[state] / connected for state in ("blocked", "starved", "limited"))
    held_back, refused = spent["held_back"] / connected, spent["refused"] / connected
    if max(held_back, refused) >= max(MATTERS, blocked, starved, limited):
        return _held_back(after, held_back, refused, when)
    failures, ended = after.failures - before.failures, after.ok - before.ok
    failing = failures / max(failures + ended, 1)
    faulty = failing > FAULTY
    if starved >= MATTERS and faulty:
        return _faults(before, after, starved, failing, when)
    if starved >= MATTERS and limited <= max(starved, blocked):
        return _storage(before, after, starved, blocked, when)
    if limited >= max(MATTERS, blocked):
        return Bottleneck(
            "limit",
            f"held to its bandwidth limit {limited:.0%} of {when}"
            + (f"; the trainer waited for storage {starved:.0%}" if starved >= MATTERS else ""),
            "Raise it with `penstock set`, if that is not wanted.",
        )
    but = f"; S3 fails {failing:.0%} of requests, the trainer waited {starved:.0%}" if faulty else ""
    if blocked >= MATTERS:
        return Bottleneck(
            "trainer",
            f"the trainer is the bottleneck: the sidecar waited for it {blocked:.0%} of {when}{but}",
        )
    moving = spent["moving"] / connected
    return Bottleneck("even", f"neither side waits much: bytes moved {moving:.0%} of {when}{but}")


def stopped(epochs: Mapping[str, int]) -> Bottleneck:
    """Return the result for a stopped channel. `epochs`: its epochs, by trailer state."""
    counts = ", ".join(f"{count:,} {trailer_state}" for trailer_state, count in epochs.items())
    return Bottleneck("idle", f"stopped; epochs: {counts}" if counts else "stopped before an epoch began")


def _urgent(now: Sample) -> Bottleneck | None:
    """Return the result for a channel that has failed, waits for this machine, or is stuck; else None."""
    if now.error is not None:
        return Bottleneck("failed", f"failed for good: {now.error}")
    if now.refused is not None:
        remedy = "Remove the cause. The FIFO stays open, and the sidecar tries again for GiveUpAfter."
        return Bottleneck("machine", f"waiting for this machine: {now.refused}", remedy)
    if now.untaken >= STUCK_AFTER:
        return Bottleneck("stuck", f"the trainer has taken no byte for {now.untaken:.0f} s", STUCK_REMEDY)
    return None


def _idle(now: Sample) -> Bottleneck:
    if now.connected:
        return Bottleneck("idle", "a reader has just opened the FIFO")
    if now.state == "stopped":
        return Bottleneck("idle", "stopped")
    return Bottleneck("idle", f"no reader: nothing has opened the FIFO of epoch {now.epoch}")


def _held_back(now: Sample, held_back: float, refused: float, when: str) -> Bottleneck:
    if refused >= held_back:
        text = f"waited for this machine {refused:.0%} of {when}"
        return Bottleneck("machine", text, "Read the last errors.")
    text = f"held back {held_back:.0%} of {when} by "
    if by := ", ".join(now.held_back_by):
        return Bottleneck(
            "held_back",
            f"{text}{by}, which {'is' if len(now.held_back_by) == 1 else 'are'} full or without a reader",
            f"Look at the process that reads {by}: the FIFOs of the channel are filled in turn. If a program "
            "reads rank after rank, set Fetch: separately.",
        )
    return Bottleneck("held_back", f"{text}another FIFO of the channel")


def _faults(before: Sample, after: Sample, starved: float, failing: float, when: str) -> Bottleneck:
    throttling = after.throttled > before.throttled
    fewer = " and asks for fewer" if throttling else ""
    return Bottleneck(
        "faults",
        f"S3 fails {failing:.0%} of requests{fewer}: the trainer waited for storage {starved:.0%} of {when}",
        REMEDIES["throttled" if throttling else "retry"],
    )


def _storage(before: Sample, after: Sample, starved: float, blocked: float, when: str) -> Bottleneck:
    causes = {cause: seconds - before.starved[cause] for cause, seconds in after.starved.items()}
    cause = max(causes, key=lambda each: causes[each])
    if blocked > starved:
        return Bottleneck(
            "mixed",
            f"storage and the trainer are slow in turn: the trainer waited {starved:.0%} of {when}, mostly "
            f"{WAITED_FOR[cause]}; the sidecar waited for the trainer {blocked:.0%}",
            REMEDIES[cause],
        )
    return Bottleneck(
        "storage",
        f"storage is the bottleneck: the trainer waited {starved:.0%} of {when}, mostly {WAITED_FOR[cause]}",
        REMEDIES[cause],
    )


def _when(seconds: float) -> str:
    return "the last minute" if seconds > 55 else f"the last {max(seconds, 1):.0f} s"
