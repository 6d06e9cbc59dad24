"""Processes that decrypt: what happens when one of them, a handshake or the sidecar ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import pytest
import trustme

from streamer.errors import BadAnswer, ConfigError, Transient, Where
from streamer.source import pool
from streamer.source.pool import LanePool
from streamer.source.session import trust
from streamer.source.terminators import Terminators
from streamer.source.watcher import Watcher
from tests.kit.harness import MORE_THAN_A_FIFO, fill, running_channel
from tests.kit.pipes import eventually, off_loop, read_all
from tests.kit.tls import serving

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")


@pytest.fixture
async def terminators(authority, tmp_path):
    async with Terminators(str(tmp_path / "ca.pem"), 2) as running:
        yield running


@pytest.fixture
async def pool_of(terminators):
    """Makes a pool of lanes to a port."""
    with contextlib.closing(Watcher()) as watcher:
        yield lambda port: LanePool("127.0.0.1", port, watcher, tls=trust(None), terminators=terminators)


def processes_of(pid):
    """The terminators that a process has started and that run."""
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
            children = file.read().split()
        found += [int(child) for child in children if _runs_as_one(child)]
    return sorted(found)


def _runs_as_one(child):
    """In the middle of exec(2), which its parent has seen go well, it has no command line yet."""
    with open(f"/proc/{child}/cmdline", encoding="utf-8") as file:
        command = file.read()
    with open(f"/proc/{child}/stat", encoding="utf-8") as file:
        state = file.read().rpartition(")")[2].split()[0]
    return "terminator.py" in command or (not command and state != "Z")


def sockets(pids):
    """How many sockets each of these processes has."""
    return [sockets_of(pid) for pid in pids]


def sockets_of(pid):
    found = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it has just been closed
            found += os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:")
    return found


async def test_a_killed_process_is_replaced_and_no_byte_is_lost(tls_stub, tmp_path):
    truth = fill(tls_stub, [MORE_THAN_A_FIFO, 1_000_000])
    options = {"transport": "kernel", "ca_bundle": str(tmp_path / "ca.pem"), "tls_processes": 2}
    async with running_channel(tls_stub, tmp_path, part_size=4_000_000, connections=4, **options) as running:
        first = processes_of(os.getpid())
        assert len(first) == 2

        def kill_in_mid_stream():
            with open(running.fifo(0), "rb", buffering=0) as reader:
                got = [reader.read(1 << 20)]
                for pid in first:
                    os.kill(pid, signal.SIGKILL)
                while chunk := reader.read(1 << 20):
                    got.append(chunk)
                return b"".join(got)

        assert await off_loop(kill_in_mid_stream) == truth
        assert sum(running.channel.statistics().retries.values()) >= 1
        assert not set(processes_of(os.getpid())) & set(first)
        assert await off_loop(read_all, running.fifo(1)) == truth
    assert processes_of(os.getpid()) == []


async def test_what_nobody_trusts_is_refused_with_the_fix(tls_stub, tmp_path, pool_of):
    with serving(trustme.CA()) as stranger, pytest.raises(BadAnswer, match="TLS failed.*CaBundle"):
        await pool_of(urlsplit(stranger.url).port).take(Where("b"))
    (await pool_of(urlsplit(tls_stub.url).port).take(Where("b"))).close()


async def test_a_certificate_for_another_host_is_refused(credentials, authority, pool_of):
    with serving(authority, name="other.test") as stub, pytest.raises(BadAnswer, match="TLS failed"):
        await pool_of(urlsplit(stub.url).port).take(Where("b"))


async def test_a_server_without_tls_is_a_broken_connection(stub, pool_of):
    with pytest.raises(Transient, match="cannot connect"):
        await pool_of(urlsplit(stub.url).port).take(Where("b"))


async def test_a_server_that_closes_in_the_handshake(pool_of):
    async def leave(_, writer):
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(leave, "127.0.0.1", 0)
    async with server:
        with pytest.raises(Transient, match="cannot connect"):
            await pool_of(server.sockets[0].getsockname()[1]).take(Where("b"))


async def test_a_handshake_that_never_ends_is_given_up(pool_of, monkeypatch):
    """The process is told, and keeps nothing of it."""
    monkeypatch.setattr(pool, "CONNECT_TIMEOUT", 0.1)
    pids = processes_of(os.getpid())
    before = sockets(pids)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(Transient, match=r"no connection .* in 0.1 s"):
            await pool_of(silent.getsockname()[1]).take(Where("b"))
        await eventually(lambda: sockets(pids) == before)


async def test_lanes_that_close_are_closed_there_too(tls_stub, pool_of):
    pids = processes_of(os.getpid())
    before = sockets(pids)
    pool = pool_of(urlsplit(tls_stub.url).port)
    taken = [await pool.take(Where("b")) for _ in range(4)]
    assert sockets(pids) == [count + 4 for count in before]
    for lane in taken:
        lane.close()
    await eventually(lambda: sockets(pids) == before)


async def test_they_carry_no_environment(credentials, terminators):
    """It holds credentials, and what is sent through them is signed already."""
    for pid in processes_of(os.getpid()):
        with open(f"/proc/{pid}/environ", encoding="utf-8") as file:
            assert "AWS_" not in file.read()


async def test_they_end_with_a_sidecar_that_is_killed(authority, tmp_path):
    """Whatever becomes of it: their control socket closes."""
    program = """
import asyncio, sys
from streamer.source.terminators import Terminators
async def main():
    async with Terminators(sys.argv[1], 2):
        print(flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""

    def kill():
        with subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "ca.pem")], stdout=subprocess.PIPE, text=True
        ) as sidecar:
            sidecar.stdout.readline()
            fds = [os.pidfd_open(pid) for pid in processes_of(sidecar.pid)]
            sidecar.kill()
            try:
                for fd in fds:
                    assert select.select([fd], [], [], 10)[0], "it runs on"
            finally:
                for fd in fds:
                    os.close(fd)
            assert len(fds) == 2

    await off_loop(kill)


async def test_without_tls_they_are_a_contradiction(stub, tmp_path):
    fill(stub, [1])
    with pytest.raises(ConfigError, match="TlsProcesses has no meaning for http"):
        async with running_channel(stub, tmp_path, transport="copying", tls_processes=1):
            pass
