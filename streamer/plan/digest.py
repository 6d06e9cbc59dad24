"""Digest of a plan: SHA-256, in hex, over lines of JSON.

The lines are the header `penstock plan 1`; the arrangement as one object, unless it is empty; then one line
per entry in plan order. An object is the array of bucket, key, ETag, start, end and, if the manifest names
one, version. An entry of several items is the array of its items, with literals as hex. Empty objects are
left out if they change no stream.

A listing that goes on has a *partial digest*, `N:HEX`: over the first N entries (`Digests.of`). A plan covers
a partial digest if its own first N entries have it.

A line takes longer to build than to hash. So the digests of plans that differ only
in their shard, such as those of a channel's rank FIFOs, are computed together in one pass.
"""

from __future__ import annotations

import hashlib
import json
import re
from json.encoder import encode_basestring_ascii as quoted
from typing import TYPE_CHECKING, Any

from streamer.plan.parts import ObjectRef

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from streamer.plan.entries import Entries
    from streamer.plan.shuffle import Shard

_PARTIAL = re.compile(r"(0|[1-9][0-9]{0,18}):([0-9a-f]{64})")
_AT_ONCE = 1024
"""Entries whose lines are built at once."""


class Digests:
    """The digests of plans over `entries`, by shard, as far as `update` has come."""

    def __init__(
        self, entries: Entries, *, seed: int | None, shards: Sequence[Shard], join: str | None
    ) -> None:
        """All `shards` have the same count, so that empty objects are left out for all of them or none."""
        self._entries = entries
        self._seed = seed
        self._shards = shards
        self._join = join
        self._states: dict[Shard, Any] = {}
        """SHA-256 objects of hashlib, by shard."""
        self._count = 0
        """Number of entries in the states."""
        self._with_empty = False

    def update(self, count: int) -> None:
        """Add the entries up to number `count` to the digests of all shards."""
        if not self._states:
            arrangements = {shard: self._arrangement(shard) for shard in self._shards}
            self._states = {shard: hashlib.sha256(_heading(each)) for shard, each in arrangements.items()}
            self._with_empty = any(arrangements.values())
        if self._count < count:
            states = list(self._states.values())
            for line in _lines(self._entries, self._count, count, with_empty=self._with_empty):
                for state in states:
                    state.update(line)
            self._count = count

    def of(self, shard: Shard, count: int) -> str:
        """Return the digest over the first `count` entries of the plan with this shard, one of `shards`.

        Raises ValueError if the digests have more entries already.
        """
        self.update(count)
        if self._count != count:
            raise ValueError(f"the digests have {self._count} entries, more than {count}")
        return str(self._states[shard].hexdigest())

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


def partial_digest(count: int, digest: str) -> str:
    """Return the partial digest of a plan whose first `count` entries have `digest`."""
    return f"{count}:{digest}"


def parse_partial(digest: str) -> tuple[int, str] | None:
    """Return count and digest of a partial digest; None if `digest` is none."""
    match = _PARTIAL.fullmatch(digest)
    return None if match is None else (int(match[1]), match[2])


def _lines(entries: Entries, first: int, end: int, *, with_empty: bool) -> Iterator[bytes]:
    """Yield the lines of the entries `first` to `end`, many at a time."""
    for start in range(first, end, _AT_ONCE):
        indices = range(start, min(start + _AT_ONCE, end))
        if (columns := entries.columns(start, indices.stop)) is not None:
            bucket = quoted(columns.bucket)
            lines = [
                f'[{bucket}, {quoted(key.decode())}, "{etag}", 0, {size}]\n'
                for key, size, etag in zip(columns.keys, columns.sizes, columns.etags, strict=True)
                if size or with_empty
            ]
        else:
            lines = [
                _entry_line(items)
                for items in map(entries.items, indices)
                if with_empty or len(items) > 1 or isinstance(items[0], bytes) or items[0].size
            ]
        yield "".join(lines).encode("ascii")


def _entry_line(items: list[ObjectRef | bytes]) -> str:
    if len(items) == 1 and isinstance(items[0], ObjectRef):
        return _line(items[0]) + "\n"
    return f"[{', '.join(map(_line, items))}]\n"


def _line(item: ObjectRef | bytes) -> str:
    if isinstance(item, bytes):
        return f'"{item.hex()}"'
    version = f", {quoted(item.version)}" if item.version else ""
    return f"[{quoted(item.bucket)}, {quoted(item.key)}, {quoted(item.etag)}, 0, {item.size}{version}]"
