"""What a FIFO holds, written straight from the contract and docs/explanation/semantics.md; slow, short, and
apart from the code that it judges. `store` is S3: contents by URI."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Collection, Sequence
from fractions import Fraction
from math import ceil, isqrt
from typing import Any

from streamer.plan import Balance


def rows(kind: str, store: dict[str, bytes], uri: str, attributes: Sequence[str] = ()) -> list[list[bytes]]:
    """Every entry's payloads, in plan order (contract §3.1, §4)."""
    if kind == "S3Prefix":
        keys = [key for key in store if key.startswith(uri) and not (key.endswith("/") and not store[key])]
        return [[store[key]] for key in sorted(keys, key=str.encode)]
    if kind == "ManifestFile":
        first, *names = json.loads(store[uri])
        return [[store[first["prefix"] + name]] for name in names]
    found = []
    for line in store[uri].decode().split("\n"):
        if line.strip():
            values = json.loads(line)
            found.append([payload(store, name, values[name]) for name in attributes])
    return found


def payload(store: dict[str, bytes], name: str, value: Any) -> bytes:
    if name.endswith("-ref"):
        return store[value]
    return (value if isinstance(value, str) else json.dumps(value)).encode()


def record(body: bytes) -> bytes:
    """Contract §5.1: one part, whatever is in it."""
    return struct.pack("<II", 0xCED7230A, len(body)) + body + bytes(-len(body) % 4)


def permutation(n: int, seed: int, epoch: int) -> list[int]:
    """docs/explanation/semantics.md, Shuffle: the entry at each position."""
    a = isqrt(n - 1) + 1 if n else 1
    b = ceil(n / a)

    def add(number: int, digit: int, base: int) -> int:
        digest = hashlib.shake_256(f"penstock shuffle 1 {seed} {epoch} {number}".encode()).digest(
            8 * digit + 8
        )
        return int.from_bytes(digest[8 * digit :], "little") % base

    def image(x: int) -> int:
        left, right = divmod(x, b)
        for number in (0, 2, 4):
            left = (left + add(number, right, a)) % a
            right = (right + add(number + 1, left, b)) % b
        x = left * b + right
        return x if x < n else image(x)

    return [image(position) for position in range(n)]


def stream(  # noqa: PLR0913 - the parameters of the contract, one by one
    found: Any,
    *,
    epoch: int,
    wrap: bool = False,
    seed: int | None = None,
    host: int = 0,
    hosts: int = 1,
    by: Balance = "count",
    rank: int = 0,
    ranks: int = 1,
) -> bytes:
    """The bytes of `<channel>_<epoch>` on one host: shuffle, then shard, then wrap (contract §3.2, §3.3).

    With rank FIFOs those of `<channel>-<rank FIFO>_<epoch>`: docs/explanation/semantics.md, Rank FIFOs.
    """
    order = range(len(found)) if seed is None else permutation(len(found), seed, epoch)
    entries = [b"".join(record(item) if wrap else item for item in found[index]) for index in order]
    if by == "count":
        return b"".join(entries[host::hosts][rank::ranks])
    loads, shares = [0] * (hosts * ranks), [b""] * (hosts * ranks)
    for entry in entries:
        lightest = loads.index(min(loads))
        loads[lightest] += max(1, len(entry))
        shares[lightest] += entry
    return shares[hosts * rank + host]


Record = tuple[int, int]
"""Number of an object and of a record in it."""


def record_order(
    counts: Sequence[int],
    sizes: Sequence[int],
    *,
    seed: int | None,
    epoch: int,
    block: int,
    selected: Collection[Record] | None = None,
) -> list[Record]:
    """docs/explanation/record-order.md: all records of an epoch, in the global order."""
    blocks = record_blocks(counts, sizes, seed=seed, epoch=epoch, block=block, selected=selected)
    return [each for unit in blocks for each in unit]


def record_blocks(
    counts: Sequence[int],
    sizes: Sequence[int],
    *,
    seed: int | None,
    epoch: int,
    block: int,
    selected: Collection[Record] | None = None,
) -> list[list[Record]]:
    """docs/explanation/record-order.md: the blocks of an epoch, in their order."""
    blocks: list[list[Record]] = []
    for entry, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        each = max(1, block * count // size) if count else 1
        found = [(entry, number) for number in range(count)]
        blocks += [found[first : first + each] for first in range(0, count, each)]
    if selected is not None:
        blocks = [kept for each in blocks if (kept := [record for record in each if record in selected])]
    turns = range(len(blocks)) if seed is None else permutation(len(blocks), seed, epoch)
    return [blocks[turn] for turn in turns]


def split_records(
    counts: Sequence[int],
    each: Sequence[int],
    keys: Sequence[str],
    *,
    of: int,
    take: Collection[int],
    seed: int,
) -> list[Record]:
    """docs/explanation/record-order.md: the records of some folds of blocks, in plan order."""
    found: list[Record] = []
    for entry, count in enumerate(counts):
        drawn = hashlib.shake_256(f"split blocks {seed} {keys[entry]}".encode()).digest(8 * count + 8)
        for number in range(count):
            block = number // each[entry]
            word = int.from_bytes(drawn[8 * block : 8 * block + 8], "little")
            if word * of // 2**64 in take:
                found.append((entry, number))
    return found


def mixed(sources: Sequence[Sequence[Any]], weights: Sequence[int]) -> list[Any]:
    """docs/explanation/record-order.md: the units of several sources, each unit a list of records, mixed."""
    rest = [list(units) for units in sources]
    taken, order = [0] * len(rest), []
    while any(rest):
        shares = [Fraction(sum(taken) * weight, sum(weights)) for weight in weights]
        chosen = min(
            (
                taken[number] > shares[number],
                Fraction(taken[number] + len(rest[number][0]), weights[number]),
                number,
            )
            for number in range(len(rest))
            if rest[number]
        )[2]
        unit = rest[chosen].pop(0)
        taken[chosen] += len(unit)
        order.append((chosen, unit))
    return order


def mixed_counts(counts: Sequence[int], weights: Sequence[int], until: str) -> list[int]:
    """docs/explanation/record-order.md: the records of each source in an epoch."""
    taken = [0] * len(counts)
    while until == "first" or any(have < count for have, count in zip(taken, counts, strict=True)):
        shares = [Fraction(sum(taken) * weight, sum(weights)) for weight in weights]
        chosen = min(
            (taken[number] > shares[number], Fraction(taken[number] + 1, weights[number]), number)
            for number in range(len(counts))
        )[2]
        if until == "first" and taken[chosen] == counts[chosen]:
            break
        taken[chosen] += 1
    return taken


def picked(weights: Sequence[int], records: int) -> list[int]:
    """docs/explanation/record-order.md: the records of each source in `records` picks."""
    taken = [0] * len(weights)
    for position in range(records):
        shares = [Fraction(position * weight, sum(weights)) for weight in weights]
        chosen = min(
            (have > share, Fraction(have + 1, weight), number)
            for number, (have, share, weight) in enumerate(zip(taken, shares, weights, strict=True))
        )[2]
        taken[chosen] += 1
    return taken


def global_batches(order: list[Record], size: int, remainder: str) -> list[list[Record]]:
    """docs/explanation/record-order.md: the global batches of an epoch."""
    batches = [order[first : first + size] for first in range(0, len(order), size)]
    if batches and len(batches[-1]) < size:
        last = batches.pop()
        if remainder != "drop":
            endless = last + order * (size // len(order) + 1)
            batches.append(endless[:size])
    return batches
