"""One cell: one fault, at one operation, over one transport; and its outcome.

    evil     plan and stream a bucket with the fault
    other    plan and stream a right bucket over the same clients and transport, beside it and after
    watch    the loop's lag, as CPU time of this thread between two of its ticks, and the peak of memory

The outcome is `equal`, or the name of an error of ours; anything else is a finding: other bytes, an exception
that is not ours, an end that comes late, memory or lag over the limit, another channel that suffers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import random
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Literal

from streamer.errors import PenstockError
from streamer.plan import Plan, S3Uri
from streamer.relay.once import stream_once
from streamer.relay.statistics import ChannelCounters
from streamer.relay.transport import Transport, TransportSpec, open_transport
from streamer.retry import RetryPolicy, retry_while_unavailable
from streamer.s3.client.endpoint import Endpoint
from streamer.s3.client.session import Clients, open_clients
from streamer.s3.manifests.object_finder import ObjectClients
from streamer.s3.pages.object_info import open_inspector
from streamer.s3.pages.validation import PlanMemory
from streamer.sink.outlet import PipeOutlet
from streamer.units import MIB
from tests.kit.planning import alone, plan_manifest, plan_prefix
from tests.machines.hostile.faults import BELOW, CRUMBS, FAULTS, ONLY, TLS_ONLY, UNSEEN
from tests.machines.hostile.wire import MANIFEST, TRUTH

Operation = Literal["body", "HEAD", "listing", "manifest"]
TransportName = Literal["splice", "buffered", "aiobotocore"]
OPERATIONS: tuple[Operation, ...] = ("body", "HEAD", "listing", "manifest")
TRANSPORTS: tuple[TransportName, ...] = ("splice", "buffered", "aiobotocore")
STALL_TIMEOUT = 2.0
GIVE_UP_AFTER = 2.5
POLICY = RetryPolicy(GIVE_UP_AFTER, first_wait=0.05, longest_wait=0.2)
LONGEST = 25.0
"""Seconds of a cell. The limits above allow 5; the rest is for a machine at load."""
MOST_MEMORY = 96 * MIB
"""Bytes that the process may grow by. Buffers of a cell take some 20 MiB."""
LONGEST_LAG = 1.5
"""Seconds of CPU between two turns of the loop."""
WARM_UPS = 5
"""Tries of the other channel before the fault, until one is right; the first one reads certificates."""
PLAN_MEMORY = MIB // 2


@dataclass(frozen=True)
class Cell:
    fault: str
    operation: Operation
    transport: TransportName
    tls: bool
    once: bool = False
    """Whether the fault strikes once; the stream must be right then, or its error certain."""

    def __str__(self) -> str:
        scheme = "TLS" if self.tls else "HTTP"
        return (
            f"{self.fault} | {self.operation} | {self.transport} | {scheme}{' | once' if self.once else ''}"
        )

    @classmethod
    def of(cls, text: str) -> Cell:
        """Return the cell with this text. Raises ValueError."""
        fault, operation, transport, scheme, *once = text.split(" | ")
        if fault not in {*FAULTS, *BELOW} or operation not in OPERATIONS or transport not in TRANSPORTS:
            raise ValueError(f"no such fault, operation or transport: {text}")
        return cls(fault, operation, transport, scheme == "TLS", bool(once))


@dataclass(frozen=True)
class Judgement:
    outcome: str
    """`equal`, an error's name, or `crumbs` for a stream that was still going on."""
    finding: str = ""
    """What is wrong; empty if nothing."""


