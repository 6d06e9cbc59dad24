"""Child processes of the benchmark: lines with a deadline, CPU seconds and memory measured from outside.

CPU time is read from the kernel's clock of a process (user and system time of all its threads, including
ended ones, to the nanosecond), so a client need not report it. Memory is VmHWM, because `ru_maxrss` counts
the parent's memory at the fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class ProcessFailed(Exception):
    """A process of the benchmark ended, or did not respond in time."""


class Child:
    """A child process with a protocol of lines. Keeps the end of its standard error."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | None = None,
        lines_on_stderr: bool = False,
    ) -> None:
        """`lines_on_stderr`: read lines from standard error and discard standard output."""
        self.name = name
        self._errors = None if lines_on_stderr else tempfile.TemporaryFile()  # noqa: SIM115 - see close
        self._process = subprocess.Popen(
            command,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL if lines_on_stderr else subprocess.PIPE,
            stderr=self._errors or subprocess.PIPE,
            process_group=0,
        )
        self.pid = self._process.pid
        stdout = self._process.stderr if lines_on_stderr else self._process.stdout
        if self._process.stdin is None or stdout is None:
            raise RuntimeError("no pipes")
        self._stdin, self._stdout = self._process.stdin, stdout
        self._pending = b""
        self._output: deque[str] = deque(maxlen=5)

    @property
    def fd(self) -> int:
        """Return a descriptor that becomes readable when a line may have come or the process has ended."""
        return self._stdout.fileno()

    def say(self, line: str) -> None:
        """Write one line to the child's standard input. Raises ProcessFailed if the child has ended."""
        try:
            os.write(self._stdin.fileno(), (line + "\n").encode())
        except BrokenPipeError:
            raise ProcessFailed(f"{self.name} ended early: {self.errors()}") from None

    def line(self, *, deadline: float) -> str:
        """Return the child's next line. `deadline`: of `time.monotonic()`. Raises ProcessFailed."""
        while b"\n" not in self._pending:
            if not select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise ProcessFailed(f"{self.name} did not answer in time: {self.errors()}")
            data = os.read(self.fd, 1 << 16)
            if not data:
                raise ProcessFailed(f"{self.name} ended early: {self.errors()}")
            self._pending += data
        first, _, self._pending = self._pending.partition(b"\n")
        self._output.append(first.decode())
        return self._output[-1]

    def errors(self) -> str:
        """Return the end of the child's standard error."""
        if self._errors is None:
            return "\n".join((*self._output, self._pending.decode(errors="replace")))
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 1500))
        return self._errors.read().decode(errors="replace").strip() or "(nothing on standard error)"

    def close(self, *, patience: float = 5.0) -> None:
        """End the child: close its standard input, then SIGTERM, then SIGKILL after `patience` seconds."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
                break
        self._stdout.close()
        if self._errors is not None:
            self._errors.close()

    def terminate(self) -> None:
        """Send SIGTERM to the child."""
        self._process.terminate()


@contextlib.contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """Make processes that are started within the block run on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def family(pid: int) -> list[int]:
    """Return the ids of a process and its running descendants; none if it has ended."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                for child in file.read().split():
                    found += family(int(child))
    return found


def await_ready(sidecar: subprocess.Popen[str]) -> dict[str, Any]:
    """Read the sidecar's log until it is ready; return that event. Raises RuntimeError if it ends before."""
    line = ""
    for line in sidecar.stderr or ():
        if '"ready"' in line:
            event: dict[str, Any] = json.loads(line)
            return event
    raise RuntimeError(f"the sidecar did not start: {line}")


def cpu_seconds(pid: int) -> float:
    """Return the user and system seconds so far of a process and its running descendants, all threads.

    Ended descendants do not count. Raises ProcessLookupError.
    """
    return sum(_of_family(pid, _cpu_seconds))


def peak_memory(pid: int) -> int:
    """Return the most resident bytes of a process and its descendants in all. Raises ProcessLookupError."""
    return sum(_of_family(pid, _peak_memory))


def _of_family(pid: int, ask: Callable[[int], T]) -> list[T]:
    """Return the results of `ask` for a process and for its descendants that still run."""
    found = [ask(pid)]
    for each in family(pid)[1:]:
        with contextlib.suppress(ProcessLookupError):
            found.append(ask(each))
    return found


def _cpu_seconds(pid: int) -> float:
    # The number of the clock as by clock_getcpuclockid(3): scheduler time of the process.
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        raise ProcessLookupError(f"process {pid} is gone") from None


def _peak_memory(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError):
        raise ProcessLookupError(f"process {pid} is gone") from None


def wait_for_all(children: Sequence[Child], *, beside: Child, deadline: float) -> list[str]:
    """Return one line of each child. Raises ProcessFailed at the deadline, or as soon as `beside` ends."""
    lines: dict[Child, str] = {}
    watched = os.pidfd_open(beside.pid)
    try:
        while waiting := [child for child in children if child not in lines]:
            timeout = max(0.0, deadline - time.monotonic())
            ready = select.select([*(child.fd for child in waiting), watched], [], [], timeout)[0]
            if not ready:
                raise ProcessFailed(f"no end in time; {beside.name} says: {beside.errors()}")
            for child in waiting:
                if child.fd in ready:
                    lines[child] = child.line(deadline=deadline)
            if ready == [watched]:
                raise ProcessFailed(f"{beside.name} ended in mid-stream: {beside.errors()}")
    finally:
        os.close(watched)
    return [lines[child] for child in children]
