"""Writes an object to S3: whole, or not at all.

    up to `PART` bytes    one PUT
    more                  a multipart upload, its parts in parallel; it is aborted if it fails

The request that makes the object names the ETag that it replaces (If-Match), or that there is none
(If-None-Match), so that of two writers one learns of the other. It has the CRC-64NVME of the whole object,
and the request of a part has that of the part; servers that know this checksum compare it with what they
store. aiobotocore sends these requests, because they are rare and the only ones with a body.

A request that is repeated may find the object that the first one has made, so a condition that does not hold
is no proof of another writer. A HEAD then shows whether the object has these bytes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from dataclasses import dataclass, field
from hashlib import md5
from typing import TYPE_CHECKING, Any

from streamer.errors import BadAnswer, Denied, ErrorContext, Missing, SourceChanged, SourceError
from streamer.retry import retry_while_unavailable
from streamer.s3.checksums import Stored, kinds, stored_sum
from streamer.s3.client.faults import first_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from streamer.retry import RetryPolicy
    from streamer.s3.client.session import S3Client

PART = 8 << 20
"""Bytes of a part, which is in memory while it is sent; more if the object has over `MOST_PARTS` of these."""
MOST_PARTS = 10_000
"""S3's limit."""
PARTS_IN_FLIGHT = 4
"""Parts that are sent at once, if the caller sets no limit."""
ANY = "*"
"""In place of the ETag to replace: whatever object there is, or none."""
_CONFLICTS = {"412", "PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey"}
"""Codes of a request whose condition does not hold: the object is another one, or there is none any more."""
_UPLOAD_GONE = "NoSuchUpload"
"""Code of a part or a completion after the upload has been completed, perhaps by the same request."""
_NOT_ALLOWED = {"AccessDenied", "403"}
"""Codes without permission; a response without a body has its status in the place of the code."""
_UNSUPPORTED = {"NotImplemented", "InvalidArgument", "InvalidRequest"}
"""Codes with which servers refuse a condition that they do not know."""


async def _at_once() -> None:
    """Let the object be made as soon as its bytes are read."""


@dataclass(frozen=True, slots=True)
class NewObject:
    """The bytes of an object that is to be written."""

    size: int
    read: Callable[[int, int], Awaitable[bytes]]
    """Returns bytes, by offset and number; called once for each part."""
    before_made: Callable[[], Awaitable[None]] = _at_once
    """Called when all bytes are read, before the request that makes the object; may raise."""
    requests: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PARTS_IN_FLIGHT))
    """Limits the parts in flight."""


async def put_object(
    client: S3Client,
    context: ErrorContext,
    new: NewObject,
    *,
    replaces: str | None,
    policy: RetryPolicy,
    on_wait: Callable[[SourceError], None] | None = None,
) -> str | None:
    """Write the object; return its ETag, or None if the object in S3 is not the one to replace.

    `context`: has bucket and key. `replaces`: the ETag of the object to replace; None if there is none; or
    `ANY`. `policy`, `on_wait`: each request is repeated as by `retry_while_unavailable`. Raises SourceError,
    ConfigError without awscrt, and what the functions of `new` raise.
    """
    conditional = client.sends_if_match and replaces != ANY
    upload = _Upload(client, context, new, policy, on_wait)
    try:
        return await upload.run(_conditions(replaces) if conditional else {})
    except Denied as error:
        if error.code in _NOT_ALLOWED:
            denied = Denied(
                "the credentials may not write this object; they need s3:PutObject on it (S3 responded "
                f"{'403 AccessDenied' if error.code == 'AccessDenied' else 403})",
                error.context,
            )
            raise denied from error
        raise
    except SourceError as error:
        if error.code == _UPLOAD_GONE or (conditional and error.code in _CONFLICTS):
            return await upload.etag_if_same()
        if conditional and error.code in _UNSUPPORTED:
            raise BadAnswer(
                f"{error.message}; if the endpoint has no conditional PUT, set Penstock.Endpoint.IfMatch: "
                "omit, and let one program write at a time",
                error.context,
            ) from error
        if isinstance(error, SourceChanged):  # its text is that of a GET
            raise BadAnswer(
                f"the endpoint refused to write the object, as if the request had a condition (S3 responded "
                f"{error.code})",
                error.context,
            ) from error
        raise


def _conditions(replaces: str | None) -> dict[str, str]:
    return {"IfNoneMatch": "*"} if replaces is None else {"IfMatch": f'"{replaces}"'}


