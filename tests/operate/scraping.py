"""A real Prometheus beside a test: started, asked, and ended."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from examples.demo.server import free_ports
from tests.kit.patience import Patience
from tests.operate.promql import ROOT

T = TypeVar("T")

# Reads epochs for ever: at the end of one FIFO the next one is there (contract §1.5).
READER = """
import hashlib, itertools, sys, time
for epoch in itertools.count():
    time.sleep(float(sys.argv[2]))
    for channel in sys.argv[3:]:
        with open(f"{sys.argv[1]}/{channel}_{epoch}", "rb", buffering=0) as fifo:
            while chunk := fifo.read(65536):
                hashlib.sha256(chunk)
"""


def eventually(condition: Callable[[], T | None]) -> T:
    """The first true value of `condition()`; other programs' progress can only be asked for."""
    patience = Patience(60)
    while not (value := condition()):
        assert not patience.exhausted(), f"never true: {condition.__doc__ or condition}"
        time.sleep(0.2)
    return value


@contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A child process until the end of the block; terminated, and killed if that does not help."""
    child = subprocess.Popen(command, **options)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def reading(base: Path, *channels: str, pause: float = 0.0) -> AbstractContextManager[subprocess.Popen[Any]]:
    """A process that reads these channels, epoch after epoch, until the end of the block.

    `pause`: seconds before each epoch, in which it takes no CPU time.
    """
    return running([sys.executable, "-c", READER, str(base / "input/data"), str(pause), *channels])


@dataclass(frozen=True)
class Prometheus:
    url: str

    def get(self, path: str, **parameters: Any) -> Any:
        """The data of an API call; None while the server does not answer."""
        query = urlencode(parameters, doseq=True)
        try:
            with urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as answer:
                body = json.load(answer)
        except HTTPError as error:
            if error.code == HTTPStatus.SERVICE_UNAVAILABLE:  # it starts
                return None
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error
        except (URLError, OSError):
            return None
        assert body["status"] == "success"
        return body["data"]

    def ask(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Series with a number, as (labels, value) pairs."""
        data = self.get("query", query=expression)
        series = [] if data is None else data["result"]
        pairs = [(one["metric"], float(one["value"][1])) for one in series]
        return [(labels, value) for labels, value in pairs if math.isfinite(value)]

    def wait_for(self, expression: str, answer: list[tuple[dict[str, str], float]]) -> None:
        """Ask until this is the answer. On a busy machine a scrape fails at times, and its series end."""
        given: list[tuple[dict[str, str], float]] = []

        def answered() -> bool:
            given[:] = self.ask(expression)
            return given == answer

        answered.__doc__ = f"{expression} is {answer}"
        try:
            eventually(answered)
        except AssertionError as error:
            raise AssertionError(f"{error}, last {given}") from error


@contextmanager
def scraping(work: Path, *targets: str, **changes: Any) -> Iterator[Prometheus]:
    """A Prometheus configured by the committed file, with other targets and a shorter interval.

    `changes`: to that configuration, besides.
    """
    config = yaml.safe_load((ROOT / "dashboards/prometheus.yml").read_text(encoding="utf-8"))
    config["global"] |= {
        "scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms",
    }  # fmt: skip
    config["rule_files"] = [str(ROOT / "dashboards" / path) for path in config["rule_files"]]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": list(targets)}]
    (port,) = free_ports(1)
    file = work / "prometheus.yml"
    file.write_text(yaml.safe_dump(config | changes), encoding="utf-8")
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={work / 'tsdb'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with running(command):
        yield Prometheus(f"http://127.0.0.1:{port}")
