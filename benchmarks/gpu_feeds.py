"""The feeds of `benchmarks.gpu`: datasets that DataLoader workers read, each with another source of bytes.

A shard is an object of whole records, one after the other. A record is the pixels of an image and a mark of a
few bytes. Every feed yields file objects, which the same code reads into batches, so the feeds differ only in
the source of the bytes:

    penstock          one FIFO per worker (the channel's rank FIFOs), one sidecar
    s3torchconnector  AWS's connector for PyTorch, on the CRT's client; it divides shards among workers
    obstore           all ranges of a shard at once, while the next shard is fetched
    boto3             the bodies of one GET after the other
    s5cmd, rclone     `cat` of one shard after the other, as WebDataset's `pipe:` does
    files             the same shards as local files in the page cache: the limit of the DataLoader
    memory            one batch repeatedly: the limit of the GPU
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.clients import rclone_path
from benchmarks.gpu_task import AHEAD, IMAGE, MARK, RECORD, Order

MIB = 1 << 20
PIPE = 1 * MIB
RANGE = 8 * MIB


class Readable(Protocol):
    """The one method of a file that the feeds need."""

    def readinto(self, room: memoryview, /) -> int | None:
        """Read into the buffer; return the number of bytes, 0 at the end."""


def loader(order: Order, batch: int) -> DataLoader[Any]:
    """Return an endless loader of batches of records: uint8 of (batch, RECORD), in pinned memory."""
    if order.feed == "memory":
        return DataLoader(_Memory(batch), batch_size=None)
    return DataLoader(
        _Shards(order, batch),
        batch_size=None,
        num_workers=order.workers,
        prefetch_factor=AHEAD,
        pin_memory=torch.cuda.is_available(),
    )


class _Memory(IterableDataset):  # type: ignore[misc] # torch is not followed by the checker
    def __init__(self, batch: int) -> None:
        made = torch.randint(0, 256, (batch, RECORD), dtype=torch.uint8)
        made[:, IMAGE:] = torch.frombuffer(bytearray(MARK), dtype=torch.uint8)
        self._batch = made.pin_memory() if torch.cuda.is_available() else made

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._batch


class _Shards(IterableDataset):  # type: ignore[misc] # as above
    def __init__(self, order: Order, batch: int) -> None:
        self._order = order
        self._batch = batch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        files = FEEDS[self._order.feed](self._order, info.id if info else 0)
        file = next(files)
        while True:
            batch = torch.empty((self._batch, RECORD), dtype=torch.uint8)
            room = memoryview(batch.view(-1).numpy())
            while room:
                count = file.readinto(room)
                if count:
                    room = room[count:]
                else:
                    file = next(files)
            yield batch


def _mine(order: Order, worker: int) -> Iterator[str]:
    """Yield the names of a worker's shards, repeatedly."""
    while True:
        yield from order.keys[worker :: order.workers]


def _files(order: Order, worker: int) -> Iterator[Readable]:
    for key in _mine(order, worker):
        with open(os.path.join(order.directory, key), "rb", buffering=0) as file:
            yield file


def _penstock(order: Order, worker: int) -> Iterator[Readable]:
    from streamer.readers import open_channel, rank_channels

    del order  # the sidecar has the job file instead
    rank = rank_channels("train")[worker]
    while True:
        with open_channel(rank) as stream:
            yield stream


def _s3torchconnector(order: Order, worker: int) -> Iterator[Readable]:
    from s3torchconnector import S3ClientConfig, S3IterableDataset

    del worker  # s3torchconnector divides the shards itself
    dataset = S3IterableDataset.from_prefix(
        f"s3://{order.bucket}/",
        region="us-east-1",
        endpoint=order.url,
        s3client_config=S3ClientConfig(force_path_style=True, throughput_target_gbps=50.0),
        enable_sharding=True,
    )
    while True:
        yield from dataset


class _Pieces:
    """A sequence of buffers as one file."""

    def __init__(self, buffers: list[Any]) -> None:
        self._left = [memoryview(buffer) for buffer in reversed(buffers)]

    def readinto(self, room: memoryview, /) -> int:
        if not self._left:
            return 0
        first = self._left.pop()
        count = min(len(first), len(room))
        room[:count] = first[:count]
        if count < len(first):
            self._left.append(first[count:])
        return count


def _obstore(order: Order, worker: int) -> Iterator[Readable]:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        order.bucket,
        endpoint=order.url,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    starts = list(range(0, order.size, RANGE))
    ends = [min(start + RANGE, order.size) for start in starts]

    def fetch(key: str) -> _Pieces:
        return _Pieces(obstore.get_ranges(store, key, starts=starts, ends=ends, coalesce=0))

    keys = _mine(order, worker)
    with ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(fetch, next(keys))
        while True:
            found, coming = coming.result(), ahead.submit(fetch, next(keys))
            yield found


def _boto3(order: Order, worker: int) -> Iterator[Readable]:
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=order.url,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}, response_checksum_validation="when_required"),
    )
    for key in _mine(order, worker):
        yield client.get_object(Bucket=order.bucket, Key=key)["Body"]


def _program(command: Callable[[Order, str], list[str]]) -> Callable[[Order, int], Iterator[Readable]]:
    def files(order: Order, worker: int) -> Iterator[Readable]:
        for key in _mine(order, worker):
            with subprocess.Popen(command(order, key), stdout=subprocess.PIPE, bufsize=0) as process:
                if process.stdout is None:
                    raise RuntimeError("no pipe")
                fcntl.fcntl(process.stdout.fileno(), fcntl.F_SETPIPE_SZ, PIPE)
                # Reopens the pipe as a FileIO, because the type of `Popen.stdout` has no `readinto`.
                with open(process.stdout.fileno(), "rb", buffering=0, closefd=False) as file:
                    yield file
            if process.returncode:
                raise RuntimeError(f"{process.args!r} ended with exit code {process.returncode}")

    return files


def _s5cmd(order: Order, key: str) -> list[str]:
    options = ["--concurrency", "8", "--part-size", str(RANGE // MIB)]
    return ["s5cmd", "--endpoint-url", order.url, "cat", *options, f"s3://{order.bucket}/{key}"]


def _rclone(order: Order, key: str) -> list[str]:
    return ["rclone", "--config", os.devnull, "cat", rclone_path(order.url, f"{order.bucket}/{key}")]


FEEDS: dict[str, Callable[[Order, int], Iterator[Readable]]] = {
    "files": _files,
    "penstock": _penstock,
    "s3torchconnector": _s3torchconnector,
    "obstore": _obstore,
    "boto3": _boto3,
    "s5cmd": _program(_s5cmd),
    "rclone": _program(_rclone),
}
"""Functions that yield a worker's files, by feed; `memory` reads no file."""
