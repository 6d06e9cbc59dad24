"""The clients that a loader reads by. Each gets the pieces of a batch and returns the bytes that it read.

A sample of one object is in memory as a whole before the next is read, or many small ones at a time. What a
careful user of each library would write:

    penstock          one FIFO, one loader; each sample into the same buffer
    files             the objects as local files, each sample into the same buffer
    obstore           ranges of 8 MiB at a time, by the library's asyncio functions
    s3dlio            `get_many` for small objects, `get_range` in threads for the ranges of large ones
    s3torchconnector  `S3MapDataset`, whose CRT client divides an object into ranges
    runai             Run:ai's model streamer: `FileStreamer` over all pieces
    boto3             `get_object` of ranges in threads

Third-party libraries are imported by the feed that needs them.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

MIB = 1 << 20
RANGE = 8 * MIB
Span = tuple[str, int, int]
"""Key, first byte and length of a range of an object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the loaders of one accelerator read."""

    feed: str
    url: str
    ca_bundle: str | None
    bucket: str
    keys: list[str]
    whole: bool
    """Whether a piece is a whole object."""
    directory: str
    """The bucket's objects as local files."""
    fifo: str
    largest: int
    """Bytes of the largest sample."""
    loaders: int
    requests: int
    """Requests in flight of one loader, where the library asks for a number."""
    batches: list[list[tuple[int, int, int]]]
    """Pieces of each batch: index of the key, first byte, length."""


class Feed(Protocol):
    """A client that reads batches."""

    def load(self, batch: Sequence[Span]) -> int:
        """Read every piece of a batch; return the number of bytes."""


class _Buffer:
    """A buffer for one sample, which every sample uses again. Huge pages save a third of the CPU time."""

    def __init__(self, size: int) -> None:
        room = mmap.mmap(-1, max(size, MIB))
        room.madvise(mmap.MADV_HUGEPAGE)
        self._room = memoryview(room)

    def fill(self, fd: int, length: int) -> int:
        """Read `length` bytes, or fewer at the end of the file."""
        done = 0
        while done < length:
            at = done % len(self._room)
            count = os.readv(fd, [self._room[at : at + length - done]])
            if not count:
                break
            done += count
        return done


class _Penstock:
    def __init__(self, order: Order) -> None:
        self._path, self._fd = order.fifo, -1
        self._buffer = _Buffer(order.largest)

    def load(self, batch: Sequence[Span]) -> int:
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        return sum(self._buffer.fill(self._fd, length) for _, _, length in batch)


class _Files:
    def __init__(self, order: Order) -> None:
        self._directory = order.directory
        self._buffer = _Buffer(order.largest)

    def load(self, batch: Sequence[Span]) -> int:
        total = 0
        for key, start, length in batch:
            fd = os.open(os.path.join(self._directory, key), os.O_RDONLY | os.O_CLOEXEC)
            os.lseek(fd, start, os.SEEK_SET)
            total += self._buffer.fill(fd, length)
            os.close(fd)
        return total


def ranges(span: Span) -> list[Span]:
    """Return a piece as ranges of at most 8 MiB."""
    key, start, length = span
    return [(key, start + at, min(RANGE, length - at)) for at in range(0, length, RANGE)]


def groups(batch: Sequence[Span]) -> Iterator[list[Span]]:
    """Yield the ranges to request at a time: those of each large piece, and the small pieces together."""
    yield from (ranges(span) for span in batch if span[2] > RANGE)
    if small := [span for span in batch if span[2] <= RANGE]:
        yield small


class _Obstore:
    def __init__(self, order: Order) -> None:
        from obstore.store import S3Store

        options: Any = {"allow_http": True}
        if order.ca_bundle:
            with open(order.ca_bundle, "rb") as file:
                options["root_certificate"] = file.read()
        self._store = S3Store(
            order.bucket,
            endpoint=order.url,
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options=options,
        )
        self._requests = order.requests
        self._loop = asyncio.Runner()

    def load(self, batch: Sequence[Span]) -> int:
        return self._loop.run(self._load(batch))

    async def _load(self, batch: Sequence[Span]) -> int:
        import obstore

        slots = asyncio.Semaphore(self._requests)

        async def get(span: Span) -> Any:
            async with slots:
                key, start, length = span
                return await obstore.get_range_async(self._store, key, start=start, length=length)

        total = 0
        for group in groups(batch):
            total += sum(map(len, await asyncio.gather(*map(get, group))))
        return total


