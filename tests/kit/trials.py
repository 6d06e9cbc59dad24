"""What a seed of the soak stands for: one job, its data, its readers and its weather, all drawn from it.

Nothing here does anything. A trial with `kills` is run as the program `penstock`, behind a keeper, and is
killed under its readers; any other is run in this process, where more can be watched and much more fits into
an hour. What cannot be (splicing of what is inflated) is not
drawn.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, TypeVar

from streamer.plan import Balance, Shard
from streamer.relay.transport import Wish
from streamer.units import KIB, MIB
from tests.kit.faults import PASSING, SPOILT, WRONG

Naming = Literal["prefix", "manifest", "augmented"]
Compression = Literal["none", "gzip", "zstd"]
Listing = Literal["right", "goes round", "sent twice"]

NAMINGS: dict[Naming, int] = {"prefix": 6, "manifest": 2, "augmented": 2}
COMPRESSIONS: dict[Compression, int] = {"none": 7, "gzip": 2, "zstd": 1}
LISTINGS: dict[Listing, int] = {"right": 30, "goes round": 1, "sent twice": 1}
"""Each value with its weight in a draw."""

REDIRECTS = ("301", "307")
"""Kinds of fault that need to know where the server is."""


_Value = TypeVar("_Value")


def _weighted(dice: random.Random, weights: dict[_Value, int]) -> _Value:
    """Draw one of the keys; a key's value is its weight."""
    return dice.choices(list(weights), list(weights.values()))[0]


@dataclass(frozen=True)
class Trial:
    """One run, drawn from its seed."""

    seed: int
    transport: Wish
    loop: str
    tls: bool
    proxied: bool
    sizes: tuple[tuple[int, ...], ...]
    """Of every channel's objects before any compression, bytes."""
    part_size: int
    requests_in_flight: int | None
    budget: int
    epochs: int
    rates: dict[str, float]
    wrong: dict[str, float]
    check: bool
    """Whether whole objects are compared with their checksums."""
    change: str
    """What happens to an object of the first channel in mid-job: nothing, deleted, overwritten or cut off.

    Cut off is from the beginning: a compressed object whose end was never uploaded.
    """
    naming: Naming
    wrap: bool
    compression: Compression
    shuffle: int | None
    shard: Shard
    ranks: int
    """FIFOs of the first channel."""
    hedge: float
    page: int
    """Keys in a page of a listing."""
    listing: Listing
    folders: bool
    """Whether keys have further slashes."""
    bad_headers: float
    """Share of the objects whose first HEAD is answered with 503."""
    leaves: float
    """Share of the epochs whose reader closes early."""
    kills: tuple[float, ...]
    """When the sidecar is killed: parts of all bytes of all epochs."""

    @property
    def inflate(self) -> bool:
        return self.compression != "none"

    @property
    def early(self) -> bool:
        """Whether channels stream while their prefixes are listed, in a run without kills.

        Kills are of programs, which do so by themselves.
        """
        in_order = self.shuffle is None and self.shard.by == "count" and self.naming == "prefix"
        as_listed = self.change == "nothing" and self.listing == "right" and not self.kills
        return in_order and as_listed and self.page < 1000

    @property
    def features(self) -> tuple[str, ...]:
        """What is drawn besides the plainest job, in words."""
        drawn = {
            self.transport: True,
            self.naming: self.naming != "prefix",
            "wrapped": self.wrap,
            self.compression: self.inflate,
            "shuffled": self.shuffle is not None,
            "sharded": self.shard.count > 1,
            "ranks": self.ranks > 1,
            "early": self.early,
            "checksums": self.check,
            "hedges": self.hedge > 0,
            "TLS": self.tls,
            "proxied": self.proxied,
            "readers leave": self.leaves > 0,
            "killed": bool(self.kills),
        }
        return tuple(name for name, there in drawn.items() if there)

    @classmethod
    def draw(cls, seed: int) -> Trial:
        dice = random.Random(seed)
        tls = dice.random() < 0.25
        compression = _weighted(dice, COMPRESSIONS)
        wishes: list[Wish] = ["aiobotocore", "buffered"]
        if not tls and compression == "none":
            wishes += ["splice", "splice"]
        transport = dice.choice(wishes)
        naming = _weighted(dice, NAMINGS)
        wrap = naming == "augmented" or dice.random() < 0.2
        part_size = dice.choice([64 * KIB, 100_000, MIB, 3_000_000])
        channels = dice.choice([1, 1, 2, 3])
        whole = dice.choice([300_000, 2_000_000, 12_000_000])
        sizes = []
        for _ in range(channels):
            count = dice.randrange(1, 30)
            most = 1 + 2 * whole // count
            sizes.append(tuple(dice.choice([0, 1, dice.randrange(most)]) for _ in range(count)))
        killed = dice.random() < 0.08
        check = transport != "splice" and dice.random() < 0.4
        changes = ["nothing", "nothing", "deleted", "overwritten"]
        if compression != "none":
            changes.append("cut off")
        ranks = dice.choice([1, 1, 1, 2, 4])
        hosts = dice.choice([1, 1, 1, 2, 3])
        by: Balance = dice.choice(["count", "bytes"]) if hosts > 1 or ranks > 1 else "count"
        rate = dice.choice([0.0, 0.02, 0.1, 0.3])
        passing = sorted({**PASSING, **dict.fromkeys(REDIRECTS)})
        kinds = dice.sample(passing, dice.randrange(1, len(passing)))
        wrong = sorted(WRONG | (SPOILT if check else {}))
        fifos = channels - 1 + ranks
        return cls(
            seed=seed,
            transport=transport,
            loop=dice.choice(["asyncio", "uvloop"]),
            tls=tls,
            proxied=dice.random() < 0.4,
            sizes=tuple(sizes),
            part_size=part_size,
            requests_in_flight=dice.choice([None, 1, 4, 16]),
            budget=fifos * dice.choice([2, 3, 8]) * max(part_size, MIB) + fifos * MIB,
            epochs=dice.randrange(1, 4),
            rates=dict.fromkeys(kinds, rate / len(kinds)),
            wrong={dice.choice(wrong): 0.01} if dice.random() < 0.3 and not killed else {},
            check=check,
            change="nothing" if killed else dice.choice(changes),
            naming=naming,
            wrap=wrap,
            compression=compression,
            shuffle=dice.randrange(2**63) if dice.random() < 0.3 else None,
            shard=Shard(dice.randrange(hosts), hosts, by),
            ranks=ranks,
            hedge=dice.choice([0.0, 0.05, 0.5]),
            page=dice.choice([1, 3, 10, 1000]),
            listing=_weighted(dice, LISTINGS),
            folders=dice.random() < 0.5,
            bad_headers=dice.choice([0.0, 0.0, 0.1]),
            leaves=dice.choice([0.0, 0.0, 0.0, 0.3]) * (not killed),
            kills=tuple(sorted(dice.random() for _ in range(dice.randrange(1, 4)))) if killed else (),
        )
