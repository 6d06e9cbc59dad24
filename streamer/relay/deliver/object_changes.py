"""What becomes of objects that are no longer what was listed: replaced or deleted in mid-job.

    fail      the epoch fails on reaching the object (the default)
    refetch   the object is streamed as it is now, in the place of the listed one
    skip      the object is left out

Never a mix: a replacement is possible only while no byte of the listed version has left. After that the epoch
fails under every policy. Each change is counted, reported to the channel's observer, and listed in the
trailer. The plan stays as it was listed, so every epoch decides anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from streamer.errors import ObjectMissing, SourceChanged, SourceError
from streamer.plan import ObjectRef

WhenChanged = Literal["fail", "refetch", "skip"]
Done = Literal["refetched", "skipped"]
DONE = ("failed", "refetched", "skipped")
"""What may be counted."""

MOST_LISTED = 100
"""Objects that one epoch's trailer names; all of them are counted and logged."""
MOST_TRIES = 5
"""So many versions of one object are asked for in one epoch; one that changes faster fails."""

StatObject = Callable[[str, str, str | None], Awaitable[ObjectRef]]
"""Returns the object as S3 has it now, by bucket, key and version; raises SourceError."""


@dataclass(frozen=True, slots=True)
class Change:
    """One object that was not as listed, and what was done about it."""

    epoch: int
    ref: ObjectRef
    """As listed."""
    done: Done
    now: ObjectRef | None = None
    """What is streamed instead."""

    def __str__(self) -> str:
        instead = f" as ETag {self.now.etag}" if self.now else ""
        return f"s3://{self.ref.bucket}/{self.ref.key} {self.done}{instead}"


@dataclass(frozen=True, slots=True)
class ChangePolicy:
    """What happens to an object that is not as listed."""

    when_changed: WhenChanged = "fail"
    stat: StatObject | None = None
    """Required for `refetch`."""

    def __post_init__(self) -> None:
        if self.when_changed == "refetch" and self.stat is None:
            raise ValueError("nothing can be refetched without a way to find it")


FAIL = ChangePolicy()


@dataclass(slots=True)
class Changes:
    """One channel's changed objects: the policy, and what was done."""

    policy: ChangePolicy = FAIL
    on_change: Callable[[Change], None] | None = None
    totals: Counter[str] = field(default_factory=Counter)
    """Over all epochs, by what was done."""
    count: int = 0
    """In the epoch that is being delivered."""
    listed: list[str] = field(default_factory=list)
    """The first of them, as text."""

    def begin(self) -> None:
        """Begin a new epoch."""
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
    """Whether the error says that the object is not the one that was listed."""
    return isinstance(error, (SourceChanged, ObjectMissing))
