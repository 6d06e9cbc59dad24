"""`penstock` as its users run it: a process."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from tests.kit.patience import Patience
from tests.kit.warm import Started, warm

PENSTOCK = [sys.executable, "-m", "sidecar"]


def job(stub_url: str, base: Path | None, *prefixes: str, **penstock: object) -> dict[str, Any]:
    """A job with one channel per prefix, named after its last step."""
    section: dict[str, Any] = {
        "Endpoint": {"Url": stub_url, "PathStyle": True},
        "Admin": {"Port": 0},
        "MemoryBudget": "16MiB",
        "PartSize": "1MiB",
    } | penstock
    if base is not None:
        section["BaseDirectory"] = str(base)
    return {
        "InputDataConfig": [
            {
                "ChannelName": prefix.strip("/").split("/")[-1],
                "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": f"s3://{prefix}"}},
            }
            for prefix in prefixes
        ],
        "Penstock": section,
    }


def write_job(path: Path, document: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(document))
    return str(path)


def penstock(*arguments: str, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run to the end; text output. A warm start, unless other options of `subprocess.run` are given."""
    if options.keys() <= {"text", "env"}:
        return _warm_penstock(*arguments, **options)
    options = {"capture_output": True, "text": True} | options
    return subprocess.run([*PENSTOCK, *arguments], check=False, **options)


def _warm_penstock(
    *arguments: str, text: bool = True, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[Any]:
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    with open(os.devnull, "rb") as nothing, open(out, "rb") as output, open(err, "rb") as errors:
        running = warm().start(*arguments, stdin=nothing.fileno(), stdout=out_end, stderr=err_end, env=env)
        try:
            os.close(out_end)
            os.close(err_end)
            with ThreadPoolExecutor(1) as other:
                late = other.submit(errors.read)
                stated = output.read(), late.result()
        except BaseException:
            running.kill()
            raise
        code = running.wait()
    shown = [each.decode() for each in stated] if text else stated
    return subprocess.CompletedProcess([*PENSTOCK, *arguments], code, *shown)


def findings(path: str, *options: str, code: int | None = None, **process: Any) -> dict[str, dict[str, Any]]:
    """What `penstock doctor` finds, by names of checks; fails unless it ends with `code`, if given."""
    done = penstock("doctor", "--json", "-c", path, *options, **process)
    assert code in (None, done.returncode), done.stdout + done.stderr
    return {each["check"]: each for each in json.loads(done.stdout)["findings"]}


def penstock_with(*settings: str) -> list[str]:
    """`penstock` with other values of its modules, each as `sidecar.MODULE.NAME = VALUE`.

    Also for `prefix` of `Sidecar`: the command after it is left out.
    """
    modules = {setting.split(" = ")[0].rpartition(".")[0] for setting in settings}
    return [
        sys.executable,
        "-c",
        f"import sys, {', '.join(sorted(modules))}; {'; '.join(settings)}\n"
        f"if sys.argv[1:4] == {PENSTOCK}: del sys.argv[1:4]\n"
        "from sidecar.cli import main; main()",
    ]


def uploader_of(parent: int) -> int | None:
    """The process of the uploader that a sidecar has started; None if there is none now."""
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            above = (each / "stat").read_text().rsplit(")", 1)[1].split()[1]
            if int(above) == parent and "sidecar.upload" in (each / "cmdline").read_text():
                return int(each.name)
    return None


class Sidecar:
    """A running `penstock run`; its log is read continuously and kept."""

    def __init__(self, path: str, *options: str, prefix: Sequence[str] = (), cold: bool = False) -> None:
        """`prefix`: put before the command; it must become the command by exec. `cold`: no warm start."""
        read_end, write_end = os.pipe()
        self._log = open(read_end, encoding="utf-8")  # noqa: SIM115 - closed by wait()
        arguments = "run", "-c", path, *options
        try:
            with open(os.devnull, "r+b") as nothing:
                null = nothing.fileno()
                self.process: subprocess.Popen[bytes] | Started
                if prefix or cold:
                    command = [*prefix, *PENSTOCK, *arguments]
                    self.process = subprocess.Popen(command, stderr=write_end, stdout=null)
                else:
                    self.process = warm().start(*arguments, stdin=0, stdout=null, stderr=write_end)
        finally:
            os.close(write_end)
        self.events: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="sidecar log")
        self._reader.start()

    def _read(self) -> None:
        for line in self._log:
            with self._news:
                self.events.append(json.loads(line) if line.startswith("{") else {"event": line.strip()})
                self._news.notify_all()
        with self._news:
            self.events.append({"event": "log ended"})
            self._news.notify_all()

    def wait_for(self, event: str, *, times: int = 1, **fields: object) -> dict[str, Any]:
        """The first log line of this event with these fields; fails if the log ends before.

        With `times`, the line with that number among those that fit.
        """

        wanted = {"event": event, **fields}.items()

        def find() -> dict[str, Any] | None:
            found = (each for each in self.events if all(each.get(key) == value for key, value in wanted))
            return next(itertools.islice(found, times - 1, None), None)

        patience = Patience(30)
        with self._news:
            while not (found := find()) and self.events[-1:] != [{"event": "log ended"}]:
                if not self._news.wait(1) and patience.exhausted():
                    break
        assert found, f"{event} never came: {self.events}"
        return found

    @property
    def url(self) -> str:
        address: str = self.wait_for("starting")["admin"]
        return address.rstrip("/")

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.get("/status")[1])
        return document

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait, and return the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait()
        self._reader.join()
        self._log.close()
        return code


@contextlib.contextmanager
def sidecar(path: str, *options: str, prefix: Sequence[str] = (), cold: bool = False) -> Iterator[Sidecar]:
    """A sidecar until the end of the block; killed if it is still there. Parameters as of `Sidecar`."""
    running = Sidecar(path, *options, prefix=prefix, cold=cold)
    try:
        yield running
    except BaseException:
        print(*running.events, sep="\n")
        raise
    finally:
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGCONT)
            running.process.kill()
        running.wait()


def leftovers(base: Path) -> list[str]:
    """What lies in the data directory, but for the lock."""
    return sorted(name for name in os.listdir(base / "input" / "data") if name != ".penstock.lock")
