"""Warns of objects by their keys: of those with an end mark (tar, Arrow), and of those that may be no data.

A program that reads several objects with end marks in one stream stops after the first. Marks of writers,
checksums, indexes and hidden files are probably no data (`streamer.plan.strays`). `penstock run`, `cat` and
`doctor` warn of both, `plan` of the latter.
"""

from __future__ import annotations

import json
import shlex
from itertools import islice
from typing import TYPE_CHECKING

from sidecar.process.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from sidecar.config.request import ChannelConfig
    from streamer.plan import Plan
    from streamer.plan.strays import Strays


SUFFIXES = {
    "tar": (".tar", ".tar.gz", ".tgz", ".tar.zst"),
    "arrow": (".arrow", ".arrows", ".arrow.gz", ".arrows.gz"),
}
"""By format with an end mark, the suffixes of its objects."""
MOST_KEYS = 1000
"""Most keys of a channel that are compared with the suffixes."""

_STOPS = "programs that know the format stop at the first end mark and report success"


def end_mark_advice(channel: ChannelConfig, form: str) -> str:
    """Return advice for a channel whose objects of this format have end marks."""
    own_readers = "Penstock's own readers, which read on"
    ranks = channel.penstock.by_record
    # Such a channel can have no Join.
    if ranks is not None and (form != "tar" or channel.record_format.kind != "tar"):
        return f"{_STOPS}; read the channel with {own_readers}"
    if form == "arrow":
        return f"{_STOPS}; set RecordWrapperType: RecordIO, and read the channel with TableReader"
    return f"{_STOPS}; add Penstock: {{Join: tar}} to the channel, or read it with {own_readers}"


def unjoined(channel: ChannelConfig, plan: Plan) -> str | None:
    """Return the format of objects with end marks that follow each other in this channel, if any do."""
    return unjoined_keys(channel, _keys(plan))


def unjoined_keys(channel: ChannelConfig, keys: Iterable[str]) -> str | None:
    """Return the same as `unjoined`, for objects with these keys."""
    if channel.penstock.join is not None or channel.record_wrapper_type != "None":
        return None
    return _end_marked(keys)


def warn_of_end_marks(plan: Plan) -> None:
    """Log that objects with end marks follow each other in the stream of `penstock cat`, if they do."""
    if (form := _end_marked(_keys(plan))) is not None:
        do = "add --join tar, or for compressed objects read on after an end mark (tar --ignore-zeros)"
        if form == "arrow":
            do = "read each object by itself, or a channel with RecordWrapperType: RecordIO by TableReader"
        log.warning("objects carry end marks", format=form, do=f"{_STOPS}; {do}")


def _keys(plan: Plan) -> Iterator[str]:
    return (ref.key for ref in islice(plan.refs(0), MOST_KEYS) if ref.size)


def _end_marked(keys: Iterable[str]) -> str | None:
    """Return the format with end marks that more than one key names; None if there is none."""
    lowered = [key.lower() for key in keys]
    for form, suffixes in SUFFIXES.items():
        if sum(key.endswith(suffixes) for key in lowered) > 1:
            return form
    return None


def warn_of_strays(strays: Strays | None, *, advice: Callable[[Strays], str], **fields: str) -> None:
    """Log the objects, with `advice`. `fields`: further fields of the event."""
    if strays is not None and strays.keys:
        log.warning("objects that may not be data", **fields, keys=strays.keys, do=advice(strays))


def option_advice(strays: Strays) -> str:
    """Return which options leave the objects out, or declare them data."""
    options = " ".join(f"--exclude {shlex.quote(glob)}" for glob in strays.globs)
    return f"add {options} to leave them out, or --include '**' if they are data"


def channel_advice(strays: Strays) -> str:
    """Return which setting of the channel leaves the objects out, or declares them data."""
    return (
        f"add Penstock: {{Exclude: {json.dumps(strays.globs)}}} to the channel to leave them out, or "
        'Include: ["**"] if they are data'
    )
