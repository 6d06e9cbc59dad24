"""The record index of a channel as an object of S3: `s3://BUCKET/PREFIX/CHANNEL.index`.

    run, plan, verify, show   HEAD ─▶ ranged GETs of this ETag ─▶ unnamed file in TMPDIR ─▶ StoredIndex
    build, a job that learns  likewise, into a folder of copies (`sidecar.index.target`)

The index of a job is copied once, at its start: what happens to the object later changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import TYPE_CHECKING

from sidecar.config.index_place import index_path, index_uri
from sidecar.index.file import write_all
from sidecar.index.objects import check_etag, read_plan
from sidecar.index.stored import StoredIndex, open_stored
from streamer.aio import in_thread
from streamer.directory import scratch_folder
from streamer.errors import ConfigError, ObjectMissing, SinkError, SourceChanged
from streamer.plan import Plan
from streamer.s3.pages.object_info import open_inspector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sidecar.index.objects import Access
    from streamer.plan import ObjectRef, S3Uri, Segment

MOST_CHANGES = 10
"""Times that an object is read because another build has replaced it meanwhile."""


async def open_channel_index(
    place: str,
    channel: str,
    access: Access,
    *,
    named_by: str = "--from",
    build: str = "penstock index build",
) -> StoredIndex:
    """Open a channel's index in a folder or in S3, of which it makes a copy in an unnamed file.

    `named_by`: the option or key that names the place. `build`: the command that makes the index. Raises
    ConfigError if there is none, SinkError, SourceError.
    """
    if (stored := await find_channel_index(place, channel, access)) is None:
        uri = index_uri(place, channel)
        name = index_path(place, channel) if uri is None else str(uri)
        raise ConfigError(f"there is no record index {name}: make it by `{build}`, or correct {named_by}")
    return stored


async def find_channel_index(place: str, channel: str, access: Access) -> StoredIndex | None:
    """Open a channel's index, or return None if there is none. Raises SinkError, SourceError."""
    if (uri := index_uri(place, channel)) is None:
        return await in_thread(open_stored, index_path(place, channel))
    return (await open_copy(uri, access))[0]


async def open_copy(uri: S3Uri, access: Access) -> tuple[StoredIndex, str] | tuple[None, None]:
    """Return the index in an unnamed file, and its ETag; None if there is none."""
    with _copying(uri):
        file = tempfile.TemporaryFile(prefix="penstock-index-", buffering=0)  # noqa: SIM115 - closed below
    with file:
        etag = await fetch_index(uri, access, file.fileno())
        return (None, None) if etag is None else (StoredIndex(str(uri), os.dup(file.fileno())), etag)


async def fetch_index(uri: S3Uri, access: Access, fd: int) -> str | None:
    """Copy an index in S3 into an empty file; return its ETag, or None if there is none.

    Raises SourceError, SinkError.
    """
    for left in reversed(range(MOST_CHANGES)):
        with open_inspector(access.clients, give_up_after=access.job.penstock.give_up_after) as inspector:
            try:
                ref = await inspector.stat(*uri)
            except ObjectMissing:
                return None
        check_etag(ref)
        try:
            await _copy(ref, fd, uri, access)
        except SourceChanged:
            if not left:
                raise
        else:
            return ref.etag
    raise AssertionError


async def _copy(ref: ObjectRef, fd: int, uri: S3Uri, access: Access) -> None:
    with _copying(uri):
        os.ftruncate(fd, 0)
        os.lseek(fd, 0, os.SEEK_SET)
        if ref.size:
            await in_thread(os.posix_fallocate, fd, 0, ref.size)  # fails now if the disk is too small

    def write(_: Segment, data: memoryview) -> None:
        with _copying(uri):
            write_all(fd, data)

    await read_plan(Plan.of([ref]), write, access)


@contextlib.contextmanager
def _copying(uri: S3Uri) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SinkError(
            f"cannot copy the record index {uri} into {scratch_folder()}: {error.strerror}; free space "
            "there, or set TMPDIR"
        ) from error
