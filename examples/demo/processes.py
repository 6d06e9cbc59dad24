"""Runs the demo's two child processes, each with a minimal environment.

The sidecar gets the credentials, the trainer does not. Each is a process group of its own, so that Ctrl-C
reaches the demo only, which then ends them in order. Each process ends with its `with` block.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import sysconfig
import threading
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any
from urllib.request import urlopen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
READY_WITHIN = 60
"""Seconds from the sidecar's start to its FIFOs; it takes 1 s on an idle machine."""
END_WITHIN = 30
"""Seconds that a child may take to end after SIGTERM."""
HARMLESS = (
    "PATH", "LANG", "LC_ALL", "TERM", "COLUMNS", "TZ", "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "NVIDIA_VISIBLE_DEVICES", "XLA_FLAGS",
)  # fmt: skip
"""Variables that a child inherits: they describe programs, libraries, terminal and GPU."""


class DemoFailed(Exception):
    """The demo cannot continue; the text names the reason."""


def bare_environment(home: str) -> dict[str, str]:
    """Return an environment with the user's `HARMLESS` variables only.

    Makes `home`. Temporary files go there too, because a killed program does not remove its own.
    """
    os.makedirs(home, exist_ok=True)
    kept = {name: os.environ[name] for name in HARMLESS if name in os.environ}
    return kept | {"HOME": home, "TMPDIR": home}


def trainer_environment(home: str) -> dict[str, str]:
    """Return `bare_environment`, set so that TensorFlow is quiet and does not look for a missing GPU."""
    environment = bare_environment(home) | {"TF_CPP_MIN_LOG_LEVEL": "2"}
    if not os.path.exists("/dev/nvidiactl"):
        environment.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    return environment


def penstock(*arguments: str) -> list[str]:
    """Return the command line of the `penstock` that is installed beside this interpreter."""
    return [os.path.join(sysconfig.get_path("scripts"), "penstock"), *arguments]


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A sidecar that has offered its FIFOs."""

    process: subprocess.Popen[str]
    admin: str
    """Base URL of its admin server."""

    def status(self) -> dict[str, Any]:
        """Return the document of `/status`."""
        with urlopen(self.admin + "status", timeout=10) as answer:  # noqa: S310 - its own loopback port
            document: dict[str, Any] = json.load(answer)
            return document

    def stop(self) -> int:
        """Send SIGTERM; return the sidecar's exit code. Raises subprocess.TimeoutExpired."""
        self.process.terminate()
        return self.process.wait(END_WITHIN)


@contextlib.contextmanager
def running_sidecar(job: str, environment: dict[str, str], *, log: str) -> Iterator[Sidecar]:
    """Run `penstock run` on the file `job` until the end of the block; its log goes to the file `log`.

    Raises DemoFailed, with the last lines of the log, if the sidecar does not become ready.
    """
    command = penstock("run", "-c", job)
    with (
        open(log, "w", encoding="utf-8") as sink,
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        ) as process,
    ):
        events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        assert process.stderr is not None  # noqa: S101 - for the type checker
        reader = threading.Thread(target=_copy_log, args=(process.stderr, sink, events))
        reader.start()
        try:
            yield Sidecar(process, _await_ready(events, log))
        finally:
            end(process)
            reader.join()


def _copy_log(source: IO[str], sink: IO[str], events: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Write every line to the file and its event to the queue; put an empty event at the end."""
    for line in source:
        sink.write(line)
        sink.flush()
        with contextlib.suppress(ValueError):
            events.put(json.loads(line))
    events.put({})


def _await_ready(events: queue.SimpleQueue[dict[str, Any]], log: str) -> str:
    """Wait for the log event `ready`; return its admin URL. Raises DemoFailed."""
    while True:
        try:
            event = events.get(timeout=READY_WITHIN)
        except queue.Empty:
            raise DemoFailed(f"the sidecar said nothing for {READY_WITHIN} s:\n{tail(log)}") from None
        if not event:
            raise DemoFailed(f"the sidecar ended before it was ready:\n{tail(log)}")
        if event.get("event") == "ready":
            return str(event["admin"])


def run_trainer(arguments: Sequence[str], environment: dict[str, str], *, beside: Sidecar, log: str) -> None:
    """Run the training program to its end, with this process's standard output and errors to the file `log`.

    Raises DemoFailed if it fails, or if the sidecar ends first.
    """
    command = [sys.executable, "-m", "examples.demo.train", *arguments]
    with (
        open(log, "w", encoding="utf-8") as sink,
        subprocess.Popen(
            command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=sink, process_group=0
        ) as process,
    ):
        try:
            if _first_to_end(process, beside.process) is not process:
                raise DemoFailed(f"the sidecar ended with exit code {beside.process.wait()} in mid-training")
            if code := process.wait():
                raise DemoFailed(f"the trainer ended with exit code {code}:\n{tail(log)}")
        finally:
            end(process)


def _first_to_end(*processes: subprocess.Popen[Any]) -> subprocess.Popen[Any]:
    """Wait until one of the processes has ended; return it, or the first of several."""
    with contextlib.ExitStack() as stack:
        handles = {}
        for process in processes:
            handles[os.pidfd_open(process.pid)] = process
        for handle in handles:
            stack.callback(os.close, handle)
        ended, _, _ = select.select(handles, [], [])
        return next(process for handle, process in handles.items() if handle in ended)


def end(process: subprocess.Popen[Any]) -> None:
    """End `process`: SIGTERM, then SIGKILL."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_WITHIN)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def tail(path: str, lines: int = 15) -> str:
    """Return the last lines of a file."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return "".join(file.readlines()[-lines:])
