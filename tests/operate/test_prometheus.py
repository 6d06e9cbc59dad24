"""A real Prometheus scrapes a real sidecar while it streams, and answers every panel of the dashboard.

weed mini (S3) -> penstock run -> FIFO -> a reader process; Prometheus on the side, configured by the
committed dashboards/prometheus.yml with another target and a shorter interval. Of two channels one is
read, epoch after epoch, and one is not, as happens in training.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import boto3
import pytest
import yaml

from examples.demo.server import free_ports, running_s3
from streamer import __version__
from tests.operate.promql import ROOT, annotation_queries, document, panel_queries

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

WITHIN = 60
"""Seconds for a condition to come true; it takes a few."""
MIB = 1 << 20

# Reads epochs for ever: at the end of one FIFO the next one is there (contract §1.5).
READER = """
import hashlib, itertools, sys
for epoch in itertools.count():
    with open(f"{sys.argv[1]}/train_{epoch}", "rb", buffering=0) as fifo:
        while chunk := fifo.read(65536):
            hashlib.sha256(chunk)
"""


def eventually(condition, *, within=WITHIN, every=0.2):
    """The first true value of `condition()`; other programs' progress can only be asked for."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within} s: {condition.__doc__ or condition}"
        time.sleep(every)
    return value


@contextmanager
def running(command, **options):
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


@dataclass(frozen=True)
class Prometheus:
    url: str
    target: str
    """The sidecar's address as `instance`."""

    def get(self, path, **parameters):
        """The data of an API call; None while the server does not answer."""
        query = urlencode(parameters, doseq=True)
        try:
            with urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as answer:
                body = json.load(answer)
        except HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error
        except (URLError, OSError):
            return None
        assert body["status"] == "success"
        return body["data"]

    def ask(self, expression):
        """Series with a number, as (labels, value) pairs."""
        data = self.get("query", query=expression)
        series = [] if data is None else data["result"]
        pairs = [(one["metric"], float(one["value"][1])) for one in series]
        return [(labels, value) for labels, value in pairs if math.isfinite(value)]


def run_sidecar(stack, work, *, s3, port):
    """Run `penstock run` until the stack unwinds; returns once it is ready."""
    job = work / "job.yaml"
    job.write_text(yaml.safe_dump(_job(s3.url, work / "ml", port)), encoding="utf-8")
    command = [sys.executable, "-m", "sidecar", "run", "-c", str(job)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    log = stack.enter_context((work / "sidecar.log").open("w+"))
    child = stack.enter_context(running(command, stderr=log, env=environment | s3.environment, cwd=ROOT))

    def ready():
        """The sidecar says that it is ready."""
        if child.poll() is not None:
            log.seek(0)
            pytest.fail(f"the sidecar ended with {child.returncode}:\n{log.read()}")
        try:
            with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10):
                return True
        except (URLError, OSError):
            return False

    eventually(ready)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """A Prometheus that has scraped a streaming sidecar some times."""
    work = tmp_path_factory.mktemp("operate")
    with ExitStack() as stack:
        s3 = stack.enter_context(running_s3("demo"))
        client = boto3.client(
            "s3", endpoint_url=s3.url, region_name="us-east-1",
            aws_access_key_id=s3.access_key, aws_secret_access_key=s3.secret_key,
        )  # fmt: skip
        for key in ("train/a", "train/b", "train/c", "eval/a"):
            client.put_object(Bucket="demo", Key=key, Body=os.urandom(8 * MIB))
        client.close()
        admin, port = free_ports(2)
        run_sidecar(stack, work, s3=s3, port=admin)
        stack.enter_context(running([sys.executable, "-c", READER, str(work / "ml/input/data")]))
        config = work / "prometheus.yml"
        config.write_text(yaml.safe_dump(_scrape(f"127.0.0.1:{admin}")), encoding="utf-8")
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={work / 'tsdb'}"]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
        stack.enter_context(running(command))
        server = Prometheus(f"http://127.0.0.1:{port}", f"127.0.0.1:{admin}")

        def scraped():
            """Prometheus has scraped the sidecar four times."""
            return server.ask('count_over_time(penstock_ready{job="penstock"}[1m]) >= 4')

        eventually(scraped)
        yield server


