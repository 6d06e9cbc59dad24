"""A pod with a native sidecar, started and ended in a kubelet's order: a harness of processes, no kubelet.

    start       sidecar ─▶ its startup probe succeeds ─▶ trainer
    completed   the trainer ends ─▶ SIGTERM to the sidecar ─▶ SIGKILL after the whole grace period
    deleted     SIGTERM to the trainer ─▶ SIGKILL when the grace period is over
                then SIGTERM to the sidecar ─▶ SIGKILL when the rest of the period is over

The harness has no images, namespaces, cgroups and volumes: both processes share a directory of this machine.
Source: Kubernetes' documentation, "Sidecar Containers" and "Pod Lifecycle, Termination of Pods". A kubelet
gives a sidecar 2 s if nothing is left of the period; `LEAST` is shorter.

`python -m tests.kit.pod BASE [MODE]` is a sidecar of `finish_requests` alone, with a stub of the uploader. It
prints JSON lines, and each line of its standard input is the result of one upload: a code and a text.

    ["ready"]  ["request", CODE, REASON]  ["stopping"]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from sidecar.job.finish import finish_requests
from sidecar.job.layout import Layout
from tests.kit.children import output_of

LEAST = 0.5
"""Seconds that a sidecar has after SIGTERM, if nothing is left of the grace period."""


class StubSidecar:
    """The program of this module as a process."""

    def __init__(self, base: Path, mode: int = 0o640, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.kit.pod", str(base), f"{mode:o}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )
        assert self.line() == ["ready"]

    def line(self) -> list[Any]:
        """The next line that it prints; empty at its end."""
        text = output_of(self.process).readline()
        return list(json.loads(text)) if text else []

    def uploaded(self, code: int, text: str = "") -> None:
        """End an upload."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{code} {text}\n")
        self.process.stdin.flush()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        with self.process:  # closes its pipes and waits
            pass


@contextlib.contextmanager
def stub_sidecar(base: Path, mode: int = 0o640, **options: Any) -> Iterator[StubSidecar]:
    """A sidecar that is ready, until the end of the block."""
    sidecar = StubSidecar(base, mode, **options)
    try:
        yield sidecar
    finally:
        sidecar.close()


class Pod:
    """A trainer beside a sidecar that is ready. A harness of processes, no kubelet: see the module."""

    def __init__(self, sidecar: subprocess.Popen[Any], trainer: Sequence[str], *, grace: float) -> None:
        """Start the trainer. `grace`: terminationGracePeriodSeconds."""
        self.sidecar = sidecar
        self.grace = grace
        self.trainer = subprocess.Popen(
            trainer, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.trainer.poll() is None:
            self.trainer.kill()
        self.trainer.communicate()

    def completed(self) -> tuple[int, int]:
        """Wait for the trainer; end the sidecar. Return both exit codes, of the trainer first."""
        code = self.trainer.wait()
        return code, self._end(self.sidecar, self.grace)

    def deleted(self) -> tuple[int, int]:
        """End the pod from outside. Return both exit codes, of the trainer first."""
        began = time.monotonic()
        code = self._end(self.trainer, self.grace)
        left = self.grace - (time.monotonic() - began)
        return code, self._end(self.sidecar, max(left, LEAST))

    @staticmethod
    def _end(process: subprocess.Popen[Any], seconds: float) -> int:
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _print(*values: object) -> None:
    print(json.dumps(values), flush=True)


async def _serve(base: str, mode: int) -> None:
    layout, stopped, loop = Layout(base), asyncio.Event(), asyncio.get_running_loop()
    layout.create()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    results = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(results), sys.stdin)
    one_upload, requested = asyncio.Lock(), False

    async def upload(code: int, reason: str) -> tuple[int, str]:
        nonlocal requested
        requested = True
        _print("request", code, reason)
        async with one_upload:
            result, _, text = (await results.readline()).decode().rstrip("\n").partition(" ")
        return int(result), text

    with finish_requests(layout, fifo_mode=mode) as requests:
        serving = asyncio.ensure_future(requests.serve(upload))
        _print("ready")
        await asyncio.wait({serving, asyncio.ensure_future(stopped.wait())}, return_when="FIRST_COMPLETED")
        _print("stopping")
        async with one_upload:  # one that was requested goes on
            if not requested:
                await results.readline()  # at SIGTERM, best effort
        os._exit(0)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2], 8)))
