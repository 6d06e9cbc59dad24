"""Measures how busy emulated accelerators are by client: `python -m benchmarks.mlperf`.

    nginx --HTTP--> penstock --FIFO--> one loader   --bytes of a batch--> emulated accelerator
    nginx --HTTP-->      the loaders of a peer      --bytes of a batch--> emulated accelerator

The workloads are those of MLPerf Storage (`benchmarks.mlperf.loads`), each accelerator with a stream of its
own. Every client is run once with each of its settings; then the clients take turns with their best, in an
order that rotates. A run begins with new processes and lasts `--seconds` from the end of the first step.

The CPU seconds are those of the client from then on: of the sidecar, the loaders and the accelerator, which
alone takes next to none. A batch counts when every byte of it has been in the memory of a loader.

The figures are no results of MLPerf: data sets are smaller than its rules demand, and origin and client share
the machine. Peers: `pip install --group mlperf`. A peer that is not installed has a row with the reason.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import sys
from collections.abc import Iterator, Sequence

from benchmarks.dataset import directory_in_memory
from benchmarks.lineup import CLIENTS
from benchmarks.mlperf.feeds import FEEDS
from benchmarks.mlperf.loads import LOADS
from benchmarks.mlperf.runs import AHEAD, DISTRIBUTIONS, Bench, Document, measure, unavailable
from benchmarks.mlperf.samples import DISTINCT_BYTES, Samples
from benchmarks.origin import SERVERS, OriginFailed, missing, running_origin
from benchmarks.report import circumstances, insert_into, keep, kept, say
from benchmarks.stats import list_of, spread

BEGIN = "<!-- mlperf: begin; written by python -m benchmarks.mlperf -->"
END = "<!-- mlperf: end -->"


def rows(entries: Document, least: float) -> Iterator[str]:
    """Yield the table's rows of one load, the highest utilisation first, feeds without figures last."""
    made = []
    for feed, entry in entries.items():
        if entry["problem"] or not entry["runs"]:
            reason = " ".join((entry["problem"] or "no run").replace("|", "/").split())
            made.append((-1.0, f"| {feed} | {reason[:160]} | - | - | - |"))
            continue
        busy, rate, cpu = (
            spread([run[what] for run in entry["runs"]])
            for what in ("utilisation", "gb_per_second", "cpu_per_gb")
        )
        passed = "**" if busy.median >= least else ""
        shown = f"{passed}{busy.median:.1%}{passed} ({busy.low:.1%}–{busy.high:.1%})"
        row = f"| {feed} | {entry['setting']} | {shown} | {rate.text()} | {cpu.text()} |"
        made.append((busy.median, row))
    yield from (row for _, row in sorted(made, key=lambda each: -each[0]))


