"""Compressed objects on real FIFOs, over both transports that bring bytes into memory."""

from __future__ import annotations

import asyncio
import functools
import gzip
import json
import os
import random
import tempfile
import threading
import zlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from backports import zstd

from streamer.errors import ConfigError
from streamer.plan import Arrangement, Plan, S3Uri, Shard
from streamer.relay.deliver import transform_runner, wrap
from streamer.relay.transport import TransportSpec, open_transport, why_read
from streamer.s3.client.doubt import DOUBTED
from streamer.units import MIB
from tests.kit.harness import MORE_THAN_A_FIFO, RunChannel, Running, clients_of, running_channel
from tests.kit.pipes import eventually, off_loop, read_all, read_some
from tests.kit.planning import plan_augmented, plan_prefix
from tests.kit.stub import S3Stub, cut_after, stalls
from tests.kit.trailers import published_trailer
from tests.relay.test_faults import failed_after
from tests.unit import reference

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")


@pytest.fixture(params=["aiobotocore", "buffered"])
def run(request: pytest.FixtureRequest) -> RunChannel:
    """A channel whose plan is to inflate, over a transport that can: over one of them, ahead of delivery."""

    def running(
        stub: S3Stub, directory: Path, *, wrap: bool = False, **others: Any
    ) -> AbstractAsyncContextManager[Running]:
        arrangement = Arrangement(wrap=wrap, inflate=True)
        ahead = 4 * MIB if request.param == "buffered" else 0
        arguments = {
            "arrangement": arrangement,
            "inflate": True,
            "ahead": ahead,
            "transport": request.param,
        } | others
        return running_channel(stub, directory, **arguments)

    return running


