"""The order in which files become visible in S3: that in which they were closed.

A file that is closed again leaves its place for the end: what was closed after its older bytes need not wait
for bytes that are lost. But a file that names others, such as the state of `--resume`, goes to the end with
it, once, so that it never names bytes that S3 has not. So it also waits while a file before it is being
written again, at most until the next scan. Every other file waits until each one before it is in S3, or
cannot be.

With several hosts, a directory in the root (a step) ends with a marker (`sidecar.upload.markers`). It is due
when the step is over on this host: the directory was renamed into place, or another one has begun that was
never there, or the trainer has ended.

    BEGUN ─ over ─▶ DUE, and each further file puts the marker after it ─ in S3 ─▶ MARKED ─ a file ─▶ BEGUN
"""

from __future__ import annotations

import itertools
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
    folder: str | None = None
    """What the names of the files begin with that it names; None if it names no others."""
    started: bool = False
    changing: bool = False
    """Whether its file is being written again."""
    moved: bool = False
    """Whether it has gone to the end with another file."""

    def names(self, file: str) -> bool:
        """Return whether it names a file of this name."""
        return self.folder is not None and file.startswith(self.folder)


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
            if entry is None or entry.changing or entry.mark != mark_of(file.status):
                folder = file.name[: file.name.rfind("/") + 1] if each.is_last else None
                self._append(Entry(file.name, mark_of(file.status), each.event, folder))
                if entry is not None and folder is None:
                    self._move_those_that_name(file.name)
            elif each.event:
                entry.event = True
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

    def _move_those_that_name(self, file: str) -> None:
        for other in [each for each in self._entries.values() if each.names(file) and not each.moved]:
            other.moved = True
            self._entries.move_to_end(other.name)

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
        before = itertools.takewhile(lambda each: each is not entry, self._entries.values())
        return all(each.changing and not entry.names(each.name) for each in before)

    def has(self, entry: Entry) -> bool:
        """Return whether an entry still has a place; it has none after its file was closed again."""
        return self._entries.get(entry.name) is entry

    def remove_changing(self) -> None:
        """Remove the entries of files that are being written again; a close or a scan finds these."""
        for each in [each for each in self._entries.values() if each.changing]:
            self.remove(each)

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

    @property
    def entries(self) -> Iterable[Entry]:
        """Those that have a place, in order."""
        return self._entries.values()