def markdown(results: Document) -> str:
    """Return date, machine and a table per load, as Markdown."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    reported = (
        f"Measured on {results['date']}: median, and in parentheses minimum and maximum. "
        f"{machine['cores']} cores, which the origin shares, Linux {machine['kernel']}, Python "
        f"{machine['python']}. {versions}."
    )
    lines = [reported]
    for name, entry in results["loads"].items():
        load, count = LOADS[name], entry["accelerators"]
        accelerators = "one accelerator" if count == 1 else f"{count} accelerators"
        title = (
            f"**`{name}`**, {accelerators}, origin `{entry['server']}`: 100 % takes "
            f"{count * load.rate / 1e9:.2f} GB/s; bold: at least the {load.least:.0%} that MLPerf accepts; "
            f"{entry['rounds']} runs of {entry['seconds']:g} s for each row"
        )
        lines += [
            "",
            title,
            "",
            "| client | setting | utilisation | GB/s | client CPU-s/GB |",
            "|---|---|---|---|---|",
            *rows(entry["feeds"], load.least),
        ]
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.mlperf", description=__doc__.splitlines()[0])
    for name, known, usual in (("loads", LOADS, "unet3d-a100,unet3d-h100"), ("clients", FEEDS, "all")):
        text = f"of {', '.join(known)} ({usual})"
        made.add_argument(f"--{name}", type=list_of(known), default=usual, metavar="LIST", help=text)
    made.add_argument("--accelerators", type=int, default=1, metavar="N", help="at a time (1)")
    made.add_argument("--server", default="fast", choices=SERVERS, help="of the origin (fast)")
    made.add_argument("--rounds", type=int, default=3, help="counted runs of each (3); 0: try settings only")
    made.add_argument("--seconds", type=float, default=10.0, help="of a run, after its first step (10)")
    made.add_argument("--defaults", action="store_true", help="each client's first setting; try no other")
    made.add_argument(
        "--settings-of",
        metavar="LOAD",
        help="the settings that the earlier results of this load chose; try no others",
    )
    made.add_argument("--gigabytes", type=float, default=DISTINCT_BYTES / 1e9, help="of distinct objects (2)")
    made.add_argument(
        "--out",
        default="build/benchmarks/mlperf.json",
        metavar="FILE",
        help="results; loads of an earlier run stay",
    )
    made.add_argument("--into", metavar="FILE", help="put the tables of all results into this Markdown file")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0, 1 if an installed client failed, 2 if nothing can be measured."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    loads, feeds = chosen.loads, chosen.clients
    if chosen.rounds < 0 or chosen.accelerators < 1 or chosen.seconds <= 0 or chosen.gigabytes <= 0:
        parser.error("--rounds must not be negative, --accelerators at least 1, the others above 0")
    results = kept(chosen.out) or {"loads": {}}
    earlier: Document = {}
    if chosen.settings_of is not None:
        if chosen.settings_of not in results["loads"]:
            parser.error(f"{chosen.out} has no results of {chosen.settings_of}")
        earlier = results["loads"][chosen.settings_of]["feeds"]
    if loads and (reason := missing()):
        print(f"bench: {reason}", file=sys.stderr)
        return 2
    try:
        for name in loads:
            entries = _of_load(name, feeds, chosen, earlier)
            results["loads"][name] = {
                "server": chosen.server,
                "accelerators": chosen.accelerators,
                "rounds": chosen.rounds,
                "seconds": chosen.seconds,
                "feeds": entries,
            }
            results |= circumstances() | {"versions": _versions(feeds)}
            keep(results, chosen.out)
    except OriginFailed as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print(markdown(results))
    if chosen.into is not None:
        insert_into(chosen.into, markdown(results), begin=BEGIN, end=END)
    failed = [
        feed
        for name in loads
        for feed, entry in results["loads"][name]["feeds"].items()
        if entry["problem"] and not unavailable(feed)
    ]
    return 1 if failed else 0


def _of_load(name: str, feeds: Sequence[str], chosen: argparse.Namespace, earlier: Document) -> Document:
    load = LOADS[name]
    ahead = max(AHEAD, load.loaders)
    steps = math.ceil(chosen.seconds / load.computation) + ahead + 1
    with directory_in_memory("penstock-mlperf-") as made:
        data = Samples(
            load,
            os.path.join(made, "data"),
            accelerators=chosen.accelerators,
            steps=steps,
            distinct_bytes=chosen.gigabytes * 1e9,
        )
        say(f"{name}: writing {data.distinct} objects, {len(data.sizes) - data.distinct} links to them")
        data.create()
        with running_origin(data, os.path.join(made, "origin")) as origin:
            bench = Bench(load, origin, chosen.server, data, chosen.seconds)
            return measure(bench, feeds, chosen.rounds, defaults=chosen.defaults, earlier=earlier)


def _versions(feeds: Sequence[str]) -> dict[str, str]:
    names = [name for feed in feeds if not unavailable(feed) for name in DISTRIBUTIONS.get(feed, ())]
    return {"penstock": CLIENTS["penstock"].version()} | {
        name: importlib.metadata.version(name) for name in names
    }


if __name__ == "__main__":
    sys.exit(main())
