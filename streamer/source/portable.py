"""The portable transport: ranged GETs by aiobotocore, bodies through user space.

It works wherever aiobotocore works (TLS, proxies, any endpoint) and is the reference that faster
transports must equal byte for byte. The body is taken with `readchunk()`, which hands over each buffer
as the socket filled it; `readany()` joins what has piled up first (measured with 8 MiB parts: 1.4
against 1.8 CPU-s/GB in all), and botocore's own iterator costs more than either. That bypasses
botocore's length check, so the length is checked here.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from streamer.errors import Truncated, Where
from streamer.source.bounded import within_stall
from streamer.source.credentials import LastingCredentials, renewing
from streamer.source.faults import map_errors, of_listed
from streamer.source.ranges import check_head
from streamer.source.redirects import visible_id

if TYPE_CHECKING:
    from streamer.source.ranges import Receiver


class PortableSource:
    """A `RangeSource` over one aiobotocore client, which it does not own."""

    name = "aiobotocore"

    def __init__(self, client: Any, credentials: LastingCredentials | None = None) -> None:
        """`credentials`: the client's, to be told if they are refused."""
        self._client = client
        self._credentials = credentials
        self._stall_timeout: float = client.meta.config.read_timeout

    async def fetch(self, into: Receiver, *, attempt: int) -> None:
        with renewing(self._credentials), of_listed():
            await self._fetch(into, attempt)

    async def _fetch(self, into: Receiver, attempt: int) -> None:
        part, first = into.part, into.part.start + into.received
        ref = part.object
        where = Where(ref.bucket, ref.key, first, attempt)
        with map_errors(where):
            answer = await self._client.get_object(
                Bucket=ref.bucket,
                Key=ref.key,
                Range=f"bytes={first}-{part.end - 1}",
                IfMatch=f'"{ref.etag}"',
                **({"VersionId": ref.version} if ref.version else {}),
            )
            metadata = answer["ResponseMetadata"]
            where = Where(ref.bucket, ref.key, first, attempt, visible_id(metadata.get("RequestId")))
            async with answer["Body"] as body:
                check_head(
                    ref,
                    first,
                    part.end,
                    where,
                    status=metadata["HTTPStatusCode"],
                    content_range=answer.get("ContentRange"),
                    content_length=answer.get("ContentLength"),
                    etag=answer.get("ETag"),
                    version=answer.get("VersionId"),
                )
                into.answered()
                with map_errors(where):
                    await _drain(body.raw_stream.content, into, where, self._stall_timeout)


async def _room(into: Receiver) -> None:
    """Wait until a full receiver has been drained; what is in the socket meanwhile stays there."""
    drained = asyncio.Event()
    into.on_room = drained.set
    try:
        await drained.wait()
    finally:
        if into.on_room == drained.set:
            into.on_room = None


async def _drain(content: Any, into: Receiver, where: Where, stall_timeout: float) -> None:
    """Feed the body until the part is whole. Raises Truncated if it ends before, Transient if it stalls."""
    wanted = into.part.body
    async with within_stall(stall_timeout, where) as stall:
        while into.received < wanted:
            if into.full:
                stall.pause()
                await _room(into)
                stall.moved()
            data, end_of_chunk = await content.readchunk()
            if not data and not end_of_chunk:
                raise Truncated(f"the body ended {wanted - into.received} bytes early", where)
            if data:
                into.feed(data)
                stall.moved()
