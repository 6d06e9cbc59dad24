"""What a seed stands for: channels, their objects and readers, the server's faults, and an operator."""

from __future__ import annotations

import gzip
import random
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from streamer.relay.channel_spec import WhenFailed
from streamer.units import KIB, MIB

BUCKET = "b"

RECORD = 512
"""Bytes of a record of a shared stream."""

FAULTS = (
    *("500", "503", "reset", "reset later", "cut", "stall", "slow", "drip", "range", "closes", "says close"),
    *("trailing", "interim"),
)
"""Kinds of faults that pass, by what the server does to one answer."""

LASTING = {
    403: ("access denied",),
    404: ("is gone", "no such object"),
    412: ("was replaced", "is as it was listed"),
}
"""Statuses that an object is answered with for good, and what the error must say."""

Action = Literal["drain", "cancel", "requests", "budget", "bandwidth", "no bandwidth"]


@dataclass(frozen=True)
class ChannelTrial:
    """One channel."""

    name: str
    objects: dict[str, bytes] = field(repr=False)
    """By key, in plan order: what S3 stores when the job begins."""
    wrap: bool
    inflate: bool
    shuffle: int | None
    when_failed: WhenFailed
    epochs: int
    """How many its reader reads."""
    leaves: float
    """Share of the epochs whose reader leaves early."""
    pause: float
    """Seconds that the reader may take between two reads."""
    fifo: int | None
    """Bytes that the FIFO is made to hold, as a kernel may that grants no more."""
    listing: tuple[float, ...] | None = None
    """Seconds before the listing names each object after the first, and before it ends; None: it has ended.

    Objects that are named at once are named in one run.
    """
    listing_fails: bool = False
    """Whether the listing ends with an error."""


@dataclass(frozen=True)
class SharedTrial:
    """A stream that all channels of a run share: records of `RECORD` bytes, dealt to ranks."""

    ranks: int
    copies: int
    """FIFOs of each rank."""
    batch: int
    """Records of a rank in a step."""
    shuffle: int | None
    workers: int
    """FIFOs of each rank and copy, which take turns."""


@dataclass(frozen=True)
class SeedTrial:
    """One run."""

    seed: int
    splice: bool
    tls: bool
    channels: tuple[ChannelTrial, ...]
    part_size: int
    budget: int
    requests_in_flight: int
    adaptive: bool
    hedge: float
    faults: dict[str, float]
    lasting: dict[str, int]
    """By key, the status of every answer."""
    changed: tuple[str, float, bytes | None] | None = field(repr=False)
    """A key, when it is replaced, and by what; None deletes it."""
    refused: float
    """Share of the connections that are refused, or never come."""
    actions: tuple[tuple[float, Action], ...]
    """What an operator does, and when."""
    small_part: int
    """Bytes of a part that is not parked in its socket."""
    turn: int
    """Bytes after which delivery lets other tasks run."""
    ahead: int
    """Bytes in which a channel inflates ahead of delivery."""
    shared: SharedTrial | None
    """None: each channel has a stream of its own."""

    @classmethod
    def draw(cls, seed: int) -> SeedTrial:
        dice = random.Random(seed)
        splice = dice.random() < 0.5
        part_size = dice.choice([1, 4, 16, 48]) * KIB
        channels = tuple(
            _channel(dice, f"c{number}", splice, seed=seed) for number in range(dice.choice([1, 1, 1, 2, 3]))
        )
        shared = None
        # Their own dice, so that the other seeds are as they were without shared streams.
        if (own := random.Random(f"{seed} shared")).random() < 0.3:
            part_size = own.choice([part_size, 256 * KIB, MIB])
            shared = SharedTrial(
                own.choice([1, 2, 3]), own.choice([1, 1, 2]), own.choice([1, 3, 40]),
                own.choice([None, own.randrange(1000)]),
                random.Random(f"{seed} workers").choice([1, 1, 2, 3]),
            )  # fmt: skip
            channels = _shared_channels(own, channels[0], shared)
        keys = [key for channel in channels for key in channel.objects]
        rate = dice.choice([0.0, 0.05, 0.2, 0.5])
        kinds = dice.sample(FAULTS, dice.randint(1, 5))
        changed = None
        if dice.random() < 0.25:
            key = dice.choice(keys)
            channel = next(each for each in channels if key in each.objects)
            now = None if dice.random() < 0.4 else _content(dice, channel.inflate)
            changed = key, dice.choice([0.0, dice.expovariate(1), dice.expovariate(10)]), now
        actions = [
            (dice.choice([0.0, dice.expovariate(2), dice.expovariate(20)]), dice.choice(get_args(Action)))
            for _ in range(dice.choice([0, 0, 1, 2]))
        ]
        streams = len(channels) if shared is None else 1
        least = 2 * streams * max(128 * KIB, part_size) * (8 if splice else 1)
        return cls(
            seed=seed,
            splice=splice,
            tls=not splice and dice.random() < 0.4,
            channels=channels,
            part_size=part_size,
            budget=least * dice.choice([1, 1, 2, 4]),
            requests_in_flight=dice.choice([1, 2, 3, 8]),
            adaptive=dice.random() < 0.3,
            hedge=dice.choice([0.0, 0.5]),
            faults=dict.fromkeys(kinds, rate / len(kinds)),
            lasting={dice.choice(keys): dice.choice([*LASTING])} if dice.random() < 0.2 else {},
            changed=changed,
            refused=dice.choice([0.0, 0.0, 0.1]),
            actions=tuple(sorted(actions)),
            small_part=dice.choice([0, 0, MIB]),
            turn=dice.choice([1, 10_000, MIB]),
            ahead=dice.choice([0, 16 * KIB, 256 * KIB, 256 * KIB]),
            shared=shared,
        )


