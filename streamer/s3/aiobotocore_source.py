"""Ranged GETs by aiobotocore, through user space.

This transport works wherever aiobotocore works (TLS, proxies, any endpoint); `http_source` must deliver the
same bytes. Bodies are read with aiohttp's `readchunk()`, which returns each buffer as the socket filled it.
`readany()` joins all buffered bytes first (measured with 8 MiB parts: 1.8 CPU-s/GB in all, against 1.4), and
botocore's own iterator costs more than either. `readchunk()` bypasses botocore's length check, so this module
checks the length: each body is read to its own end, which a chunked one has, and its end must be the range's.
The last bytes are queued after that.

    the task that opened the body: readchunk ─→ at most `QUEUED` bytes ─→ read_into by the stage
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from streamer.errors import ErrorContext, InvalidResponse, SourceError, Truncated
from streamer.plan import is_modified
from streamer.s3.client.credentials import RenewableCredentials, renewing
from streamer.s3.client.faults import escaped_id, map_errors, of_listed
from streamer.s3.client.final_answers import confirmed
from streamer.s3.client.stall import within_stall
from streamer.s3.ranges import check_header, content_encoding, suggest_omission, transformation
from streamer.units import KIB, counted

if TYPE_CHECKING:
    from streamer.s3.client.session import S3Client
    from streamer.s3.ranges import RangeRequest

QUEUED = 256 * KIB
"""Bytes to read ahead of the stage, exceeded by one chunk at most."""
SMALL_CHUNK = 4 * KIB
"""Size in bytes below which a chunk is joined with all other bytes that have arrived."""


class AiobotocoreSource:
    """A `RangeSource` over one aiobotocore client, which it does not own."""

    name = "aiobotocore"
    span_size = 0

    def __init__(self, client: S3Client, credentials: RenewableCredentials | None) -> None:
        """`credentials`: the client's credentials, renewed if S3 refuses them."""
        self._client = client
        self._credentials = credentials
        self._stall_timeout = client.stall_timeout

    async def open(self, request: RangeRequest) -> AiobotocoreBody:
        return await confirmed(partial(self._open, request))

    async def _open(self, request: RangeRequest) -> AiobotocoreBody:
        part, context = request.part, request.context
        ref = part.object
        sends_if_match = self._client.sends_if_match and not is_modified(ref.etag)
        conditions = {"IfMatch": f'"{ref.etag}"'} if sends_if_match else {}
        if ref.version:
            conditions["VersionId"] = ref.version
        with renewing(self._credentials), of_listed(), map_errors(context):
            try:
                with map_errors(context):
                    response = await self._client.get_object(
                        Bucket=ref.bucket,
                        Key=ref.key,
                        Range=f"bytes={request.first}-{part.end - 1}",
                        **conditions,
                    )
            except SourceError as error:
                if sends_if_match:
                    suggest_omission(error)
                raise
            metadata = response["ResponseMetadata"]
            request_id = escaped_id(metadata.get("RequestId"))
            context = ErrorContext(ref.bucket, ref.key, request.first, request.attempt, request_id)
            stream = response["Body"]
            try:
                check_header(
                    ref,
                    request.first,
                    part.end,
                    context,
                    status=metadata["HTTPStatusCode"],
                    content_length=response.get("ContentLength"),
                    fields=metadata["HTTPHeaders"],
                )
            except BaseException:
                stream.close()
                raise
            length = part.end - request.first
            body = AiobotocoreBody(stream, length, context, stall_timeout=self._stall_timeout)
            if content_encoding(metadata["HTTPHeaders"]):
                body.doubt = transformation(metadata["HTTPHeaders"], response.get("ContentLength"))
            return body


