"""States of several FIFOs that one process reads, saved together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from streamer.errors import ChannelError
from streamer.trailer import channel_of_rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streamer.readers.core.position import ReaderPosition


def joint_states(positions: Sequence[ReaderPosition]) -> list[dict[str, Any]]:
    """Return the states of channels, one for all rank FIFOs of a channel. Raises ChannelError."""
    by_record = {channel_of_rank(each.channel) for each in positions if each.rank or each.start}
    states: list[dict[str, Any]] = []
    ranks: dict[str, list[ReaderPosition]] = {}
    for position in positions:
        if (name := channel_of_rank(position.channel)) in by_record:
            ranks.setdefault(name, []).append(position)
        else:
            states.append(position.state())
    for name, fifos in ranks.items():
        least = min(fifos, key=lambda each: each.next_step())
        most = max(each.next_step(begun=True) for each in fifos)
        rank = next((each.rank for each in fifos if each.rank is not None), None)
        epoch, step = least.next_step()
        if rank is not None and most > rank.following(epoch, step):
            raise ChannelError(
                f"the rank FIFOs of {name} that this process reads are at different steps, from epoch "
                f"{epoch}, step {step} to epoch {most[0]}, step {most[1]}, so there is no state; give each "
                "a reader, or a worker, of its own"
            )
        states.append(replace(least, rank=least.rank or rank).state())
    return states