class _Upload:
    """The requests that write one object."""

    def __init__(
        self,
        client: S3Client,
        context: ErrorContext,
        new: NewObject,
        policy: RetryPolicy,
        on_wait: Callable[[SourceError], None] | None,
    ) -> None:
        self._client = client
        self._context = context
        self._new = new
        self._policy = policy
        self._on_wait = on_wait
        self._crc64 = kinds()["CRC64NVME"]
        self._crc = 0
        """CRC-64NVME of the whole object, once all bytes are read."""
        self._hashed = b""
        """What has the ETag's MD5, where ETags are MD5s: the body, or those of the parts."""
        self._suffix = ""
        """What follows it in an ETag, in S3's way."""

    async def run(self, conditions: Mapping[str, str]) -> str:
        """Write the object; return its ETag. Raises SourceError."""
        if self._new.size > PART:
            made = await self._in_parts(conditions)
        else:
            async with self._new.requests:
                body = await self._new.read(0, self._new.size)
                self._crc = self._crc64(memoryview(body), 0)
                self._hashed = body
                await self._new.before_made()
                made = await self._send("put_object", Body=body, **_sum(self._crc), **conditions)
        stored = stored_sum(made)
        if stored is not None and stored.algorithm == "CRC64NVME" and stored.value != self._crc:
            raise BadAnswer("the endpoint has stored other bytes than were sent; upload again", self._context)
        etag = made.get("ETag")
        if not isinstance(etag, str) or not etag.strip('"'):
            raise BadAnswer("the response to PUT has no ETag", self._context)
        return etag.strip('"')

    async def _in_parts(self, conditions: Mapping[str, str]) -> Any:
        """Write the object by a multipart upload; return the response to its completion."""
        whole = {"ChecksumType": "FULL_OBJECT"}
        begun = await self._send("create_multipart_upload", ChecksumAlgorithm="CRC64NVME", **whole)
        upload = {"UploadId": begun["UploadId"]}
        size = max(PART, -(-self._new.size // MOST_PARTS))
        try:
            try:
                async with asyncio.TaskGroup() as group:
                    sent = [
                        group.create_task(
                            self._part(number, start, min(size, self._new.size - start), upload)
                        )
                        for number, start in enumerate(range(0, self._new.size, size), 1)
                    ]
            except BaseExceptionGroup as errors:
                raise first_error(errors) from errors
            await self._new.before_made()
            self._join([part.result() for part in sent], size)
            parts = [{"ETag": f'"{part.result()[0]}"', "PartNumber": n} for n, part in enumerate(sent, 1)]
            return await self._send(
                "complete_multipart_upload",
                MultipartUpload={"Parts": parts},
                MpuObjectSize=self._new.size,
                **upload,
                **whole,
                **_sum(self._crc),
                **conditions,
            )
        except BaseException:
            with contextlib.suppress(Exception):  # what ended the upload is raised
                await self._call("abort_multipart_upload", upload)
            raise

    async def _part(self, number: int, start: int, size: int, upload: Mapping[str, str]) -> tuple[str, int]:
        """Send a part of at most `size` bytes; return its ETag and its CRC."""
        async with self._new.requests:
            body = await self._new.read(start, min(size, self._new.size - start))
            crc = self._crc64(memoryview(body), 0)
            made = await self._send("upload_part", Body=body, PartNumber=number, **upload, **_sum(crc))
        return made["ETag"].strip('"'), crc

    def _join(self, parts: list[tuple[str, int]], size: int) -> None:
        """Take the CRC, and what the ETag is made of, from the parts, of `size` bytes each but the last."""
        from awscrt.checksums import combine_crc64nvme

        left = self._new.size
        for _, crc in parts:
            self._crc = combine_crc64nvme(self._crc, crc, min(size, left))
            left -= size
        with contextlib.suppress(ValueError):  # they are no MD5s
            self._hashed = b"".join(bytes.fromhex(etag) for etag, _ in parts)
            self._suffix = f"-{len(parts)}"

    async def etag_if_same(self) -> str | None:
        """Return the ETag of the object that is in S3 if it has the bytes that were sent, else None."""
        try:
            found = await self._send("head_object", ChecksumMode="ENABLED")
        except (BadAnswer, Denied, Missing):
            return None
        etag, stored = str(found.get("ETag", "")).strip('"'), stored_sum(found)
        known = stored is not None and stored.algorithm == "CRC64NVME"
        if known:
            same = stored == Stored("CRC64NVME", self._crc)
        else:  # only now, because an MD5 costs more than all else
            same = etag == md5(self._hashed, usedforsecurity=False).hexdigest() + self._suffix
        return etag if same and found.get("ContentLength") == self._new.size else None

    async def _send(self, operation: str, **parameters: Any) -> Any:
        """Send a request of aiobotocore's client until it is answered. Raises SourceError."""
        return await retry_while_unavailable(
            lambda _: self._call(operation, parameters), self._policy, on_wait=self._on_wait, what="an upload"
        )

    async def _call(self, operation: str, parameters: Mapping[str, Any]) -> Any:
        name = {"Bucket": self._context.bucket, "Key": self._context.key}
        return await self._client.send(operation, self._context, **name, **parameters)


def _sum(crc: int) -> dict[str, str]:
    return {"ChecksumCRC64NVME": base64.b64encode(crc.to_bytes(8, "big")).decode()}
