"""Selects which of the listed entries a channel streams: by globs and folds of keys, and by a limit.

    listing or manifest, in plan order ─ Include, Exclude, Split ─ Limit ─ entries ─ shuffle, shard …

`Selection` is what the job file says. `KeyFilter` decides about one key, before the entry is made, so that
keys that are left out take no memory (`streamer.plan.globs` has the rules of globs, `streamer.plan.split`
those of folds). `Selector` applies the limit to runs of entries while they are listed:

    the first     entries pass as they come until the limit is reached; then `full`, and the listing may end
    a sample      every entry draws a number from the seed and its name; those with the smallest numbers stay.
                  They are known, and returned in plan order, when the listing has ended

A limit never cuts an entry. The first entry that does not fit ends the selection, so both rules depend on
nothing but the limit, the seed, and the listing: they select the same entries on every host, and hosts shard
what is selected.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING

from streamer.errors import ConfigError
from streamer.plan.globs import compile_globs
from streamer.plan.parts import ObjectRef
from streamer.plan.strays import Strays
from streamer.plan.uris import S3Uri
from streamer.units import counted, decimal_bytes

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable, Sequence

    from streamer.plan.entries import Entries
    from streamer.plan.split import Split

_MARGIN = 10_000
"""Entries beyond twice the sample that are kept before the sample is cut again."""


@dataclass(frozen=True, slots=True)
class Limit:
    """At most so many entries, or so many bytes of them; exactly one of the two is given."""

    objects: int | None = None
    """Entries: objects, or lines of an augmented manifest."""
    bytes: int | None = None
    """Bytes in the stream; objects that are inflated on delivery count with their compressed length."""
    seed: int | None = None
    """Draw a sample with this seed; None: take the first entries in plan order."""

    def __post_init__(self) -> None:
        """Raise ValueError unless exactly one limit is given and is above zero."""
        if (self.objects is None) == (self.bytes is None) or (self.objects or self.bytes or 0) <= 0:
            raise ValueError("a limit is a number of objects or of bytes, above zero")

    def fits(self, sizes: Sequence[int], *, entries: int = 0, size: int = 0) -> int:
        """Return how many of the next entries, with these sizes, fit after `entries` of `size` bytes."""
        if self.objects is not None:
            return min(len(sizes), self.objects - entries)
        most = self.bytes or 0
        for count, each in enumerate(sizes):
            size += each
            if size > most:
                return count
        return len(sizes)


@dataclass(frozen=True, slots=True)
class Selection:
    """What a channel streams of the objects that its source names; by default all of them."""

    include: tuple[str, ...] = ()
    """Globs of which one must match; none: every key is included."""
    exclude: tuple[str, ...] = ()
    """Globs of which none may match."""
    limit: Limit | None = None
    split: Split | None = None
    """Folds of keys that are taken; None: all."""
    apart: frozenset[S3Uri] = frozenset()
    """Objects that are no data, such as record indexes: they count as absent."""

    def __post_init__(self) -> None:
        """Raise ConfigError for an invalid glob."""
        compile_globs(self.include)
        compile_globs(self.exclude)

    @property
    def by_key(self) -> bool:
        """Whether globs or folds decide about keys."""
        return bool(self.include or self.exclude) or self.split is not None

    def strays(self, *, records: bool) -> Strays | None:
        """Return a collector of selected keys that are probably no data; None if Include asks for them.

        `records`: every object becomes a record.
        """
        return None if self.include else Strays(empty_too=records)

    def keys(
        self, prefix: str, strays: Strays | None = None, *, alone: bool = False, bucket: str = ""
    ) -> KeyFilter:
        """Return the filter for keys below `prefix` of a bucket, which reports to `strays`.

        `alone`: if an object has the prefix as its key, no other object is data of this prefix.
        """
        globs = compile_globs(self.include), compile_globs(self.exclude)
        apart = [uri.key for uri in self.apart if uri.bucket == bucket and uri.key.startswith(prefix)]
        return KeyFilter(*globs, prefix, strays, split=self.split, alone=alone, apart=apart)


class KeyFilter:
    """Decides which keys below one prefix are selected, and keeps what reports about them need."""

    def __init__(
        self,
        include: re.Pattern[str] | None,
        exclude: re.Pattern[str] | None,
        prefix: str,
        strays: Strays | None = None,
        *,
        split: Split | None = None,
        alone: bool = False,
        apart: Iterable[str] = (),
    ) -> None:
        """`apart`: keys that count as absent from a listing."""
        self._apart = frozenset(key.encode() for key in apart)
        self._include = include
        self._exclude = exclude
        self._split = split
        self._prefix = prefix
        self._start = prefix.rfind("/") + 1
        """Characters of a key before the part that globs are compared with."""
        self.strays = strays
        self._alone = alone
        self.exact = False
        """Whether an object has the prefix as its key. A folder marker, an empty `a/b/`, is no object."""
        self.left_out = 0
        """Keys that were not selected, those of a page that was listed twice counted twice."""
        self.other_folds = 0
        """Those of them that the globs selected, and that are in no fold of the split."""
        self.example = ""
        """The part of the last such key that the globs were compared with."""

    def __call__(self, key: str) -> bool:
        """Return whether the key is selected; it begins with the prefix."""
        include, exclude, start = self._include, self._exclude, self._start
        if (include is None or include.fullmatch(key, start)) and (
            exclude is None or not exclude.fullmatch(key, start)
        ):
            if self._split is None or self._split.takes(key):
                return True
            self.other_folds += 1
        self.left_out += 1
        self.example = key[start:]
        return False

    @property
    def nothing_left(self) -> str:
        """The text of the error that every key was left out."""
        if self.other_folds and self._split is not None:
            return (
                f"Split leaves out every object: {counted(self.other_folds, 'key is', 'keys are')} in other "
                f"folds of the {self._split.of}; take more folds, or fewer and larger ones by a smaller Of"
            )
        return (
            "Include and Exclude leave out every object; globs are compared with texts such as "
            f"{self.example!r}, or without a slash with the part after its last slash"
        )

    def select(self, keys: Sequence[bytes], sizes: Sequence[int]) -> list[bool] | None:
        """Return which objects of a page of a listing are selected; None if all are. `keys`: in UTF-8."""
        prefix = self._prefix.encode()
        if prefix in keys:
            self.exact = not prefix.endswith(b"/") or sizes[keys.index(prefix)] > 0
        selected = None
        if (self._include, self._exclude, self._split) != (None, None, None):
            selected = [key not in self._apart and self(key.decode()) for key in keys]
        elif not self._apart.isdisjoint(keys):
            selected = [key not in self._apart for key in keys]
        if selected is not None:
            keys, sizes = list(compress(keys, selected)), list(compress(sizes, selected))
        if self.strays is not None and not (self._alone and self.exact):
            self.strays.look(keys, sizes, self._prefix)
        return selected


class Selector:
    """Applies the limit of one selection to runs of entries, which come in plan order."""

    def __init__(self, limit: Limit | None, empty: Callable[[], Entries], *, by_number: bool = False) -> None:
        """`empty` returns new entries of the plan's make.

        `by_number`: a sample draws entries by their number, as lines of an augmented manifest, which have no
        name of their own; else by bucket and key.
        """
        self._limit = limit
        self._empty = empty
        self._entries = self._bytes = 0
        self._sample = (
            None
            if limit is None or limit.seed is None
            else _Sample(limit, Draw(limit.seed, by_number=by_number), empty)
        )
        self.full = False
        """Whether no further entry can be selected."""

    @property
    def kept(self) -> int:
        """Number of entries that a sample keeps at the moment."""
        return 0 if self._sample is None else len(self._sample)

    def take(self, run: Entries) -> Entries:
        """Return the entries of the next run that are selected; a sample has none until `finish`.

        Raises ConfigError if the first entry has more bytes than the limit.
        """
        limit = self._limit
        if limit is None:
            return run
        if self._sample is not None:
            self._sample.take(run)
            return self._empty()
        count = limit.fits(run.sizes, entries=self._entries, size=self._bytes)
        if count < len(run):
            if not self._entries + count:
                raise _too_large(limit, run, 0)
            self.full = True
            run = _picked(run, range(count), self._empty())
        self._entries += len(run)
        self._bytes += run.total
        self.full = self.full or self._entries == limit.objects
        return run

    def finish(self) -> Entries:
        """Return the sample, in plan order; without a sample, empty entries. Raises ConfigError as `take`."""
        return self._empty() if self._sample is None else self._sample.finish()


class Draw:
    """The number that an entry draws: 64 bits of BLAKE2b, keyed with the seed, of its name.

    docs/explanation/semantics.md specifies it for other languages.
    """

    def __init__(self, seed: int, *, by_number: bool = False) -> None:
        self._key = seed.to_bytes(8, "little", signed=True)
        self._by_number = by_number
        self._number = 0

    def __call__(self, items: list[ObjectRef | bytes]) -> int:
        """Return the number of the next entry, which consists of `items`."""
        first = items[0]
        if self._by_number or not isinstance(first, ObjectRef):
            name = str(self._number)
        else:
            name = f"{first.bucket}/{first.key}"
        self._number += 1
        drawn = hashlib.blake2b(name.encode(), digest_size=8, key=self._key).digest()
        return int.from_bytes(drawn, "big")


class _Sample:
    """The entries with the smallest numbers so far, within the limit; of equal numbers the earlier entry.

    Keeps at most twice the sample and `_MARGIN` entries: when there are more, those that can no longer be in
    the sample are dropped. The number from which entries are dropped never rises, since further entries only
    take more of the limit.
    """

    def __init__(self, limit: Limit, draw: Draw, empty: Callable[[], Entries]) -> None:
        self._limit = limit
        self._draw = draw
        self._empty = empty
        self._kept = empty()
        self._drawn = array("Q")
        """Numbers of the kept entries."""
        self._cutoff = 1 << 64
        """Entries with this number or a greater one are not in the sample."""
        self._most = _MARGIN
        self._too_large: ConfigError | None = None
        """Error about the entry with the smallest number, if that does not fit; a later one may."""

    def __len__(self) -> int:
        return len(self._drawn)

    def take(self, run: Entries) -> None:
        """Draw for every entry of the run."""
        for items in run:
            drawn = self._draw(items)
            if drawn < self._cutoff:
                self._kept.add(*items)
                self._drawn.append(drawn)
                if len(self._drawn) > self._most:
                    self._cut()

    def finish(self) -> Entries:
        """Return the sample, in plan order."""
        self._cut()
        if not len(self._kept) and self._too_large is not None:
            raise self._too_large
        return self._kept

    def _cut(self) -> None:
        kept, drawn = self._kept, self._drawn
        order = sorted(range(len(drawn)), key=drawn.__getitem__)  # stable: of equal numbers the earlier one
        count = self._limit.fits([kept.sizes[index] for index in order])
        if count < len(order):
            if not count:
                self._too_large = _too_large(self._limit, kept, order[0])
            self._cutoff = drawn[order[count]]
        stay = sorted(order[:count])
        self._kept = _picked(kept, stay, self._empty())
        self._drawn = array("Q", [drawn[index] for index in stay])
        self._most = 2 * count + _MARGIN


def _too_large(limit: Limit, entries: Entries, index: int) -> ConfigError:
    """Return the error of a limit that selects nothing, because of this entry."""
    first = entries.items(index)[0]
    name = f"s3://{first.bucket}/{first.key}" if isinstance(first, ObjectRef) else "a line of the manifest"
    return ConfigError(
        f"the limit of {decimal_bytes(limit.bytes or 0)} selects nothing: the first object, {name}, has "
        f"{entries.sizes[index]} bytes, and no object is cut; raise the limit"
    )


def _picked(entries: Entries, indices: Iterable[int], into: Entries) -> Entries:
    for index in indices:
        into.add(*entries.items(index))
    return into
