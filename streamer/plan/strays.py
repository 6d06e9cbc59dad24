"""Recognises objects that are probably no data, but were left beside it or describe it.

    _SUCCESS, _committed_*, _started_*, _temporary/     marks and left-overs of Hadoop, Spark and Databricks
    *.crc                                               Hadoop's checksums
    .*, .*/                                             hidden files and folders
    *.idx, *.index, index.json, manifest.json           indexes of records and shards

The globs are those of `streamer.plan.globs`, so that the warning can name what to exclude. `Strays` looks at
every key of a listing. That costs little, because only pages with a suspicious fragment are searched, and
only keys with a suspicious prefix of a name or with a suffix of the list are compared with the globs.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from streamer.plan.globs import compile_globs

if TYPE_CHECKING:
    import re
    from collections.abc import Sequence

STRAYS = (
    "_SUCCESS", "_committed_*", "_started_*", "_temporary/", "*.crc", ".*", ".*/", "*.idx", "*.index",
    "index.json", "manifest.json",
)  # fmt: skip
"""Globs of keys that are probably no data."""
MOST_NAMED = 3
"""Most keys that a warning names."""
MOST_FOUND = 1000
"""Most keys after which the search ends, so that a million of them cost no more."""
_SUFFIXES = (".crc", ".idx", ".index", "index.json", "manifest.json")
_FRAGMENTS = (b"/_", b"/.", *(suffix.encode() for suffix in _SUFFIXES))
"""Parts of a page's keys, joined by slashes, without which none of them is a stray."""


class Strays:
    """Keys of one listing that are probably no data: the first few, and what excludes all."""

    def __init__(self, *, empty_too: bool) -> None:
        """`empty_too`: empty objects count, because each becomes a record."""
        self.keys: list[str] = []
        """At most `MOST_NAMED` keys."""
        self.globs: list[str] = []
        """Globs that exclude those keys, and others of which none is named."""
        self._empty_too = empty_too
        self._found = 0
        """Number of keys that are probably no data."""

    def look(self, keys: Sequence[bytes], sizes: Sequence[int], prefix: str) -> None:
        """Look at objects below a prefix. `keys`: in UTF-8.

        An object whose key is the prefix is data: the URI names it.
        """
        names = b"/" + b"/".join(keys)
        if self._found >= MOST_FOUND or not any(fragment in names for fragment in _FRAGMENTS):
            return
        start = prefix.rfind("/") + 1
        for name, size in zip(keys, sizes, strict=True):
            key = name.decode()
            if (
                (
                    key.endswith(_SUFFIXES)
                    or key.find("/_", start) >= 0
                    or key.find("/.", start) >= 0
                    or key.startswith(("_", "."), start)
                )
                and (size or self._empty_too)
                and key != prefix
            ):
                self._compare(key, start)

    def _compare(self, key: str, start: int) -> None:
        matching = (glob for glob, expression in _expressions() if expression.fullmatch(key, start))
        if (glob := next(matching, None)) is None or key in self.keys:
            return
        self._found += 1
        self.keys += [key] if len(self.keys) < MOST_NAMED else []
        self.globs += [glob] if glob not in self.globs else []


@cache
def _expressions() -> list[tuple[str, re.Pattern[str]]]:
    """Return the globs with their expressions, which take milliseconds to compile."""
    return [(glob, expression) for glob in STRAYS if (expression := compile_globs([glob])) is not None]
