"""Finds size and ETag of objects by HEAD, many at once.

    stat() ─ at most 128 ─┬─ our own HTTP client: sign, send, parse a response header    nearly all HEADs
                          └─ aiobotocore's head_object, 64 at once                       all others

aiobotocore sends the HEADs that our own client does not support (`why_not`), and repeats those that end in a
redirect, or in 400, which S3 also sends for a request signed for another region. Both clients return the same
objects and raise the same errors. A HEAD is retried as a part is: for `give_up_after` seconds, with growing
waits. It counts as in flight during a wait, so a server that throttles gets fewer requests.

The response to HEAD has no body, whatever its Content-Length (RFC 9110 §9.3.2), even for an error. So S3's
error code is unknown, and the status decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
from functools import partial
from typing import TYPE_CHECKING

from streamer.errors import ClockSkew, ErrorContext, InvalidResponse
from streamer.plan import ObjectRef
from streamer.plan.validators import is_validator, validator_of
from streamer.retry import ANSWER_FAILED, Attempts, RetryPolicy, retry
from streamer.s3.client.faults import error_from_response, escaped_id
from streamer.s3.pages.object_get import ControlClient
from streamer.s3.pages.validation import described_object
from streamer.s3.ranges import check_version, transformation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from streamer.s3.client.session import Clients

HEADS = 128
"""Most HEADs in flight, and connections for them, in the whole process."""
AIOBOTOCORE_HEADS = 64
"""Most HEADs in flight by aiobotocore: the size of its connection pool."""
LONGEST_WAIT = 20.0
"""Most seconds before a retry, unless the server's Retry-After is longer."""


class ObjectInspector:
    """Finds size and ETag of objects, many at once."""

    def __init__(self, control: ControlClient, *, give_up_after: float) -> None:
        """`give_up_after`: seconds for which a HEAD that fails is retried."""
        self._control = control
        self._policy = RetryPolicy(give_up_after, longest_wait=LONGEST_WAIT)
        self._worked = False
        """Whether a HEAD has been answered."""
        self._turns = asyncio.Semaphore(HEADS)
        self._aiobotocore_turns = asyncio.Semaphore(AIOBOTOCORE_HEADS)

    async def stat(self, bucket: str, key: str, version: str | None = None) -> ObjectRef:
        """Return size and ETag of the object's current version, or of `version`.

        Raises SourceError: GaveUp if the HEAD still fails after `give_up_after` seconds.
        """
        async with self._turns:
            context = ErrorContext(bucket, key)
            attempts = Attempts(self._policy, ANSWER_FAILED, what="an answer", context=context)
            try:
                found = await self._send_head(bucket, key, version)
            except ANSWER_FAILED as error:
                failed, attempts.worked = error, self._worked
            else:
                self._worked = True
                return found
            ask = partial(self._send_head, bucket, key, version)
            return await retry(partial(attempts.bounded, ask), attempts, failed=failed)

    async def _by_aiobotocore(self, context: ErrorContext, version: str | None) -> ObjectRef:
        params = {"VersionId": version} if version else {}
        async with self._aiobotocore_turns:
            response = await self._control.clients.control.send(
                "head_object", context, Bucket=context.bucket, Key=context.key, **params
            )
        headers = response["ResponseMetadata"]["HTTPHeaders"]
        return _described(context, version, response.get("ContentLength"), headers)

    async def _send_head(self, bucket: str, key: str, version: str | None) -> ObjectRef:
        control = self._control
        context = ErrorContext(bucket, key)
        if not control.supports(bucket):
            return await self._by_aiobotocore(context, version)
        endpoint = await control.signer.endpoint(bucket)
        response = await control.send(
            "HeadObject",
            endpoint,
            context,
            lambda: control.signer.head(endpoint, bucket, key, version=version),
        )
        response.end(reuse=True)
        status, headers = response.header.status, response.header.fields
        context = ErrorContext(bucket, key, request_id=escaped_id(headers.get("x-amz-request-id")))
        if status == http.HTTPStatus.OK:
            return _described(context, version, response.header.content_length, headers)
        if 300 <= status < 400 or status == http.HTTPStatus.BAD_REQUEST:
            if status < http.HTTPStatus.BAD_REQUEST:  # a redirect affects every HEAD of the bucket
                control.leave_to_aiobotocore(bucket)
            return await self._by_aiobotocore(ErrorContext(bucket, key), version)
        error = error_from_response(
            status=status,
            code=str(status),
            message="",
            fields=headers,
            context=context,
        )
        if isinstance(error, ClockSkew):
            control.signer.ahead = error.ahead
        raise error


@contextlib.contextmanager
def open_inspector(clients: Clients, *, give_up_after: float) -> Iterator[ObjectInspector]:
    """Open an inspector for the block. `give_up_after`: as for `ObjectInspector`."""
    with contextlib.closing(ControlClient(clients)) as control:
        yield ObjectInspector(control, give_up_after=give_up_after)


def _described(
    context: ErrorContext, wanted_version: str | None, length: int | None, fields: Mapping[str, str]
) -> ObjectRef:
    """Return the object. `fields`: of the response, by lower-case name. Raises BadAnswer."""
    etag = validator_of(fields.get("etag"), fields.get("last-modified"))
    if length is None or not is_validator(etag):
        raise InvalidResponse(
            "the response to HEAD has no Content-Length, or neither ETag nor Last-Modified"
            + transformation(fields, length),
            context,
        )
    check_version(wanted_version, fields.get("x-amz-version-id"), context)
    return described_object(context, context.key or "", size=length, etag=etag, version=wanted_version)
