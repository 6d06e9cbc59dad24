"""Ranged GETs by aiobotocore, through user space.

This transport works wherever aiobotocore works (TLS, proxies, any endpoint); `http_source` must deliver the
same bytes.

    part of one range    the task that opened the body: readchunk ─→ at most `QUEUED` bytes ─→ read_into
    part of several      read whole before `open` returns, as many ranges at once as the request allows

After an error of a range no later one is requested, and the requests for later ones are cancelled.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from streamer.aio import TaskGroup
from streamer.errors import BadAnswer, ErrorContext, SourceError
from streamer.plan import Segment, is_modified
from streamer.s3.aiobotocore_body import AiobotocoreBody, RangeResponse
from streamer.s3.client import faults
from streamer.s3.client.faults import escaped_id, map_errors, of_listed
from streamer.s3.client.final_answers import confirmed
from streamer.s3.client.stall import Stall, within_stall
from streamer.s3.ranges import NO_HEADER, check_header, suggest_omission

if TYPE_CHECKING:
    from streamer.s3.client.session import S3Client
    from streamer.s3.ranges import Outcome, RangeRequest


class AiobotocoreSource:
    """A `RangeSource` over one aiobotocore client, which it does not own."""

    together = 0

    def __init__(self, client: S3Client) -> None:
        self._client = client

    async def open(self, request: RangeRequest) -> AiobotocoreBody:
        items = request.part.rest(request.first)
        ranges = {index: item for index, item in enumerate(items) if isinstance(item, Segment)}
        if len(ranges) > 1:
            return await self._read_all(request, items, ranges)
        body = AiobotocoreBody(request.part.size - request.first)
        for item in items:
            if isinstance(item, bytes):
                body.add(item)
            else:
                body.begin(await self._response(request, item))
        return body

    async def _read_all(
        self, request: RangeRequest, items: list[Segment | bytes], ranges: dict[int, Segment]
    ) -> AiobotocoreBody:
        """Read a part of several ranges, and return its body. Raises SourceError if that has no byte."""
        contents: dict[int, list[bytes]] = {index: [] for index in ranges}
        errors: dict[int, SourceError] = {}
        free = asyncio.Semaphore(max(1, request.requests))

        async def fetch(index: int) -> None:
            async def take(data: bytes, _: Stall) -> None:
                contents[index].append(data)

            try:
                async with free:
                    response = await self._response(request, ranges[index])
                    await response.read(take)
            except SourceError as error:
                errors[index] = error
                for later, task in tasks.items():
                    if later > index:
                        task.cancel()

        async with TaskGroup() as group:
            tasks = {index: group.create_task(fetch(index)) for index in ranges}
        failed = min(errors, default=None)
        body = AiobotocoreBody(request.part.size - request.first)
        for index, item in enumerate(items):
            for data in [item] if isinstance(item, bytes) else contents[index]:
                body.add(data)
            if index == failed:
                body.fail(errors[index], doubted=sum(map(len, contents[index])))
                break
        return body

    async def _response(self, request: RangeRequest, each: Segment) -> RangeResponse:
        """Send the GET of a range, and return its response. Raises SourceError."""
        since = time.monotonic()
        try:
            return await confirmed(partial(self._send, request, each, since))
        except BaseException as error:
            outcome: Outcome = error if isinstance(error, SourceError) else "cancelled"
            request.on_request_ended(outcome, 0, 0.0, 0.0, NO_HEADER)
            raise

    async def _send(self, request: RangeRequest, each: Segment, since: float) -> RangeResponse:
        ref = each.object
        context = ErrorContext(ref.bucket, ref.key, each.start, request.attempt)
        sends_if_match = self._client.sends_if_match and not is_modified(ref.etag)
        conditions = {"IfMatch": f'"{ref.etag}"'} if sends_if_match else {}
        if ref.version:
            conditions["VersionId"] = ref.version
        on_whole = request.on_whole if each.whole else None
        wanted = {"ChecksumMode": "ENABLED"} if on_whole else {"Range": f"bytes={each.start}-{each.end - 1}"}
        with of_listed(), map_errors(context):
            try:
                response = await self._client.send(
                    "get_object",
                    context,
                    Bucket=ref.bucket,
                    Key=ref.key,
                    **wanted,
                    **conditions,
                )
            except SourceError as error:
                if sends_if_match:
                    suggest_omission(error)
                raise
            metadata = response["ResponseMetadata"]
            request_id = escaped_id(metadata.get("RequestId"))
            context = ErrorContext(ref.bucket, ref.key, each.start, request.attempt, request_id)
            try:
                check_header(
                    ref,
                    each.start,
                    each.end,
                    context,
                    status=metadata["HTTPStatusCode"],
                    content_length=response.get("ContentLength"),
                    fields=metadata["HTTPHeaders"],
                )
            except BaseException as error:
                fields, length = metadata["HTTPHeaders"], response.get("ContentLength")
                if isinstance(error, BadAnswer) and faults.may_be_error(fields, length):
                    async with within_stall(self._client.stall_timeout, context):
                        body = await response["Body"].read(faults.ERROR_BYTES)
                    if inside := faults.error_inside(metadata["HTTPStatusCode"], body, fields, context):
                        raise inside from error
                response["Body"].close()
                raise
            if on_whole:
                on_whole(ref, metadata["HTTPHeaders"])
            return RangeResponse(
                response, each, context, request, since=since, stall_timeout=self._client.stall_timeout
            )
