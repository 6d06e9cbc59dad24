"""Joined objects on real FIFOs, over both transports that bring bytes into memory."""

from __future__ import annotations

import contextlib
import gzip
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from backports import zstd

from streamer.plan import Arrangement, Position, ResumePoint, S3Uri, Shard
from streamer.relay.deliver import object_ends
from streamer.relay.transport import Wish
from tests.kit.harness import RunChannel, Running, clients_of, fill, running_channel
from tests.kit.pipes import eventually, off_loop, read_all, read_exactly, read_some
from tests.kit.planning import plan_prefix
from tests.kit.stub import S3Stub, cut_after
from tests.kit.trailers import published_trailer
from tests.relay.test_faults import failed_after
from tests.unit.test_joiners import listed, without_mark
from tests.unit.test_tar import archive

TRANSPORTS: tuple[Wish, ...] = ("splice", "buffered", "aiobotocore")
pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")


@pytest.fixture(params=["aiobotocore", "buffered"])
def run(request: pytest.FixtureRequest) -> RunChannel:
    """A channel whose plan is to join, over a transport that can."""

    def running(
        stub: S3Stub,
        directory: Path,
        join: str = "tar",
        *,
        inflate: bool = False,
        seed: int | None = None,
        shard: Shard | None = None,
        **others: Any,
    ) -> AbstractAsyncContextManager[Running]:
        arrangement = Arrangement(join=join, inflate=inflate, seed=seed, shard=shard or Shard())

        arguments = {"arrangement": arrangement, "join": True, "inflate": inflate, "transport": request.param}
        return running_channel(stub, directory, **arguments | others)

    return running


def tars(
    stub: S3Stub, count: int = 4, size: int = 60_000, *, compress: Callable[..., bytes] | None = None
) -> list[bytes]:
    """Put archives, of a different number of members each, an empty one among them; return them."""
    found = []
    for number in range(count):
        members = [(f"{number:03d}-{i}.bin", bytes([i]) * size) for i in range(number and number + 2)]
        found.append(archive(members, kind=[tarfile.GNU_FORMAT, tarfile.PAX_FORMAT][number % 2]))
    wrap = compress or bytes
    stub.objects |= {f"b/data/{i:04d}.tar": wrap(data) for i, data in enumerate(found)}
    return found


def texts(stub: S3Stub, count: int = 4) -> list[bytes]:
    """Put texts, of which every other one ends in the middle of a line, and one has no byte."""
    found = [b"\n".join(b"%d %d" % (i, n) for n in range(i * 9000)) + b"\n" * (i % 2) for i in range(count)]
    found[0] = b""
    stub.objects |= {f"b/data/{i:04d}.txt": data for i, data in enumerate(found)}
    return found


def one_text(objects: list[bytes]) -> bytes:
    return b"".join(data + b"\n" * (data[-1:] not in {b"", b"\n"}) for data in objects)


def headed(stub: S3Stub, count: int = 4) -> list[bytes]:
    """Put objects that begin with a header, one of which has nothing else."""
    found = [b"header " + bytes([65 + i]) * (i * 60_000) for i in range(count)]
    stub.objects |= {f"b/data/{i:04d}.bin": data for i, data in enumerate(found)}
    return found


def one_body(objects: list[bytes]) -> bytes:
    return b"".join(data[7:] for data in objects)


PUT: dict[str, Callable[..., list[bytes]]] = {"tar": tars, "lines": texts, "skip:7": headed}


def one_tar(archives: list[bytes]) -> bytes:
    return b"".join(map(without_mark, archives)) + bytes(1024)


@pytest.mark.parametrize("compress", [None, gzip.compress, zstd.compress])
async def test_every_epoch_is_one_archive(
    run: RunChannel, stub: S3Stub, tmp_path: Path, compress: Callable[..., bytes] | None
) -> None:
    """In any order of objects, with a length that is proven at the end."""
    archives = tars(stub, compress=compress)
    async with run(stub, tmp_path, inflate=compress is not None, seed=7) as running:
        for epoch in range(2):
            order = [int(ref.key[-8:-4]) for ref in running.plan.refs(epoch)]
            opening = published_trailer(tmp_path, "train", epoch)
            assert (opening.state, opening.bytes_total) == ("open", None)
            found = await off_loop(read_all, running.fifo(epoch))
            assert found == one_tar([archives[i] for i in order])
            assert listed(found) == [each for i in order for each in listed(archives[i])]
            trailer = published_trailer(tmp_path, "train", epoch)
            assert trailer.state == "complete"
            assert trailer.bytes_delivered == trailer.bytes_total == len(found)


ONE = {"tar": one_tar, "lines": one_text, "skip:7": one_body}


@pytest.mark.parametrize("join", PUT)
async def test_a_broken_body_is_resumed(run: RunChannel, stub: S3Stub, tmp_path: Path, join: str) -> None:
    due = ONE[join](PUT[join](stub))
    for key in stub.objects:
        stub.faults[key] += [cut_after(30_000)] * 3
    async with run(stub, tmp_path, join) as running:
        assert await off_loop(read_all, running.fifo(0)) == due


