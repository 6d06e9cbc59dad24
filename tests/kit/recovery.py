"""Each fault alone, measured: is it waited out, how soon do bytes come again, what does it cost.

    python -m tests.kit.recovery [--seeds 6] [--into docs/explanation/reliability.md]
    python -m tests.kit.recovery --hedges [--into docs/explanation/reliability.md]

One channel with Penstock's defaults streams from the stub, epoch by epoch with and without the fault, which
meets one part in twenty. A fault says when it has ended and which byte of the stream it withheld; the
reader notes when it had how many bytes. Time to recover is what lies between, with all that was still due
before that byte. Seeds go over the three transports in turn. Server, sidecar and reader share this
process, so its throughput says nothing by itself; only that with the fault over that without.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import uvloop
from aiohttp import web

from benchmarks.report import insert_into
from benchmarks.stats import percentile
from streamer.errors import StreamError
from streamer.plan import S3Uri
from streamer.readers.core.stream import PipeStream
from streamer.relay.channel import Channel
from streamer.relay.channel_spec import ChannelSpec
from streamer.relay.transport import HEDGED, TransportSpec, Wish, open_transport
from streamer.retry import RetryPolicy
from streamer.s3.client.endpoint import Endpoint
from streamer.s3.client.session import open_clients
from streamer.units import KIB, MIB
from tests.kit.credentials import set_credentials
from tests.kit.faults import displaced, drips, newer, redirects, resets_after, silent_for
from tests.kit.harness import fill
from tests.kit.planning import plan_prefix
from tests.kit.stub import Answer, Fault, S3Stub, StubThread, cut_after, fails, with_headers

BEGIN = "<!-- {}: begin; written by python -m tests.kit.recovery -->"
END = "<!-- {}: end -->"
OBJECTS, SIZE, PART = 32, MIB, 256 * KIB
SHARE = 0.05
"""Share of the parts that meet the fault."""
TRANSPORTS: tuple[Wish, ...] = ("splice", "buffered", "aiobotocore")
STEP = 64 * KIB
CAUSES = {
    "gone": ("deleted", "no such object"),
    "denied": ("access denied",),
    "replaced": ("replaced",),
}
"""Words of the error that a fault must end in, one of them, by its cause."""


@dataclass(frozen=True)
class Kind:
    """A fault to measure."""

    name: str
    make: Callable[[random.Random, int, str], tuple[Fault, int]]
    """From dice, bytes asked for and the server's URL: the fault, and how many bytes come before it."""
    cause: str = ""
    """The entry of `CAUSES` that it must fail by, every time; empty for one that is waited out."""


def _plain(fault: Fault) -> Callable[[random.Random, int, str], tuple[Fault, int]]:
    return lambda _dice, _size, _url: (fault, 0)


def _short(dice: random.Random, size: int, _url: str) -> tuple[Fault, int]:
    count = dice.randrange(size)
    return cut_after(count), count


def _reset(dice: random.Random, size: int, _url: str) -> tuple[Fault, int]:
    count = dice.randrange(size)
    return resets_after(count), count


def _silence(dice: random.Random, size: int, _url: str) -> tuple[Fault, int]:
    count = dice.randrange(size)
    return silent_for(2.0, after=count), count


