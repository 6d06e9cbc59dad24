"""Reads a manifest from S3, resumed after a failure, as one version.

Source of the rules: the manifest must have a Content-Length, so that its end is proven, and an ETag for what
is left after a failure, so that both pieces are of the same version.
"""

from __future__ import annotations

import http
from typing import TYPE_CHECKING, Any

from streamer.errors import BadAnswer, ErrorContext, Transient, Truncated
from streamer.plan import ObjectRef, S3Uri, bare_etag, is_etag
from streamer.s3.client.faults import map_errors
from streamer.s3.client.stall import within_stall
from streamer.s3.ranges import check_header

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

ATTEMPTS = 5
"""Most successive requests for the rest of a manifest without a byte of progress."""
_READ_SIZE = 256 * 1024


async def read_manifest(client: Any, uri: S3Uri) -> AsyncGenerator[bytes, None]:
    """Yield one version of an object in pieces; resume after a failure. Raises SourceError."""
    received, size, failures, etag = 0, -1, 0, ""
    pinned: dict[str, str] = {}
    while received != size:
        context = ErrorContext(uri.bucket, uri.key, received, failures + 1)
        before = received
        try:
            with map_errors(context):
                response = await client.get_object(Bucket=uri.bucket, Key=uri.key, **pinned)
                async with response["Body"] as body:
                    status = response["ResponseMetadata"]["HTTPStatusCode"]
                    if size < 0:
                        if status != http.HTTPStatus.OK:
                            raise BadAnswer(
                                f"the response to a GET without a range has status {status}", context
                            )
                        size, etag = response.get("ContentLength", -1), response.get("ETag", "")
                        if size < 0:
                            raise BadAnswer(
                                "the response has no Content-Length, so its end cannot be proven", context
                            )
                    else:
                        check_header(
                            ObjectRef(uri.bucket, uri.key, size, bare_etag(etag)),
                            received,
                            size,
                            context,
                            status=status,
                            content_range=response.get("ContentRange"),
                            content_length=response.get("ContentLength"),
                            etag=response.get("ETag"),
                            version=None,
                        )
                    content = body.raw_stream.content
                    async with within_stall(client.stall_timeout, context) as stall:
                        while data := await content.read(_READ_SIZE):
                            received += len(data)
                            if received > size:
                                raise BadAnswer(
                                    f"the body is longer than its Content-Length, {size} bytes", context
                                )
                            stall.pause()
                            yield data
                            stall.moved()
            if received != size:
                raise Truncated(f"the body ended {size - received} bytes early", context)
        except Transient:
            failures = 1 if received > before else failures + 1
            if failures >= ATTEMPTS:
                raise
            if size >= 0:
                if not is_etag(bare_etag(etag)):
                    raise  # without an ETag the rest may be of another version
                pinned = {"IfMatch": etag, "Range": f"bytes={received}-{size - 1}"}