async def test_a_host_without_archives_has_an_empty_one(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    tars(stub, 2)
    async with run(stub, tmp_path, shard=Shard(2, 3)) as running:
        assert await off_loop(read_all, running.fifo(0)) == bytes(1024)


@pytest.mark.parametrize("inflate", [False, True])
async def test_a_cut_archive_fails_by_name(
    run: RunChannel, stub: S3Stub, tmp_path: Path, inflate: bool
) -> None:
    """Bytes of whole archives arrive; then the trailer tells bucket, key and offset."""
    wrap = gzip.compress if inflate else bytes
    archives = tars(stub, 3, compress=wrap)
    cut = without_mark(archives[1])
    stub.objects["b/data/0001.tar"] = wrap(cut)
    due = len(without_mark(archives[0])) + len(cut)
    async with run(stub, tmp_path, inflate=inflate) as running:
        error = await failed_after(running, due)
    assert "the archive has no end mark" in error
    assert "s3://b/data/0001.tar" in error
    assert (f"at byte {len(cut)} of what it inflates to" if inflate else f"offset {len(cut)}") in error


@pytest.mark.parametrize("join", PUT)
async def test_an_epoch_goes_on_at_the_exact_byte(
    run: RunChannel, stub: S3Stub, tmp_path: Path, join: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From every mark that an epoch tells, at any byte after it: within an object, in the end mark."""
    monkeypatch.setattr(object_ends, "MARK_EVERY", 100_000)
    objects = PUT[join](stub, 5)
    due = ONE[join](objects)
    async with run(stub, tmp_path, join) as running:
        assert await off_loop(read_all, running.fifo(0)) == due
        marks = [*running.marks]
    assert len(marks) >= 2
    starts = {0}
    for data in objects:
        starts.add(max(starts) + len(data))
    assert all(mark.fetched in starts for mark in marks)
    for mark in (ResumePoint(), marks[-1]):
        for ahead in (1, 70_001, len(due) - 5 - mark.streamed):
            offset = mark.streamed + ahead
            start = Position(0, offset, skipped=offset, mark=mark)
            async with run(stub, tmp_path, join, start=start) as running:
                assert await off_loop(read_all, running.fifo(0)) == due[offset:]
                trailer = published_trailer(tmp_path, "train", 0)
            ended = trailer.state, trailer.bytes_skipped, trailer.bytes_delivered, trailer.bytes_total
            assert ended == ("complete", offset, len(due) - offset, len(due))


async def test_an_object_that_ends_inside_its_header_fails_by_name(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    stub.objects |= {"b/data/0": b"header and bytes", "b/data/1": b"head"}
    async with run(stub, tmp_path, "skip:7") as running:
        error = await failed_after(running, 9)
    assert "the object has 4 bytes, and SkipBytes leaves out 7: s3://b/data/1" in error


async def test_compressed_texts_end_with_a_line_feed(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    objects = texts(stub)
    stub.objects |= {key: gzip.compress(data) for key, data in stub.objects.items()}
    async with run(stub, tmp_path, "lines", inflate=True) as running:
        assert await off_loop(read_all, running.fifo(0)) == one_text(objects)


@contextlib.asynccontextmanager
async def reporting_ends(
    stub: S3Stub, tmp_path: Path, transport: Wish
) -> AsyncIterator[tuple[Running, list[tuple[int, int]]]]:
    """Run a channel in a directory of its own; with the epochs and offsets of believed ends, as they come."""
    reported: list[tuple[int, int]] = []
    directory = tmp_path / transport
    directory.mkdir()
    async with running_channel(
        stub,
        directory,
        transport=transport,
        part_size=1 << 20,
        on_end_believed=lambda *place: reported.append(place),
    ) as running:
        yield running, reported


async def test_a_reader_that_believes_an_end_mark_is_noticed(stub: S3Stub, tmp_path: Path) -> None:
    """Without `Join`, over all transports; and not one that leaves in the middle of an object."""
    archives = tars(stub, 4, 3_000_000)
    for transport in TRANSPORTS:
        async with reporting_ends(stub, tmp_path, transport) as (running, reported):
            for epoch, count in enumerate([len(archives[0]) + len(archives[1]), 5_000_000]):
                await off_loop(read_some, running.fifo(epoch), count)
                await eventually(lambda epoch=epoch: len(running.states) > epoch)
            statistics = running.channel.statistics()
        ((epoch, offset),) = reported
        assert (epoch, (offset - len(archives[0]) - len(archives[1])) // 8192) == (0, 0), transport
        assert (statistics.readers_gone, statistics.readers_at_ends) == (2, 1), transport


async def test_a_reader_that_believes_the_end_of_a_small_archive_is_noticed(
    stub: S3Stub, tmp_path: Path
) -> None:
    """A hundred such archives are in the FIFO by then, and a transport may fetch many as one part."""
    small = archive([("0.bin", b"0")], kind=tarfile.USTAR_FORMAT)
    stub.objects |= {f"b/data/{i:04d}.tar": small for i in range(600)}
    for transport in TRANSPORTS:
        async with reporting_ends(stub, tmp_path, transport) as (running, reported):
            await off_loop(read_exactly, running.fifo(0), len(small))
            await eventually(lambda: running.states)
            statistics = running.channel.statistics()
        assert reported == [(0, len(small))], transport
        assert statistics.objects_completed == statistics.written_bytes // len(small), transport


async def test_digests_tell_joined_plans_apart(stub: S3Stub) -> None:
    fill(stub, [100])
    digests = set()
    async with clients_of(stub) as clients:
        for join in (None, "tar", "lines"):
            plan = await plan_prefix(clients, S3Uri("b", "data/"), Arrangement(join=join))
            digests |= {plan.digest, *(rank.digest for rank in plan.ranks(2))}
            assert {rank.join for rank in plan.ranks(2)} == {join}
    assert len(digests) == 9
