"""What readers see of an epoch that fails for good: its FIFO is held or closed."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from streamer.errors import TruncatedStream
from streamer.readers import PipeStream
from streamer.relay.transport import Wish
from tests.kit.harness import Running, fill, running_channel
from tests.kit.pipes import eventually, off_loop, read_all
from tests.kit.stub import Answer, S3Stub, fails
from tests.kit.trailers import published_trailer

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")

FAULTS = {
    "denied": fails(403, "AccessDenied"),
    "gone": fails(404, "NoSuchKey"),
    "replaced": fails(412, "PreconditionFailed"),
}
PART = 50_000


def fail_at(
    stub: S3Stub, key: str, start: int, fault: Callable[[Answer], Awaitable[web.StreamResponse]]
) -> None:
    """Have every GET of the object from byte `start` on fail."""
    stub.weather = lambda name, first, _size: fault if name == key and first >= start else None


async def end(running: Running) -> None:
    running.channel.drain()
    await running.task


@pytest.mark.parametrize("transport", ["aiobotocore", "buffered", "splice"])
async def test_close_is_an_end_that_only_the_trailer_denies(
    stub: S3Stub, tmp_path: Path, transport: Wish
) -> None:
    fill(stub, [70_000, 20_000])
    fail_at(stub, "b/data/0001", 0, FAULTS["denied"])
    async with running_channel(
        stub, tmp_path, transport=transport, part_size=PART, when_failed="close"
    ) as running:
        assert await off_loop(read_all, running.fifo(0)) == stub.objects["b/data/0000"]
        await eventually(lambda: running.fifo(1).exists() and not running.withdrawn(0).exists())
        assert published_trailer(tmp_path, "train", 0).state == "failed"
        with pytest.raises(TruncatedStream, match="received 0 of 90000 bytes of train_1: the source failed"):
            await off_loop(lambda: PipeStream(running.fifo(1)).read(1))
        await end(running)
    assert not running.fifo(1).exists()


async def test_close_while_our_reader_reads(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [70_000, 20_000])
    fail_at(stub, "b/data/0001", 0, FAULTS["gone"])
    async with running_channel(stub, tmp_path, when_failed="close") as running:
        with pytest.raises(
            TruncatedStream, match="received 70000 of 90000 bytes of train_0: the source failed"
        ):
            await off_loop(lambda: PipeStream(running.fifo(0)).readall())
        await end(running)


@pytest.mark.parametrize("transport", ["aiobotocore", "buffered", "splice"])
async def test_who_leaves_a_failed_epoch_is_told_in_the_next(
    stub: S3Stub, tmp_path: Path, transport: Wish
) -> None:
    """The failure came while the reader left early, as steps_per_epoch has it: nobody will write there."""
    fill(stub, [70_000, 20_000])
    fail_at(stub, "b/data/0001", 0, FAULTS["gone"])
    async with running_channel(stub, tmp_path, transport=transport, part_size=PART) as running:
        with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb", buffering=0) as reader:
            assert await off_loop(reader.read, 1000)
            await eventually(lambda: published_trailer(tmp_path, "train", 0).state == "failed")
        with pytest.raises(
            TruncatedStream,
            match=r"received 0 of 90000 bytes of train_1: the source failed: .* s3://b/data/0001 ",
        ):
            await off_loop(lambda: PipeStream(running.fifo(1), timeout=300).read(1))
        assert running.withdrawn(0).exists()  # held: a restart may go on with it
        await end(running)


async def test_a_fifo_that_is_closed_keeps_its_bytes(stub: S3Stub, tmp_path: Path) -> None:
    truth = fill(stub, [500_000, 1])[:500_000]
    fail_at(stub, "b/data/0001", 0, FAULTS["denied"])
    async with running_channel(
        stub, tmp_path, transport="buffered", requests_in_flight=1, when_failed="close", parts=30
    ) as running:
        with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb", buffering=0) as reader:
            await eventually(lambda: running.channel.error and not running.withdrawn(0).exists())
            assert published_trailer(tmp_path, "train", 0).state == "failed"
            assert await off_loop(reader.readall) == truth
        await end(running)
