"""Objects that are replaced or deleted after the listing, under each policy: never a mix of two versions."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from streamer.plan import S3Uri
from streamer.plan.plan import Plan
from streamer.relay.deliver.object_changes import MOST_TRIES
from streamer.s3.client.doubt import DOUBTED
from streamer.s3.client.session import Clients
from tests.kit.harness import RunChannel, Running, fill
from tests.kit.pipes import eventually, off_loop, read_all
from tests.kit.planning import plan_prefix
from tests.kit.stub import S3Stub, cut_after, fails, stalls
from tests.kit.trailers import published_trailer

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "no_blocking"),
    pytest.mark.asyncio(loop_factories=["asyncio"]),  # decisions that no loop takes part in
]

SIZES = [70_000, 130_000, 40_000]
"""Of 50,000-byte parts: two, three and one."""
REPLACEMENT = random.Random(1).randbytes(90_000)


def changing(
    stub: S3Stub, change: Callable[[dict[str, bytes]], None] | Callable[[Any], Any]
) -> Callable[[Any], Coroutine[Any, Any, Plan]]:
    """A `make_plan` that lists, and then changes what is there."""

    async def make(clients: Clients) -> Plan:
        found = await plan_prefix(clients, S3Uri("b", "data/"))
        change(stub.objects)
        return found

    return make


def put(index: int, data: bytes | None) -> Callable[[dict[str, bytes]], None]:
    """Replace the object, or delete it."""

    def change(objects: dict[str, bytes]) -> None:
        if data is None:
            del objects[f"b/data/{index:04d}"]
        else:
            objects[f"b/data/{index:04d}"] = data

    return change


def expected(objects: dict[str, bytes]) -> bytes:
    return b"".join(data for _, data in sorted(objects.items()))


@pytest.mark.parametrize(
    ("index", "data"),
    [(0, None), (1, REPLACEMENT), (2, None), (2, REPLACEMENT)],
    ids=["first-deleted", "middle-replaced", "last-deleted", "last-replaced"],
)
async def test_skipped_objects_are_left_out_whole_and_listed(
    run: RunChannel, stub: S3Stub, tmp_path: Path, index: int, data: bytes | None
) -> None:
    fill(stub, SIZES)
    make = changing(stub, put(index, data))
    async with run(stub, tmp_path, make_plan=make, when_changed="skip", parts=4) as running:
        truth = expected({name: body for name, body in stub.objects.items() if str(index) not in name[-1]})
        for epoch in (0, 1):
            assert await off_loop(read_all, running.fifo(epoch)) == truth
            await eventually(lambda due=epoch + 1: len(running.states) == due)
            trailer = published_trailer(tmp_path, "train", epoch)
            assert (trailer.state, trailer.bytes_total) == ("complete", len(truth))
            assert (trailer.changed, trailer.changes) == (1, (f"s3://b/data/000{index} skipped",))
        assert running.channel.statistics().changed == {"skipped": 2}


@pytest.mark.parametrize(("index", "size"), [(0, 0), (2, 0), (1, 1), (2, 30_000), (0, 400_000), (1, 400_000)])
async def test_refetched_objects_are_as_they_are_now(
    run: RunChannel, stub: S3Stub, tmp_path: Path, index: int, size: int
) -> None:
    """Shorter, longer, empty; of more parts than the budget has room for."""
    fill(stub, SIZES)
    make = changing(stub, put(index, random.Random(2).randbytes(size)))
    async with run(stub, tmp_path, make_plan=make, when_changed="refetch", parts=3) as running:
        truth = expected(stub.objects)
        for epoch in (0, 1):
            assert await off_loop(read_all, running.fifo(epoch)) == truth
        await eventually(lambda: len(running.states) == 2)
        assert [trailer.state for trailer in running.states] == ["complete"] * 2
        assert running.states[0].bytes_total == len(truth)
        assert running.states[0].changes[0].startswith(f"s3://b/data/000{index} refetched as ETag ")
        assert running.channel.statistics().changed == {"refetched": 2}


async def test_a_small_object_replaced_by_a_large_one_takes_few_requests(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    fill(stub, [10, *[50_000] * 12])
    make = changing(stub, put(0, random.Random(2).randbytes(500_000)))
    async with run(stub, tmp_path, make_plan=make, when_changed="refetch", parts=4) as running:
        assert await off_loop(read_all, running.fifo(0)) == expected(stub.objects)
    assert sum(seen.key == "data/0000" for seen in stub.seen) < 2 * (10 + 2)


async def test_a_replacement_is_resumed_like_any_object(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    fill(stub, SIZES)
    make = changing(stub, put(1, random.Random(2).randbytes(200_000)))
    stub.script(fails(412, "PreconditionFailed"), *[cut_after(11_000)] * 9, key="b/data/0001")
    async with run(stub, tmp_path, make_plan=make, when_changed="refetch", requests_in_flight=1) as running:
        assert await off_loop(read_all, running.fifo(0)) == expected(stub.objects)


async def test_one_that_changes_while_it_is_found_is_found_again(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """The version that HEAD found is refused again; nothing of any has left, so the choice remains."""
    fill(stub, SIZES)
    make = changing(stub, put(1, bytes(100_000)))
    stub.script(*[fails(412, "PreconditionFailed")] * 3, key="b/data/0001")
    async with run(stub, tmp_path, make_plan=make, when_changed="refetch") as running:
        assert await off_loop(read_all, running.fifo(0)) == expected(stub.objects)
        assert running.channel.statistics().changed["refetched"] > 1


async def failure(running: Running) -> tuple[bytes, str]:
    """What a reader gets of epoch 0 before it fails, and how."""
    with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb", buffering=0) as reader:
        await eventually(lambda: running.channel.error)
        os.set_blocking(reader.fileno(), False)
        got = b""
        while data := reader.read(1 << 20):
            got += data
        assert data is None, "an end of file after a failure"
        running.channel.drain()
        await running.task
    assert running.states[-1].state == "failed"
    return got, str(running.channel.error)


@pytest.mark.parametrize(
    ("policy", "data"),
    [("fail", bytes(130_000)), ("refetch", bytes(130_000)), ("refetch", None), ("skip", None)],
    ids=["fail-replaced", "refetch-replaced", "refetch-deleted", "skip-deleted"],
)
async def test_after_its_first_byte_no_policy_helps(
    run: RunChannel, stub: S3Stub, tmp_path: Path, policy: str, data: bytes | None
) -> None:
    """The reader has some of the listed version: the rest is that version's or an error."""
    truth = fill(stub, [130_000])
    stub.objects["b/other"] = b"the bucket stays"
    stub.script(stalls(stub, after=40_000))
    async with run(stub, tmp_path, when_changed=policy, requests_in_flight=1, parts=1) as running:
        failing = asyncio.create_task(failure(running))
        await eventually(lambda: running.channel.statistics().bytes_delivered == 40_000 - DOUBTED)
        put(0, data)(stub.objects)
        stub.release()
        got, error = await failing
    assert got == truth[:50_000]
    assert "s3://b/data/0000" in error
    assert running.channel.statistics().changed == {"failed": 1}


