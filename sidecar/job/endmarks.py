"""Recognises objects with an end mark (tar, Arrow) by common suffixes.

A program that reads several such objects in one stream stops after the first. `penstock run`, `penstock cat`
and `penstock doctor` warn of them.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from sidecar.process.logs import log

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sidecar.config.request import ChannelConfig
    from streamer.plan import Join, Plan

SUFFIXES: dict[Join, tuple[str, ...]] = {
    "tar": (".tar", ".tar.gz", ".tgz", ".tar.zst"),
    "arrow": (".arrow", ".arrows", ".arrow.gz", ".arrows.gz"),
}
MOST_KEYS = 1000
"""Most keys of a channel that are compared with the suffixes."""


def end_mark_advice(channel: ChannelConfig, join: Join) -> str:
    """Return advice for a channel whose objects of this format have end marks."""
    stops = "programs that know the format stop at the first end mark and report success"
    own_readers = "Penstock's own readers, which read on"
    ranks = channel.penstock.by_record
    if ranks is not None and (join != "tar" or ranks.index is None):  # such a channel can have no Join
        return f"{stops}; read the channel with {own_readers}"
    return f"{stops}; add Penstock: {{Join: {join}}} to the channel, or read it with {own_readers}"


def unjoined(channel: ChannelConfig, plan: Plan) -> Join | None:
    """Return the format of objects with end marks that follow each other in this channel; None if none do."""
    return unjoined_keys(channel, _keys(plan))


def unjoined_keys(channel: ChannelConfig, keys: Iterable[str]) -> Join | None:
    """Return the same as `unjoined`, for objects with these keys."""
    if channel.penstock.join is not None or channel.record_wrapper_type != "None":
        return None
    return _end_marked(keys)


def warn_of_end_marks(plan: Plan) -> None:
    """Log that objects with end marks follow each other in the stream of `penstock cat`, if they do."""
    if (join := _end_marked(_keys(plan))) is not None:
        log.warning(
            "objects carry end marks",
            format=join,
            do="programs that know the format stop at the first end mark and report success; add --join "
            f"{join}, or for compressed objects read on after an end mark (tar --ignore-zeros)",
        )


def _keys(plan: Plan) -> Iterator[str]:
    return (ref.key for ref in islice(plan.refs(0), MOST_KEYS) if ref.size)


def _end_marked(keys: Iterable[str]) -> Join | None:
    """Return the format with end marks that more than one key names; None if there is none."""
    lowered = [key.lower() for key in keys]
    for join, suffixes in SUFFIXES.items():
        if sum(key.endswith(suffixes) for key in lowered) > 1:
            return join
    return None
