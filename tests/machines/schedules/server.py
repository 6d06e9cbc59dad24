"""S3 on the loop of a run: answers on socket pairs, in pieces, late, wrong or not at all, by the dice."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import random
import re
import socket
from collections import Counter
from collections.abc import Callable

from tests.kit.raw import etag
from tests.kit.virtual import ScheduledLoop
from tests.machines.schedules.trial import BUCKET, SeedTrial
from tests.machines.schedules.wire import Wire, wired

TRAILING = b"HTTP/1.1 200 OK\r\n\r\nmore"
MOST_FAULTS = 2
"""Faults in a row for the same bytes: one more wrong answer would be believed."""
NAMES = {200: "OK", 206: "Partial Content", 403: "Forbidden", 404: "Not Found", 412: "Precondition Failed"}
CODES = {
    403: "AccessDenied",
    404: "NoSuchKey",
    412: "PreconditionFailed",
    500: "InternalError",
    503: "SlowDown",
}


class Server:
    """All of a run's objects."""

    def __init__(self, trial: SeedTrial, loop: ScheduledLoop) -> None:
        self.objects = {key: data for channel in trial.channels for key, data in channel.objects.items()}
        self.struck: Counter[str] = Counter()
        self._trial = trial
        self._loop = loop
        self._dice = random.Random(f"{trial.seed} server")
        self._in_a_row: Counter[tuple[str, int]] = Counter()
        self._wrong: Counter[tuple[str, int]] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._delay = self._dice.choice([0.0, 0.001, 0.02])
        self._idle = self._dice.choice([0.05, 1.0, 1000.0])

    def connect(self, peer: str) -> tuple[float, OSError | Callable[[socket.socket], None] | None]:
        """See `ScheduledLoop.connect`."""
        dice = self._dice
        if dice.random() < self._trial.refused:
            self.struck["no connection"] += 1
            return dice.random() * 0.01, dice.choice(
                [ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), None]
            )
        del peer
        return self._late(), self._accept

    def _late(self) -> float:
        return self._dice.expovariate(1 / self._delay) if self._delay else 0.0

    def _accept(self, sock: socket.socket) -> None:
        task = self._loop.create_task(self._serve(sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End every connection."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(ConnectionError, TimeoutError):
            wire = await wired(self._loop, sock, tls=self._trial.tls)
            while True:
                async with asyncio.timeout(self._idle):
                    head = await wire.request()
                if not head or not await self._answer(wire, head):
                    return
                wire.finish()

    def _fault(self, key: str, last: int) -> str:
        """What happens to this answer. `last`: of the range, whose first byte moves with repeated bytes."""
        at, roll = (key, last), self._dice.random()
        for kind, rate in self._trial.faults.items():
            if (roll := roll - rate) < 0:
                if self._in_a_row[at] >= MOST_FAULTS:
                    break
                if kind in ("range", "trailing"):
                    # This holds for a hedge and for the request that it hedges, too.
                    self._wrong[at] += 1
                    if self._wrong[at] > MOST_FAULTS:
                        break
                self._in_a_row[at] += 1
                self.struck[kind] += 1
                return kind
        self._in_a_row[at] = 0
        return ""

    async def _answer(self, wire: Wire, head: str) -> bool:
        """Whether the connection may be used again."""
        method, target, _ = head.split("\r\n", maxsplit=1)[0].split(" ")
        key = target.removeprefix(f"/{BUCKET}/")
        data = self.objects.get(key)
        wanted = re.search(r"Range: bytes=(\d+)-(\d+)", head)
        match = re.search(r'If-Match: "(\w+)"', head)
        first, last = (int(wanted[1]), int(wanted[2])) if wanted else (0, 0)
        kind = self._fault(key, last)
        status = self._trial.lasting.get(key, 206 if method == "GET" else 200)
        if method == "HEAD" and status == 412:
            status = 200  # nothing to match
        if data is None:
            status = 404
        elif status == 206 and match and match[1] != etag(data):
            status = 412
        if kind in ("500", "503") and status < 300:
            status = int(kind)
        fields = {"x-amz-request-id": f"R{self.struck.total()}"}
        body = b""
        if status >= 300:
            code = CODES[status]
            body = (
                f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
                if method == "GET"
                else b""
            )
            if status == 503 and self._dice.random() < 0.5:
                fields["Retry-After"] = self._dice.choice(["0", "1"])
        elif data is not None:
            fields["ETag"] = f'"{etag(data)}"'
            fields["Last-Modified"] = "Thu, 19 Nov 2026 00:00:00 GMT"
            if method == "GET":
                body = data[first : last + 1]
                off = 1 if kind == "range" else 0
                fields["Content-Range"] = f"bytes {first + off}-{last + off}/{len(data)}"
        fields["Content-Length"] = str(len(data or b"") if method == "HEAD" and status == 200 else len(body))
        if kind == "says close":
            fields["Connection"] = "close"
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        answer = f"HTTP/1.1 {status} {NAMES.get(status, 'Sorry')}\r\n{lines}\r\n".encode() + body
        if kind == "interim":
            answer = b"HTTP/1.1 100 Continue\r\n\r\n" + answer
        if kind == "trailing":
            answer += TRAILING
        return await self._send(wire, answer, kind)

    async def _send(self, wire: Wire, answer: bytes, kind: str) -> bool:
        dice = self._dice
        if kind == "reset":
            return False
        await asyncio.sleep(dice.uniform(0.3, 3) if kind == "slow" else self._late())
        short = kind in ("reset later", "cut", "stall")
        most = dice.randrange(len(answer)) if short else len(answer)
        # What comes behind an answer comes with its last byte: later, it could not be told from the next.
        last = most - len(TRAILING) if kind == "trailing" else most + 1
        pieces = dice.randint(5, 15) if kind == "drip" else dice.choice([1, 1, 2, 4])
        cuts = sorted({0, most, *(dice.randrange(last) for _ in range(pieces - 1))})
        for begin, end in itertools.pairwise(cuts):
            await wire.send(answer[begin:end])
            if end < most:
                await asyncio.sleep(dice.uniform(0.05, 0.4) if kind == "drip" else self._late())
        if kind == "stall":
            await asyncio.sleep(dice.choice([30.0, 1.0]))
        if kind in ("cut", "closes", "says close"):
            wire.finish()  # an end, and no reset
        return not short and kind not in ("closes", "says close")
