"""Writes an object to S3: whole, or not at all.

    up to `PART` bytes    one PUT
    more                  a multipart upload, one part after the other; it is aborted if it fails

The request that makes the object names the ETag that it replaces (If-Match), or that there is none
(If-None-Match), so that of two writers one learns of the other. aiobotocore sends these requests, because
they are rare and the only ones with a body.

A repeated request may find what the first one has written. That looks like another writer's object; the
caller reads it and finds its own bytes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamer.errors import BadAnswer, Denied, ErrorContext, SourceChanged, SourceError
from streamer.s3.client.faults import map_errors

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from streamer.s3.client.session import S3Client

PART = 32 << 20
"""Bytes of a part, which is in memory while it is sent."""
MOST_PARTS = 10_000
"""S3's limit."""
_CONFLICTS = {"412", "PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey", "NoSuchUpload"}
"""Codes of a request whose condition does not hold: the object is another one, or there is none any more."""
_NOT_ALLOWED = {"AccessDenied", "403"}
"""Codes without permission; a response without a body has its status in the place of the code."""
_UNSUPPORTED = {"NotImplemented", "InvalidArgument", "InvalidRequest"}
"""Codes with which servers refuse a condition that they do not know."""


@dataclass(frozen=True, slots=True)
class NewObject:
    """The bytes of an object that is to be written."""

    size: int
    read: Callable[[int, int], Awaitable[bytes]]
    """Returns bytes, by offset and number; called once for each request that has a body."""


async def put_object(
    client: S3Client, context: ErrorContext, new: NewObject, *, replaces: str | None
) -> str | None:
    """Write the object; return its ETag, or None if the object in S3 is not the one to replace.

    `context`: has bucket and key. `replaces`: the ETag of the object to replace; None if there is none.
    Raises SourceError.
    """
    name = {"Bucket": context.bucket, "Key": context.key}
    conditions = {} if not client.sends_if_match else _conditions(replaces)
    try:
        with map_errors(context):
            botocore = await client.opened()
            if new.size <= PART:
                body = await new.read(0, new.size)
                answer = await botocore.put_object(Body=body, **name, **conditions)
            else:
                answer = await _in_parts(botocore, new, name, conditions)
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
        if conditions and error.code in _CONFLICTS:
            return None
        if conditions and error.code in _UNSUPPORTED:
            raise BadAnswer(
                f"{error.message}; if the endpoint has no conditional PUT, set Penstock.Endpoint.IfMatch: "
                "omit, and let one build write at a time",
                error.context,
            ) from error
        if isinstance(error, SourceChanged):  # its text is that of a GET
            raise BadAnswer(
                f"the endpoint refused to write the object, as if the request had a condition (S3 responded "
                f"{error.code})",
                error.context,
            ) from error
        raise
    etag = answer.get("ETag")
    if not isinstance(etag, str) or not etag.strip('"'):
        raise BadAnswer("the response to PUT has no ETag", context)
    return etag.strip('"')


def _conditions(replaces: str | None) -> dict[str, str]:
    return {"IfNoneMatch": "*"} if replaces is None else {"IfMatch": f'"{replaces}"'}


async def _in_parts(client: Any, new: NewObject, name: dict[str, Any], conditions: dict[str, str]) -> Any:
    """Write the object by a multipart upload; return the response to its completion."""
    upload = name | {"UploadId": (await client.create_multipart_upload(**name))["UploadId"]}
    size = max(PART, -(-new.size // MOST_PARTS))
    try:
        parts = []
        for number, start in enumerate(range(0, new.size, size), 1):
            body = await new.read(start, min(size, new.size - start))
            answer = await client.upload_part(Body=body, PartNumber=number, **upload)
            parts.append({"ETag": answer["ETag"], "PartNumber": number})
        return await client.complete_multipart_upload(
            MultipartUpload={"Parts": parts}, **upload, **conditions
        )
    except BaseException:
        with contextlib.suppress(Exception):  # what ended the upload is raised
            await client.abort_multipart_upload(**upload)
        raise
