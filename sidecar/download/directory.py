"""The directory of a File channel: absent or whole, and beside it what a later start needs.

    <data>/<channel>                      the files; made by one rename
    <data>/.<channel>.penstock.files      digest of the plan that the directory has
    <data>/.<channel>.penstock.new        whole files of a download that has not ended
    <data>/.<channel>.penstock.begun      what these are files of: boot, digest, identity of each object
    <data>/.<channel>.penstock.part       files that are not whole, and what is being removed

A start that finds every file of its own plan, with its size, downloads nothing. If some are missing or have
another size, it takes the directory back as a download that has not ended, so that the directory stays absent
or whole. It fetches the files of such a download that are missing, replaces a download of another plan, and
refuses a directory without a note, which it never changes.

An identity is a hash of bucket, key, version id, size, ETag and path, so that a file of another version of
its object, or of a plan that is another now, is not taken for it. It counts in the boot that it was noted in:
nothing is flushed to the disk during a download, so after the machine has crashed a file may have its size
and not its bytes. `publish` has the kernel write all files to the disk (syncfs(2)) before it renames the
directory.

Everything is done by the descriptor of the data directory, and no link in it is followed
(`streamer.directory`): other users may write there too.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from sidecar.download.paths import common_prefix, relative_path
from streamer.directory import Directory
from streamer.errors import SinkError
from streamer.linux import sync_file_system
from streamer.plan import Arrangement, Plan
from streamer.relay.files.target import TargetFile
from streamer.trailer import replace_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamer.plan import ObjectRef

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_OLD = "old"
"""Name, beside the numbers of files that are not whole, of a directory that is being removed."""
DEEPEST = 512
"""Most steps of a path below a channel's directory: a key has 1,024 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What a download still has to fetch."""

    plan: Plan
    """The objects that are not whole, in plan order."""
    objects_done: int
    """Number of whole objects."""
    bytes_done: int
    """Bytes of the whole objects."""


class Occupied(NamedTuple):
    """Bytes and number of files on a disk."""

    bytes: int
    files: int


class DownloadDirectory:
    """Names and steps of one channel's download. Its owner closes it."""

    def __init__(self, data: Directory, channel: str) -> None:
        """`data`: the directory of all channels."""
        self._data = data
        self._target = channel
        beside = f".{channel}.penstock"
        self._note = f"{beside}.files"
        self._new = f"{beside}.new"
        self._begun = f"{beside}.begun"
        self._part = f"{beside}.part"
        self._open = contextlib.ExitStack()

    def close(self) -> None:
        """Close the directories that `begin` has opened."""
        self._open.close()

    def check(self) -> None:
        """Raise SinkError if the directory exists and is not a sidecar's download."""
        self._read_note()

    def has(self, plan: Plan) -> bool:
        """Return whether the directory has every file of this plan. Raises SinkError, as `check`."""
        if self._read_note() != _digest(plan):
            return False
        with contextlib.suppress(OSError), self._data.enter(self._target) as tree:
            return all(size == ref.size for ref, _, size in _files(tree, plan))
        return False

    def _read_note(self) -> bytes | None:
        """Return the directory's note, or None if there is no directory."""
        path = os.path.join(self._data.path, self._target)
        try:
            if self._data.status(self._target) is None:
                return None
            return self._read(self._note)
        except FileNotFoundError:
            raise SinkError(
                f"{path} exists and is not a sidecar's download; remove it or rename the channel"
            ) from None
        except OSError as error:
            raise SinkError(f"cannot read {error.filename}: {error.strerror}") from error

    def _read(self, name: str) -> bytes:
        with open(self._data.open(name, os.O_RDONLY), "rb") as file:
            return file.read()

    def occupied(self, plan: Plan) -> Occupied:
        """Return the space of what `begin` would keep or remove. Raises SinkError, as `check`."""
        count = files = 0
        begun = self._target if self._read_note() == _digest(plan) else self._new
        folders: list[tuple[str, ...]] = [(begun,), (self._part,)]
        for folder in folders:
            with contextlib.suppress(OSError), self._data.enter(*folder) as here:
                for name in here.names():
                    if (status := here.status(name)) is None:
                        continue
                    if not stat.S_ISDIR(status.st_mode):
                        count += status.st_blocks * 512
                        files += 1
                    elif len(folder) < DEEPEST:
                        folders.append((*folder, name))
        return Occupied(count, files)

    def begin(self, plan: Plan) -> Rest:
        """Open the directories of the download, and return what is to fetch. Raises OSError, SinkError.

        A kill after any step leaves no file that `_begun` names and the plan's object is not.
        """
        data, heading = self._data, _heading(plan)
        published = self._read_note() == _digest(plan)  # `has` has missed a file of it
        known = self._read_begun()
        data.remove_tree(self._part)
        self._parts = self._open.enter_context(data.make(self._part))
        if published:
            data.remove_tree(self._new)
            self._write_begun(plan, heading)
            data.move(self._target, data, self._new)
            data.remove(self._note)
        elif not known or known[0] != heading:
            self._keep(plan, set(known))
            self._write_begun(plan, heading)
        self._tree = self._open.enter_context(data.make(self._new))
        entries, objects_done, bytes_done = Arrangement().entries(), 0, 0
        for ref, _, size in _files(self._tree, plan):
            if size == ref.size:
                objects_done += 1
                bytes_done += size
            else:
                entries.add(ref)
        return Rest(plan=Plan(entries), objects_done=objects_done, bytes_done=bytes_done)

    def _read_begun(self) -> list[bytes]:
        """Return heading and identities of the download that has not ended; none if it is of another boot."""
        try:
            boot, *lines = self._read(self._begun).splitlines()
        except (OSError, ValueError):
            return []
        return lines if boot == _boot() else []

    def _write_begun(self, plan: Plan, heading: bytes) -> None:
        identities = (_identity(ref, path) for ref, path in _with_paths(plan))
        self._replace(self._begun, b"\n".join([_boot(), heading, *identities, b""]))

    def _replace(self, name: str, note: bytes) -> None:
        status = self._data.status(name)
        if status is not None and stat.S_ISDIR(status.st_mode):
            self._data.remove_tree(name)
        with self._data.errors(name):
            replace_file(name, note, dir_fd=self._data.fd)

    def _keep(self, plan: Plan, known: set[bytes]) -> None:
        """Leave only files of this plan in the download that has not ended. `known`: as `_read_begun`."""
        data, parts = self._data, self._parts
        if known:
            data.make(self._new).close()  # it may be gone, or be a link now
            data.move(self._new, parts, _OLD)
            with parts.enter(_OLD) as old, data.make(self._new) as tree:
                for ref, path, size in _files(old, plan):
                    if size == ref.size and _identity(ref, path) in known:
                        *folders, name = path.split("/")
                        with old.enter(*folders) as was, tree.make(*folders) as here:
                            was.move(name, here, name)
            parts.remove_tree(_OLD)
        else:
            data.remove_tree(self._new)

    def files(self, plan: Plan, rest: Rest) -> Iterator[TargetFile]:
        """Yield the files of the objects to fetch, in their order."""
        for number, (ref, path) in enumerate(_with_paths(rest.plan, common_prefix(plan))):
            yield TargetFile(path, ref.size, number=number, parts=self._parts, tree=self._tree)

    def publish(self, plan: Plan) -> None:
        """Rename the download to the channel's directory. Raises OSError, and SinkError if it has changed.

        Writes the note first, so that every downloaded directory has a note.
        """
        data, tree = self._data, self._tree
        for ref, path, size in _files(tree, plan):
            if size != ref.size:
                raise _changed(os.path.join(tree.path, path))
        try:
            sync_file_system(tree.fd)
        except OSError:
            data.remove(self._begun)  # the disk may have lost bytes of the files
            raise
        if data.status(self._target) is not None:
            data.move(self._target, self._parts, _OLD)
        self._replace(self._note, _digest(plan))
        data.move(self._new, data, self._target)
        status = data.status(self._target)
        if status is None or not os.path.samestat(status, os.fstat(tree.fd)):
            raise _changed(os.path.join(data.path, self._target))
        self.tidy()

    def tidy(self) -> None:
        """Remove what a published directory does not need, such as one that it replaced. Raises OSError."""
        self._data.remove(self._begun)
        self._data.remove_tree(self._part)


