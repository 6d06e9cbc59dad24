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
    """Return the states of channels, one for all rank FIFOs of a channel. Raises ChannelError.

    Several FIFOs of a channel with `Ranks.Workers` are all those of one rank.
    """
    by_record = {channel_of_rank(each.channel) for each in positions if each.rank or each.start}
    states: list[dict[str, Any]] = []
    ranks: dict[str, list[ReaderPosition]] = {}
    for position in positions:
        if (name := channel_of_rank(position.channel)) in by_record:
            ranks.setdefault(name, []).append(position)
        else:
            states.append(position.state())
    for name, read in ranks.items():
        fifos = _with_ranks(read)
        least = min(fifos, key=lambda each: each.next_step())
        epoch, step = least.next_step()
        if (after := next((each for each in fifos if each.is_after(epoch, step)), None)) is not None:
            raise ChannelError(
                f"the rank FIFOs of {name} that this process reads are at different steps, {least.channel} "
                f"at epoch {epoch}, step {step} and {after.channel} after it, so there is no state; give "
                "each a reader, or a worker, of its own, and batches of a rank's records in a global batch"
            )
        state = least.state()
        states.append(state if len(fifos) == 1 else state | {"epoch": epoch, "step": step})
    return states


def _with_ranks(positions: list[ReaderPosition]) -> list[ReaderPosition]:
    """Return the positions in the order of their FIFOs, also with the ranks of those not read yet."""
    rank = next((each.rank for each in positions if each.rank is not None), None)
    if rank is None:
        return positions
    fifos = sorted(positions, key=lambda each: (len(each.channel), each.channel))  # -10 comes after -2
    return [
        each if each.rank else replace(each, rank=replace(rank, worker=number % rank.workers))
        for number, each in enumerate(fifos)
    ]
