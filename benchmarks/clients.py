"""The clients: how to start each, how to make it begin, and its settings.

The harness starts every client before the measurement, waits until it is ready, and measures from the command
to begin. The Python peers are programs in `benchmarks.peers`. s5cmd and rclone start within milliseconds and
are measured from their start. Penstock is in `benchmarks.ours`, the list of clients in `benchmarks.lineup`.

The row of a client that is not installed names the reason.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from benchmarks.dataset import MIB, Shape
from benchmarks.process import Child, ProcessFailed
from benchmarks.task import Stream, Task

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
START_SECONDS = 60.0
SMALL = 8 * MIB
"""Most bytes of an object that is fetched by one request."""
Setting = dict[str, Any]


def environment(home: str) -> dict[str, str]:
    """Return a client's whole environment: no proxies, no profiles, credentials that the origin ignores."""
    return {
        "PATH": os.pathsep.join((sysconfig.get_path("scripts"), os.defpath)),
        "HOME": home,
        "LANG": "C.UTF-8",
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark-secret",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class Running(ABC):
    """A client that has been started."""

    child: Child
    whole_process = False
    """Whether the client is short-lived and reports its own usage from start to end."""

    @abstractmethod
    def go(self) -> None:
        """Make the client begin to stream."""

    def after(self) -> Mapping[str, Any]:
        """Return the client's own figures after all streams have ended."""
        return {}

    def close(self) -> None:
        self.child.close()


@dataclass(frozen=True)
class Client(ABC):
    name: str
    settings: dict[str, Setting]
    """Settings by the name that the tables show; the first is the default."""
    small: dict[str, Setting]
    """Settings for small objects, of which more must be in flight."""
    inflates: ClassVar[bool] = False
    """Whether the client inflates objects by itself; the harness inflates the streams of the others."""

    @abstractmethod
    def unavailable(self) -> str | None:
        """Return why the client cannot run on this machine; None if it can."""

    @abstractmethod
    def version(self) -> str:
        """Return the client's version, for the results."""

    @abstractmethod
    def start(self, task: Task, directory: str) -> Running:
        """Start the client and wait until it is ready; its files go to `directory`. Raises ProcessFailed."""

    def fifo(self, directory: str, index: int) -> str:
        """Return the path of a stream's FIFO, which exists once `start` has returned."""
        return os.path.join(directory, f"stream-{index:02d}")

    def choices(self, shape: Shape) -> list[str]:
        """Return the names of the settings to try for objects of this shape; the first is the default."""
        return list(self.small if shape.size <= SMALL else self.settings)

    def setting_for(self, name: str, streams: int) -> Setting:
        """Return a setting, adapted to the number of streams."""
        del streams
        return (self.settings | self.small)[name]


class _Agent(Running):
    def __init__(self, child: Child, *, whole_process: bool = False) -> None:
        self.child = child
        self.whole_process = whole_process

    def go(self) -> None:
        self.child.say("go")

    def after(self) -> Mapping[str, Any]:
        if not self.whole_process:
            return {}
        try:
            line = self.child.line(deadline=time.monotonic() + 3)
        except ProcessFailed:
            self.child.terminate()  # the program does not end with its pipe; the agent ends it and reports
            line = self.child.line(deadline=time.monotonic() + 10)
        usage: dict[str, Any] = json.loads(line)
        return usage


@dataclass(frozen=True)
class PythonPeer(Client):
    """A program in `benchmarks.peers` around a library."""

    module: str
    distribution: str

    def unavailable(self) -> str | None:
        try:
            importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return f"{self.distribution} is not installed"
        return None

    def version(self) -> str:
        return importlib.metadata.version(self.distribution)

    def start(self, task: Task, directory: str) -> Running:
        make_fifos(task)
        path = os.path.join(directory, "task.json")
        task.write(path)
        return _ready(
            self.name,
            [sys.executable, "-m", f"benchmarks.peers.{self.module}", path],
            directory,
            whole_process=False,
        )


@dataclass(frozen=True)
class Program(Client):
    """A foreign executable that writes to standard output, started once per stream."""

    distribution: str

    def _path(self) -> str | None:
        return shutil.which(self.name, path=sysconfig.get_path("scripts")) or shutil.which(self.name)

    def unavailable(self) -> str | None:
        return None if self._path() else f"{self.name} is not installed (PyPI: {self.distribution})"

    def version(self) -> str:
        asked = subprocess.run(
            [self._path() or self.name, "version"], capture_output=True, text=True, check=True
        )
        return asked.stdout.split("\n", 1)[0].split()[-1].removeprefix("v")

    def start(self, task: Task, directory: str) -> Running:
        make_fifos(task)
        path, executable = os.path.join(directory, "commands.json"), self._path() or self.name
        commands = [
            {"fifo": stream.fifo, "argv": [executable, *self.arguments(task, stream)]}
            for stream in task.streams
        ]
        with open(path, "w", encoding="utf-8") as file:
            json.dump(commands, file)
        agent = os.path.join(ROOT, "benchmarks", "peers", "program.py")
        command = [sys.executable, "-I", "-S", agent, path]
        return _ready(self.name, command, directory, whole_process=True)

    @abstractmethod
    def arguments(self, task: Task, stream: Stream) -> list[str]:
        """Return the command line without the program's name."""


class S5cmd(Program):
    def arguments(self, task: Task, stream: Stream) -> list[str]:
        trust = ["--no-verify-ssl"] if task.ca_bundle else []  # s5cmd has no option for a CA
        requests, part = str(task.setting["requests"]), str(task.setting["part_mib"])
        options = ["--concurrency", requests, "--part-size", part]
        return ["--endpoint-url", task.url, *trust, "cat", *options, f"s3://{stream.bucket}/*"]


class Rclone(Program):
    def arguments(self, task: Task, stream: Stream) -> list[str]:
        trust = ["--ca-cert", task.ca_bundle] if task.ca_bundle else []
        # rclone's buffer reads ahead within its one connection; 16 MiB is rclone's default.
        return ["--config", "", *trust, "cat", rclone_path(task.url, stream.bucket)]


def rclone_path(url: str, path: str) -> str:
    """Return rclone's path of a bucket, or of an object; the credentials are in the environment."""
    options = "provider=Other,env_auth=true,region=us-east-1,force_path_style=true"
    return f':s3,{options},endpoint="{url}":{path}'


def make_fifos(task: Task) -> None:
    """Make the FIFO of every stream of a task."""
    for stream in task.streams:
        os.mkfifo(stream.fifo)


def _ready(name: str, command: list[str], directory: str, *, whole_process: bool) -> Running:
    child = Child(name, command, env=environment(directory), cwd=ROOT)
    try:
        child.line(deadline=time.monotonic() + START_SECONDS)  # the line is `ready`
    except BaseException:
        child.close()
        raise
    return _Agent(child, whole_process=whole_process)
