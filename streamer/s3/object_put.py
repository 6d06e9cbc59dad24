"""Writes an object to S3: whole, or not at all.

    fewer bytes than a part    one PUT
    more                       a multipart upload, its parts in parallel; it is aborted if it fails

The bytes are read in order, and their number need not be known. A part is read when one of `requests` is
free, and has it until it is sent. An object that waits in `before_made` has none: those before it need them.

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

from streamer.aio import TaskGroup
from streamer.errors import BadAnswer, Denied, ErrorContext, GaveUp, Missing, SourceChanged, SourceError
from streamer.retry import retry_while_unavailable
from streamer.s3.checksums import Stored, kinds, stored_sum
from streamer.s3.client.faults import EXPLANATIONS, first_error
from streamer.s3.client.request_body import RequestBody

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from streamer.retry import RetryPolicy
    from streamer.s3.client.session import S3Client

PART = 8 << 20
"""Bytes of a part, which is in memory while it is sent; more if the object may have over `MOST_PARTS`."""
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
NOT_ALLOWED = {"AccessDenied", "403"}
"""Codes without permission; a response without a body has its status in the place of the code."""
_WHOLE = {"ChecksumType": "FULL_OBJECT"}
_UNSUPPORTED = {"NotImplemented", "InvalidArgument", "InvalidRequest"}
"""Codes with which servers refuse a condition that they do not know."""


async def _at_once() -> None:
    """Let the object be made as soon as its bytes are read."""


async def _now(_: int) -> None:
    """Let a part be sent as soon as it is read."""


def unnoted(*_: object) -> None:
    """Keep no record of multipart uploads."""


@dataclass(frozen=True, slots=True)
class NewObject:
    """The bytes of an object that is to be written."""

    most: int
    """Upper bound of its bytes, which sets the size of its parts."""
    read: Callable[[int], Awaitable[bytes]]
    """Returns the next bytes, as many as it is asked for; fewer only at the end."""
    before_made: Callable[[], Awaitable[None]] = _at_once
    """Awaited when all bytes are read, before the request that makes the object; may raise, and may wait."""
    requests: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PARTS_IN_FLIGHT))
    """Limits the parts in flight."""
    headers: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the request that begins the object, in botocore's names: Metadata, SSEKMSKeyId, ..."""
    on_upload: Callable[[str, bool], None] = unnoted
    """Called with the id of a multipart upload: True when it has begun, False when it has ended."""
    admit: Callable[[int], Awaitable[None]] = _now
    """Awaited with the bytes of each part, before it is sent for the first time."""
    on_sent: Callable[[int], None] = unnoted
    """Called with the bytes of each part, or of the whole object, once S3 has accepted them."""


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
        with _denied("s3:PutObject", new.headers):
            return await upload.run(_conditions(replaces) if conditional else {})
    except Denied:
        raise
    except SourceError as error:
        late = isinstance(error, GaveUp)  # S3 may take longer than a request may be silent
        conflict = conditional and error.code in _CONFLICTS
        if upload.made and (late or conflict or error.code == _UPLOAD_GONE):
            etag = await upload.etag_if_same(once=late)
            if etag is not None or (conditional and not late):
                return etag
        if conditional and error.code in _UNSUPPORTED:
            raise BadAnswer(
                f"{error.message}; if the endpoint has no conditional PUT, set Penstock.Endpoint.IfMatch: "
                "omit, and let one program write at a time",
                error.context,
            ) from error
        if error.code == _UPLOAD_GONE:
            raise BadAnswer(
                f"{error.message}; a lifecycle rule or another program has removed the parts: upload again",
                error.context,
            ) from error
        if isinstance(error, SourceChanged):  # its text is that of a GET
            raise BadAnswer(
                f"the endpoint refused to write the object, as if the request had a condition (S3 responded "
                f"{error.code})",
                error.context,
            ) from error
        raise


async def prove_writable(
    client: S3Client,
    context: ErrorContext,
    new: NewObject,
    *,
    policy: RetryPolicy,
    on_wait: Callable[[SourceError], None] | None = None,
) -> None:
    """Begin an upload of the object and abort it, as proof of the permissions, those on its KMS key included.

    `new`: nothing is read. Raises SourceError. S3 asks for kms:Decrypt only when parts are sent.
    """
    upload = _Upload(client, context, new, policy, on_wait)
    with _denied("s3:PutObject", new.headers):
        await upload.begin()
    with _denied("s3:AbortMultipartUpload", {}):
        await retry_while_unavailable(lambda _: upload.abort(), policy, on_wait=on_wait, what="an upload")


