"""Bodies that wait in their sockets: which do, what ends the wait, and what must not be taken for a stall."""

from __future__ import annotations

import functools
import os
import socket
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest

from streamer.relay.staging.stage import Stage
from streamer.s3.http import body, connection
from streamer.units import KIB, MIB
from tests.kit.faults import drips, resets_after
from tests.kit.harness import MORE_THAN_A_FIFO, RunChannel, Running, fill
from tests.kit.pipes import eventually, off_loop, read_all
from tests.kit.stub import S3Stub, stalls

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")

SIZE = 2_000_000
"""Bytes of a part: more than a pipe's, less than a socket is let hold."""


@pytest.fixture
def streaming(run_own: RunChannel) -> partial[AbstractAsyncContextManager[Running, bool | None]]:
    """A channel in parts of `SIZE` bytes, four at once."""
    return functools.partial(run_own, parts=4, requests_in_flight=4, part_size=SIZE)


def waiting(running: Running) -> list[Stage]:
    """The stages of parts that are all there, or what is left of them is, in their sockets."""
    bodies: list[tuple[Stage, Any]] = [(stage, stage._body) for stage in running.stages.undelivered]
    own = [(stage, body._body) for stage, body in bodies if body is not None]
    return [stage for stage, body in own if body is not None and body._connection.unread >= body.left]


async def test_parts_wait_in_their_sockets_and_take_nothing_else(
    server: S3Stub, streaming: partial[AbstractAsyncContextManager[Running, bool | None]]
) -> None:
    truth = fill(server, [MORE_THAN_A_FIFO])
    async with streaming() as running:
        with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb", buffering=0) as reader:
            got = await off_loop(reader.read, 10)
            await eventually(lambda: len(waiting(running)) == 4)
            found = running.stages.undelivered
            assert sum(stage.staged for stage in found[1:]) == 0
            assert not any(getattr(stage, "_pipes", None) for stage in found)
            got += await off_loop(reader.readall)
        assert got == truth


async def test_small_parts_do_not_keep_a_connection(
    server: S3Stub, streaming: partial[AbstractAsyncContextManager[Running, bool | None]]
) -> None:
    """They wait in pipes, so that a few requests bring many."""
    truth = fill(server, [500_000] * 90)
    async with streaming(requests_in_flight=1, parts=8) as running:
        with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb", buffering=0) as reader:
            got = await off_loop(reader.read, 10)
            await eventually(lambda: running.quota.requests_in_flight == 0)
            assert sum(stage.staged for stage in running.stages.undelivered) > 8 * MIB
            got += await off_loop(reader.readall)
        assert got == truth


@pytest.mark.parametrize("window", [0, 256 * KIB, 512 * KIB])
async def test_what_a_socket_cannot_hold_goes_elsewhere(
    server: S3Stub,
    streaming: partial[AbstractAsyncContextManager[Running, bool | None]],
    monkeypatch: pytest.MonkeyPatch,
    window: int,
) -> None:
    """The system lets sockets hold little (net.ipv4.tcp_rmem)."""

    def narrow(made: Any) -> None:
        made.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window or 256 * KIB)
        made.window = window

    monkeypatch.setattr(connection.Connection, "widen", narrow)
    truth = fill(server, [MORE_THAN_A_FIFO])
    async with streaming() as running:
        with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb", buffering=0) as reader:
            got = await off_loop(reader.read, 10)
            # The rest of the head of line may be little enough for its socket.
            await eventually(lambda: sum(stage.staged > 0 for stage in running.stages.undelivered) >= 3)
            got += await off_loop(reader.readall)
        assert got == truth


async def test_what_waits_for_a_sleeping_reader_is_no_stall(
    server: S3Stub,
    streaming: partial[AbstractAsyncContextManager[Running, bool | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body, "PATIENCE", 0.01)
    truth = fill(server, [4 * SIZE])
    ticks = []
    async with streaming(stall_timeout=0.5) as running:
        await eventually(lambda: len(waiting(running)) == 4)
        own = body.HttpBody._tick

        def counted(self: Any, *seen: Any) -> None:
            ticks.append(self)
            own(self, *seen)

        monkeypatch.setattr(body.HttpBody, "_tick", counted)
        await eventually(lambda: len(ticks) > 4 * 4 * 50)  # four times as long as a stall
        assert len(waiting(running)) == 4
        assert await off_loop(read_all, running.fifo(0)) == truth
        assert running.channel.statistics().counts["retries"] == {}


@pytest.mark.parametrize("after", [100_000, 1_500_000])
async def test_a_stall_is_noticed_while_the_part_waits_its_turn(
    server: S3Stub,
    streaming: partial[AbstractAsyncContextManager[Running, bool | None]],
    monkeypatch: pytest.MonkeyPatch,
    after: int,
) -> None:
    """Else the delivery that reaches it would have to wait for it."""
    monkeypatch.setattr(body, "PATIENCE", 0.01)
    truth = fill(server, [SIZE, SIZE, SIZE])
    server.script(stalls(server, after=after), key="b/data/0001")
    async with streaming(stall_timeout=0.5) as running:
        # More than one where the machine is busy: then half a second passes without a byte of the others too.
        await eventually(lambda: sum(running.channel.statistics().counts["retries"].values()) >= 1)
        assert running.channel.statistics().bytes_delivered == 0
        assert await off_loop(read_all, running.fifo(0)) == truth
    server.release()


async def test_what_comes_slowly_is_no_stall(
    server: S3Stub,
    streaming: partial[AbstractAsyncContextManager[Running, bool | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body, "PATIENCE", 0.01)
    truth = fill(server, [SIZE, SIZE, SIZE])
    server.script(drips(1000, 0.03, most=1.0), key="b/data/0001")
    async with streaming(stall_timeout=0.5) as running:
        await eventually(lambda: len(waiting(running)) >= 3)
        assert await off_loop(read_all, running.fifo(0)) == truth
        assert running.channel.statistics().counts["retries"] == {}


async def test_a_reset_while_a_part_waits_costs_the_rest_of_it_alone(
    server: S3Stub, streaming: partial[AbstractAsyncContextManager[Running, bool | None]]
) -> None:
    truth = fill(server, [SIZE, SIZE, SIZE])
    server.script(resets_after(700_000), key="b/data/0001")
    async with streaming() as running:
        await eventually(lambda: server.seen)
        assert await off_loop(read_all, running.fifo(0)) == truth
        assert sum(running.channel.statistics().counts["retries"].values()) == 1


async def test_dropping_an_epoch_drops_what_waits(
    server: S3Stub, streaming: partial[AbstractAsyncContextManager[Running, bool | None]]
) -> None:
    """A reader that leaves early: the next epoch is whole, and its sockets are new ones."""
    truth = fill(server, [MORE_THAN_A_FIFO])
    async with streaming() as running:
        reader = await off_loop(os.open, running.fifo(0), os.O_RDONLY)
        await off_loop(os.read, reader, 10)
        await eventually(lambda: len(waiting(running)) == 4)
        os.close(reader)
        assert await off_loop(read_all, running.fifo(1)) == truth