KINDS = (
    Kind("500 InternalError", _plain(fails(500, "InternalError"))),
    Kind("503 SlowDown", _plain(fails(503, "SlowDown"))),
    Kind("503 with Retry-After: 1", _plain(fails(503, "SlowDown", **{"Retry-After": "1"}))),
    Kind("body cut off", _short),
    Kind("connection reset", _reset),
    Kind("drip for 0.3 s", lambda _dice, size, _url: (drips(max(1, size // 50), 0.01), size - 1)),
    Kind("silent for 2 s", _silence),
    Kind("wrong Content-Range, once", _plain(displaced())),
    Kind("no Content-Range, once", _plain(with_headers(Content_Range=""))),
    Kind("307 to the same place", lambda _dice, _size, url: (redirects(url), 0)),
    Kind("404 in mid-epoch", _plain(fails(404, "NoSuchKey")), "gone"),
    Kind("403 AccessDenied", _plain(fails(403, "AccessDenied")), "denied"),
    Kind("412 after an overwrite", _plain(fails(412, "PreconditionFailed")), "replaced"),
    Kind("another ETag", _plain(with_headers(ETag='"another"')), "replaced"),
    Kind(
        "another version, If-Match ignored",
        lambda dice, size, _: (newer(dice.randbytes(2 * size)), 0),
        "replaced",
    ),
)


@dataclass
class Withheld:
    """A byte of the stream that a fault kept back, and when the fault was over."""

    at: int
    ended: float


@dataclass
class Told:
    """What a reader notes."""

    seconds: float = 0.0
    data: bytearray = field(default_factory=bytearray)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Moments, and the bytes it had then."""
    error: str | None = None

    def arrival(self, place: int) -> float:
        """When it had the byte at `place`."""
        return next(moment for moment, count in self.arrivals if count > place)


def read(path: Path) -> Told:
    """Read an epoch to its end."""
    reported, began = Told(), time.monotonic()
    try:
        with PipeStream(path) as stream:
            while data := stream.read(STEP):
                reported.data += data
                reported.arrivals.append((time.monotonic(), len(reported.data)))
    except StreamError as error:
        reported.error = str(error)
    reported.seconds = time.monotonic() - began
    return reported


@contextlib.asynccontextmanager
async def channel_of(
    stub: S3Stub, *, transport: Wish, part_size: int, hedge: float = HEDGED
) -> AsyncIterator[tuple[Channel, Path]]:
    """A channel of all that the stub has, with Penstock's defaults otherwise, and where its FIFOs are."""
    with tempfile.TemporaryDirectory(prefix="penstock-recovery-") as directory:
        async with (
            open_clients(Endpoint(url=stub.url, path_style=True), connections=64) as clients,
            open_transport(
                clients,
                TransportSpec(
                    wish=transport,
                    buckets={"b"},
                    channels=[None],
                    budget=64 * MIB,
                    part_size=part_size,
                    hedge=hedge,
                ),
            ) as chosen,
        ):
            plan = await plan_prefix(clients, S3Uri("b", "data/"))
            spec = ChannelSpec(name="train", plan=plan, directory=directory, retry=RetryPolicy())
            channel = Channel(spec, chosen.source, chosen.stages())
            channel.prepare()
            task = asyncio.create_task(channel.run())
            try:
                yield channel, Path(directory)
            finally:
                task.cancel()
                await asyncio.wait([task])
                channel.close()


async def epoch(stub: S3Stub, *, transport: Wish, part_size: int = PART, hedge: float = HEDGED) -> Told:
    """One epoch of a new channel."""
    with ThreadPoolExecutor(1) as thread:
        async with channel_of(stub, transport=transport, part_size=part_size, hedge=hedge) as (_, directory):
            path = directory / "train_0"
            return await asyncio.get_running_loop().run_in_executor(thread, partial(read, path))


class Striker:
    """A weather of one kind, that notes what it withholds."""

    def __init__(self, kind: Kind, seed: int, url: str) -> None:
        self._kind = kind
        self._seed = seed
        self._url = url
        self._asked: Counter[tuple[str, int]] = Counter()
        self.struck = 0
        self.withheld: list[Withheld] = []
        """By faults that are over."""

    def __call__(self, name: str, start: int, size: int) -> Fault | None:
        self._asked[name, start] += 1
        dice = random.Random(f"{self._seed} {name} {start}")
        again = self._asked[name, start] > 1 and not self._kind.cause
        if again or start % PART or not size or dice.random() >= SHARE:
            return None
        fault, before = self._kind.make(dice, size, self._url)
        self.struck += 1
        place = int(name.rsplit("/", 1)[1]) * SIZE + start + before

        async def noted(answer: Answer) -> web.StreamResponse:
            try:
                return await fault(answer)
            finally:
                self.withheld.append(Withheld(place, time.monotonic()))

        return noted


@dataclass
class Measured:
    """All seeds of one kind."""

    kind: Kind
    seeds: int = 0
    faults: int = 0
    right: int = 0
    recovered: list[float] = field(default_factory=list)
    without: list[tuple[Wish, float]] = field(default_factory=list)
    """Seconds of the epochs without the fault, by transport."""
    under: list[tuple[Wish, float]] = field(default_factory=list)
    """With it."""


async def measure(kind: Kind, seed: int, stub: S3Stub, truth: bytes, into: Measured) -> None:
    """One pair of epochs."""
    transport = TRANSPORTS[seed % len(TRANSPORTS)]
    striker = Striker(kind, seed, stub.url)
    reported: dict[bool, Told] = {}
    for struck in (False, True) if seed % 2 else (True, False):
        stub.weather = striker if struck else None
        reported[struck] = await epoch(stub, transport=transport)
    stub.weather = None
    found = reported[True]
    into.seeds += 1
    into.faults += striker.struck
    if kind.cause:
        named = found.error is not None and any(word in found.error for word in CAUSES[kind.cause])
        into.right += truth.startswith(bytes(found.data)) and (named or not striker.struck)
        return
    into.right += found.error is None and bytes(found.data) == truth
    into.without.append((transport, reported[False].seconds))
    into.under.append((transport, found.seconds))
    over = striker.withheld
    into.recovered += [max(0.0, found.arrival(each.at) - each.ended) for each in over]
    into.recovered += [0.0] * (striker.struck - len(over))  # outlasted by the epoch, which had its bytes


def kept(rows: list[Measured], row: Measured) -> float:
    """The throughput under the row's fault over that without any.

    Epochs without are alike, whatever kind they were run beside: the median of all counts, by transport.
    """
    plain: dict[Wish, list[float]] = {}
    for each in rows:
        for transport, seconds in each.without:
            plain.setdefault(transport, []).append(seconds)
    due = sum(statistics.median(plain[transport]) for transport, _ in row.under)
    return due / sum(seconds for _, seconds in row.under)


def table(rows: list[Measured]) -> str:
    """The table in Markdown."""
    lines = [
        "| Fault | Faults | Outcome | To recover, p50 / p99 | Throughput kept |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        what = "failed by its cause" if row.kind.cause else "complete, right"
        outcome = f"{what}: {row.right} of {row.seeds}"
        recovery = left = "-"
        if row.recovered:
            p50, p99 = (percentile(row.recovered, part) for part in (0.5, 0.99))
            recovery, left = f"{p50:.2f} / {p99:.2f} s", f"{kept(rows, row):.2f}"
        lines.append(f"| {row.kind.name} | {row.faults} | {outcome} | {recovery} | {left} |")
    return "\n".join(lines) + "\n"


def faults(seeds: int) -> str:
    """The table of all kinds. Seeds are the outer loop, so that a slow minute meets every kind."""
    rows = [Measured(kind) for kind in KINDS]
    thread = StubThread()
    stub = thread.start()
    try:
        truth = fill(stub, [SIZE] * OBJECTS)
        for seed in range(seeds):
            for row in rows:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(measure(row.kind, seed, stub, truth, row))
    finally:
        thread.stop()
    return table(rows)


FIRST_BYTE = 0.025
LATE, LATE_FOR = 0.02, 2.0
"""The share of requests that are silent, and for how long."""


def late(seed: int) -> Callable[[str, int, int], Fault]:
    """A server as S3 is: some requests in a hundred meet a slow machine."""
    dice = random.Random(seed)

    def fault(_name: str, _start: int, _size: int) -> Fault:
        return silent_for(LATE_FOR if dice.random() < LATE else FIRST_BYTE)

    return fault


def hedges(rounds: int) -> str:
    """Waits of the reader for its next object, with and without hedges, as Markdown."""
    count, size = 300, 1_000_000
    found: dict[float, list[Told]] = {0.0: [], HEDGED: []}
    thread = StubThread()
    stub = thread.start()
    try:
        truth = fill(stub, [size] * count)
        for number in range(rounds):
            for hedge, reported in found.items():
                stub.weather = late(number)
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    reported.append(
                        runner.run(epoch(stub, transport="buffered", part_size=size, hedge=hedge))
                    )
                if bytes(reported[-1].data) != truth:
                    raise SystemExit(f"wrong bytes with HedgeBudget {hedge}")
    finally:
        thread.stop()
    lines = [
        f"{count} objects of 1 MB, first byte after 25 ms, {LATE:.0%} of the requests silent for 2 s; "
        f"{rounds} rounds, interleaved.",
        "",
        "| HedgeBudget | Seconds an epoch | Wait for an object at the head of line, p99 | The longest |",
        "|---|---|---|---|",
    ]
    for hedge, reported in found.items():
        waits = [wait for each in reported for wait in _waits(each, size)]
        seconds = ", ".join(f"{each.seconds:.1f}" for each in reported)
        p99 = percentile(waits, 0.99)
        lines.append(f"| {hedge:g} | {seconds} | {p99:.2f} s | {max(waits):.2f} s |")
    means = [statistics.mean(each.seconds for each in reported) for reported in found.values()]
    lines += ["", f"Epochs take {means[1] / means[0]:.2f} of the time."]
    return "\n".join(lines) + "\n"


def _waits(reported: Told, size: int) -> list[float]:
    """By object, the longest time without a byte of it, from the byte before its first one on."""
    waits: dict[int, float] = {}
    before = reported.arrivals[0][0]
    for moment, count in reported.arrivals:
        number = (count - 1) // size
        waits[number] = max(waits.get(number, 0.0), moment - before)
        before = moment
    return list(waits.values())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kit.recovery", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=6, help="pairs of epochs of every kind, or rounds")
    parser.add_argument("--hedges", action="store_true", help="waits with and without hedges, instead")
    parser.add_argument("--into", metavar="FILE", help="replace the results in this Markdown file")
    options = parser.parse_args()
    set_credentials()
    name = "hedges" if options.hedges else "faults"
    text = hedges(options.seeds) if options.hedges else faults(options.seeds)
    print(text)
    if options.into:
        insert_into(options.into, text, begin=BEGIN.format(name), end=END.format(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