@functools.cache
def all_cells() -> list[Cell]:
    """The matrix.

    The body of an object has three transports, two over TLS; a HEAD and a manifest have two clients; listings
    are read by aiobotocore whatever the transport. A fault of the handshake has no operation: it counts as a
    listing's. The order is one of chance in which every fault comes once before any comes twice.
    """
    transports: dict[Operation, tuple[TransportName, ...]] = {
        "body": TRANSPORTS,
        "HEAD": ("buffered", "aiobotocore"),
        "listing": ("aiobotocore",),
        "manifest": ("buffered", "aiobotocore"),
    }
    cells = []
    known = [fault for fault in FAULTS if fault not in UNSEEN]
    for fault, operation, tls in itertools.product(known, OPERATIONS, (False, True)):
        if operation not in ONLY.get(fault, OPERATIONS) or (fault in TLS_ONLY and not tls):
            continue
        for transport in transports[operation]:
            if tls and transport == "splice":
                continue
            cells.append(Cell(fault, operation, transport, tls))
            if operation == "body" and tls == (fault in TLS_ONLY):
                cells.append(Cell(fault, operation, transport, tls, once=True))
    cells += [Cell(fault, "listing", transport, True) for fault in BELOW for transport in TRANSPORTS[1:]]
    random.Random(0).shuffle(cells)
    first = {cell.fault: cell for cell in reversed(cells)}
    return [*first.values(), *(cell for cell in cells if first[cell.fault] != cell)]


class _Watch:
    """The loop's lag, and the process's memory."""

    def __init__(self) -> None:
        self.lag = 0.0
        self._loop = asyncio.get_running_loop()
        self._last = time.thread_time()
        self._timer = self._loop.call_later(0.02, self._tick)
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        self._resident = self._status("VmRSS")

    @staticmethod
    def _status(name: str) -> int:
        with open("/proc/self/status") as file:
            line = next(line for line in file if line.startswith(name))
        return int(line.split()[1]) * 1024

    def _tick(self) -> None:
        now = time.thread_time()
        self.lag = max(self.lag, now - self._last)
        self._last = now
        self._timer = self._loop.call_later(0.02, self._tick)

    def close(self) -> int:
        """Bytes of growth."""
        self._timer.cancel()
        return self._status("VmHWM") - self._resident