def _job(url, base, port):
    def channel(name):
        source = {"S3DataType": "S3Prefix", "S3Uri": f"s3://demo/{name}/"}
        return {"ChannelName": name, "DataSource": {"S3DataSource": source}}

    return {
        "InputDataConfig": [channel("train"), channel("eval")],
        "Penstock": {
            "BaseDirectory": str(base),
            "MemoryBudget": "16MiB",
            "PartSize": "1MiB",
            "DrainFor": 0,
            "Endpoint": {"Url": url, "Region": "us-east-1", "PathStyle": True},
            "Admin": {"Port": port},
        },
    }


def _scrape(target):
    config = yaml.safe_load((ROOT / "dashboards/prometheus.yml").read_text(encoding="utf-8"))
    config["global"] |= {"scrape_interval": "500ms", "scrape_timeout": "500ms"}
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [target]}]
    return config


def test_every_panel_gets_an_answer(prometheus):
    waiting = {str(query): query.concrete(window="10s") for query in panel_queries()}
    assert len(waiting) == len(panel_queries())

    def answered():
        """Every panel's query has answered with a number at least once."""
        for name, expression in list(waiting.items()):
            if prometheus.ask(expression):
                del waiting[name]
        return not waiting

    try:
        eventually(answered)
    except AssertionError:
        pytest.fail(f"without an answer: {waiting}")


def test_annotations_are_valid_queries(prometheus):
    for query in annotation_queries():
        assert prometheus.get("query", query=query.concrete(window="10s")) is not None


def test_variables_find_the_sidecar_and_its_channels(prometheus):
    found = {}
    for variable in document()["templating"]["list"]:
        if variable["type"] == "query":
            selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]).groups()
            concrete = re.sub(r"\$\w+", ".+", selector)
            found[variable["name"]] = prometheus.get(f"label/{label}/values", **{"match[]": concrete})
    assert found == {"job": ["penstock"], "instance": [prometheus.target], "channel": ["eval", "train"]}


def test_what_the_panels_say_is_true(prometheus):
    """The read channel moves, the other one waits for a reader; nothing is said to have failed."""
    queries = {query.panel: query.concrete(window="10s") for query in panel_queries() if query.ref == "A"}

    def delivering():
        """Bytes flow on the channel that is read."""
        return [labels for labels, value in prometheus.ask(queries["Delivered by channel"]) if value > 0]

    assert eventually(delivering) == [{"channel": "train"}]
    assert prometheus.ask(queries["Ready"]) == [({}, 1)]
    assert prometheus.ask(queries["Failed channels"]) == [({}, 0)]
    assert prometheus.ask(queries["Request errors"]) == [({}, 0)]
    ((labels, _),) = prometheus.ask(queries["Version and transport"])
    assert labels == {"version": __version__, "transport": "kernel splice"}
    shares = prometheus.ask(queries["Where the time goes"])
    assert {labels["state"] for labels, _ in shares} == {
        "idle", "blocked", "starved", "limited", "moving",
    }  # fmt: skip
    verdicts = prometheus.ask(queries["Epochs ended by verdict"])
    ended = {labels["verdict"]: value for labels, value in verdicts}
    assert ended.keys() == {"complete", "abandoned", "failed", "stopped"}
    assert ended["complete"] > 0
    assert ended["abandoned"] == ended["failed"] == ended["stopped"] == 0


def test_metrics_pass_prometheus_own_lint(prometheus):
    with urlopen(f"http://{prometheus.target}/metrics", timeout=10) as answer:
        text = answer.read()
    ran = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    complaints = ran.stdout.decode() + ran.stderr.decode()
    ours = [line for line in complaints.splitlines() if line.startswith("penstock_")]
    assert ours == []
    assert b"penstock_ready 1" in text
    # A scrape costs time on the loop that moves the bytes; labels are bounded, so this is too.
    assert text.count(b"\n") < 1000
