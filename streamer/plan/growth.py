"""Growth of an open plan: the entries that its listing has found so far, and how the listing ended.

A plan is *open* while its prefix is still being listed. Its order must be the listing's: no shuffle, and
shards by count, which deal position p of the order without knowing the rest.

    listing ─ run of entries, in key order ─▶ entries ─▶ digests ─▶ `known` ─▶ observers
    channel ─ draws entries 0 … `known` in batches, each under a digest over its `known` entries

`known` rises after the digests cover the entries, so the digest over what may be streamed can be published
before the first of its bytes leaves. The growth ends once: `complete`, or with `error`. An open plan whose
listing failed stays open, so no epoch of it can be called complete.

Pure and synchronous; one event loop. `streamer.s3.pages.open_plan` drives it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from streamer.errors import SourceError
    from streamer.plan.digest import Digests
    from streamer.plan.entries import Entries

HASHED_AT_ONCE = 500
"""Entries that one step of `add` adds to the digests: about a millisecond of the event loop."""


class Growth:
    """Entries that a listing extends, and the observers of their growth and of the end of the listing."""

    def __init__(self, entries: Entries) -> None:
        self.known = len(entries)
        """Number of entries that may be streamed."""
        self.complete = False
        """Whether the listing has ended, and the plan has all its entries."""
        self.error: SourceError | None = None
        """Error that ended the listing before its last entry."""
        self._entries = entries
        self._digests: list[Digests] = []
        self._observers: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        state = "complete" if self.complete else "failed" if self.error else "open"
        return f"<Growth {self.known} entries, {state}>"

    @property
    def ended(self) -> bool:
        """Whether the listing is over, completely or by an error."""
        return self.complete or self.error is not None

    def watch(self, observer: Callable[[], None]) -> None:
        """Call `observer` after each change."""
        self._observers.append(observer)

    def extend_digests(self, digests: Digests) -> None:
        """Keep `digests` level with `known`."""
        digests.update(self.known)
        self._digests.append(digests)

    def add(self, run: Entries) -> Iterator[None]:
        """Append the next run of the listing, whose keys come after all earlier ones, in short steps."""
        entries = self._entries
        entries.extend(run)
        while self.known < len(entries):
            end = min(len(entries), self.known + HASHED_AT_ONCE)
            for digests in self._digests:
                digests.update(end)
            self.known = end
            self._notify()
            yield

    def close(self) -> None:
        """Note that the listing has ended: the plan has all its entries."""
        self.complete = True
        self._notify()

    def fail(self, error: SourceError) -> None:
        """Note that the listing has failed for good: the entries after `known` never come."""
        self.error = error
        self._notify()

    def _notify(self) -> None:
        for observer in self._observers:
            observer()