class _Threaded:
    """Reads ranges in threads, by a function of the library."""

    def __init__(self, order: Order, get: Callable[[Span], Any]) -> None:
        self._get = get
        self._pool = ThreadPoolExecutor(order.requests)

    def load(self, batch: Sequence[Span]) -> int:
        return sum(sum(map(len, self._pool.map(self._get, group))) for group in groups(batch))


def _boto3(order: Order) -> Feed:
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=order.url,
        region_name="us-east-1",
        verify=order.ca_bundle,
        config=Config(
            s3={"addressing_style": "path"},
            response_checksum_validation="when_required",
            max_pool_connections=order.requests,
        ),
    )

    def get(span: Span) -> Any:
        key, start, length = span
        asked = f"bytes={start}-{start + length - 1}"
        return client.get_object(Bucket=order.bucket, Key=key, Range=asked)["Body"].read()

    return _Threaded(order, get)


class _S3dlio:
    def __init__(self, order: Order) -> None:
        import s3dlio

        self._get_many, self._whole, self._requests = s3dlio.get_many, order.whole, order.requests
        self._prefix = f"s3://{order.bucket}/"
        self._ranges = _Threaded(
            order, lambda span: s3dlio.get_range(self._prefix + span[0], span[1], span[2])
        )

    def load(self, batch: Sequence[Span]) -> int:
        if not self._whole or any(length > RANGE for _, _, length in batch):
            return self._ranges.load(batch)
        found = self._get_many([self._prefix + key for key, _, _ in batch], max_in_flight=self._requests)
        return sum(len(body) for _, body in found)


class _S3torchconnector:
    def __init__(self, order: Order) -> None:
        from s3torchconnector import S3ClientConfig, S3MapDataset, S3ReaderConstructor

        self._index = {key: index for index, key in enumerate(order.keys)}
        self._whole = order.whole
        self._objects = S3MapDataset.from_objects(
            [f"s3://{order.bucket}/{key}" for key in order.keys],
            region="us-east-1",
            endpoint=order.url,
            s3client_config=S3ClientConfig(force_path_style=True, throughput_target_gbps=50.0),
            reader_constructor=None if order.whole else S3ReaderConstructor.range_based(),
        )
        self._pool = ThreadPoolExecutor(order.requests)

    def load(self, batch: Sequence[Span]) -> int:
        if any(length > RANGE for _, _, length in batch):
            return sum(map(self._get, batch))
        return sum(self._pool.map(self._get, batch))

    def _get(self, span: Span) -> int:
        key, start, length = span
        reader = self._objects[self._index[key]]
        if self._whole:
            return len(reader.read())
        reader.seek(start)
        return len(reader.read(length))


class _Runai:
    def __init__(self, order: Order) -> None:
        from runai_model_streamer import FileStreamer

        self._prefix = f"s3://{order.bucket}/"
        self._streamer = FileStreamer().__enter__()

    def load(self, batch: Sequence[Span]) -> int:
        from runai_model_streamer import FileChunks

        asked = [
            FileChunks.contiguous(number, self._prefix + key, start, [length])
            for number, (key, start, length) in enumerate(batch)
        ]
        self._streamer.stream_files(asked, memory_limit=2 * max(length for _, _, length in batch))
        return sum(body.nbytes for _, _, body in self._streamer.get_chunks())


FEEDS: dict[str, Callable[[Order], Feed]] = {
    "penstock": _Penstock,
    "files": _Files,
    "obstore": _Obstore,
    "s3dlio": _S3dlio,
    "s3torchconnector": _S3torchconnector,
    "runai": _Runai,
    "boto3": _boto3,
}