class _Reader:
    """Reads a pipe to its end, in a thread."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        self.data = bytearray()
        self._thread = threading.Thread(target=self._read, name="reader")
        self._thread.start()

    def _read(self) -> None:
        while data := os.read(self._read_end, 1 << 20):
            self.data += data
        os.close(self._read_end)

    def join(self) -> bytes:
        self._thread.join()
        return bytes(self.data)


async def _stream(plan: Plan, transport: Transport) -> bytes:
    reader = _Reader()
    try:
        await stream_once(
            plan,
            transport.source,
            transport.stages(),
            policy=POLICY,
            counters=ChannelCounters(),
            open_outlet=lambda on_gone: PipeOutlet(os.dup(reader.write_end), on_gone=on_gone),
        )
    finally:
        os.close(reader.write_end)
        await asyncio.to_thread(reader.join)
    return bytes(reader.data)


@contextlib.asynccontextmanager
async def _clients(url: str, cell: Cell, bundle: str) -> AsyncIterator[Clients]:
    endpoint = Endpoint(
        url=url,
        region="us-east-1",
        path_style=True,
        ca_bundle=bundle if cell.tls else None,
    )
    async with open_clients(endpoint, connections=8, stall_timeout=STALL_TIMEOUT) as clients:
        yield clients


@contextlib.asynccontextmanager
async def _transport(clients: Clients, cell: Cell) -> AsyncIterator[Transport]:
    async with open_transport(
        clients,
        TransportSpec(
            wish=cell.transport,
            buckets={"b"},
            channels=[None] * (WARM_UPS + 3),
            budget=32 * MIB,
            requests_in_flight=4,
            part_size=256 * 1024,
        ),
    ) as transport:
        yield transport


async def _evil(clients: Clients, transport: Transport, cell: Cell, bucket: str) -> bytes:
    memory = PlanMemory(PLAN_MEMORY)
    if cell.operation in ("body", "listing"):
        plan = await retry_while_unavailable(
            lambda progressed: plan_prefix(
                alone(clients),
                S3Uri(bucket, "data/"),
                progress=lambda _: progressed(),
                memory=memory,
            ),
            POLICY,
        )
    else:
        clients = replace(clients, by_aiobotocore=cell.transport == "aiobotocore")
        with open_inspector(clients, give_up_after=GIVE_UP_AFTER) as inspector:
            plan = await retry_while_unavailable(
                lambda progressed: plan_manifest(
                    clients,
                    S3Uri(bucket, MANIFEST),
                    object_clients=ObjectClients(inspector),
                    progress=lambda _: progressed(),
                    memory=memory,
                ),
                POLICY,
            )
    return await _stream(plan, transport)


async def _other(clients: Clients, transport: Transport, bucket: str) -> str:
    """What is wrong with the other channel; empty if nothing."""
    try:
        plan = await plan_prefix(alone(clients), S3Uri(bucket, "data/"))
        return "" if await _stream(plan, transport) == TRUTH else "other channel: wrong bytes"
    except Exception as error:  # noqa: BLE001 - whatever it is, the other channel has suffered
        return f"other channel: {error!r}"


class Bench:
    """The clients of one process: one of each kind, which all of its cells share.

    So a cell may also suffer from what an earlier one has left behind; that is a finding as well.
    """

    def __init__(self, ports: list[int], bundle: str) -> None:
        self._ports = ports
        self._bundle = bundle
        self._stack = contextlib.AsyncExitStack()
        self._open: dict[str, Clients] = {}

    async def close(self) -> None:
        await self._stack.aclose()

    async def _opened(self, port: int, cell: Cell) -> Clients:
        url = f"{'https' if cell.tls else 'http'}://127.0.0.1:{port}"
        if (clients := self._open.get(url)) is None:
            clients = self._open[url] = await self._stack.enter_async_context(
                _clients(url, cell, self._bundle)
            )
        return clients

    async def run(self, cell: Cell, number: int) -> Judgement:
        """The cell's outcome. `number`: of this cell alone."""
        good, bucket = f"good-{number}", f"good-{number}"
        good_port = evil_port = self._ports[cell.tls]
        if cell.fault in BELOW:
            evil_port = self._ports[2 + list(BELOW).index(cell.fault)]
        else:
            kind = "once" if cell.once else "fault"
            bucket = f"{kind}-{list(FAULTS).index(cell.fault)}-{cell.operation.lower()}-{number}"
        clients, evil_clients = await self._opened(good_port, cell), await self._opened(evil_port, cell)
        async with _transport(clients, cell) as transport:
            if evil_port == good_port:
                return await _judged(cell, (clients, transport), (clients, transport), good, bucket)
            async with _transport(evil_clients, cell) as evil_transport:
                return await _judged(cell, (clients, transport), (evil_clients, evil_transport), good, bucket)


async def _judged(
    cell: Cell, right: tuple[Clients, Transport], evil: tuple[Clients, Transport], good: str, bucket: str
) -> Judgement:
    found: list[str] = []
    for _ in range(WARM_UPS):  # what it imports and allocates is neither delay nor growth of the cell's
        if not await _other(*right, good):
            break
    outcome = ""
    watch = _Watch()
    beside = asyncio.create_task(_other(*right, good))
    try:
        async with asyncio.timeout(LONGEST):
            data = await _evil(*evil, cell, bucket)
        outcome = "equal"
        if data != TRUTH:
            found.append(f"wrong bytes: {len(data)} of {len(TRUTH)}")
    except PenstockError as error:
        outcome = type(error).__name__
    except TimeoutError:
        outcome = "crumbs" if cell.fault in CRUMBS else "late"
        if outcome == "late":
            found.append(f"no end in {LONGEST:g} s")
    except Exception as error:  # noqa: BLE001 - that is the finding
        outcome = "foreign"
        found.append(f"not an error of ours: {_leaves(error)}")
    found.append(await beside)
    grown = watch.close()
    found.append(await _other(*right, good))
    if watch.lag > LONGEST_LAG:
        found.append(f"the loop lagged by {watch.lag:.1f} s of CPU")
    if grown > MOST_MEMORY:
        found.append(f"memory grew by {grown // MIB} MiB")
    return Judgement(outcome, "; ".join(filter(None, found)))


def _leaves(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return ", ".join(_leaves(each) for each in error.exceptions)
    return repr(error)