def fill(
    stub: S3Stub, sizes: list[int], compress: Callable[..., bytes] | partial[bytes] = gzip.compress
) -> list[bytes]:
    """Put compressed objects; return their contents."""
    contents = [random.Random(i).randbytes(size // 2).hex().encode() for i, size in enumerate(sizes)]
    stub.objects |= {f"b/data/{i:04d}": compress(data) for i, data in enumerate(contents)}
    return contents


def mixed(content: bytes) -> bytes:
    """Members of both kinds, as `cat a.gz b.zst c.gz` makes them."""
    third = len(content) // 3
    parts = [content[:third], content[third : 2 * third], content[2 * third :]]
    return gzip.compress(parts[0]) + zstd.compress(parts[1]) + gzip.compress(parts[2])


@pytest.mark.parametrize("compress", [gzip.compress, zstd.compress, mixed])
@pytest.mark.parametrize("wrap", [False, True])
async def test_a_fifo_holds_what_was_compressed(
    run: RunChannel,
    stub: S3Stub,
    tmp_path: Path,
    wrap: bool,
    compress: Callable[..., bytes] | Callable[[bytes], bytes],
) -> None:
    """Objects of one part and of many, in order, in every epoch; and the length proven is that."""
    contents = fill(stub, [400_000, 2, 0, 99_998, 3_000_000, 51_111], compress)
    due = b"".join(map(reference.record, contents) if wrap else contents)
    async with run(stub, tmp_path, wrap=wrap) as running:
        for epoch in range(2):
            opening = published_trailer(tmp_path, "train", epoch)
            assert (opening.state, opening.bytes_total) == ("open", None)
            assert await off_loop(read_all, running.fifo(epoch)) == due
            trailer = published_trailer(tmp_path, "train", epoch)
            assert trailer.state == "complete"
            assert trailer.bytes_delivered == trailer.bytes_total == len(due)
        statistics = running.channel.statistics()
        assert statistics.bytes_total == sum(map(len, stub.objects.values()))
        assert (statistics.written_bytes, statistics.objects_completed) == (2 * len(due), 12)


@pytest.mark.parametrize("refused", ["inflate-ahead", "inflate"])
async def test_a_thread_that_cannot_start_costs_no_epoch(
    stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """The limit pids.max refuses the second thread of inflation, or both of them."""
    contents = fill(stub, [700_000] * 8)
    start, asked = threading.Thread.start, set()

    def started(thread: threading.Thread) -> None:
        if thread.name.startswith(refused):
            asked.add(thread.name.rpartition("_")[0])
            raise RuntimeError("can't start new thread")
        start(thread)

    arguments: dict[str, Any] = {"arrangement": Arrangement(inflate=True), "inflate": True, "ahead": 4 * MIB}
    async with running_channel(stub, tmp_path, transport="buffered", **arguments) as running:
        monkeypatch.setattr(threading.Thread, "start", started)
        assert await off_loop(read_all, running.fifo(0)) == b"".join(contents)
        monkeypatch.undo()
    assert asked == {"inflate-ahead", refused}


@pytest.mark.parametrize("wrap", [False, True])
async def test_shuffle_and_shards_are_those_of_the_reference(
    run: RunChannel, stub: S3Stub, tmp_path: Path, wrap: bool
) -> None:
    """Entries are arranged as they are without compression; framing is of the content."""
    contents = fill(stub, [0, 2, 4, 65_536, 120_000, 49_998, 6, 8])
    arrangement = Arrangement(wrap, 7, Shard(1, 2), inflate=True)

    async with run(stub, tmp_path, arrangement=arrangement) as running:
        for epoch in range(2):
            found = [[content] for content in contents]
            due = reference.stream(found, epoch=epoch, wrap=wrap, seed=7, host=1, hosts=2)
            assert await off_loop(read_all, running.fifo(epoch)) == due


async def test_an_empty_object_has_no_content(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    """Nothing to inflate is no error; wrapped, it is an empty record."""
    stub.objects["b/data/0000"] = b""
    stub.objects["b/data/0001"] = gzip.compress(b"text")
    async with run(stub, tmp_path) as running:
        assert await off_loop(read_all, running.fifo(0)) == b"text"
    (tmp_path / "wrapped").mkdir()
    async with run(stub, tmp_path / "wrapped", wrap=True) as running:
        due = reference.record(b"") + reference.record(b"text")
        assert await off_loop(read_all, running.fifo(0)) == due


@pytest.mark.parametrize("wrap", [False, True])
async def test_only_the_objects_of_an_augmented_manifest_are_inflated(
    run: RunChannel, stub: S3Stub, tmp_path: Path, wrap: bool
) -> None:
    contents = fill(stub, [70_000, 0, 130_000])
    rows = [{"label": f"l{i}", "x-ref": f"s3://b/data/{i:04d}"} for i in range(3)]
    stub.objects["b/manifest"] = "\n".join(map(json.dumps, rows)).encode()
    make = functools.partial(
        plan_augmented, uri=S3Uri("b", "manifest"), attributes=["label", "x-ref"],
        arrangement=Arrangement(wrap=wrap, inflate=True),
    )  # fmt: skip
    items = [item for i, content in enumerate(contents) for item in (b"l%d" % i, content)]
    async with run(stub, tmp_path, make_plan=make) as running:
        due = b"".join(map(reference.record, items) if wrap else items)
        assert await off_loop(read_all, running.fifo(0)) == due


@pytest.mark.parametrize("wrap", [False, True])
async def test_a_broken_body_is_resumed_and_inflates_all_the_same(
    run: RunChannel, stub: S3Stub, tmp_path: Path, wrap: bool
) -> None:
    (content,) = fill(stub, [200_000])
    stub.script(cut_after(20_000), cut_after(1), cut_after(5_000))
    async with run(stub, tmp_path, wrap=wrap, requests_in_flight=1) as running:
        due = reference.record(content) if wrap else content
        assert await off_loop(read_all, running.fifo(0)) == due
        assert running.channel.statistics().counts["retries"]["truncated"] == 3


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda packed: packed[:-1], "cut off"),
        (lambda packed: packed[:-8] + bytes([packed[-8] ^ 1]) + packed[-7:], "corrupt in member 1"),
        (lambda packed: packed + b"\0", "bytes after member 1"),
        (gzip.decompress, "neither gzip nor zstd"),
    ],
)
async def test_an_object_that_cannot_be_inflated_fails_by_name(
    run: RunChannel, stub: S3Stub, tmp_path: Path, *, spoil: Callable[[bytes], bytes], words: str, wrap: bool
) -> None:
    """What is before it is delivered, the FIFO shows no end, and a wrapped record is whole or not begun."""
    first, _ = fill(stub, [90_000, 30])
    stub.objects["b/data/0001"] = spoil(stub.objects["b/data/0001"])
    due = len(reference.record(first)) if wrap else len(first)
    if not wrap and words in ("cut off", "bytes after member 1"):
        due += 30  # known to be wrong at the end alone
    async with run(stub, tmp_path, wrap=wrap) as running:
        error = await failed_after(running, due)
        assert type(running.channel.error).__name__ == "CorruptObject"
    assert words in error
    assert "s3://b/data/0001 (offset" in error


async def test_early_close_in_the_middle_of_an_object(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    """The next epoch begins with a fresh object, also if the last was given up in a member."""
    (content,) = fill(stub, [8_000_000])
    async with run(stub, tmp_path) as running:
        assert await off_loop(read_some, running.fifo(0), 1000) == content[:1000]
        assert await off_loop(read_all, running.fifo(1)) == content
        assert [trailer.state for trailer in running.states] == ["abandoned", "complete"]
        assert running.states[0].bytes_total is None


async def test_early_close_is_noticed_while_an_object_is_spooled(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """Nothing is written then, so nothing else would tell; the object goes on until it is too long."""
    stub.objects["b/data/0000"] = gzip.compress(b"")
    stub.objects["b/data/0001"] = zstd.compress(bytes(1 << 26)) * 16
    async with run(stub, tmp_path, wrap=True, part_size=2_000_000, parts=2) as running:
        empty = await off_loop(read_some, running.fifo(0), 8)
        assert empty == reference.record(b"")
        await eventually(lambda: running.states)
        assert (running.states[0].state, running.states[0].bytes_delivered) == ("abandoned", 8)


async def test_cancelled_while_inflating_leaves_nothing(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    fill(stub, [MORE_THAN_A_FIFO], functools.partial(gzip.compress, compresslevel=1))
    async with run(stub, tmp_path, wrap=True, part_size=1_000_000) as running:
        with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb", buffering=0):
            await eventually(lambda: running.channel.statistics().bytes_consumed)
            running.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running.task
    assert published_trailer(tmp_path, "train", 0).state == "stopped"


def in_members(content: bytes) -> bytes:
    """Several members, which two threads inflate."""
    parts = [content[at : at + 2 * MIB] for at in range(0, len(content), 2 * MIB)]
    return b"".join(gzip.compress(part, 1) for part in parts)


@pytest.mark.parametrize("compress", [partial(gzip.compress, compresslevel=1), in_members, zstd.compress])
async def test_a_cancelled_epoch_counts_every_byte_that_the_fifo_has(
    run: RunChannel, stub: S3Stub, tmp_path: Path, compress: Callable[..., bytes]
) -> None:
    """The thread that inflates writes the FIFO too; a sidecar that takes over goes on after its last byte."""
    (content,) = fill(stub, [24_000_000], compress)
    async with run(stub, tmp_path) as running:
        with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb", buffering=0) as reader:
            found = await off_loop(reader.read, 1_000_000)
            rest = asyncio.ensure_future(off_loop(reader.readall))
            await eventually(lambda: running.channel.statistics().bytes_consumed)
            running.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running.task
            found += await rest
    trailer = published_trailer(tmp_path, "train", 0)
    assert (trailer.state, trailer.bytes_delivered) == ("stopped", len(found))
    assert found == content[: len(found)]


@pytest.mark.parametrize("run", ["buffered"], indirect=True)  # aiobotocore keeps a part of them
async def test_bytes_that_have_arrived_do_not_wait_for_those_that_have_not(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """Storage stalls while the FIFO is full; the reader still gets all that the thread has inflated."""
    (content,) = fill(stub, [4_000_000], partial(gzip.compress, compresslevel=1))
    packed = stub.objects["b/data/0000"]
    inflater, after, arrived = zlib.decompressobj(31), 0, b""
    while len(arrived) < 1_120_000:  # a little more than the FIFO holds
        arrived += inflater.decompress(packed[after : after + 1000])
        after += 1000
    after += DOUBTED  # the last bytes of an unfinished response are kept back
    stub.script(stalls(stub, after=after))
    async with run(stub, tmp_path, part_size=len(packed)) as running:
        statistics = running.channel.statistics
        with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb") as reader:
            # Pieces that are no whole pages leave a part of the FIFO's pages empty (pipe(7)).
            await eventually(
                lambda: statistics().received_bytes == after and statistics().fifo_bytes > 700_000
            )
            found = await asyncio.wait_for(off_loop(reader.read, len(arrived) - 1000), 30)
            stub.release()
            found += await off_loop(reader.read)
    assert found == content


async def test_a_long_record_is_spooled_to_a_file_without_a_name(
    run: RunChannel, stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (wrap, transform_runner):
        monkeypatch.setattr(module, "SPOOL_MEMORY", 100_000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "spool"))
    (tmp_path / "spool").mkdir()
    contents = fill(stub, [5_000_000, 20_000, 300_000])
    async with run(stub, tmp_path, wrap=True) as running:
        assert await off_loop(read_all, running.fifo(0)) == b"".join(map(reference.record, contents))
    assert os.listdir(tmp_path / "spool") == []


async def test_no_room_for_the_spool_is_told_with_what_to_do(
    run: RunChannel, stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (wrap, transform_runner):
        monkeypatch.setattr(module, "SPOOL_MEMORY", 100_000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    fill(stub, [5_000_000])
    async with run(stub, tmp_path, wrap=True) as running:
        error = await failed_after(running, 0)
    assert "let TMPDIR name a directory with space" in error


async def test_a_record_that_inflates_beyond_its_format_is_refused_by_name(
    run: RunChannel, stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2^29 bytes; here less, so that the test is short."""
    monkeypatch.setattr(wrap, "LONGEST_RECORD", 3_000_000)
    stub.objects["b/data/0000"] = gzip.compress(bytes(3_000_000))
    stub.objects["b/data/0001"] = gzip.compress(bytes(3_000_001))
    async with run(stub, tmp_path, wrap=True) as running:
        error = await failed_after(running, 3_000_008)
    assert "more than the 3000000 bytes that a RecordIO record holds" in error
    assert "s3://b/data/0001" in error


async def test_a_bomb_takes_no_memory_and_no_time_of_others(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """A little that stands for much is delivered as it is read; what is not read is not inflated."""
    stub.objects["b/data/0000"] = zstd.compress(bytes(1 << 30))
    assert len(stub.objects["b/data/0000"]) < 100_000
    async with run(stub, tmp_path) as running:
        assert await off_loop(read_some, running.fifo(0), 5_000_000) == bytes(5_000_000)
        await eventually(lambda: running.states)
        assert running.states[0].bytes_delivered < 20_000_000


async def test_the_kernel_transport_is_not_for_them(stub: S3Stub, tmp_path: Path) -> None:
    why = why_read(Plan.of([], Arrangement(inflate=True)))
    assert why == "compressed objects are inflated in memory"
    async with clients_of(stub) as clients:
        spec = TransportSpec(buckets={"b"}, channels=[why], budget=64 << 20)
        async with open_transport(clients, spec) as transport:
            assert transport.pipes is None
            assert transport.reason == why
        with pytest.raises(ConfigError, match="but compressed objects are inflated in memory"):
            async with open_transport(clients, replace(spec, wish="splice")):
                pass


async def test_digests_tell_an_inflating_plan_apart(stub: S3Stub) -> None:
    fill(stub, [100])
    async with clients_of(stub) as clients:
        plans = [
            await plan_prefix(clients, S3Uri("b", "data/"), Arrangement(inflate=inflate))
            for inflate in (False, True)
        ]
    assert plans[0].digest != plans[1].digest
