"""What tells plans apart: SHA-256, in hex, over lines of JSON.

The header `penstock plan 1`; what is arranged, as one object, unless nothing is; then a line an entry in
plan order: an object is the array of bucket, key, ETag, start, end and, if one is asked for, version; a row
of several items is the array of those, with literals as hex. Empty objects are left out where they change
no stream.

A line costs some two microseconds, the hash next to nothing. So plans of the same entries that differ in
their shard alone, such as those of a channel's rank FIFOs, have their digests made together, in one pass.
"""

from __future__ import annotations

import hashlib
import json
from json.encoder import encode_basestring_ascii as quoted
from typing import TYPE_CHECKING, Any

from streamer.plan.segments import ObjectRef

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from streamer.formats.join import Join
    from streamer.plan.entries import Entries
    from streamer.plan.shards import Shard


class Digests:
    """The digests of plans over `entries`, by shard; made when the first of them is asked for."""

    def __init__(
        self, entries: Entries, *, seed: int | None, shards: Sequence[Shard], join: Join | None
    ) -> None:
        """All `shards` are of the same count, so that an empty object is left out for all of them or none."""
        self._entries = entries
        self._seed = seed
        self._shards = shards
        self._join = join
        self._found: dict[Shard, str] = {}

    def of(self, shard: Shard) -> str:
        """The digest of the plan with this shard, which is one of `shards`."""
        if not self._found:
            told = [self._arranged(each) for each in self._shards]
            states = [hashlib.sha256(_heading(each)) for each in told]
            for line in _lines(self._entries, with_empty=any(told)):
                for state in states:
                    state.update(line)
            self._found = {each: state.hexdigest() for each, state in zip(self._shards, states, strict=True)}
        return self._found[shard]

    def _arranged(self, shard: Shard) -> dict[str, Any]:
        """What is arranged; empty if nothing is."""
        arranged = {
            "seed": self._seed,
            "shard": [shard.index, shard.count, shard.by] if shard.count > 1 else None,
            "wrap": self._entries.wrap or None,
            "inflate": self._entries.inflate or None,
            "join": self._join,
        }
        return {name: value for name, value in arranged.items() if value is not None}


def _heading(arranged: dict[str, Any]) -> bytes:
    return b"penstock plan 1\n" + (json.dumps(arranged).encode() + b"\n" if arranged else b"")


def _lines(entries: Entries, *, with_empty: bool) -> Iterator[bytes]:
    for items in entries:
        if len(items) == 1 and isinstance(items[0], ObjectRef):
            if not with_empty and not items[0].size:
                continue
            line = _line(items[0])
        else:
            line = f"[{', '.join(map(_line, items))}]"
        yield line.encode("ascii") + b"\n"


def _line(item: ObjectRef | bytes) -> str:
    if isinstance(item, bytes):
        return f'"{item.hex()}"'
    version = f", {quoted(item.version)}" if item.version else ""
    return f"[{quoted(item.bucket)}, {quoted(item.key)}, {quoted(item.etag)}, 0, {item.size}{version}]"
