"""Objects that carry an end mark: a program that reads several in one stream stops after the first.

`penstock run` warns of them by the names that they commonly have, `penstock doctor` too.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sidecar.config.request import ChannelConfig
    from streamer.plan import Join, Plan

SUFFIXES: dict[Join, tuple[str, ...]] = {
    "tar": (".tar", ".tar.gz", ".tgz", ".tar.zst"),
    "arrow": (".arrow", ".arrows", ".arrow.gz", ".arrows.gz"),
}
LOOKED_AT = 1000
"""Objects of a channel whose names are looked at."""
JOIN_ADVICE = (
    "programs that know the format stop at the first end mark and report success; add "
    "Penstock: {{Join: {0}}} to the channel, or read it with Penstock's own readers"
)


def unjoined(channel: ChannelConfig, plan: Plan) -> Join | None:
    """The format of end-marked objects that follow each other in this channel's stream, if there are any."""
    return carried(channel, (ref.key for ref in islice(plan.refs(0), LOOKED_AT) if ref.size))


def carried(channel: ChannelConfig, keys: Iterable[str]) -> Join | None:
    """As `unjoined`, of an epoch with these keys."""
    if channel.penstock.join is not None or channel.record_wrapper_type != "None":
        return None
    lowered = [key.lower() for key in keys]
    for join, suffixes in SUFFIXES.items():
        if sum(key.endswith(suffixes) for key in lowered) > 1:
            return join
    return None
