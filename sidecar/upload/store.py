"""The objects of a prefix that a job writes while it runs, again and again: its checkpoints.

Runs share a prefix, and a trainer that goes on from a checkpoint writes the file `checkpoint` again. So each
object is written with If-Match or If-None-Match. It replaces another one only if this job has written or
restored that (the journal has its ETag), if its metadata names this job and host, or if it was there before
the journal, as the job was given the prefix then. What others have made meanwhile stays, and is named.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, NoReturn

from sidecar.process.resources import UPLOAD_PARTS
from sidecar.upload.uploads import MOST_READS, OpenFile, Unreadable
from streamer.errors import BadAnswer, Denied, ErrorContext, GaveUp, Missing, SourceError
from streamer.retry import retry_while_unavailable
from streamer.s3.object_put import (
    ANY,
    MOST_PARTS,
    NOT_ALLOWED,
    PART,
    NewObject,
    abort_upload,
    prove_writable,
    put_object,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from sidecar.upload.admission import Admission
    from sidecar.upload.journal import Journal
    from streamer.plan import S3Uri
    from streamer.retry import RetryPolicy
    from streamer.s3.client.session import S3Client

_EARLIER = 1.0
"""Seconds; times in S3 have no fractions."""
_TAKEN = (
    "another program or host has written its key since this job began; give each one names, or a prefix, of "
    "its own"
)


async def _never(_: int = 0) -> NoReturn:
    """Stand for the functions of an object that is never sent."""
    raise AssertionError


def is_ours(found: Mapping[str, Any], headers: Mapping[str, Any]) -> bool:
    """Return whether the metadata in the response to a HEAD name the job and host that `headers` do."""
    ours: Mapping[str, str] = headers.get("Metadata", {})
    return bool(ours) and ours.items() <= found.get("Metadata", {}).items()


@dataclass
class Store:
    """The objects, and the parameters of their requests."""

    uri: S3Uri
    """Bucket, and what precedes the names in their keys."""
    client: S3Client
    policy: RetryPolicy
    on_wait: Callable[[SourceError], None]
    requests: asyncio.Semaphore
    """See `NewObject`."""
    headers: Mapping[str, Any]
    """See `NewObject`; the metadata names job and host."""
    journal: Journal
    """Has the files that were restored, and what an earlier process has left."""
    admission: Admission
    failed: Counter[str] = field(default_factory=Counter)
    """Requests that failed, by the error's kind."""

    async def prove(self, name: str, *, instead: str) -> None:
        """Raise SourceError unless the object can be written. `instead`: the section to set to `ignore`."""
        new, context = self.new(name, PART, _never, _never), self._context(name)
        try:
            await prove_writable(self.client, context, new, policy=self.policy, on_wait=self.waiting)
        except Denied as error:
            if error.code not in NOT_ALLOWED:  # reads would fail, too
                raise
            remedy = f"if it shall stay on this machine, set {instead}: ignore"
            raise Denied(f"{error.message}; {remedy}", error.context) from error

    async def put(
        self,
        name: str,
        fd: int,
        *,
        on_read: Callable[[int], None],
        before_made: Callable[[], Awaitable[None]],
    ) -> str:
        """Upload an open file; return the ETag. `on_read`: see `OpenFile`. `before_made`: see `NewObject`.

        Raises SourceError, Unreadable if the key has another program's object, FileChanged.
        """
        size = os.fstat(fd).st_size
        for attempt in range(MOST_READS):
            replaces = await self._replaced(name, size, again=attempt > 0)
            opened = OpenFile(fd, on_read)
            new = self.new(name, size, opened.read, before_made)
            if (etag := await self.write(name, new, replaces)) is not None:
                return etag
        raise Unreadable(_TAKEN)

    def new(
        self,
        name: str,
        most: int,
        read: Callable[[int], Awaitable[bytes]],
        before_made: Callable[[], Awaitable[None]],
    ) -> NewObject:
        """Return an object that is to be written; see `NewObject`."""
        noted, requests = self._noted(name, most), self.requests
        if most > PART * MOST_PARTS:  # its parts are larger, and take the memory of several
            requests = asyncio.Semaphore(max(1, UPLOAD_PARTS * PART * MOST_PARTS // most))
        admission = self.admission
        return NewObject(
            most, read, before_made, requests, self.headers, noted, admission.admit, admission.note_sent
        )

    async def put_small(self, name: str, data: bytes) -> None:
        """Write an object whose key no other program has. Raises SourceError."""
        left = [b"", data]

        async def read(_: int) -> bytes:
            return left.pop()

        await self.write(name, NewObject(0, read, requests=self.requests, headers=self.headers), ANY)

    async def write(self, name: str, new: NewObject, replaces: str | None) -> str | None:
        """Write an object; see `put_object`."""
        return await put_object(
            self.client,
            self._context(name),
            new,
            replaces=replaces,
            policy=self.policy,
            on_wait=self.waiting,
        )

    def _context(self, name: str) -> ErrorContext:
        return ErrorContext(self.uri.bucket, self.uri.key + name)

    def waiting(self, error: SourceError) -> None:
        """Count an error after which a request is repeated; `on_wait` of each request."""
        self.failed[error.kind] += 1
        self.on_wait(error)

    def _noted(self, name: str, size: int) -> Callable[[str, bool], None]:
        """Return what notes the multipart uploads of an object; announce them if it may have one."""
        key, note, failed = self.uri.key + name, self.journal.note_upload, self.failed.total()

        def on_upload(upload_id: str, begun: bool) -> None:  # noqa: FBT001 - of `NewObject`
            note(key, upload_id, begun)
            if begun and self.failed.total() == failed:  # else another one may have begun without a response
                note(key, "", begun=False)

        if size >= PART:
            note(key, "", begun=True)
        return on_upload

    async def _replaced(self, name: str, size: int, *, again: bool) -> str | None:
        """Return the ETag of the object that an upload may replace; None if there must be none.

        `again`: whether the key had another one. Raises Unreadable if it is another program's, SourceError.
        """
        if name in self.journal.files and not again:
            return self.journal.files[name].etag
        if size < PART and self.client.sends_if_match and not again:
            return None  # if there is one, so few bytes are sent again
        if (found := await self.head(name)) is None:  # without permission to look, the condition decides
            return None
        date = found["ResponseMetadata"]["HTTPHeaders"].get("date", "")
        now = datetime.now(UTC)
        with contextlib.suppress(ValueError):  # proxies leave the header out
            now = parsedate_to_datetime(date).replace(tzinfo=UTC)
        age = (now - found.get("LastModified", now)).total_seconds()
        earlier = age > time.time() - self.journal.began + _EARLIER
        if earlier or is_ours(found, self.headers):
            return str(found["ETag"])
        raise Unreadable(_TAKEN)

    async def head(self, name: str) -> dict[str, Any] | None:
        """Return the response to HEAD, with an ETag without quotes; None if no object can be seen.

        Without the permission to list, S3 denies the HEAD of an object that is absent. Raises SourceError.
        """
        try:
            found: dict[str, Any] = await self.send("head_object", name, Key=self.uri.key + name)
        except (Missing, Denied):
            return None
        found["ETag"] = str(found.get("ETag", "")).strip('"')
        if not found["ETag"]:
            raise BadAnswer("the response to HEAD has no ETag", self._context(name))
        return found

    async def send(self, operation: str, name: str, **parameters: Any) -> Any:
        """Send a request, again while storage is away; return the response. Raises SourceError."""
        context = self._context(name)
        return await retry_while_unavailable(
            lambda _: self.client.send(operation, context, Bucket=context.bucket, **parameters),
            self.policy,
            on_wait=self.waiting,
            what="an upload",
        )

    async def abort_left(self) -> None:
        """Abort the uploads of an earlier process; with an empty id all of the key. Raises GaveUp.

        Without permission they are left to the next start, or to a lifecycle rule of the bucket.
        """
        for key, upload_id in self.journal.left:
            if key.startswith(self.uri.key):
                context = ErrorContext(self.uri.bucket, key)
                try:
                    for each in [upload_id] if upload_id else await self._begun(key):
                        await self._abort(context, each)
                except GaveUp:
                    raise
                except SourceError:
                    continue
            self.journal.note_upload(key, upload_id, begun=False)

    async def _abort(self, context: ErrorContext, upload_id: str) -> None:
        await retry_while_unavailable(
            lambda _: abort_upload(self.client, context, upload_id),
            self.policy,
            on_wait=self.waiting,
            what="an upload",
        )

    async def _begun(self, key: str) -> list[str]:
        """Return the ids of all uploads of a key. Raises SourceError."""
        found = await self.send("list_multipart_uploads", key.removeprefix(self.uri.key), Prefix=key)
        return [each["UploadId"] for each in found.get("Uploads", []) if each["Key"] == key]