@pytest.mark.parametrize("policy", ["fail", "refetch"])
async def test_what_is_deleted_cannot_be_refetched(
    run: RunChannel, stub: S3Stub, tmp_path: Path, policy: str
) -> None:
    truth = fill(stub, SIZES)
    async with run(stub, tmp_path, make_plan=changing(stub, put(1, None)), when_changed=policy) as running:
        got, error = await failure(running)
    assert got == truth[: SIZES[0]]
    assert "s3://b/data/0001" in error


async def test_one_that_never_stands_still_is_given_up(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    truth = fill(stub, SIZES)
    stub.script(*[fails(412, "PreconditionFailed")] * 100, key="b/data/0001")
    async with run(stub, tmp_path, when_changed="refetch") as running:
        got, error = await failure(running)
    assert got == truth[: SIZES[0]]
    assert "replaced" in error
    assert running.channel.statistics().changed == {"refetched": MOST_TRIES, "failed": 1}


@pytest.mark.parametrize("policy", ["refetch", "skip"])
async def test_a_bucket_that_is_gone_is_no_change(
    run: RunChannel, stub: S3Stub, tmp_path: Path, policy: str
) -> None:
    """Else an emptied account would look like an empty epoch."""
    fill(stub, SIZES)
    async with run(
        stub, tmp_path, make_plan=changing(stub, lambda objects: objects.clear()), when_changed=policy
    ) as running:
        got, error = await failure(running)
    assert got == b""
    assert "no such bucket" in error


@pytest.mark.parametrize("policy", ["refetch", "skip"])
async def test_a_reader_may_leave_in_the_middle_of_a_replacement(
    run: RunChannel, stub: S3Stub, tmp_path: Path, policy: str
) -> None:
    """The next epoch begins at its own first byte."""
    fill(stub, SIZES)
    make = changing(stub, put(0, random.Random(3).randbytes(300_000)))
    stub.script(fails(412, "PreconditionFailed"), key="b/data/0000")
    async with run(stub, tmp_path, make_plan=make, when_changed=policy, parts=2) as running:
        truth = expected({k: v for k, v in stub.objects.items() if policy == "refetch" or k[-1] != "0"})
        fd = await off_loop(os.open, running.fifo(0), os.O_RDONLY)
        assert await off_loop(os.read, fd, 1000) == truth[:1000]
        os.close(fd)
        assert await off_loop(read_all, running.fifo(1)) == truth
