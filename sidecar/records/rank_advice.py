"""Advice about the ranks of a channel: unequal numbers of steps, and many small requests.

Ranks that end an epoch at different steps make a trainer hang that waits for all of them, as DDP does. A
request costs as much CPU time as some hundreds of kilobytes (docs/how-to/several-ranks.md). `penstock plan`
counts the requests of an epoch; `penstock doctor`, which lists few objects, reckons with their mean size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from streamer.units import KIB, MIB, human_bytes

if TYPE_CHECKING:
    from sidecar.config.request import ChannelConfig
    from streamer.plan.record_order import Deal

SMALL = 512 * KIB
"""Mean bytes of a request below which its own cost is most of the cost."""
LARGEST = 8 * MIB
"""Bytes of a part at first."""
MANY = 3
"""Times the requests of `Fetch: together`, from which on these are many."""


class Advice(NamedTuple):
    """Why the ranks are not as they should be, and what to do."""

    why: str
    do: str


def unequal_steps(channel: ChannelConfig, *, hosts: int) -> Advice | None:
    """Return what is to be said of a Pipe channel's ranks; None if there is one, or they share records."""
    ranks = channel.penstock.ranks
    count = 1 if ranks is None else ranks.count
    divided = channel.source.sharded and hosts > 1
    if channel.penstock.by_record is not None or (count == 1 and not divided):
        return None
    who = "rank" if count > 1 else "host"
    why = f"each {who} has whole objects, so their numbers of steps differ and are not known beforehand"
    if (obstacle := channel.not_by_record) is not None:
        return Advice(why, f"Ranks can have no GlobalBatch, which would make them equal: {obstacle}")
    records = " and Records: {Format: FORMAT, Index: index}" if channel.record_wrapper_type == "None" else ""
    return Advice(why, f"for equal steps set Ranks: {{Count: {count}, GlobalBatch: RECORDS}}{records}")


def small_requests(
    channel: ChannelConfig, *, bytes_total: int, separately: int, together: int
) -> Advice | None:
    """Return what is to be said of a channel whose ranks share it by record; None if there is nothing.

    `separately`, `together`: requests with either value of `Fetch`.
    """
    if not _separate(channel) or separately < MANY * together:
        return None
    if (size := bytes_total // separately) >= SMALL:
        return None
    return Advice(
        f"each rank is fetched on its own, by {separately} requests of {human_bytes(size)} on average",
        _remedy(channel, f"for {together} "),
    )


def expected_small_requests(channel: ChannelConfig, deal: Deal, *, record_bytes: float) -> Advice | None:
    """Return the same by the mean size of a record, for a deal of this host's ranks."""
    ranks = channel.penstock.by_record
    if ranks is None or not _separate(channel):
        return None
    most = LARGEST if channel.shuffle_config is None else min(LARGEST, ranks.block_bytes)
    """Bytes of adjacent records that are requested at once."""
    share = deal.slice * (deal.end - deal.first)
    separately = min(most, deal.slice * record_bytes)
    together = most if share == deal.global_batch else min(most, share * record_bytes)
    if separately >= SMALL or together < MANY * separately:
        return None
    return Advice(
        f"each rank is fetched on its own, by requests of about {human_bytes(int(separately))}",
        _remedy(channel, f"for requests of about {human_bytes(int(together))} "),
    )


def _separate(channel: ChannelConfig) -> bool:
    """Return whether several ranks share the channel by record, each with requests of its own."""
    ranks = channel.penstock.by_record
    return ranks is not None and ranks.count * ranks.workers > 1 and not channel.may_fetch_together


def _remedy(channel: ChannelConfig, gain: str) -> str:
    extras = channel.penstock
    if extras.join is not None:
        return "raise GlobalBatch"
    return f"{gain}remove Fetch: separately from Ranks"
