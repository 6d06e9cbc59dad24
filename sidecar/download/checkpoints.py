"""The checkpoints in S3: which objects are files to restore, and which directories are whole.

Names of Penstock's own begin with `.penstock` and are no files. A directory in the root is a step, if the
name of another one differs from its name in a number alone: `step-1` beside `step-2`, and not `runs`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import defaultdict
from datetime import UTC
from typing import TYPE_CHECKING, Any, NamedTuple

from sidecar.download.paths import LONGEST_NAME
from sidecar.process.logs import log
from sidecar.upload.markers import PREFIX, Marker, newest_complete, parse_marker
from sidecar.upload.watch import is_own
from streamer.aio import task_group
from streamer.errors import ConfigError, ErrorContext, ObjectMissing
from streamer.plan import S3Uri
from streamer.plan.validators import validator_of
from streamer.retry import retry_while_unavailable
from streamer.s3.manifests.body import read_manifest
from streamer.s3.pages.page_parser import Page, next_token
from streamer.s3.pages.prefix_pages import Cursor
from streamer.s3.pages.validation import described_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from streamer.errors import SourceError
    from streamer.plan import ObjectRef
    from streamer.retry import RetryPolicy
    from streamer.s3.client.session import Clients

MARKERS_AT_ONCE = 16
_NUMBER = re.compile("[0-9]+")


def numbers_of(path: str) -> list[int]:
    """Return the numbers in a path, which decide between checkpoints of one second: S3 has whole seconds."""
    return [*map(int, _NUMBER.findall(path))]


class InS3(NamedTuple):
    """An object of the checkpoints."""

    path: str
    """What its key has after the prefix."""
    ref: ObjectRef
    modified: float
    """Unix time; 0 if the server does not list it."""

    @property
    def step(self) -> str:
        """The directory in the root that it is in; empty if it is in the root itself."""
        return self.path.partition("/")[0] if "/" in self.path else ""


async def list_checkpoints(
    clients: Clients, uri: S3Uri, policy: RetryPolicy, on_wait: Callable[[SourceError], None]
) -> list[InS3]:
    """Return the objects of the checkpoints. Raises SourceError."""
    found: list[InS3] = []
    context, cursor = ErrorContext(*uri), Cursor()
    request: dict[str, Any] = {"Bucket": uri.bucket, "Prefix": uri.key}

    async def send(_: Callable[[], None]) -> Any:
        return await clients.control.send("list_objects_v2", context, **request)

    while True:
        listed = await retry_while_unavailable(send, policy, on_wait=on_wait)
        entries = listed.get("Contents", ())
        for each in entries:
            key, time = each["Key"], each.get("LastModified")
            etag = validator_of(each.get("ETag"), time and time.astimezone(UTC).isoformat())
            ref = described_object(ErrorContext(uri.bucket, key), key, size=each.get("Size", -1), etag=etag)
            found.append(InS3(key.removeprefix(uri.key), ref, time.timestamp() if time else 0.0))
        token, truncated = listed.get("NextContinuationToken"), listed.get("IsTruncated")
        token = next_token(token, context, truncated=truncated, keys=len(entries))
        cursor.advance(Page(keys=[each["Key"].encode() for each in entries], token=token), context)
        if cursor.token is None:
            return found
        request["ContinuationToken"] = cursor.token


async def read_markers(
    found: list[InS3], clients: Clients, policy: RetryPolicy, on_wait: Callable[[SourceError], None]
) -> list[Marker]:
    """Return the markers among the objects of a listing. Raises SourceError."""
    gate, markers = asyncio.Semaphore(MARKERS_AT_ONCE), list[Marker]()

    async def read(ref: ObjectRef) -> None:
        uri = S3Uri(ref.bucket, ref.key)
        async with gate:
            reading = read_manifest(clients, uri, policy, on_wait=on_wait, what="a marker of a checkpoint")
            with contextlib.suppress(ObjectMissing):
                async with contextlib.aclosing(reading) as pieces:
                    if marker := parse_marker(b"".join([piece async for piece in pieces])):
                        markers.append(marker)

    async with task_group() as tasks:
        for each in found:
            if each.path.startswith(PREFIX):
                tasks.create_task(read(each.ref))
    return markers


def files_of(found: list[InS3]) -> list[InS3]:
    """Return the objects that are files, without markers of folders. Raises ConfigError."""
    folders = {each.path[: slash.start()] for each in found for slash in re.finditer("/", each.path)}
    files = []
    for each in found:
        names = each.path.split("/")
        if is_own(names[0]) or (each.ref.size <= 1 and not names[-1]):
            continue
        if each.path in folders:
            if each.ref.size:
                log.warning("checkpoint not restored", file=each.path, reason="a directory has its name")
        elif "\0" in each.path or any(
            name in ("", ".", "..") or len(name.encode()) > LONGEST_NAME for name in names
        ):
            raise ConfigError(
                f"s3://{each.ref.bucket}/{each.ref.key} cannot be a file of LocalPath; remove it, or give "
                "CheckpointConfig another S3Uri"
            )
        else:
            files.append(each)
    return files


def whole_steps(
    files: Iterable[InS3], markers: Iterable[Marker], *, newest: bool
) -> tuple[list[InS3], list[str]]:
    """Return the files to restore, and of each kind of steps the newest one that all hosts have written.

    `newest`: restore no other step.
    """
    files, times = list(files), {"": 0.0}
    for file in files:
        times[file.step] = max(times.get(file.step, 0.0), file.modified)
    marked: dict[str, list[Marker]] = defaultdict(list)
    for marker in markers:
        marked[marker.step].append(marker)
    kinds: dict[str, list[str]] = defaultdict(list)
    for step in sorted(times, key=lambda step: (times[step], numbers_of(step))):
        kinds[_NUMBER.sub("#", step)].append(step)
    etags = {file.path: file.ref.etag for file in files}
    kept, chosen = set(), []
    for steps in kinds.values():
        whole, last = steps, steps[-1]
        if of_kind := [marker for step in steps for marker in marked[step]]:
            whole = [step for step in steps if newest_complete(marked[step], etags)]
            last = newest_complete(of_kind, etags) or ""
        kept.update([last] if newest else whole)
        chosen += [last] if last else []
    return [file for file in files if file.step in kept], sorted(chosen)
