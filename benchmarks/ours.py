"""Penstock as a client: `penstock run` with a job file, one channel per stream.

It is ready at its log event `ready`, and begins when a reader opens its FIFO. The harness lets the readers
open their FIFOs at that moment, so next to nothing is fetched before the measurement.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from benchmarks.clients import ROOT, START_SECONDS, Client, Running, Setting, environment
from benchmarks.process import Child
from benchmarks.task import Stream, Task

VENV_PYTHON = os.path.join(".venv", "bin", "python")


class Sidecar(Running):
    def __init__(self, child: Child, admin: str) -> None:
        self.child = child
        self.admin = admin

    def go(self) -> None:
        """Do nothing: the sidecar begins when the reader opens its FIFO."""

    def status(self) -> dict[str, Any]:
        """Return the document of `/status`."""
        with urllib.request.urlopen(  # noqa: S310 - our own child
            self.admin + "status", timeout=10
        ) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def after(self) -> Mapping[str, Any]:
        status = self.status()
        received = sum(channel["received_bytes"] for channel in status["channels"].values())
        return {"transport": status["transport"], "received_bytes": received}


@dataclass(frozen=True)
class Penstock(Client):
    """`penstock run`; the setting is merged into the job's `Penstock` section."""

    always: Setting
    """Keys of every setting, such as a transport."""
    checkout: str = field(default=ROOT, kw_only=True)
    """Directory of the source tree whose sidecar runs."""
    inflates: ClassVar[bool] = True

    def unavailable(self) -> str | None:
        from sidecar.config.job import Job

        if not os.path.exists(self._python()):
            return f"no {VENV_PYTHON} in {self.checkout}: run `make bench BENCH=--help` there once"
        task = Task(url="http://127.0.0.1", ca_bundle=None, streams=[], setting=self.always)
        stream = Stream(bucket="any", keys=[], size=0, fifo="/any/input/data/channel-00_0")
        try:
            Job.model_validate(self.job(task, [stream], "/any"))
        except ValueError as error:
            return f"this version refuses {self.always}: {str(error).splitlines()[0]}"
        return None

    def version(self) -> str:
        from streamer import __version__

        return __version__

    def _python(self) -> str:
        return sys.executable if self.checkout == ROOT else os.path.join(self.checkout, VENV_PYTHON)

    def fifo(self, directory: str, index: int) -> str:
        return os.path.join(directory, "ml", "input", "data", f"channel-{index:02d}_0")

    def setting_for(self, name: str, streams: int) -> Setting:
        # A channel's quota must allow two parts.
        many = {"PartSize": "4MiB"} if streams > 8 else {}
        return many | (self.settings | self.small)[name] | self.always

    def job(self, task: Task, streams: list[Stream], base: str) -> dict[str, Any]:
        """Return the job file: one channel per stream."""
        endpoint = {"Url": task.url, "Region": "us-east-1", "PathStyle": True}
        if task.ca_bundle:
            endpoint["CaBundle"] = task.ca_bundle
        penstock = {"BaseDirectory": base, "Admin": {"Port": 0}} | task.setting
        penstock["Endpoint"] = endpoint | penstock.get("Endpoint", {})
        return {
            "InputDataConfig": [
                {
                    "CompressionType": "Gzip" if task.gzip else "None",
                    "ChannelName": os.path.basename(stream.fifo).removesuffix("_0"),
                    "DataSource": {
                        "S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": f"s3://{stream.bucket}/"}
                    },
                }
                for stream in streams
            ],
            "Penstock": penstock,
        }

    def start(self, task: Task, directory: str) -> Sidecar:
        path = os.path.join(directory, "job.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.job(task, task.streams, os.path.join(directory, "ml")), file)
        child = Child(
            self.name,
            [self._python(), "-m", "sidecar", "run", "-c", path],
            env=environment(directory),
            cwd=self.checkout,
            lines_on_stderr=True,
        )
        deadline = time.monotonic() + START_SECONDS
        try:
            while True:
                line = child.line(deadline=deadline)
                if line.startswith("{") and (event := json.loads(line))["event"] == "ready":
                    sidecar = Sidecar(child, event["admin"])
                    sidecar.status()  # the admin server is imported now, and not while bytes move
                    return sidecar
        except BaseException:
            child.close()
            raise
