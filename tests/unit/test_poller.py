"""Readiness of sockets, told a few at a time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from streamer.aio import AT_ONCE, FairPoller

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")


Pairs = Callable[[], tuple[socket.socket, socket.socket]]


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    """Makes a pair of connected sockets, ours non-blocking."""
    with contextlib.ExitStack() as stack:

        def make() -> tuple[socket.socket, socket.socket]:
            ours, theirs = (stack.enter_context(each) for each in socket.socketpair())
            ours.setblocking(False)
            return ours, theirs

        yield make


@contextlib.asynccontextmanager
async def watching() -> AsyncIterator[FairPoller]:
    poller = FairPoller()
    poller.open()
    try:
        yield poller
    finally:
        poller.close()


async def test_a_few_are_told_and_then_others_have_their_turn(pairs: Pairs) -> None:
    reported: list[int] = []
    turns: list[int] = []
    many = 3 * AT_ONCE
    everybody = asyncio.Event()
    loop = asyncio.get_running_loop()

    def turn() -> None:
        turns.append(len(reported))
        if len(set(reported)) < many:
            loop.call_soon(turn)
        else:
            everybody.set()

    async with watching() as poller:
        for number in range(many):
            ours, theirs = pairs()
            theirs.send(b"x")
            poller.add(ours.fileno(), functools.partial(reported.append, number))
        loop.call_soon(turn)
        await everybody.wait()
    steps = [after - before for before, after in itertools.pairwise(turns)]
    assert max(steps) == AT_ONCE
    assert set(reported[:many]) == set(range(many))  # nobody twice before all


async def test_what_is_not_read_and_a_reset_are_told_until_they_are_heard(pairs: Pairs) -> None:
    """libuv tells of an error once and watches no more, whatever was done about it."""
    reported = 0
    enough = asyncio.Event()

    def tell() -> None:
        nonlocal reported
        reported += 1
        if reported == 5:
            enough.set()

    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.socket()
        ours.setblocking(False)
        with ours:
            await asyncio.get_running_loop().sock_connect(ours, server.getsockname())
            theirs, _ = server.accept()
            async with watching() as poller:
                poller.add(ours.fileno(), tell)
                theirs.send(b"x")
                await enough.wait()
                assert ours.recv(2) == b"x"
                enough.clear()
                reported = 0
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                theirs.close()
                await enough.wait()
            with pytest.raises(ConnectionResetError):
                ours.recv(1)


async def test_what_one_raises_keeps_no_other_from_its_turn(pairs: Pairs) -> None:
    failures = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))
    noticed = asyncio.Event()

    def fail() -> None:
        raise ValueError("a callback failed")

    async with watching() as poller:
        for on_readable in (fail, noticed.set):
            ours, theirs = pairs()
            theirs.send(b"x")
            poller.add(ours.fileno(), on_readable)
        await noticed.wait()
    assert isinstance(failures[0], ValueError)


async def test_whoever_is_told_may_remove_another(pairs: Pairs) -> None:
    """One that was as ready, and whose turn would have been the same."""
    reported, failures = [], []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    async with watching() as poller:
        numbers = [ours.fileno() for ours, theirs in (pairs(), pairs()) if theirs.send(b"x")]

        def tell(index: int) -> None:
            reported.append(index)
            for fd in numbers:
                poller.remove(fd)

        for index, fd in enumerate(numbers):
            poller.add(fd, functools.partial(tell, index))
        done = asyncio.get_running_loop().create_future()
        ours, theirs = pairs()

        def end() -> None:
            if not done.done():
                done.set_result(None)

        poller.add(ours.fileno(), end)
        theirs.send(b"x")
        await done
        assert len(reported) == 1
        assert not failures
        assert ours.recv(2) == b"x"
        for fd in numbers:  # refused by epoll_ctl(2) if the kernel still watches the descriptor
            poller.add(fd, end)


async def test_a_closed_watcher_calls_nobody(pairs: Pairs) -> None:
    ours, theirs = pairs()
    poller = FairPoller()
    poller.open()
    reported = []
    poller.add(ours.fileno(), lambda: reported.append(1))
    poller.close()
    poller.close()
    poller.remove(ours.fileno())
    poller.add(ours.fileno(), lambda: reported.append(2))
    theirs.send(b"x")
    noticed = asyncio.Event()
    async with watching() as other:  # the same socket, by another
        other.add(ours.fileno(), noticed.set)
        await noticed.wait()
    assert not reported
