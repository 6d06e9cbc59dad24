"""The directory of a File channel: absent or whole, and beside it what a later start needs.

    <data>/<channel>                      the files; made by one rename
    <data>/.<channel>.penstock.files      digest of the plan that the directory has
    <data>/.<channel>.penstock.new        the files of a download that has not ended
    <data>/.<channel>.penstock.journal    its journal (`sidecar.job.download_journal`)
    <data>/.<channel>.penstock.old        the replaced directory, while it is removed

A start that finds the note of its own plan downloads nothing. It continues a download that has not ended,
replaces a download of another plan, and refuses a directory without a note, which it never changes.

`publish` has the kernel write all files to the disk (syncfs(2)) before it renames the directory, so that a
crash of the machine leaves no directory with torn files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from sidecar.job.download_journal import DownloadJournal, identity, proof, read_journal
from sidecar.job.download_paths import common_prefix, relative_path
from streamer.errors import BadAnswer, ErrorContext, SinkError
from streamer.linux import sync_file_system
from streamer.plan import Arrangement, Plan
from streamer.relay.files.pieces import TargetFile
from streamer.trailer import replace_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamer.plan import ObjectRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What a download still has to fetch."""

    plan: Plan
    """The objects that are not whole, in plan order, but the one with proven bytes first."""
    first: int = 0
    """Proven bytes of the first object."""
    objects_done: int = 0
    """Number of whole objects."""
    bytes_done: int = 0
    """Proven bytes of all objects."""
    proofs: bytes = b""
    """Journal lines of the proven bytes."""


class Occupied(NamedTuple):
    """Bytes and number of files on a disk."""

    bytes: int
    files: int


class DownloadDirectory:
    """Paths and steps of one channel's download."""

    def __init__(self, data: str, channel: str) -> None:
        """`data`: the directory of all channels."""
        self.target = os.path.join(data, channel)
        beside = os.path.join(data, f".{channel}.penstock")
        self._note = f"{beside}.files"
        self._temporary = f"{beside}.new"
        self._journal = f"{beside}.journal"
        self._old = f"{beside}.old"

    def check(self) -> None:
        """Raise SinkError if the directory exists and is not a sidecar's download."""
        self._read_note()

    def has(self, plan: Plan) -> bool:
        """Return whether the directory is a download of this plan. Raises SinkError, as `check`."""
        return self._read_note() == _digest(plan)

    def _read_note(self) -> bytes | None:
        """Return the directory's note, or None if there is no directory."""
        if not os.path.lexists(self.target):
            return None
        try:
            with open(self._note, "rb") as file:
                return file.read()
        except FileNotFoundError:
            raise SinkError(
                f"{self.target} exists and is not a sidecar's download; remove it or rename the channel"
            ) from None
        except OSError as error:
            raise SinkError(f"cannot read {self._note}: {error.strerror}") from error

    def rest(self, plan: Plan) -> Rest:
        """Return what is to fetch, without what an earlier start has fetched. Raises SinkError."""
        proven = read_journal(self._journal)
        if not proven:
            return Rest(plan=plan)
        whole = bytearray(plan.objects(0))
        begun = (0, -1, "")  # the object that is not whole and has the most proven bytes
        objects_done, bytes_done, proofs = 0, 0, bytearray()
        for index, (ref, path) in enumerate(_with_paths(plan)):
            name = identity(ref, path)
            count = min(proven.get(name, -1), self._size(path))
            if count == ref.size:
                whole[index] = True
                objects_done += 1
                bytes_done += count
                proofs += proof(name, count)
            elif count < ref.size:
                begun = max(begun, (count, index, name))
        count, begun_index, name = begun
        entries = Arrangement().entries()
        if begun_index >= 0:
            entries.add(next(islice(plan.refs(0), begun_index, None)))
            proofs += proof(name, count)
        for index, ref in enumerate(plan.refs(0)):
            if not whole[index] and index != begun_index:
                entries.add(ref)
        return Rest(
            plan=Plan(entries),
            first=count,
            objects_done=objects_done,
            bytes_done=bytes_done + count,
            proofs=bytes(proofs),
        )

    def occupied(self) -> Occupied:
        """Return the space of a download that has not ended."""
        count = files = 0
        for folder, _, names in os.walk(self._temporary):
            for name in names:
                with contextlib.suppress(OSError):
                    count += os.lstat(os.path.join(folder, name)).st_blocks * 512
                    files += 1
        return Occupied(count, files)

    def _size(self, path: str) -> int:
        """Return the bytes of a file of the download that has not ended; -1 if it is no file."""
        try:
            status = os.lstat(os.path.join(self._temporary, path))
        except OSError:
            return -1
        return status.st_size if stat.S_ISREG(status.st_mode) else -1

    def begin(self, plan: Plan, rest: Rest) -> DownloadJournal:
        """Make the directory of the download, or remove from it what is not proven. Raises OSError.

        The journal is replaced first: it must not prove a file that is about to be written again.
        """
        journal = DownloadJournal(self._journal, rest.proofs)
        if not rest.proofs:
            shutil.rmtree(self._temporary, ignore_errors=True)
            os.mkdir(self._temporary)
            return journal
        keep = {os.path.join(self._temporary, path) for _, path in _with_paths(plan)}
        keep.difference_update(file.path for file in self.files(plan, rest) if not file.first)
        for folder, folders, files in os.walk(self._temporary, topdown=False):
            for name in files:
                if (path := os.path.join(folder, name)) not in keep:
                    os.unlink(path)
            for name in folders:
                _remove_folder(os.path.join(folder, name))
        return journal

    def files(self, plan: Plan, rest: Rest) -> Iterator[TargetFile]:
        """Yield the files of the objects to fetch, in their order."""
        first = rest.first
        for ref, path in _with_paths(rest.plan, common_prefix(plan)):
            yield TargetFile(os.path.join(self._temporary, path), ref.size, first, identity(ref, path))
            first = 0

    def publish(self, plan: Plan) -> None:
        """Rename the download to the channel's directory. Raises OSError, and BadAnswer for a torn file.

        Writes the note first, so that every downloaded directory has a note.
        """
        for ref, path in _with_paths(plan):
            if self._size(path) != ref.size:
                raise BadAnswer(
                    f"{os.path.join(self._temporary, path)} has not the {ref.size} bytes that were listed",
                    ErrorContext(ref.bucket, ref.key),
                )
        try:
            sync_file_system(self._temporary)
        except OSError:
            os.unlink(self._journal)  # the disk may have lost bytes that the journal proves
            raise
        shutil.rmtree(self._old, ignore_errors=True)
        if os.path.lexists(self.target):
            os.rename(self.target, self._old)
        replace_file(self._note, _digest(plan))
        os.rename(self._temporary, self.target)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._journal)
        shutil.rmtree(self._old, ignore_errors=True)


def _with_paths(plan: Plan, prefix: str | None = None) -> Iterator[tuple[ObjectRef, str]]:
    """Yield every object of the plan with its path. `prefix`: default is that of the plan."""
    prefix = common_prefix(plan) if prefix is None else prefix
    for ref in plan.refs(0):
        yield ref, relative_path(ref.key, prefix)


def _remove_folder(path: str) -> None:
    """Remove a folder unless it has files. Raises OSError."""
    if os.path.islink(path):
        os.unlink(path)
        return
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise


def _digest(plan: Plan) -> bytes:
    """Return the text of the note for a plan, which differs for each plan."""
    return f"{plan.digest} {plan.base}\n".encode()
