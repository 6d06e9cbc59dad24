"""The order in which files become visible in S3: that in which they were closed.

A file that is closed again leaves its place for the end: what was closed after its older bytes need not wait
for bytes that are lost. Every other file waits until each one before it is in S3, or cannot be.

With several hosts, a directory in the root (a step) ends with a marker (`sidecar.upload.markers`). It is due
when the step is over on this host: the directory was renamed into place, or another one has begun that was
never there, or the trainer has ended.

    BEGUN ─ over ─▶ DUE, and each further file puts the marker after it ─ in S3 ─▶ MARKED ─ a file ─▶ BEGUN
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from sidecar.upload.tree import mark_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sidecar.upload.tree import Mark
    from sidecar.upload.watch import ClosedFile


class Step(Enum):
    """How far a step is on this host; see above."""

    BEGUN = auto()
    DUE = auto()
    MARKED = auto()


@dataclass(eq=False, slots=True)
class Entry:
    """A file to upload, or a marker."""

    name: str
    """Path of the file, or of the step with a slash."""
    mark: Mark | None = None
    """The mark of the file when it was found; None for a marker."""
    event: bool = False
    """See `ClosedFile`."""
    started: bool = False


class Order:
    """The files that are to be uploaded."""

    def __init__(self, *, marked: bool) -> None:
        """`marked`: whether steps have markers."""
        self.steps: dict[str, Step] = {}
        self._marked = marked
        self._entries: OrderedDict[str, Entry] = OrderedDict()

    def resume(self, names: Iterable[str], unmarked: Iterable[str]) -> None:
        """Add the steps of earlier processes: of files in S3, and of steps without a marker."""
        if self._marked:
            self.steps |= {name.split("/")[0]: Step.MARKED for name in names if "/" in name}
            for step in unmarked:
                self.end()
                self.steps[step] = Step.BEGUN

    def take(self, found: Iterable[ClosedFile]) -> None:
        """Append files that are new, or that were closed again."""
        for each in found:
            file, entry = each.file, self._entries.get(each.file.name)
            step, below, _ = file.name.partition("/")
            in_step = self._marked and bool(below)
            if in_step and step not in self.steps:
                self.end()
            if entry is None or entry.mark != mark_of(file.status):
                self._append(Entry(file.name, mark_of(file.status), each.event))
            elif each.event:
                self._entries.move_to_end(file.name)
            else:
                continue
            if in_step and (each.whole or self.steps.get(step) is Step.DUE):
                self._due(step)
            elif in_step:
                self.steps[step] = Step.BEGUN

    def end(self) -> None:
        """Let all steps be over."""
        for step, state in self.steps.items():
            if state is Step.BEGUN:
                self._due(step)

    def _due(self, step: str) -> None:
        """Let a step be over: its marker comes after all that is waiting now."""
        self.steps[step] = Step.DUE
        self._append(Entry(f"{step}/"))

    def _append(self, entry: Entry) -> None:
        self._entries.pop(entry.name, None)
        self._entries[entry.name] = entry

    def next(self) -> Entry | None:
        """Return the first entry that has not been started, and count it as started."""
        for entry in self._entries.values():  # those that have been are few, and in front
            if not entry.started:
                entry.started = True
                return entry
        return None

    def is_first(self, entry: Entry) -> bool:
        """Return whether all that was closed before an entry is in S3, or cannot be."""
        return next(iter(self._entries.values())) is entry

    def has(self, entry: Entry) -> bool:
        """Return whether an entry still has a place; it has none after its file was closed again."""
        return self._entries.get(entry.name) is entry

    def remove(self, entry: Entry) -> None:
        """Remove an entry that is in S3, or cannot be."""
        if self.has(entry):
            del self._entries[entry.name]

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the files that have a place."""
        return sum(entry.mark[1] for entry in self._entries.values() if entry.mark is not None)

    @property
    def waiting_files(self) -> int:
        """Number of the files that have a place."""
        return sum(entry.mark is not None for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)
