"""Inside the guest: the scenes, each a job in trouble, and their outcome.

    python -m tests.machines.guest.scenes NAME [NAME...]   # prints a line of JSON for each run of each scene

Readers of all channels are threads of this process, the sidecar is `penstock run` with or without a keeper,
storage is a process in a namespace of its own. A channel's outcome is `equal` (every byte, and an end that
is proven), `told` (the reader raised our error), or `BROKEN` with what happened: other bytes, an end that
is too early, a reader that waits beyond every bound.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sidecar.process.exits import Exit
from sidecar.process.resources import Footprint
from streamer.errors import PenstockError
from streamer.readers import PipeStream
from streamer.schedule.concurrency import MOST_REQUESTS
from streamer.trailer import fifo_path, withdrawn_path
from tests.kit.patience import Patience
from tests.kit.processes import Sidecar, job, sidecar, write_job
from tests.machines.guest import network
from tests.machines.guest.limits import Limited
from tests.machines.guest.origin import content

MIB = 1 << 20
LONGEST = 240.0
"""Seconds without progress after which a reader counts as hung; far longer than GiveUpAfter."""
TRANSPORTS = (("splice", "http"), ("buffered", "https"), ("aiobotocore", "https"))


class Reader:
    """Reads one epoch of a channel in a thread; `state` is what came of it.

    `news` is notified of every piece and of the end.
    """

    def __init__(self, data: Path, channel: int, expected: str, news: threading.Condition) -> None:
        self.received = 0
        self.ended = False
        self.state = "BROKEN: waits for ever"
        self._news = news
        self._path, self._expected = data / f"c{channel}_0", expected
        threading.Thread(target=self._run, name=f"reader {channel}", daemon=True).start()

    def _run(self) -> None:
        state = self._read()
        with self._news:
            self.state, self.ended = state, True
            self._news.notify_all()

    def _read(self) -> str:
        digest = hashlib.sha256()
        try:
            with PipeStream(self._path, timeout=LONGEST) as stream:
                while data := stream.read(1 << 18):
                    digest.update(data)
                    with self._news:
                        self.received += len(data)
                        self._news.notify_all()
        except PenstockError as error:
            return f"told: {error}"
        except Exception as error:  # noqa: BLE001 - a outcome like any other
            return f"BROKEN: {error!r}"
        if digest.hexdigest() != self._expected:
            return f"BROKEN: ended with other bytes, {self.received} of them"
        return "equal"


@dataclass
class Stage:
    """A job of `channels` over one transport, its storage, and its readers, until the end of the block."""

    transport: str
    scheme: str
    channels: int = 2
    objects: int = 4
    size: int = 2 * MIB
    section: dict[str, Any] = field(default_factory=dict)
    readers: list[Reader] = field(default_factory=list)
    news: threading.Condition = field(default_factory=threading.Condition)
    """Notified when a reader has more bytes or has ended, and when a watched sidecar has ended."""

    @contextlib.contextmanager
    def running(self, *options: str, prefix: tuple[str, ...] | list[str] = ()) -> Iterator[Sidecar]:
        with self._storage() as url, sidecar(self.write(url), *options, prefix=prefix) as running:
            yield running

    @contextlib.contextmanager
    def _storage(self) -> Iterator[str]:
        self.place = Path(tempfile.mkdtemp())
        arguments = [network.STORAGE, str(self.place), self.scheme, self.channels, self.objects, self.size]
        command = [sys.executable, "-m", "tests.machines.guest.origin", *map(str, arguments)]
        process = subprocess.Popen(
            ["ip", "netns", "exec", network.NAMESPACE, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if not (url := process.stdout.readline().strip()):
                raise RuntimeError("storage did not start")
            yield url
        finally:
            network.spoil()
            process.stdin.close()
            process.wait()
            process.stdout.close()

    def write(self, url: str) -> str:
        section = {
            "Transport": self.transport,
            "StallTimeout": 5,
            "GiveUpAfter": 90,
            "MemoryBudget": "32MiB",
            "PartSize": "1MiB",
        } | self.section
        document = job(
            url, self.place / "ml", *(f"b/c{number}/" for number in range(self.channels)), **section
        )
        if self.scheme == "https":
            document["Penstock"]["Endpoint"]["CaBundle"] = str(self.place / "ca.pem")
        self.path = write_job(self.place / "job.yaml", document)
        return self.path

    def read(self) -> None:
        """Let readers of epoch 0 of all channels begin."""
        for channel in range(self.channels):
            digest = hashlib.sha256()
            for number in range(self.objects):
                digest.update(content(channel, number, self.size))
            expected = digest.hexdigest()
            self.readers.append(Reader(self.place / "ml/input/data", channel, expected, self.news))

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until `condition` holds, which `news` announces, or nothing progresses for `LONGEST`."""
        patience = Patience(LONGEST)
        with self.news:
            while not condition() and not patience.exhausted():
                self.news.wait(1)

    def have_ended(self) -> bool:
        """Whether all readers have ended."""
        return all(reader.ended for reader in self.readers)

    def wait_for_bytes(self, count: int) -> None:
        """Wait until all readers together have that many bytes, or all have ended."""
        self.wait(lambda: self.have_ended() or sum(reader.received for reader in self.readers) >= count)

    def ends_before_its_readers(self, running: Sidecar) -> bool:
        """Wait for the end of the sidecar or of all readers; whether it was the sidecar's."""

        def announce() -> None:
            running.process.wait()
            with self.news:
                self.news.notify_all()

        threading.Thread(target=announce, name="end of the sidecar", daemon=True).start()
        self.wait(lambda: running.process.poll() is not None or self.have_ended())
        return running.process.poll() is not None

    def states(self) -> list[str]:
        """The result of every reader, at its end."""
        self.wait(self.have_ended)
        return [reader.state for reader in self.readers]

    @property
    def total(self) -> int:
        return self.channels * self.objects * self.size


