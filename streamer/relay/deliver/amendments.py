"""Skips or replaces objects that were changed after the listing, and keeps the place in the plan meanwhile.

    head of line fails: changed ─▶ `amend` ─▶ skip     the plan goes on after the object
                                           └▶ refetch  its present version is delivered instead

Only an object of which no byte is delivered is amended (`torn`). The plan does not change: `consumed` stays
the same while a replacement is delivered, and then grows by the planned object's bytes. `Delivery` is the
only caller. It waits in `amend` for a HEAD, while the requests of other parts go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamer.relay.deliver.object_changes import MOST_TRIES, Change, Changes, is_change

if TYPE_CHECKING:
    from streamer.errors import SourceError
    from streamer.plan import ObjectRef
    from streamer.relay.fetch.prefetcher import Prefetcher


@dataclass(slots=True)
class _Replacement:
    """An object that is delivered instead of a planned one."""

    listed: ObjectRef
    now: ObjectRef
    planned: int
    """Bytes of the planned object in the plan."""
    tries: int
    """Versions requested, this one included."""
    delivered: int = 0


class Amendments:
    """The place of one delivery in its plan, also while an object is replaced."""

    def __init__(self, prefetcher: Prefetcher, changes: Changes) -> None:
        self.consumed = 0
        """Offset in the plan. It does not change while a replacement is delivered."""
        self._prefetcher = prefetcher
        self._changes = changes
        self._amends = changes.policy.amends
        self._replacement: _Replacement | None = None

    def __repr__(self) -> str:
        return f"<Amendments {self.consumed} bytes consumed, {self._replacement or 'nothing'} replaced>"

    @property
    def replacing(self) -> bool:
        """Whether bytes of a replacement are due."""
        return self._replacement is not None

    @property
    def due(self) -> int:
        """Offset of the byte that the head of line must have: in the plan, or in a replacement."""
        return self.consumed if self._replacement is None else self._replacement.delivered

    def begin(self, consumed: int) -> None:
        """Begin an epoch at an offset in the plan."""
        self.consumed = consumed
        self._replacement = None

    def advance(self, count: int) -> None:
        """Note that `count` bytes of the head of line are taken."""
        instead = self._replacement
        if instead is None:
            self.consumed += count
            return
        instead.delivered += count
        if instead.delivered == instead.now.size:
            self.consumed += instead.planned
            self._replacement = None

    def torn(self) -> SourceError | None:
        """Return the error of a changed object at the head of line, if it is to be amended."""
        if not self._amends:
            return None
        window = self._prefetcher.window
        head = window.head_of_line
        if head is None or head.part.start or head.delivered:
            return None
        errors = (self._prefetcher.fetches[slot].error for slot in window.object_at_head())
        return next((error for error in errors if is_change(error)), None)

    async def amend(self, error: SourceError) -> None:
        """Skip the object at the head of line, or replace it by its present version in S3.

        Raises SourceError if the policy allows neither.
        """
        head, instead, policy = self._prefetcher.window.head_of_line, self._replacement, self._changes.policy
        if head is None:
            raise error
        part, now = head.part, None
        listed, tries = (instead.listed, instead.tries + 1) if instead else (part.object, 1)
        if policy.when_changed == "refetch":
            if policy.stat is None or tries > MOST_TRIES:
                raise error
            self._prefetcher.counters.timer.starve("first_byte")
            now = await policy.stat(listed.bucket, listed.key, listed.version)
        replaced = self._prefetcher.replace_head(part, now)
        planned = instead.planned if instead else replaced
        self._changes.note(Change(part.epoch, listed, "refetched" if now else "skipped", now))
        self._replacement = _Replacement(listed, now, planned, tries) if now and now.size else None
        if self._replacement is None:
            self.consumed += planned