async def abort_upload(client: S3Client, context: ErrorContext, upload_id: str) -> None:
    """Abort a multipart upload, if there is one of this id. Raises SourceError."""
    try:
        name = {"Bucket": context.bucket, "Key": context.key}
        await client.send("abort_multipart_upload", context, **name, UploadId=upload_id)
    except SourceError as error:
        if error.code != _UPLOAD_GONE:
            raise


@contextlib.contextmanager
def _denied(action: str, headers: Mapping[str, Any]) -> Iterator[None]:
    """Name the action, and those on the KMS key, in the error of a request without permission.

    The text of S3, which may name the action, the resource and the policy, stays in front.
    """
    try:
        yield
    except Denied as error:
        explanation = EXPLANATIONS.get(error.code, "")
        if error.code not in NOT_ALLOWED or explanation not in error.message:
            raise
        words, _, response = error.message.partition(explanation)
        keys = ", and kms:GenerateDataKey and kms:Decrypt on its key" if "SSEKMSKeyId" in headers else ""
        denied = Denied(
            f"{words}the credentials may not write this object; they need {action} on it{keys}{response}",
            error.context,
        )
        denied.code = error.code
        raise denied from error


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
        self._part_size = max(PART, -(-new.most // MOST_PARTS))
        self._upload: dict[str, str] = {}
        """Parameters that name the multipart upload; empty if there is none."""
        self._sent: dict[int, tuple[str, int, int]] = {}
        """ETag, CRC and size of the parts that were sent, by number."""
        self._size = 0
        """Bytes of the object, once all are read."""
        self._crc = 0
        """CRC-64NVME of the whole object, once all bytes are read."""
        self._hashed = b""
        """What has the ETag's MD5, where ETags are MD5s: the body, or those of the parts."""
        self._suffix = ""
        """What follows it in an ETag, in S3's way."""
        self.made = False
        """Whether the request that makes the object may have been sent."""

    async def run(self, conditions: Mapping[str, str]) -> str:
        """Write the object; return its ETag. Raises SourceError."""
        try:
            try:
                async with TaskGroup() as parts:
                    await self._part(1, parts)
            except BaseExceptionGroup as errors:
                raise first_error(errors) from errors
            await self._new.before_made()
            self.made = True
            if self._upload:
                made = await self._complete(conditions)
            else:
                async with self._new.requests:
                    made = await self._make(
                        "put_object", conditions, Body=self._hashed, **self._new.headers, **_sum(self._crc)
                    )
                self._new.on_sent(self._size)
        except BaseException:
            if self._upload:
                with contextlib.suppress(Exception):  # what ended the upload is raised
                    await self.abort()
            raise
        stored = stored_sum(made)
        if stored is not None and stored.algorithm == "CRC64NVME" and stored.value != self._crc:
            raise BadAnswer("the endpoint has stored other bytes than were sent; upload again", self._context)
        # Ceph's first response to a completion has none.
        etag = str(made.get("ETag") or "").strip('"') or await self.etag_if_same()
        return etag or self._named(made, "ETag")

    async def begin(self) -> None:
        """Begin a multipart upload. Raises SourceError."""
        begun = await self.send(
            "create_multipart_upload", ChecksumAlgorithm="CRC64NVME", **_WHOLE, **self._new.headers
        )
        self._upload = {"UploadId": self._named(begun, "UploadId")}
        self._note(begun=True)

    async def abort(self) -> None:
        """Abort it. Raises SourceError."""
        await abort_upload(self._client, self._context, self._upload["UploadId"])
        self._note(begun=False)

    async def _part(self, number: int, parts: TaskGroup) -> None:
        """Read a part, let another task read the next one, and send it. The first part begins the upload.

        If all bytes are less than a part they are kept, for a PUT.
        """
        async with self._new.requests:
            body = await self._new.read(self._part_size)
            await self._new.admit(len(body))
            crc = self._crc64(memoryview(body), 0)
            if len(body) == self._part_size:
                if number == 1:
                    await self.begin()
                parts.create_task(self._part(number + 1, parts))
            elif number == 1:
                self._size, self._crc, self._hashed = len(body), crc, body
                return
            elif not body:
                return
            made = await self.send("upload_part", Body=body, PartNumber=number, **self._upload, **_sum(crc))
        self._sent[number] = self._named(made, "ETag"), crc, len(body)
        self._new.on_sent(len(body))

    async def _complete(self, conditions: Mapping[str, str]) -> Any:
        """Make the object of the parts; return the response."""
        from awscrt.checksums import combine_crc64nvme

        sent = [self._sent[number] for number in range(1, len(self._sent) + 1)]
        for _, crc, size in sent:
            self._crc, self._size = combine_crc64nvme(self._crc, crc, size), self._size + size
        with contextlib.suppress(ValueError):  # they are no MD5s
            self._hashed = b"".join(bytes.fromhex(etag.strip('"')) for etag, _, _ in sent)
            self._suffix = f"-{len(sent)}"
        if conditions:
            await self._check(conditions)
        made = await self._make(
            "complete_multipart_upload",
            conditions,
            MultipartUpload={"Parts": [{"ETag": each[0], "PartNumber": n} for n, each in enumerate(sent, 1)]},
            MpuObjectSize=self._size,
            **self._upload,
            **_WHOLE,
            **_sum(self._crc),
        )
        self._note(begun=False)
        return made

    async def _check(self, conditions: Mapping[str, str]) -> None:
        """Raise SourceChanged if conditions do not hold: Ceph 16 and moto complete an upload all the same."""
        try:
            etag = str((await self.send("head_object")).get("ETag", "")).strip('"')
        except Missing:
            etag = ""
        except (BadAnswer, Denied):  # without permission to look, the request decides
            return
        if etag != conditions.get("IfMatch", "").strip('"'):
            changed = SourceChanged("another object has the key; use another one", self._context)
            changed.code = "PreconditionFailed"
            raise changed

    async def _make(self, operation: str, conditions: Mapping[str, str], **parameters: Any) -> Any:
        """Send the request that makes the object; return the response. Raises SourceError.

        Ceph 16 compares If-Match, quotes included, with an ETag that has none.
        """
        try:
            return await self.send(operation, **parameters, **conditions)
        except SourceError as error:
            if error.code not in _CONFLICTS or "IfMatch" not in conditions:
                raise
        return await self.send(operation, **parameters, IfMatch=conditions["IfMatch"].strip('"'))

    def _note(self, *, begun: bool) -> None:
        self._new.on_upload(self._upload["UploadId"], begun)

    def _named(self, response: Mapping[str, Any], name: str) -> str:
        """Return what the response has of this name. Raises BadAnswer if it has none."""
        value = response.get(name)
        if not isinstance(value, str) or not value.strip('"'):
            raise BadAnswer(f"the response to PUT has no {name}", self._context)
        return value

    async def etag_if_same(self, *, once: bool = False) -> str | None:
        """Return the ETag of the object that is in S3 if it has the bytes that were sent, else None.

        `once`: do not repeat the request.
        """
        send = self._call if once else self.send
        try:
            found = await send("head_object", ChecksumMode="ENABLED")
        except SourceError as error:
            if once or isinstance(error, BadAnswer | Denied | Missing):
                return None
            raise
        etag, stored = str(found.get("ETag", "")).strip('"'), stored_sum(found)
        known = stored is not None and stored.algorithm == "CRC64NVME"
        if known:
            same = stored == Stored("CRC64NVME", self._crc)
        else:  # only now, because an MD5 costs more than all else
            same = etag == md5(self._hashed, usedforsecurity=False).hexdigest() + self._suffix
        return etag if same and found.get("ContentLength") == self._size else None

    async def send(self, operation: str, **parameters: Any) -> Any:
        """Send a request of aiobotocore's client until it is answered. Raises SourceError."""
        return await retry_while_unavailable(
            lambda _: self._call(operation, **parameters),
            self._policy,
            on_wait=self._on_wait,
            what="an upload",
        )

    async def _call(self, operation: str, **parameters: Any) -> Any:
        name = {"Bucket": self._context.bucket, "Key": self._context.key}
        body = {"Body": RequestBody(parameters["Body"])} if "Body" in parameters else {}  # read once
        return await self._client.send(operation, self._context, **{**parameters, **name, **body})


def _sum(crc: int) -> dict[str, str]:
    return {"ChecksumCRC64NVME": base64.b64encode(crc.to_bytes(8, "big")).decode()}
