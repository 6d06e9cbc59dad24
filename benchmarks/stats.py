"""Orders runs, and makes rows of them: medians with their range, the fastest setting, the best peer.

The functions use only the plain values of a results document, so a report can be made from the file alone.
"""

from __future__ import annotations

import statistics
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
GB = 1e9
Document = dict[str, Any]


def in_turns(rounds: int, contestants: Sequence[T]) -> Iterator[tuple[int, T]]:
    """Yield (round, contestant), each contestant once a round, in an order that rotates between rounds.

    So a disturbance of the machine affects all contestants.
    """
    for number in range(rounds):
        turn = number % len(contestants)
        for each in (*contestants[turn:], *contestants[:turn]):
            yield number, each


def list_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return a type for argparse: a comma-separated list of some of these names, or `all`, in their order."""

    def convert(text: str) -> list[str]:
        wanted = {name.strip() for name in text.split(",")} - {""}
        if "all" in wanted:
            return list(known)
        if unknown := wanted - set(known):
            raise ArgumentTypeError(f"no {min(unknown)!r}; there are {', '.join(known)}")
        return [name for name in known if name in wanted]

    return convert


def percentile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that is at least as large as `part` of the values."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and the range around it."""

    median: float
    low: float
    high: float

    def text(self) -> str:
        """Return `median (low-high)` with two digits, three below 0.1; the median alone if all are equal."""
        digits = 2 if self.median >= 0.1 else 3
        low, middle, high = (f"{value:.{digits}f}" for value in (self.low, self.median, self.high))
        return middle if low == high else f"{middle} ({low}–{high})"


def spread(values: Sequence[float]) -> Spread:
    """Return median and range of the values. Raises ValueError for no value."""
    if not values:
        raise ValueError("no values")
    return Spread(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Figures of one client in one scenario, or the reason why there are none."""

    client: str
    setting: str = ""
    throughput: Spread | None = None
    """GB/s."""
    cpu: Spread | None = None
    """CPU seconds per GB."""
    peak: Spread | None = None
    """Peak memory, bytes."""
    cut: bool = False
    verified: bool = False
    ahead: float = 0.0
    """Bytes fetched and not delivered, as a share of those delivered; median."""
    transport: str | None = None
    problem: str | None = None


def rows(scenario: Mapping[str, Any]) -> list[Row]:
    """Return a scenario's rows, the fastest first, those without figures last."""
    made = [_row(name, entry) for name, entry in scenario["clients"].items()]
    return sorted(made, key=lambda row: -row.throughput.median if row.throughput else 1.0)


def _row(name: str, entry: Mapping[str, Any]) -> Row:
    runs: list[Mapping[str, Any]] = entry.get("runs", [])
    if entry.get("problem") or not runs:
        return Row(client=name, problem=entry.get("problem") or "no run")
    ahead = [run["received_bytes"] / run["bytes"] - 1 for run in runs if run["received_bytes"] is not None]
    return Row(
        client=name,
        setting=entry["setting"],
        throughput=spread([run["bytes"] / GB / run["seconds"] for run in runs]),
        cpu=spread([run["cpu_seconds"] / (run["bytes"] / GB) for run in runs]),
        peak=spread([run["peak_rss"] for run in runs]),
        cut=any(run["cut"] for run in runs),
        verified=bool(entry["verified"]),
        ahead=statistics.median(ahead) if ahead else 0.0,
        transport=runs[-1]["transport"],
    )


def fastest(tried: Mapping[str, float]) -> str:
    """Return the setting with the highest throughput; the first if several are equal."""
    return max(tried, key=lambda name: tried[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Penstock compared with the peers, as ratios of medians."""

    fastest_peer: str
    throughput: float
    """Throughput divided by that of the fastest peer."""
    cheapest_peer: str
    cpu: float
    """CPU per GB divided by that of the peer with the least CPU per GB, however slow that peer is."""


def beside(made: Sequence[Row], *, ours: str = "penstock") -> Beside | None:
    """Compare `ours` with the peers; None if it or all peers have no figures. Its variants are no peers."""
    figures = {
        row.client: (row.throughput.median, row.cpu.median) for row in made if row.throughput and row.cpu
    }
    peers = {name: pair for name, pair in figures.items() if not name.startswith(ours)}
    if ours not in figures or not peers:
        return None
    throughput, cpu = figures[ours]
    quick = max(peers, key=lambda name: peers[name][0])
    cheap = min(peers, key=lambda name: peers[name][1])
    return Beside(
        fastest_peer=quick,
        throughput=throughput / peers[quick][0],
        cheapest_peer=cheap,
        cpu=cpu / peers[cheap][1],
    )