class AiobotocoreBody:
    """A `Body` that the task in `taken` reads up to `QUEUED` bytes ahead of the stage."""

    spliceable = False

    def __init__(self, stream: Any, length: int, context: ErrorContext, *, stall_timeout: float) -> None:
        from streamer.s3.client.redirects import surplus_after  # imports aiobotocore

        self.left = length
        self.doubt = ""
        """Text to add to an error of the body."""
        self._length = length
        self._stream = stream
        self._to_read = length
        self._context = context
        self._stall_timeout = stall_timeout
        self._loop = asyncio.get_running_loop()
        self._chunks: deque[memoryview] = deque()
        self._queued = 0
        self._room = asyncio.Event()
        self._call: Callable[[], None] | None = None
        self._parked = False
        self._failure: SourceError | None = None
        self._followed = surplus_after(stream.raw_stream)

    def __repr__(self) -> str:
        return f"<AiobotocoreBody {self._queued} of {self.left} bytes left are here>"

    def splice_into(self, pipe_fd: int, most: int, *, revocable: bool = False) -> int:
        """Raise NotImplementedError: the bytes are in memory already."""
        raise NotImplementedError("not spliceable")

    def read_into(self, memory: memoryview) -> int:
        self.probe()
        count = 0
        while self._chunks and count < len(memory):
            chunk = self._chunks[0]
            step = min(len(chunk), len(memory) - count)
            memory[count : count + step] = chunk[:step]
            count += step
            if step == len(chunk):
                self._chunks.popleft()
            else:
                self._chunks[0] = chunk[step:]
        self._queued -= count
        self.left -= count
        self._room.set()
        return count

    def probe(self) -> None:
        if not self._chunks:
            if self._failure is not None:
                raise self._failure
            raise BlockingIOError

    def doubted(self) -> tuple[int, bytes]:
        return self._length - self.left, b""

    def notify(self, call: Callable[[], None]) -> None:
        self._wait(call, parked=False)

    def park(self, call: Callable[[], None]) -> None:
        self._wait(call, parked=True)

    def _wait(self, call: Callable[[], None], *, parked: bool) -> None:
        self._call, self._parked = call, parked
        if self._is_due():
            self._loop.call_soon(self._wake)

    def _is_due(self) -> bool:
        if self._failure is not None:
            return True
        return self._queued >= QUEUED or not self._to_read if self._parked else self._queued > 0

    def _wake(self) -> None:
        if self._call is not None and self._is_due():
            call, self._call = self._call, None
            call()

    def hush(self) -> None:
        self._call = None

    async def taken(self) -> None:
        """As `Body.taken`; reads the body meanwhile."""
        try:
            with map_errors(self._context):
                await self._read()
        except SourceError as error:
            error.message += self.doubt
            self._failure = error
            self._wake()
            raise

    async def _read(self) -> None:
        content = self._stream.raw_stream.content
        async with within_stall(self._stall_timeout, self._context) as stall:
            while self.left:
                if self._queued >= QUEUED or not self._to_read:
                    stall.pause()
                    self._room.clear()
                    await self._room.wait()
                    stall.moved()
                    continue
                data, end_of_chunk = await content.readchunk()
                if not data and not end_of_chunk:
                    raise Truncated(f"the body ended {counted(self._to_read, 'byte')} early", self._context)
                if data:
                    if len(data) < SMALL_CHUNK:  # readchunk() does not yield to the loop between chunks
                        data += content.read_nowait()
                    if len(data) >= self._to_read:
                        await self._check_end(content, len(data) - self._to_read)
                    self._add(data)
                    stall.moved()

    async def _check_end(self, content: Any, surplus: int) -> None:
        """Wait for the end of the body. Raises InvalidResponse if other bytes come before or after it."""
        while not surplus and not content.at_eof():
            data, end_of_chunk = await content.readchunk()
            surplus += len(data)
            if not data and not end_of_chunk:
                break
        if surplus or await self._followed:
            raise InvalidResponse(
                f"more bytes follow the {counted(self._length, 'byte')} of the range, so a server or a proxy "
                "mixes up responses; see to what is between Penstock and S3",
                self._context,
            )

    def _add(self, data: bytes) -> None:
        self._chunks.append(memoryview(data))
        self._queued += len(data)
        self._to_read -= len(data)
        self._wake()

    def close(self) -> None:
        self._call = None
        self._chunks.clear()
        self._stream.close()
