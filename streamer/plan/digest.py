"""Digest of a plan: SHA-256, in hex, over lines of JSON.

The lines are the header `penstock plan 1`; the arrangement as one object, unless it is empty; then one line
per entry in plan order. An object is the array of bucket, key, ETag, start, end and, if the manifest names
one, version. An entry of several items is the array of its items, with literals as hex. Empty objects are
left out if they change no stream.

A line takes about two microseconds to build and almost none to hash. So the digests of plans that differ only
in their shard, such as those of a channel's rank FIFOs, are computed together in one pass.
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
    """The digests of plans over `entries`, by shard; the first call of `of` computes all of them."""

    def __init__(
        self, entries: Entries, *, seed: int | None, shards: Sequence[Shard], join: Join | None
    ) -> None:
        """All `shards` have the same count, so that empty objects are left out for all of them or none."""
        self._entries = entries
        self._seed = seed
        self._shards = shards
        self._join = join
        self._by_shard: dict[Shard, str] = {}

    def of(self, shard: Shard) -> str:
        """Return the digest of the plan with this shard, one of `shards`."""
        if not self._by_shard:
            arrangements = [self._arrangement(each) for each in self._shards]
            states = [hashlib.sha256(_heading(each)) for each in arrangements]
            for line in _lines(self._entries, with_empty=any(arrangements)):
                for state in states:
                    state.update(line)
            self._by_shard = {
                each: state.hexdigest() for each, state in zip(self._shards, states, strict=True)
            }
        return self._by_shard[shard]

    def _arrangement(self, shard: Shard) -> dict[str, Any]:
        """Return the arrangement as JSON; empty if it is the default."""
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
