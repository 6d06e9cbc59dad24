"""One trial's server as it begins, and the judgement of what its readers got.

`Scene` is what both ways of running a trial share: it fills the stub, sets the weather, makes the plans as
the job would, and compares every epoch with the truth.
"""

from __future__ import annotations

import asyncio
import base64
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from awscrt import checksums

from streamer.errors import BadAnswer, StreamError
from streamer.plan import Arrangement, Plan, S3Uri
from streamer.readers.core.stream import PipeStream
from streamer.retry import RetryPolicy
from streamer.s3.catalog.open_plan import OpenPlan
from streamer.s3.catalog.pages import AiobotocorePages, PageSource
from streamer.s3.catalog.sources import Sources
from streamer.s3.client.endpoint import Endpoint
from streamer.s3.client.session import Clients
from tests.kit.faults import PASSING, SPOILT, WRONG, Weather, redirects
from tests.kit.planning import alone, plan_augmented, plan_manifest, plan_prefix
from tests.kit.stub import Fault, S3Stub, cut_after, fails
from tests.kit.trials import REDIRECTS, Trial
from tests.kit.truth import BUCKET, REF, TEXT, Contents, Piece, compress

POLICY = RetryPolicy(give_up_after=30, first_wait=0.002, longest_wait=0.05)

STORED = "do not match its stored checksum"

CAUSES = {
    "range": ("the response has bytes", "Content-Range"),
    "no range": ("Content-Range",),
    "etag": ("replaced",),
    "gone": ("deleted", "no such object"),
    "denied": ("access denied",),
    "replaced": ("replaced",),
    "newer": ("replaced",),
    "bit flip": (STORED, "is corrupt", "wrong header", "neither gzip nor zstd", "no further member"),
    "deleted for good": ("deleted", "no such object"),
    "overwritten for good": ("replaced",),
    "cut off for good": ("cut off", "neither gzip nor zstd", "header without end"),
}
"""What an error must say after a fault of that kind."""


class Broken(Exception):
    """A promise was not kept."""


@dataclass
class Account:
    """What runs have come to."""

    runs: int = 0
    bytes: int = 0
    epochs: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    hedges: Counter[str] = field(default_factory=Counter)
    longest_wait: float = 0.0
    """Of a reader for its next byte, seconds."""
    pauses: list[float] = field(default_factory=list)
    """From the start of a sidecar after one that was killed to its readers' next byte, seconds."""

    def __add__(self, other: Account) -> Account:
        return Account(
            self.runs + other.runs,
            self.bytes + other.bytes,
            self.epochs + other.epochs,
            self.faults + other.faults,
            self.retries + other.retries,
            self.hedges + other.hedges,
            max(self.longest_wait, other.longest_wait),
            self.pauses + other.pauses,
        )

    def __str__(self) -> str:
        return (
            f"{self.runs} runs, {self.bytes / 1e9:.2f} GB checked, epochs {dict(self.epochs)}, "
            f"faults {dict(self.faults)}, retries {dict(self.retries)}, hedges {dict(self.hedges)}, "
            f"{len(self.pauses)} restarts, longest wait {self.longest_wait:.1f} s"
        )


@dataclass
class Got:
    """What a reader got of one epoch."""

    data: bytearray = field(default_factory=bytearray)
    error: str | None = None
    left: bool = False
    """Whether it closed early, as it was to."""
    longest_wait: float = 0.0
    last_byte: float = 0.0
    """When it came, on the monotonic clock."""


def read_epoch(path: Path, *, step: int, most: int | None = None, into: Got | None = None) -> Got:
    """Read the stream to its end, or `most` bytes of it."""
    got = into or Got()
    try:
        with PipeStream(path) as stream:
            stream.open()
            while most is None or len(got.data) < most:
                before = time.monotonic()
                data = stream.read(step)
                got.last_byte = time.monotonic()
                if got.data:  # the first bytes wait for the channel to begin
                    got.longest_wait = max(got.longest_wait, got.last_byte - before)
                if not data:
                    return got
                got.data += data
            got.left = True
    except StreamError as error:
        got.error = str(error)
    return got


