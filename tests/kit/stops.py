"""Each process of a job stopped (SIGSTOP) in the middle of an epoch, over many FIFOs.

    python -m tests.kit.stops [--fifos 1024] [--seconds 30] [--transport splice] [--restart]

A sidecar with a keeper streams one object through each FIFO, and one process, the trainer, reads all FIFOs.
At a quarter of the streams the sidecar is stopped, at half the trainer, and at three quarters the keeper, so
every epoch ends while the keeper is stopped. With `--restart` the sidecar is killed while the keeper is
stopped, and another one starts. Every stream must be equal, and its trailer must say `complete`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streamer.units import KIB
from tests.kit.processes import job, sidecar, write_job
from tests.kit.stub import StubThread
from tests.kit.trailers import published_trailer

SIZE = 2048 * KIB
CONTENTS = 64
"""Different objects; FIFOs of the same remainder have the same one."""
QUARTERS = 4


def read(paths: list[str]) -> None:
    """Run the trainer: after each quarter print its number and wait for a line; at the end print sums."""
    fds = [os.open(path, os.O_RDONLY | os.O_NONBLOCK) for path in paths]
    counts = dict.fromkeys(fds, 0)
    sums = {fd: hashlib.sha256() for fd in fds}
    ended: set[int] = set()
    for quarter in range(1, QUARTERS + 1):
        last = quarter == QUARTERS
        poll = select.poll()
        waited = {fd for fd in fds if last or counts[fd] < quarter * SIZE // QUARTERS}
        for fd in waited:
            poll.register(fd, select.POLLIN)
        while waited:
            for fd, _ in poll.poll():
                wanted = 64 * KIB if last else quarter * SIZE // QUARTERS - counts[fd]
                data = os.read(fd, min(wanted, 64 * KIB))
                sums[fd].update(data)
                counts[fd] += len(data)
                ended |= set() if data else {fd}
                if not data or (not last and counts[fd] >= quarter * SIZE // QUARTERS):
                    poll.unregister(fd)
                    waited.discard(fd)
        print(json.dumps({"quarter": quarter, "ended": len(ended)}), flush=True)
        sys.stdin.readline()
    print(json.dumps([sums[fd].hexdigest() for fd in fds]), flush=True)


@contextlib.contextmanager
def stopped(pid: int, seconds: float) -> Iterator[None]:
    """Stop a process before the block, and let it continue `seconds` after the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


def run(base: Path, fifos: int, seconds: float, *, transport: str, restart: bool) -> list[str]:
    """Return what is wrong, one line each."""
    dice = random.Random(1)
    contents = [dice.randbytes(SIZE) for _ in range(CONTENTS)]
    names = [f"c{number:04d}" for number in range(fifos)]
    server = StubThread()
    stub = server.start()
    try:
        stub.objects |= {f"b/{name}/o": contents[n % CONTENTS] for n, name in enumerate(names)}
        document = job(
            stub.url, base, *(f"b/{name}/" for name in names),
            Transport=transport, MemoryBudget=f"{fifos * 9 // 4 + 16}MiB", PartSize="1MiB",
            Endpoint={"Url": stub.url, "PathStyle": True, "Anonymous": True},
        )  # fmt: skip
        path = write_job(base / "job.yaml", document)
        return _run(base, path, names, contents, seconds=seconds, restart=restart)
    finally:
        server.stop()


def _run(
    base: Path, path: str, names: list[str], contents: list[bytes], *, seconds: float, restart: bool
) -> list[str]:
    data = base / "input" / "data"
    with contextlib.ExitStack() as stack:
        began = time.monotonic()

        def note(text: str) -> None:
            print(f"{time.monotonic() - began:6.1f} s: {text}", flush=True)

        running = stack.enter_context(sidecar(path, "--keeper", "auto"))
        running.wait_for("ready")
        keeper: int = running.wait_for("keeper")["pid"]
        note(f"sidecar ready with {len(names)} FIFOs, keeper {keeper}")
        stack.enter_context(contextlib.suppress(ProcessLookupError))  # a keeper ends when it holds nothing
        stack.callback(os.kill, keeper, signal.SIGKILL)
        trainer = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "tests.kit.stops", "--read", *(f"{data / name}_0" for name in names)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        wrong = []

        def reported() -> Any:
            assert trainer.stdout is not None
            return json.loads(trainer.stdout.readline())

        def resume() -> None:
            assert trainer.stdin is not None
            trainer.stdin.write("\n")
            trainer.stdin.flush()

        for stop in (running.process.pid, trainer.pid):
            reached = reported()
            note(f"trainer: {reached}")
            if reached["ended"]:
                wrong.append(f"{reached['ended']} streams had ended by quarter {reached['quarter']}")
            with stopped(stop, seconds):
                resume()
        reached = reported()
        note(f"trainer: {reached}")
        with stopped(keeper, seconds):
            if restart:
                running.process.kill()
                running.wait()
                running = stack.enter_context(sidecar(path, "--keeper", "auto"))
            resume()
        reached = reported()
        note(f"trainer: {reached}")
        resume()
        for name, number, digest in zip(names, range(len(names)), reported(), strict=True):
            if digest != hashlib.sha256(contents[number % CONTENTS]).hexdigest():
                wrong.append(f"{name}: wrong bytes")
            if (state := published_trailer(data, name, 0).state) != "complete":
                wrong.append(f"{name}: its trailer says {state}")
        if restart:
            running.wait_for("ready")
        if code := running.end():
            wrong.append(f"the sidecar ended with {code}: {running.events[-3:]}")
        return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kit.stops", description=__doc__.split("\n")[0])
    parser.add_argument("--fifos", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--transport", default="splice", choices=("splice", "buffered", "aiobotocore"))
    parser.add_argument("--restart", action="store_true", help="kill the sidecar while the keeper is stopped")
    parser.add_argument("--read", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read:
        read(given.read)
        return 0
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="penstock-stops-") as directory:
        wrong = run(
            Path(directory), given.fifos, given.seconds, transport=given.transport, restart=given.restart
        )
    print(*wrong[:20], sep="\n")
    print(f"{given.fifos} FIFOs, each process stopped for {given.seconds:g} s: {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
