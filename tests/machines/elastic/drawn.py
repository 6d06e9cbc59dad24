"""What a seed draws, and the global batches that its job must have, by the specification.

order   format, shuffle, block, part of the records or mix, global batch, remainder    one for the job
runs    ranks, hosts, copies, workers, fetch, join                                     others for each run
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from tests.unit import reference
from tests.unit.reference import Record

TRAIN, RARE = (31, 0, 150, 4, 67, 1, 210), (37, 18)
"""Records of the objects of both prefixes: any mix has a global batch."""
KINDS = ("TFRecord", "RecordIO", "lines", "fixed:64", "tar")
GLOBAL_BATCHES = (12, 60, 64)
MOST_KILLS = 4
MOST_FIFOS = 64
Batches = list[tuple[int, int, list[str]]]
"""Epoch, step, and names of the records, of global batches in order."""


def keys(kind: str) -> list[str]:
    """The keys of the objects of a format, in plan order."""
    both = ("train", TRAIN), ("rare", RARE)
    return [f"{kind.partition(':')[0]}/{name}/{each}" for name, all_ in both for each in range(len(all_))]


@dataclass(frozen=True)
class Run:
    """One run of a job, up to a kill."""

    ranks: int
    """Over all hosts."""
    hosts: int
    copies: int
    fetch: str
    joined: bool
    workers: int

    @classmethod
    def draw(cls, draw: random.Random, batch: int, kind: str) -> Run:
        divisors = [number for number in range(1, 65) if batch % number == 0]
        # Few ranks as often as many: the number is drawn by its size.
        target = 2 ** draw.uniform(0, 6)
        ranks = min(divisors, key=lambda each: abs(each - target))
        hosts = draw.choice([1, 1, 2])
        copies = draw.choice([1, 1, 2, 3])
        joined = kind == "tar" and draw.random() < 0.5
        drawn = draw.random()
        fetch = "separately" if drawn < 0.25 else "auto" if drawn < 0.75 or joined else "together"
        hosts, copies = hosts if ranks % hosts == 0 else 1, copies if ranks * copies <= MOST_FIFOS else 1
        # Its own dice, so that the other draws of a seed are as they were without workers.
        workers = random.Random(f"{draw.getstate()} workers").choice([1, 1, 2, 3])
        if ranks * copies * workers > MOST_FIFOS or kind == "tar":
            workers = 1  # tarfile refuses a stream without a sample
        return cls(ranks, hosts, copies, fetch, joined, workers)


@dataclass(frozen=True)
class Job:
    """What a seed draws."""

    seed: int
    kind: str
    batch: int
    remainder: str
    shuffle: int | None
    block: int | None
    """Bytes; None: 1 MiB."""
    limit: tuple[int, int | None] | None
    """Records, and the seed that draws them."""
    folds: tuple[int, ...]
    """Folds of three that are taken, by block; none: no split."""
    mix: tuple[tuple[int, int], str, str] | None
    """Weights, Until and By."""
    epochs: int
    runs: tuple[Run, ...]
    """The last one reads to the end."""

    @classmethod
    def draw(cls, seed: int) -> Job:
        draw = random.Random(seed)
        kind, batch = draw.choice(KINDS), draw.choice(GLOBAL_BATCHES)
        shuffle = draw.choice([None, draw.randrange(1 << 31)])
        part = draw.choice(["all", "all", "limit", "split", "mix"])
        block = draw.choice([1, 100, 700, 1 << 20])
        weights = draw.choice([(2, 1), (1, 3), (7, 2)])
        return cls(
            seed,
            kind,
            batch,
            draw.choice(["drop", "repeat", "pad"]),
            shuffle,
            block if part != "split" and (shuffle is not None or part == "mix") else None,
            (draw.randint(batch, sum(TRAIN)), draw.choice([None, 7])) if part == "limit" else None,
            draw.choice([(0, 1), (1, 2), (0, 2)]) if part == "split" else (),
            (weights, draw.choice(["first", "all"]), draw.choice(["record", "block"]))
            if part == "mix"
            else None,
            draw.randint(1, 2),
            tuple(Run.draw(draw, batch, kind) for _ in range(draw.randint(1, MOST_KILLS) + 1)),
        )

    def names(self) -> Counter[str]:
        """The options that were drawn: those of the job once, those of the runs once for each run."""
        found = Counter([self.kind, self.remainder])
        parts = {
            "limit": self.limit,
            "split": self.folds,
            "mix": self.mix,
            "shuffle": self.shuffle is not None,
        }
        found.update(name for name, drawn in parts.items() if drawn)
        for run in self.runs:
            each = {"hosts": run.hosts > 1, "copies": run.copies > 1, f"fetched {run.fetch}": True}
            each |= {"join": run.joined, "workers": run.workers > 1}
            found.update(name for name, drawn in each.items() if drawn)
        return found

    def channel(self) -> dict[str, Any]:
        """The keys of the channel that are the same in all runs, without `Ranks`."""
        extras: dict[str, Any] = {}
        if self.limit is not None:
            most, seed = self.limit
            extras["Limit"] = {"Records": most} | ({} if seed is None else {"Seed": seed})
        if self.folds:
            extras["Split"] = {"Of": 3, "Take": ",".join(map(str, self.folds)), "By": "block"}
        if self.mix is not None:
            weights, until, by = self.mix
            extras["AlsoFrom"] = [f"s3://b/{self.kind.partition(':')[0]}/rare/"]
            extras["Mix"] = {"Weights": list(weights), "Until": until, "By": by}
        return extras

    def ranks(self) -> dict[str, Any]:
        """The keys of `Ranks` that are the same in all runs."""
        keys: dict[str, Any] = {"GlobalBatch": self.batch, "Remainder": self.remainder}
        return keys if self.block is None else keys | {"Block": self.block}

    def due(self, sizes: Sequence[int]) -> Batches:
        """The global batches of all epochs. `sizes`: bytes of all objects."""
        found: Batches = []
        for epoch in range(self.epochs):
            batches = reference.global_batches(self._order(sizes, epoch), self.batch, self.remainder)
            for step, batch in enumerate(batches):
                found.append((epoch, step, [f"{entry}/{number}/" for entry, number in batch]))
        return found

    def _order(self, sizes: Sequence[int], epoch: int) -> list[Record]:
        block = self.block or 1 << 20
        if self.mix is not None:
            return self._mixed(sizes, epoch, block)
        selected = None
        if self.folds:
            selected = reference.split_records(TRAIN, TRAIN, keys(self.kind), of=3, take=self.folds, seed=0)
        if self.limit is not None:
            most, seed = self.limit
            selected = [(entry, number) for entry, count in enumerate(TRAIN) for number in range(count)]
            if seed is not None:
                key = seed.to_bytes(8, "little", signed=True)
                drawn = [
                    hashlib.blake2b(f"b/{name}".encode(), digest_size=8, key=key).digest()
                    for name in keys(self.kind)
                ]
                selected.sort(key=lambda record: (drawn[record[0]], record))
            selected = selected[:most]
        return reference.record_order(
            TRAIN,
            sizes[: len(TRAIN)],
            seed=self.shuffle,
            epoch=epoch,
            block=block,
            selected=None if selected is None else {*selected},
        )

    def _mixed(self, sizes: Sequence[int], epoch: int, block: int) -> list[Record]:
        assert self.mix is not None
        weights, until, by = self.mix
        due = reference.mixed_counts([sum(TRAIN), sum(RARE)], weights, until)
        sources = (TRAIN, sizes[: len(TRAIN)], 0), (RARE, sizes[len(TRAIN) :], len(TRAIN))
        found = []
        for (counts, bytes_, first), count in zip(sources, due, strict=True):
            passes = -(-count // sum(counts))
            units: list[list[Record]] = []
            for turn in range(passes):
                blocks = reference.record_blocks(
                    counts, bytes_, seed=self.shuffle, epoch=epoch * passes + turn, block=block
                )
                units += [[(first + entry, number) for entry, number in unit] for unit in blocks]
            flat = [record for unit in units for record in unit][:count]
            ends = range(count + 1) if by == "record" else accumulate(map(len, units), initial=0)
            found.append([unit for start, end in pairwise(ends) if (unit := flat[start:end])])
        return [record for _, unit in reference.mixed(found, weights) for record in unit]