def _shared_channels(
    dice: random.Random, channel: ChannelTrial, shared: SharedTrial
) -> tuple[ChannelTrial, ...]:
    """The FIFOs of a shared stream, otherwise as `channel`: its small and large objects are theirs."""
    most = dice.choice([8, 60, 600])
    sizes = [dice.randrange(most) for _ in range(dice.choice([2, 8, 20]))]
    sizes.append(max(5 * most, shared.batch * shared.ranks))  # a stream has at least one step
    objects = {f"shared/{number}": dice.randbytes(RECORD * size) for number, size in enumerate(sizes)}
    each = replace(
        channel, objects=objects, wrap=False, inflate=False, shuffle=None, listing=None, listing_fails=False
    )
    if most == 600:  # a run has at most some 100,000 turns of the loop
        each = replace(each, epochs=1)
    fifos = shared.ranks * shared.workers * shared.copies
    return tuple(replace(each, name=f"s-{number}") for number in range(fifos))


def _content(dice: random.Random, inflate: bool) -> bytes:
    size = dice.choice([0, 1, dice.randrange(2000), dice.randrange(60_000)])
    data = dice.randbytes(size)
    return gzip.compress(data, 1, mtime=0) if inflate else data


def _channel(dice: random.Random, name: str, splice: bool, *, seed: int) -> ChannelTrial:
    inflate = not splice and dice.random() < 0.3
    when_failed: WhenFailed = dice.choice(["hold", "hold", "close"])
    wrap = dice.random() < 0.25
    count = dice.choice([1, 2, 3, 8])
    found = ChannelTrial(
        name=name,
        objects={f"{name}/{i}": _content(dice, inflate) for i in range(count)},
        wrap=wrap,
        inflate=inflate,
        shuffle=dice.randrange(1000) if dice.random() < 0.3 else None,
        when_failed=when_failed,
        epochs=dice.randint(1, 3),
        leaves=dice.choice([0.0, 0.0, 0.5]),
        pause=dice.choice([0.0, 0.001, 0.05]),
        fifo=dice.choice([None, 4096, 16384]),
    )
    # Their own dice, so that the rest of a seed is as it was without open plans.
    dice = random.Random(f"{seed} listing of {name}")
    if found.shuffle is not None or dice.random() < 0.5:
        return found
    mean_pause = dice.choice([0.001, 0.05, 1.0])
    pauses = (dice.choice([0.0, dice.expovariate(1 / mean_pause)]) for _ in range(count))
    return replace(found, listing=tuple(pauses), listing_fails=dice.random() < 0.2)
