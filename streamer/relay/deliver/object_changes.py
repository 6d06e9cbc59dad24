"""Policy for objects that were replaced or deleted after the listing, and the record of such changes.

    fail      the epoch fails at the object (the default)
    refetch   the object's present version is streamed instead of the listed one
    skip      the object is left out

Two versions are never mixed: an object can be replaced only before the first byte of the listed version is
delivered. After that the epoch fails under every policy. Each change is counted, reported to the channel's
observer, and listed in the trailer. The plan does not change, so each epoch decides again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from streamer.errors import ObjectMissing, SourceChanged, SourceError
from streamer.plan import ObjectRef
from streamer.plan.validators import described

WhenChanged = Literal["fail", "refetch", "skip"]
Done = Literal["refetched", "skipped"]
DONE = ("failed", "refetched", "skipped")
"""Actions that are counted."""

MOST_LISTED = 100
"""Maximum number of changed objects that one epoch's trailer names; all are counted and logged."""
MOST_TRIES = 5
"""Maximum number of versions of one object requested in one epoch; after that the epoch fails."""

StatObject = Callable[[str, str, str | None], Awaitable[ObjectRef]]
"""Returns the present version of an object, by bucket, key and version id. Raises SourceError."""


@dataclass(frozen=True, slots=True)
class Change:
    """One object that differs from the listed version, and the action taken."""

    epoch: int
    ref: ObjectRef
    """The listed version."""
    done: Done
    now: ObjectRef | None = None
    """The version that is streamed instead; None if the object is skipped."""

    def __str__(self) -> str:
        instead = f" as {described(self.now.etag)}" if self.now else ""
        return f"s3://{self.ref.bucket}/{self.ref.key} {self.done}{instead}"


@dataclass(frozen=True, slots=True)
class ChangePolicy:
    """Action for objects that differ from the listed version."""

    when_changed: WhenChanged = "fail"
    stat: StatObject | None = None
    """Required for `refetch`."""

    def __post_init__(self) -> None:
        if self.when_changed == "refetch" and self.stat is None:
            raise ValueError("nothing can be refetched without a way to find it")

    @property
    def amends(self) -> bool:
        """Whether a changed object is skipped or replaced, so that the epoch does not fail."""
        return self.when_changed != "fail"


FAIL = ChangePolicy()


@dataclass(slots=True)
class Changes:
    """One channel's policy for changed objects, and its counts of them."""

    policy: ChangePolicy = FAIL
    on_change: Callable[[Change], None] | None = None
    totals: Counter[str] = field(default_factory=Counter)
    """Changes in all epochs, by action."""
    count: int = 0
    """Changes in the current epoch."""
    listed: list[str] = field(default_factory=list)
    """Texts of the current epoch's first `MOST_LISTED` changes."""

    def begin(self) -> None:
        """Reset the counts of the current epoch."""
        self.count = 0
        self.listed = []

    def note(self, change: Change) -> None:
        """Count the change and report it."""
        self.totals[change.done] += 1
        self.count += 1
        if len(self.listed) < MOST_LISTED:
            self.listed.append(str(change))
        if self.on_change is not None:
            self.on_change(change)


def is_change(error: SourceError | None) -> bool:
    """Return whether the error means that the object was replaced or deleted after the listing."""
    return isinstance(error, (SourceChanged, ObjectMissing))
