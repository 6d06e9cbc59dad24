"""What a sidecar that is killed leaves to the next one: uploads that it had begun, and files that are in S3.

    note_upload, note_file, note_step ─▶ a line of JSON each ─ next start ─▶ left, files, steps

A line is appended by one write(2) and never changes. It begins with its line end, so that one that a kill or
a full disk has cut short spoils no other. Each start rewrites the file without what is over. Nothing is
flushed to the disk: a machine that loses power may lose lines, and then files are uploaded again. A file that
the trainer has removed, with its directory perhaps, is written again with the next record.

The trainer may write in the directory. So only a regular file of this user with one name is read and written
(`streamer.directory`), anything else of that name is replaced, and a line that is no record is ignored. A
trainer of the same user can write records, as it can write checkpoints; so their keys are used only below the
job's own prefix. Each prefix has a journal of its own: what one job has uploaded is not in S3 for another one
on the same volume.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

from sidecar.process.logs import log
from sidecar.upload.tree import Mark, mark_of
from streamer.trailer import replace_file

if TYPE_CHECKING:
    from streamer.directory import Directory
    from streamer.plan import S3Uri

FILE = ".penstock.uploads"
LONGEST = 1 << 28
"""Most bytes that are read; a million records have fewer."""


class StoredFile(NamedTuple):
    """A file that is in S3."""

    mark: Mark
    etag: str


def journal_of(uri: S3Uri) -> str:
    """Return the name of the journal of uploads below a prefix."""
    return f"{FILE}.{crc32(str(uri).encode()):08x}"


class Journal:
    """The records of one prefix in one directory; its owner closes it once."""

    def __init__(self, directory: Directory, name: str = FILE) -> None:
        """Read the records, and rewrite the file. If it cannot be written, that is logged."""
        self.began = time.time()
        """When the first process of the journal began, in seconds since 1970."""
        self.files: dict[str, StoredFile] = {}
        """By name."""
        self.steps: dict[str, bool] = {}
        """Directories whose marker is to be written, in the order in which they were begun."""
        self._uploads: dict[tuple[str, str], bool] = {}
        self._directory, self._name = directory, name
        self._fd = -1
        self._failed = False
        try:
            with open(directory.open(name, os.O_RDWR), "rb") as file:  # for writing: none but this user's own
                for line in file.read(LONGEST).split(b"\n"):
                    with contextlib.suppress(ValueError, RecursionError):  # cut short, or another program's
                        self._apply(json.loads(line))
        except OSError:  # there is none, or another program's
            pass
        self.left = list(self._uploads)
        """Keys and ids of multipart uploads that an earlier process has begun; an empty id is unknown."""
        try:
            if directory.status(name) is not None and directory.size(name) < 0:
                directory.remove_tree(name)
            with directory.errors(name):
                replace_file(name, b"".join(self._lines()), mode=0o600, dir_fd=directory.fd)
            self._fd = directory.open(name, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            self._report(error)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def note_upload(self, key: str, upload_id: str, begun: bool) -> None:  # noqa: FBT001 - as `on_upload`
        """Note that a multipart upload was begun, or completed or aborted.

        An empty id announces one before it is begun: a kill may lose the response that has the id.
        """
        self._note("upload", [key, upload_id], begun)

    def note_file(self, name: str, status: os.stat_result, etag: str) -> None:
        """Note that a file is in S3 with this ETag, as it was uploaded or restored."""
        self._note("file", name, [mark_of(status), etag])

    def note_step(self, step: str, unmarked: bool) -> None:  # noqa: FBT001 - as `note_upload`
        """Note that a directory needs a marker, or has it."""
        if unmarked != (step in self.steps):
            self._note("step", step, unmarked)

    def same(self, name: str, status: os.stat_result) -> str | None:
        """Return the ETag of a file that is in S3 as it is now; None if it must be uploaded."""
        stored = self.files.get(name)
        return stored.etag if stored is not None and stored.mark == mark_of(status) else None

    def _apply(self, record: Any) -> None:
        match record:
            case ["began", "", float(seconds)]:
                self.began = seconds
            case ["file", str(name), [[int(inode), int(size), int(modified)], str(etag)]]:
                self.files[name] = StoredFile((inode, size, modified), etag)
            case ["upload", [str(key), str(upload_id)], True]:
                self._uploads[key, upload_id] = True
            case ["upload", [str(key), str(upload_id)], False]:
                self._uploads.pop((key, upload_id), None)
            case ["step", str(step), True]:
                self.steps[step] = True
            case ["step", str(step), False]:
                self.steps.pop(step, None)

    def _lines(self) -> list[bytes]:
        records: dict[str, dict[Any, Any]] = {
            "began": {"": self.began},
            "file": self.files,
            "upload": self._uploads,
            "step": self.steps,
        }
        return [_line(kind, *record) for kind, each in records.items() for record in each.items()]

    def _note(self, *record: Any) -> None:
        self._apply(record)
        try:
            if self._fd >= 0 and self._directory.status(self._name) is None:
                with contextlib.suppress(FileNotFoundError):  # until the trainer makes the directory anew
                    fd = self._directory.open(self._name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL)
                    os.dup2(fd, self._fd, inheritable=False)
                    os.close(fd)
                    os.write(self._fd, b"".join(self._lines()))
            elif self._fd >= 0:
                os.write(self._fd, _line(*record))
        except OSError as error:
            self._report(error)

    def _report(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            log.warning(
                "uploads cannot be noted",
                error=f"cannot write {error.filename or FILE}: {error.strerror}",
                do="let this user write there; else a sidecar that is killed leaves multipart uploads in S3",
            )


def _line(*record: Any) -> bytes:
    return b"\n" + json.dumps(record).encode()
