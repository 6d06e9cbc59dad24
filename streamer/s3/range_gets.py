"""The GETs of the ranges of one part by our own client: how they are sent, and how responses are judged.

range ─▶ `request`: bytes to send, signed ─▶ response header ─┬▶ `body`: checked, left in its socket
                                                              └▶ `error`: of a response without the body
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from streamer.errors import ClockSkew, ErrorContext, ObjectMissing, SourceError, WrongEndpoint
from streamer.plan import is_modified
from streamer.s3.client.credentials import renewed
from streamer.s3.client.documents import MAX_ERROR_BODY
from streamer.s3.client.faults import (
    CODE,
    MANY_REASONS,
    cut_off,
    deleted,
    error_from_body,
    error_inside,
    escaped_id,
    may_be_error,
)
from streamer.s3.ranges import check_header, suggest_omission

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamer.plan import Segment
    from streamer.s3.client.endpoint import Keys
    from streamer.s3.http.body import HttpBody
    from streamer.s3.http.client import HttpClient, Response
    from streamer.s3.http.pool import ConnectionPool
    from streamer.s3.http.response import ResponseHeader
    from streamer.s3.ranges import OnWhole
    from streamer.s3.signing.endpoints import BucketEndpoint
    from streamer.s3.signing.requests import RangeSigner


class LeftToAiobotocore(SourceError):
    """A response or a bucket that our own client does not support; the message is the cause."""

    kind = "left_to_aiobotocore"


class RangeGets:
    """Requests and responses of one part's ranges. Its credentials are those of the time when it is made."""

    def __init__(
        self,
        client: HttpClient,
        signer: RangeSigner,
        endpoints: Mapping[str, BucketEndpoint],
        keys: Keys | None,
        on_whole: OnWhole | None = None,
    ) -> None:
        """`endpoints`: of each bucket. `keys`: None to send requests without a signature.

        `on_whole`: see `RangeRequest`.
        """
        self.stall_timeout = client.stall_timeout
        self._pools = {bucket: client.pool(endpoint) for bucket, endpoint in endpoints.items()}
        self._signer = signer
        self._endpoints = endpoints
        self._keys = keys
        self._on_whole = on_whole
        self._sent_at = time.monotonic()

    def pool(self, each: Segment) -> ConnectionPool:
        """Return the connections to the host of the range's bucket."""
        return self._pools[each.object.bucket]

    def request(self, each: Segment) -> bytes:
        """Return the bytes of the range's request."""
        ref = each.object
        checksum = self._on_whole is not None and each.whole
        return self._signer.ranged_get(
            self._keys, self._endpoints[ref.bucket], ref, each.start, each.end, checksum=checksum
        )

    def body(self, response: Response, each: Segment, context: ErrorContext) -> HttpBody | None:
        """Return the body of a response; None if it is not one that can be taken: `error` then ends it.

        Raises SourceError if it is another version's, or other bytes.
        """
        header = response.header
        length, fields = header.content_length, header.fields
        if header.status not in (200, 206) or length is None or "transfer-encoding" in fields:
            return None
        if "etag" not in fields and may_be_error(fields, length):
            return None
        _check(header, length, each, context)
        if self._on_whole is not None and each.whole:
            self._on_whole(each.object, fields)
        return response.body(length, context)

    async def error(self, response: Response, each: Segment, context: ErrorContext) -> SourceError:
        """End a response without a body that can be taken, and return its error."""
        error = await self._error(response, each, context)
        return renewed(error, self._signer.credentials, self._sent_at)

    async def _error(self, response: Response, each: Segment, context: ErrorContext) -> SourceError:
        status = response.header.status
        if 300 <= status < 400:
            response.end(reuse=False)
            return LeftToAiobotocore(f"the server redirects requests (status {status})", context)
        if status in (200, 206):
            if may_be_error(response.header.fields, response.header.content_length):
                header, body = response.header, await response.error_body()
                if error := error_inside(header.status, body, header.fields, context):
                    return error
                _check(header, header.content_length, each, context)
            response.end(reuse=False)
            return LeftToAiobotocore("the server sends a body without its length, as a chunked one", context)
        error = await refusal(response, context, self._signer)
        if error is None:
            return LeftToAiobotocore("the bucket is in another region than the job file names", context)
        if self._signer.sends_if_match and not is_modified(each.object.etag):
            suggest_omission(error)
        return deleted(error) if isinstance(error, ObjectMissing) else error


def _check(header: ResponseHeader, length: int | None, each: Segment, context: ErrorContext) -> None:
    """Raise SourceError unless the response is the range of the listed version. `length`: the header's."""
    fields = header.fields
    try:
        check_header(
            each.object,
            each.start,
            each.end,
            context,
            status=header.status,
            content_length=length,
            fields=fields,
        )
    except SourceError as error:
        error.context = replace(context, request_id=escaped_id(fields.get("x-amz-request-id")))
        raise


async def refusal(response: Response, context: ErrorContext, signer: RangeSigner) -> SourceError | None:
    """Return the error of a response that is neither a success nor a redirect; None for WrongEndpoint.

    After None the caller lets aiobotocore repeat the request, because botocore resolves the bucket's region.
    ClockSkew sets `signer.ahead`, so the signer's next signature uses S3's time. Reads the body, and ends
    the response.
    """
    error = error_of(response.header, await response.error_body(), context)
    if isinstance(error, WrongEndpoint):
        return None
    if isinstance(error, ClockSkew):
        signer.ahead = error.ahead
    return error


def error_of(header: ResponseHeader, body: bytes, context: ErrorContext) -> SourceError:
    """Return the error for a response that is neither a success nor a redirect. `body` may be cut off."""
    cut = len(body) < min(header.content_length or 0, MAX_ERROR_BODY)
    if cut and header.status in MANY_REASONS and not CODE.search(body):
        return cut_off(header.status, context)
    return error_from_body(header.status, body, header.fields, context)
