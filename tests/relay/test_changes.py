"""Objects that are replaced or deleted after the listing: an error, and never a mix of two versions."""

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
from streamer.s3.client.doubt import DOUBTED
from streamer.s3.client.session import Clients
from tests.kit.harness import RunChannel, Running, fill
from tests.kit.pipes import eventually, off_loop
from tests.kit.planning import plan_prefix
from tests.kit.stub import S3Stub, stalls

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "no_blocking"),
    pytest.mark.asyncio(loop_factories=["asyncio"]),  # decisions that no loop takes part in
]

SIZES = [70_000, 130_000, 40_000]
"""Sizes in parts of 50,000 bytes: two, three and one."""
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


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("data", [None, REPLACEMENT], ids=["deleted", "replaced"])
async def test_a_changed_object_fails_the_epoch_by_name(
    run: RunChannel, stub: S3Stub, tmp_path: Path, index: int, data: bytes | None
) -> None:
    truth = fill(stub, SIZES)
    async with run(stub, tmp_path, make_plan=changing(stub, put(index, data)), parts=4) as running:
        got, error = await failure(running)
    assert got == truth[: sum(SIZES[:index])]
    assert f"s3://b/data/000{index}" in error


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


@pytest.mark.parametrize("data", [bytes(130_000), None], ids=["replaced", "deleted"])
async def test_after_its_first_byte_the_rest_is_of_that_version(
    run: RunChannel, stub: S3Stub, tmp_path: Path, data: bytes | None
) -> None:
    """Or an error comes."""
    truth = fill(stub, [130_000])
    stub.objects["b/other"] = b"the bucket stays"
    stub.script(stalls(stub, after=40_000))
    async with run(stub, tmp_path, requests_in_flight=1, parts=1) as running:
        failing = asyncio.create_task(failure(running))
        await eventually(lambda: running.channel.statistics().bytes_delivered == 40_000 - DOUBTED)
        put(0, data)(stub.objects)
        stub.release()
        got, error = await failing
    assert got == truth[:50_000]
    assert "s3://b/data/0000" in error


async def test_a_bucket_that_is_gone_is_said(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, SIZES)
    async with run(stub, tmp_path, make_plan=changing(stub, lambda objects: objects.clear())) as running:
        got, error = await failure(running)
    assert got == b""
    assert "no such bucket" in error
