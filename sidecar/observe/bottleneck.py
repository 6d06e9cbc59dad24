"""Who is slow, in plain words: a pure function of two snapshots of a channel.

The status page, `penstock top` and the line logged at an epoch's end all say what this says. Time without
a reader does not count. Of the rest, whoever was waited for most is the bottleneck, from `MATTERS` on; a
storage that is waited for because its answers fail is named so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from streamer.relay.statistics import CAUSES, STATES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamer.relay.statistics import ChannelStatistics

Kind = Literal["failed", "idle", "trainer", "storage", "faults", "limit", "even"]

MATTERS = 0.2
"""Part of the time, with a reader there, that must have been waited for one side to be called slow."""
FAULTY = 0.05
"""Part of the requests that must have failed for that to be the storage's trouble."""
FAILURES = ("transient", "throttled", "truncated", "bad_answer")

WAITED_FOR = {
    "queued": "for a free connection or memory",
    "credentials": "for credentials",
    "connect": "for connections to be made",
    "first_byte": "for first bytes",
    "body": "for the bytes of bodies",
    "throttled": "because S3 asks for fewer requests",
    "retry": "between repeated requests",
    "inflate": "for bytes to be inflated",
}
REMEDIES = {
    "queued": "Raise MemoryBudget; leave RequestsInFlight unset.",
    "credentials": "Look at the credentials' provider: it answers slowly.",
    "connect": "Look at DNS, the network and the number of new connections.",
    "first_byte": "Let RequestsInFlight adapt, or raise it; join small objects into larger ones.",
    "body": "Bandwidth is short: look at the network, or raise RequestsInFlight.",
    "throttled": "Lower RequestsInFlight, or spread the keys over more prefixes.",
    "retry": "See the last errors.",
    "inflate": "Inflating is the bottleneck: store the objects uncompressed, or with Zstandard.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What of a channel matters here, at one time."""

    at: float
    """Seconds of a clock that never goes back."""
    state: str
    connected: bool
    error: str | None
    epoch: int
    total: int
    """Bytes of the current epoch, as stored."""
    consumed: int
    """Of those, the delivered ones."""
    ever_consumed: int
    """The same over all epochs, so that it never goes back."""
    written: int
    """Bytes that FIFOs have accepted, in all."""
    seconds: Mapping[str, float]
    starved: Mapping[str, float]
    ok: int
    failures: int
    """Requests that ended in one of `FAILURES`."""
    throttled: int

    @classmethod
    def beginning(cls, at: float) -> Sample:
        """Of a channel before it has done anything."""
        return cls(
            at=at, state="waiting", connected=False, error=None, epoch=0, total=0, consumed=0,
            ever_consumed=0, written=0, seconds=dict.fromkeys(STATES, 0.0),
            starved=dict.fromkeys(CAUSES, 0.0), ok=0, failures=0, throttled=0,
        )  # fmt: skip

    @classmethod
    def of(cls, statistics: ChannelStatistics, at: float) -> Sample:
        """The channel as `statistics` has it."""
        return cls(
            at=at,
            state=statistics.state,
            connected=statistics.reader_connected,
            error=statistics.error,
            epoch=statistics.epoch,
            total=statistics.bytes_total,
            consumed=statistics.bytes_consumed,
            ever_consumed=statistics.consumed_bytes,
            written=statistics.written_bytes,
            seconds=statistics.seconds,
            starved=statistics.starved,
            ok=statistics.requests.get("ok", 0),
            failures=sum(statistics.requests.get(kind, 0) for kind in FAILURES),
            throttled=statistics.requests.get("throttled", 0),
        )


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """`text` for people, `kind` for programs, and what to do about it, if anything."""

    kind: Kind
    text: str
    remedy: str = ""


def rate(before: Sample, after: Sample) -> float:
    """Bytes per second into the FIFOs; 0 for no time at all."""
    seconds = after.at - before.at
    return (after.written - before.written) / seconds if seconds > 0 else 0.0


def eta(before: Sample, after: Sample) -> float | None:
    """Seconds until the current epoch is delivered, at the rate between the two; None if nothing moves."""
    seconds, moved = after.at - before.at, after.ever_consumed - before.ever_consumed
    if after.state != "streaming" or seconds <= 0 or moved <= 0:
        return None
    return (after.total - after.consumed) * seconds / moved


def shares(before: Sample, after: Sample) -> dict[str, float]:
    """Of the time between the two, the part spent in each state."""
    spent = {state: after.seconds[state] - before.seconds[state] for state in after.seconds}
    whole = sum(spent.values())
    return {state: seconds / whole if whole > 0 else 0.0 for state, seconds in spent.items()}


def diagnose(before: Sample, after: Sample, *, when: str | None = None) -> Bottleneck:
    """Who was slow between the two; `when` in words, if the length of time does not say it."""
    if after.error is not None:
        return Bottleneck(
            "failed", f"failed for good: {after.error}", "See the error; then start the job again."
        )
    spent = shares(before, after)
    there = 1 - spent["idle"]
    if there < 0.02 or after.at <= before.at:
        return _nobody(after)
    when = when or _when(after.at - before.at)
    blocked, starved, limited = (spent[state] / there for state in ("blocked", "starved", "limited"))
    failures, ended = after.failures - before.failures, after.ok - before.ok
    faulty = failures > FAULTY * (failures + ended)
    failing = failures / max(failures + ended, 1)
    if starved >= max(MATTERS, blocked, limited):
        return _storage(before, after, starved, failing if faulty else 0.0, when)
    if limited >= max(MATTERS, blocked):
        return Bottleneck(
            "limit",
            f"held to its bandwidth limit {limited:.0%} of {when}",
            "Raise it with `penstock set`, if that is not wanted.",
        )
    but = f"; S3 fails {failing:.0%} of requests, so far without harm" if faulty else ""
    if blocked >= MATTERS:
        return Bottleneck(
            "trainer", f"trainer is the bottleneck: storage waited {blocked:.0%} of {when}{but}"
        )
    return Bottleneck("even", f"nobody waits much: bytes moved {spent['moving'] / there:.0%} of {when}{but}")


def _nobody(now: Sample) -> Bottleneck:
    if now.connected:
        return Bottleneck("idle", "a reader has just come")
    if now.state == "stopped":
        return Bottleneck("idle", "stopped")
    return Bottleneck("idle", f"no reader: epoch {now.epoch} waits in its FIFO")


def _storage(before: Sample, after: Sample, starved: float, failing: float, when: str) -> Bottleneck:
    causes = {cause: seconds - before.starved[cause] for cause, seconds in after.starved.items()}
    cause = max(causes, key=lambda each: causes[each])
    if failing:
        asked = " and it asks for fewer" if after.throttled > before.throttled else ""
        return Bottleneck(
            "faults",
            f"S3 is in trouble: {failing:.0%} of requests fail{asked}; "
            f"the trainer waited {starved:.0%} of {when}",
            REMEDIES["throttled" if asked else "retry"],
        )
    return Bottleneck(
        "storage",
        f"storage is the bottleneck: the trainer waited {starved:.0%} of {when}, mostly {WAITED_FOR[cause]}",
        REMEDIES[cause],
    )


def _when(seconds: float) -> str:
    return "the last minute" if seconds > 55 else f"the last {max(seconds, 1):.0f} s"