Outcomes = tuple[list[str], dict[str, Any]]
"""The result of every channel, and what else is worth knowing."""


def spoilt(*netem: str) -> Callable[[str, str], Outcomes]:
    """The whole run over packets that netem treats so."""

    def scene(transport: str, scheme: str) -> Outcomes:
        stage = Stage(transport, scheme)
        with stage.running() as running:
            running.wait_for("ready")
            network.spoil(*netem)
            stage.read()
            states = stage.states()
            network.spoil()
            return states, {"code": running.end()}

    return scene


def cut_off(*, silently: bool, seconds: float = 20.0) -> Callable[[str, str], Outcomes]:
    """No packet passes for a while in mid-epoch: the link is down, or everything is lost."""

    def scene(transport: str, scheme: str) -> Outcomes:
        stage = Stage(transport, scheme, size=4 * MIB)
        with stage.running() as running:
            running.wait_for("ready")
            network.spoil("rate", "40mbit")
            stage.read()
            stage.wait_for_bytes(stage.total // 4)
            network.spoil("loss", "100%") if silently else network.set_link(up=False)
            time.sleep(seconds)  # the fault itself
            network.spoil() if silently else network.set_link(up=True)
            states = stage.states()
            return states, {"code": running.end()}

    return scene


def short_of_memory(most: int) -> Callable[[str, str], Outcomes]:
    """Twenty channels and a keeper within `most` MiB; a sidecar that the kernel kills is started again."""

    def scene(transport: str, scheme: str) -> Outcomes:
        stage = Stage(transport, scheme, channels=20, objects=2, section={"MemoryBudget": "64MiB"})
        limited = Limited(f"memory{most}-{transport}-{scheme}", memory_max=f"{most}M")
        with stage.running("--keeper", "auto", prefix=limited.prefix) as first:
            stage.place.joinpath("ml/input/data").mkdir(parents=True, exist_ok=True)
            stage.read()
            killed = stage.ends_before_its_readers(first)
            if not killed:
                return stage.states(), {"code": first.end(), "killed": 0}
            limited.set("memory.max", "max")
            with sidecar(stage.path, "--keeper", "auto", prefix=limited.prefix) as second:
                states = stage.states()
                return states, {"code": second.end(), "killed": limited.events("memory")["oom_kill"]}

    return scene


def least_memory(transport: str, scheme: str) -> Outcomes:
    """Twenty channels within the least memory that is accepted, and within 1 MiB less, which is refused."""
    mounted = Path("/sys/fs/cgroup")  # where the sidecar looks for its limit
    subprocess.run(["mount", "-t", "cgroup2", "none", mounted], check=False)
    footprint = Footprint(transport=transport, fifos=20, requests=MOST_REQUESTS)
    least = footprint.needed(2 * 20 * MIB) // MIB
    section = {"MemoryBudget": None}
    stage = Stage(transport, scheme, channels=20, objects=4, size=MIB, section=section)
    refused = Limited(f"refused-{transport}-{scheme}", memory_max=f"{least - 1}M")
    with stage.running(prefix=refused.prefix) as running:
        code, last = running.wait(), running.events[-2:-1]
        if code != Exit.LOCAL or "memory limit" not in str(last):
            return [f"BROKEN: exit {code}, {str(last)[-400:]}"] * stage.channels, {"least": least}
    accepted = Limited(f"accepted-{transport}-{scheme}", memory_max=f"{least}M")
    with stage.running(prefix=accepted.prefix) as running:
        running.wait_for("ready")
        stage.read()
        states, code = stage.states(), running.end()
        if killed := accepted.events("memory")["oom_kill"]:
            states = ["BROKEN: the kernel has killed the sidecar"]
        return states, {"code": code, "least": least, "killed": killed}


def short_of_processes(most: int) -> Callable[[str, str], Outcomes]:
    """Eight channels where the cgroup limits all threads together, the keeper's too."""

    def scene(transport: str, scheme: str) -> Outcomes:
        stage = Stage(transport, scheme, channels=8)
        limited = Limited(f"pids{most}-{transport}-{scheme}", pids_max=str(most))
        with stage.running("--keeper", "auto", prefix=limited.prefix) as running:
            data = stage.place.joinpath("ml/input/data")
            data.mkdir(parents=True, exist_ok=True)
            stage.read()
            ended = stage.ends_before_its_readers(running)
            names = [path(str(data), "c0", 0) for path in (fifo_path, withdrawn_path)]
            if ended and not any(map(os.path.lexists, names)):
                code, last = running.wait(), running.events[-2:-1]
                right = code == Exit.LOCAL
                state = "told: by its exit" if right else f"BROKEN: exit {code}, {str(last)[-400:]}"
                return [state] * stage.channels, {"code": code}
            limited.set("pids.max", "max")
            with contextlib.ExitStack() as stack:
                current = running
                if ended:
                    current = stack.enter_context(sidecar(stage.path, "--keeper", "auto"))
                return stage.states(), {"code": current.end(), "met": limited.events("pids")["max"]}

    return scene


def short_of_time(percent: int) -> Callable[[str, str], Outcomes]:
    """So little of a processor that every timer is late."""

    def scene(transport: str, scheme: str) -> Outcomes:
        stage = Stage(transport, scheme, objects=2)
        limited = Limited(f"cpu{percent}-{transport}-{scheme}")
        with stage.running(prefix=limited.prefix) as running:
            running.wait_for("ready")
            limited.set("cpu.max", f"{percent * 1000} 100000")
            stage.read()
            states = stage.states()
            limited.set("cpu.max", "max 100000")
            return states, {"code": running.end()}

    return scene


SCENES: dict[str, Callable[[str, str], Outcomes]] = {
    "loss-1%": spoilt("loss", "1%", "delay", "2ms"),
    "loss-5%": spoilt("loss", "5%", "delay", "2ms"),
    "delay-200ms": spoilt("delay", "100ms"),
    "jitter": spoilt("delay", "50ms", "40ms", "25%"),
    "reordering": spoilt("delay", "10ms", "reorder", "25%", "50%"),
    "duplication": spoilt("duplicate", "5%", "delay", "2ms"),
    "down-20s": cut_off(silently=False),
    "silent-20s": cut_off(silently=True),
    "memory-64": short_of_memory(64),
    "memory-96": short_of_memory(96),
    "memory-160": short_of_memory(160),
    "memory-256": short_of_memory(256),
    "memory-least": least_memory,
    "pids-3": short_of_processes(3),
    "pids-6": short_of_processes(6),
    "pids-12": short_of_processes(12),
    "cpu-10%": short_of_time(10),
}


def main(names: list[str]) -> None:
    network.make_link()
    for name in names:
        for transport, scheme in TRANSPORTS:
            began = time.monotonic()
            try:
                states, more = SCENES[name](transport, scheme)
            except Exception as error:  # noqa: BLE001 - the other scenes shall run
                states, more = [f"BROKEN: {error!r}"], {}
            network.spoil()
            report = {
                "scene": name,
                "transport": f"{transport} {scheme}",
                "outcomes": Counter(states),
                "seconds": round(time.monotonic() - began, 1),
            }
            print(json.dumps(report | more), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