class Scene:
    """A trial's server, and what must come of it."""

    def __init__(self, trial: Trial, stub: S3Stub, url: str, ca: str | None, account: Account) -> None:
        self.trial = trial
        self.stub = stub
        self.account = account
        self.endpoint = Endpoint(url=url, path_style=True, ca_bundle=ca)
        self.contents = Contents(trial)
        stub.objects |= self.contents.stored
        stub.page = trial.page
        kinds = PASSING | {each: _redirect(url, int(each)) for each in REDIRECTS}
        self._good = Weather(trial.seed, trial.rates, kinds)
        self.bad = Weather(trial.seed + 1, trial.wrong, WRONG | SPOILT, spells=10**6)
        stub.weather = self._weather
        self._other: Counter[str] = Counter()
        if trial.naming != "prefix":
            self._write_manifests()
        for name in self._share("heads", trial.bad_headers):
            stub.script_head(fails(503, "SlowDown"), key=name)
            self._other["503 of a HEAD"] += 1
        if trial.listing != "right" and trial.naming == "prefix":
            self._bend_listings()
        if trial.check:
            for name, data in stub.objects.items():
                stated = base64.b64encode(checksums.crc64nvme(data).to_bytes(8, "big")).decode()
                stub.checksums[name] = {"x-amz-checksum-crc64nvme": stated}

    def _weather(self, name: str, start: int, size: int) -> Fault | None:
        if name.startswith(f"{BUCKET}/manifest"):
            return None
        return self.bad(name, start, size) or self._good(name, start, size)

    def _share(self, what: str, part: float) -> Iterator[str]:
        dice = random.Random(f"{self.trial.seed} {what}")
        return (name for name in sorted(self.contents.all) if dice.random() < part)

    def _write_manifests(self) -> None:
        dice = random.Random(f"{self.trial.seed} manifests")
        for number in range(len(self.trial.sizes)):
            name, text = f"{BUCKET}/manifest{number}", self.contents.manifest(number)
            self.stub.objects[name] = text
            if dice.random() < 0.3:
                self.stub.script(cut_after(dice.randrange(len(text))), key=name)
                self._other["manifest cut off"] += 1

    def _bend_listings(self) -> None:
        """Have the listings of every prefix lead back, if they have pages enough."""
        for number, objects in enumerate(self.contents.channels):
            keys = sorted(name.removeprefix(f"{BUCKET}/") for name in objects)
            write_ends = keys[self.trial.page - 1 :: self.trial.page]
            if len(keys) > 2 * self.trial.page:
                back = f"c{number}/" if self.trial.listing == "goes round" else write_ends[0]
                self.stub.tokens[write_ends[1]] = back
                self._other[f"listing {self.trial.listing}"] += 1

    @property
    def struck(self) -> Counter[str]:
        """Faults by kind."""
        changes = Counter([] if self.trial.change == "nothing" else [self.trial.change])
        return self._good.struck + self.bad.struck + self._other + changes

    @property
    def arrangement(self) -> Arrangement:
        trial = self.trial
        return Arrangement(wrap=trial.wrap, seed=trial.shuffle, shard=trial.shard, inflate=trial.inflate)

    async def plans(self, clients: Clients) -> dict[str, Plan]:
        """By channel, a rank being one. Raises BadAnswer for a listing that was bent, as it must be."""
        found: dict[str, Plan] = {}
        for number in range(len(self.trial.sizes)):
            uri, name = S3Uri(BUCKET, f"manifest{number}"), f"c{number}"
            try:
                if self.trial.naming == "manifest":
                    plan = await plan_manifest(alone(clients), uri, self.arrangement)
                elif self.trial.naming == "augmented":
                    plan = await plan_augmented(alone(clients), uri, [REF, TEXT], self.arrangement)
                else:
                    plan = await plan_prefix(
                        AiobotocorePages(clients.control), S3Uri(BUCKET, f"c{number}/"), self.arrangement
                    )
            except BadAnswer:
                if not self.stub.tokens:
                    raise
                self.account.epochs["refused"] += 1
                raise
            if number == 0 and self.trial.ranks > 1:
                ranks = plan.ranks(self.trial.ranks)
                found |= {f"{name}-{rank}": each for rank, each in enumerate(ranks)}
            else:
                found[name] = plan
        if self.stub.tokens:
            raise Broken("a listing that leads back was believed")
        return found

    async def open_plans(self, pages: PageSource, tasks: list[asyncio.Task[None]]) -> dict[str, Plan]:
        """The same plans, each while a further task lists the rest of it."""
        found: dict[str, Plan] = {}
        for number in range(len(self.trial.sizes)):
            name, uri = f"c{number}", S3Uri(BUCKET, f"c{number}/")
            open_plan = OpenPlan(self.arrangement, Sources(pages, [uri], self.arrangement))
            tasks.append(asyncio.create_task(open_plan.list(POLICY), name=f"listing of {name}"))
            await open_plan.first()
            ranks = open_plan.plan.ranks(self.trial.ranks) if number == 0 else ()
            if len(ranks) > 1:
                found |= {f"{name}-{rank}": each for rank, each in enumerate(ranks)}
            else:
                found[name] = open_plan.plan
        return found

    def change(self) -> None:
        """Replace or delete an object that the plans name, before anything of it is read."""
        name = self.contents.changed
        if name is None or self.trial.change == "cut off":
            return
        if self.contents.now is None:
            del self.stub.objects[name]
        else:
            self.stub.objects[name] = data = compress(self.contents.now, self.trial.compression)
            if self.trial.check:
                stated = base64.b64encode(checksums.crc64nvme(data).to_bytes(8, "big")).decode()
                self.stub.checksums[name] = {"x-amz-checksum-crc64nvme": stated}

    def judge(self, name: str, plan: Plan, epoch: int, got: Got, *, after_left: bool = False) -> None:
        """Raises Broken unless the epoch is right, or failed for a reason that it was given.

        `after_left`: the reader left the epoch before this one early, which may have failed nevertheless.
        """
        self.account.bytes += len(got.data)
        self.account.longest_wait = max(self.account.longest_wait, got.longest_wait)
        pieces, data = self.contents.pieces(plan, epoch), bytes(got.data)
        truth = b"".join(piece.data for piece in pieces)
        right = truth.startswith(data)
        if got.error is None:
            whole = got.left or len(data) == len(truth)
            if not right or not whole:
                raise Broken(
                    f"{name}_{epoch} has {len(data)} bytes that are not the {len(truth)} it should have"
                )
            return
        spoilt = self.bad.struck["bit flip"] > 0
        if not right and not spoilt:
            raise Broken(f"{name}_{epoch} failed after bytes that are not the truth's")
        before = self.contents.pieces(plan, epoch - 1) if after_left else []
        self._blame(name, before + pieces, got.error)

    def _blame(self, name: str, pieces: list[Piece], error: str) -> None:
        """A failure must be deserved, and must say by what."""
        trial, changed = self.trial, self.contents.changed
        causes = [CAUSES[kind] for kind in self.bad.struck]
        if changed is not None and any(piece.name == changed for piece in pieces):
            causes.append(CAUSES[f"{trial.change} for good"])
        if not any(word in error for words in causes for word in words):
            raise Broken(f"{name} failed for no reason that was given to it: {error}")


def _redirect(url: str, status: int) -> Any:
    return lambda _dice, _size: redirects(url, status=status)


def moved(statistics: Mapping[str, int], into: Counter[str]) -> None:
    """Add counts that a channel has kept."""
    into.update({name: count for name, count in statistics.items() if count})
