"""Says where ranks that are fetched separately send many small requests, and what sends fewer.

A request costs as much CPU time as some hundreds of kilobytes (docs/how-to/several-ranks.md). `penstock plan`
says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from streamer.units import KIB, human_bytes

if TYPE_CHECKING:
    from sidecar.config.request import ChannelConfig

SMALL = 512 * KIB
"""Mean bytes of a request below which its own cost is most of the cost."""
MANY = 3
"""Times the requests of `Fetch: together`, from which on these are many."""


class SmallRequests(NamedTuple):
    """Why the requests are small, and what to do."""

    why: str
    do: str


def small_requests(
    channel: ChannelConfig, *, bytes_total: int, separately: int, together: int
) -> SmallRequests | None:
    """Return what is to be said of a channel whose ranks share it by record; None if there is nothing.

    `separately`, `together`: requests with either value of `Fetch`.
    """
    ranks, extras = channel.penstock.by_record, channel.penstock
    if ranks is None or ranks.fetch == "together" or ranks.count == 1 or separately < MANY * together:
        return None
    if (size := bytes_total // separately) >= SMALL:
        return None
    do = f"for {together} set Fetch: together in Ranks, if all ranks of this host are read at the same time"
    if extras.join is not None or extras.when_failed == "poison":
        do = "raise the batch"
    return SmallRequests(
        f"each rank is fetched on its own, by {separately} requests of {human_bytes(size)} on average", do
    )
