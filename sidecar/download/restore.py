"""Restores checkpoints: objects of `CheckpointConfig.S3Uri` become files of `LocalPath` before the training.

    list      files and whole steps in S3 (`sidecar.download.checkpoints`)
    compare   a file that the journal has as it is now is replaced if S3 has another one; any other file stays
              as it is, and is named, because it is uploaded later
    fetch     a batch, as a File channel (`Download`), and compare it with the checksums that S3 stores
    publish   write the batch to the disk, rename each file into place, note it in the journal

So a file is absent, or whole and verified, with the time of its object. A kill costs a batch. If an object
changes meanwhile, everything is listed again.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from sidecar.config.transport import retry_policy, transport_spec
from sidecar.download.channels import Download, local_errors
from sidecar.download.checkpoints import files_of, list_checkpoints, read_markers, whole_steps
from sidecar.download.directory import Rest
from sidecar.process.logs import WaitLog, log
from sidecar.upload.journal import Journal, journal_of
from sidecar.upload.watch import OURS
from streamer.aio import in_thread
from streamer.errors import SinkError, SourceChanged
from streamer.linux import sync_file_system
from streamer.plan import Plan
from streamer.relay.files.target import TargetFile
from streamer.relay.staging.taps import ChecksumTap
from streamer.s3.checksums import StoredChecksums
from streamer.trailer import replace_file
from streamer.units import decimal_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sidecar.download.checkpoints import InS3
    from sidecar.observe.state import JobState
    from streamer.directory import Directory
    from streamer.plan import ObjectRef, S3Uri
    from streamer.s3.client.session import Clients

RESTORED = f"{OURS}.restored"
"""File with the names of the steps that were chosen, for ranks to compare."""
_NEW = f"{OURS}.restoring"
BATCH_BYTES, BATCH_FILES = 4 << 30, 10_000
MOST_LISTINGS = 5
MOST_NAMED = 10


async def restore_checkpoints(state: JobState, clients: Clients, uri: S3Uri, root: Directory) -> None:
    """Restore what S3 has below `uri` and `root` has not. `state` has the progress.

    Raises SourceError, SinkError, ConfigError.
    """
    state.downloading = lambda: f"checkpoints: listing {uri}"
    try:
        with local_errors(), contextlib.closing(await in_thread(Journal, root, journal_of(uri))) as journal:
            for left in reversed(range(MOST_LISTINGS)):
                try:
                    return await _restore(state, clients, uri, root, journal)
                except SourceChanged as error:
                    if not left:
                        raise
                    log.warning("listing the checkpoints again", error=str(error))
    finally:
        state.downloading = None
        with contextlib.suppress(OSError):
            await in_thread(root.remove_tree, _NEW)


async def _restore(state: JobState, clients: Clients, uri: S3Uri, root: Directory, journal: Journal) -> None:
    policy, newest = retry_policy(state.job), state.job.penstock.checkpoints.restore == "newest"
    on_wait = WaitLog(give_up_after=policy.give_up_after).waiting
    found = await list_checkpoints(clients, uri, policy, on_wait)
    files, left_out, chosen = files_of(found), set[str](), list[str]()
    if newest or len(state.hosts.names) > 1:
        left_out = {file.step for file in files}
        files, chosen = whole_steps(files, await read_markers(found, clients, policy, on_wait), newest=newest)
        left_out -= {file.step for file in files}
    todo = await in_thread(_to_fetch, files, root, journal)
    download = Download("checkpoints", Plan.of(file.ref for file in todo), root.path)
    state.downloading = download.text
    outcomes = Counter[str]()

    def note(_: ObjectRef, outcome: str) -> None:
        outcomes[outcome] += 1

    spec = transport_spec(state.job, {uri.bucket}, ["checksums are computed in memory"])
    spec = replace(spec, wish="auto") if spec.wish == "splice" else spec
    stored, done, moved = StoredChecksums(clients.control, clients.credentials), 0, 0
    for batch in _batches(todo):
        rest = Rest(plan=Plan.of(file.ref for file in batch), objects_done=done, bytes_done=moved)
        with await in_thread(_emptied, root) as new:
            sizes = enumerate(file.ref.size for file in batch)
            targets = (TargetFile(str(n), size, number=n, parts=new, tree=new) for n, size in sizes)
            await download.fetch(targets, rest, clients, spec, ChecksumTap(stored, note))
            await in_thread(_publish, batch, new, root, journal)
        done, moved = done + len(batch), moved + rest.plan.total_bytes(0)
    names = "".join(f"{step}\n" for step in chosen).encode()
    await in_thread(_write_steps, root, names)
    log.info(
        "checkpoints restored",
        objects=len(files),
        fetched=done,
        bytes=moved,
        verified=outcomes["verified"],
        left_out=sorted(left_out)[-MOST_NAMED:],
        newest=chosen,
    )


def _to_fetch(files: list[InS3], root: Directory, journal: Journal) -> list[InS3]:
    """Return the files that are absent, or as an object that S3 has replaced; log the others that differ.

    Raises SinkError if they need more space than there is.
    """
    todo, differ = [], []
    for file in files:
        local = _local(file, root, journal)
        if local is None or local not in (file.ref.etag, ""):
            todo.append(file)
        elif not local:
            differ.append(file.path)
    if differ:
        log.warning("local checkpoints are kept", files=differ[:MOST_NAMED], count=len(differ))
    space, needed = os.fstatvfs(root.fd), sum(file.ref.size for file in todo)
    if needed > (free := space.f_bavail * space.f_frsize):
        raise SinkError(
            f"checkpoints need {decimal_bytes(needed)}, and {root.path} has {decimal_bytes(free)} left; set "
            "Penstock.Checkpoints: {Restore: newest}, remove old ones from S3, or give LocalPath more space"
        )
    return todo


def _local(file: InS3, root: Directory, journal: Journal) -> str | None:
    """Return the ETag of a local file by the journal, or "" if it has changed since, None if it is absent."""
    *folders, name = file.path.split("/")
    try:
        with root.enter(*folders) as folder:
            status = folder.status(name)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return ""
    return None if status is None else journal.same(file.path, status) or ""


def _emptied(root: Directory) -> Directory:
    root.remove_tree(_NEW)
    return root.make(_NEW)


def _publish(batch: list[InS3], new: Directory, root: Directory, journal: Journal) -> None:
    """Rename whole files into place, unless another program has made one there meanwhile."""
    for number, file in enumerate(batch):
        if file.modified:
            os.utime(str(number), (file.modified, file.modified), dir_fd=new.fd)
    sync_file_system(new.fd)
    for number, file in enumerate(batch):
        *folders, name = file.path.split("/")
        if _local(file, root, journal) != "":
            with root.add(*folders) as folder:
                new.move(str(number), folder, name)
                journal.note_file(file.path, os.lstat(name, dir_fd=folder.fd), file.ref.etag)


def _write_steps(root: Directory, names: bytes) -> None:
    with root.errors(RESTORED):
        replace_file(RESTORED, names, dir_fd=root.fd)


def _batches(files: list[InS3]) -> Iterator[list[InS3]]:
    """Cut the files into batches."""
    batch: list[InS3] = []
    size = 0
    for file in files:
        batch.append(file)
        size += file.ref.size
        if len(batch) == BATCH_FILES or size >= BATCH_BYTES or file is files[-1]:
            yield batch
            batch, size = [], 0
