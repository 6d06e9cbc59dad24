"""Says where ranks have unequal numbers of steps, since whole objects are dealt, and what makes them equal.

Ranks that end an epoch at different steps make a trainer hang that waits for all of them, as DDP does.
`penstock plan` and `penstock doctor` say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sidecar.config.request import ChannelConfig


class UnequalSteps(NamedTuple):
    """Why the numbers of steps differ, and what to do."""

    why: str
    do: str


def unequal_steps(channel: ChannelConfig, *, hosts: int) -> UnequalSteps | None:
    """Return what is to be said of a Pipe channel's ranks; None if there is one, or they share records."""
    ranks = channel.penstock.ranks
    count = 1 if ranks is None else ranks.count
    divided = channel.source.sharded and hosts > 1
    if channel.penstock.by_record is not None or (count == 1 and not divided):
        return None
    who = "rank" if count > 1 else "host"
    name, framing = channel.channel_name, channel.penstock.framing or "FORMAT"
    why = f"each {who} has whole objects, so their numbers of steps differ and are not known beforehand"
    if (obstacle := channel.not_by_record) is not None:
        return UnequalSteps(why, f"Ranks can have no batch, which would make them equal: {obstacle}")
    return UnequalSteps(
        why,
        f"for equal steps build a record index (penstock index build -c JOB --to index --channel {name} "
        f"--every 1 --format {framing}), or let a job learn it (LearnIndex: {{To: index, Format: {framing}, "
        f"Every: 1}}), and set Ranks: {{Count: {count}, Batch: RECORDS, Index: index}}",
    )