def _changed(path: str) -> SinkError:
    return SinkError(
        f"another program has changed {path} during the download; let no other program write there, and "
        "start again"
    )


def _files(tree: Directory, plan: Plan) -> Iterator[tuple[ObjectRef, str, int]]:
    """Yield every object of the plan, its path, and the bytes of its file in `tree`; -1 if it has none."""
    opened: list[str] | None = None
    folder: Directory | None = None
    with contextlib.ExitStack() as stack:
        for ref, path in _with_paths(plan):
            *folders, name = path.split("/")
            if folders != opened:  # objects of one folder follow each other
                stack.close()
                opened, folder = folders, None
                with contextlib.suppress(OSError):
                    folder = stack.enter_context(tree.enter(*folders))
            yield ref, path, -1 if folder is None else folder.size(name)


def _with_paths(plan: Plan, prefix: str | None = None) -> Iterator[tuple[ObjectRef, str]]:
    """Yield every object of the plan with its path. `prefix`: default is that of the plan."""
    prefix = common_prefix(plan) if prefix is None else prefix
    for ref in plan.refs(0):
        yield ref, relative_path(ref.key, prefix)


def _identity(ref: ObjectRef, path: str) -> bytes:
    """Return the hash that stands for one version of an object at a path of its channel's directory."""
    fields = (ref.bucket, ref.key, ref.version or "", str(ref.size), ref.etag, path)
    return blake2b("\n".join(fields).encode(), digest_size=16).hexdigest().encode()


def _boot() -> bytes:
    """Return the first line of a note of this boot; one that no note has if the kernel does not name it."""
    try:
        with open(_BOOT_ID, "rb") as file:
            return b"penstock download 2 " + file.read().strip()
    except OSError:
        return b"penstock download 2 " + os.urandom(16).hex().encode()


def _heading(plan: Plan) -> bytes:
    return _digest(plan).strip()


def _digest(plan: Plan) -> bytes:
    """Return the text of the note for a plan, which differs for each plan."""
    return f"{plan.digest} {plan.base}\n".encode()
