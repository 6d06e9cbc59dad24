"""A running sidecar as people see it: page, events, `penstock top`, limits that change."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from sidecar.admin.client import change_limits, parse_limits
from sidecar.config.settings import read_token
from streamer.errors import ConfigError
from streamer.units import MIB
from tests.kit.harness import MORE_THAN_A_FIFO, fill
from tests.kit.pipes import read_all
from tests.kit.processes import Sidecar, job, penstock, penstock_with, sidecar, write_job
from tests.kit.raw import Request, answer, raw_server
from tests.kit.stub import S3Stub, fails

TOKEN = "0123456789abcdef"


@pytest.fixture
def token(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return str(path)


def serving(stub: S3Stub, tmp_path: Path, *prefixes: str, **penstock: Any) -> AbstractContextManager[Sidecar]:
    return sidecar(write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", *prefixes, **penstock)))


def events(running: Sidecar) -> Iterator[Any]:
    """Yields the documents of `/events` until the sidecar ends."""
    with urllib.request.urlopen(running.url + "/events") as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        while line := answer.readline():
            yield json.loads(line.removeprefix(b"data: "))
            assert answer.readline() == b"\n"


def first_event(running: Sidecar) -> Any:
    return next(events(running))


def test_page_events_and_top(stub: S3Stub, tmp_path: Path) -> None:
    truth = fill(stub, [3_000_000, 500_000], prefix="b/train/")
    with serving(stub, tmp_path, "b/train/") as running:
        running.wait_for("ready")
        code, page = running.get("/")
        assert (code, "<!doctype html>" in page) == (200, True)
        assert "://" not in page.replace("http://www.w3.org/2000/svg", ""), "the page needs another host"
        assert read_all(tmp_path / "ml/input/data/train_0") == truth
        running.wait_for("epoch complete")
        event = first_event(running)
        (channel,) = event["channels"]
        assert event["ready"] is True
        assert event["uploads"] is running.status()["uploads"] is None
        assert (channel["name"], channel["source"]) == ("train", "s3://b/train/")
        assert (channel["objects"], channel["bytes"], channel["written"]) == (2, len(truth), len(truth))
        assert channel["bottleneck"]["text"]
        # One listing at 5, and at least 4 parts at 0.4, thousandths of a dollar per thousand.
        assert event["requests"]["dollars"] >= (1 * 0.005 + 4 * 0.0004) / 1000
        shown = penstock("top", "--once", "--url", running.url, env={**os.environ, "COLUMNS": "120"})
        assert shown.returncode == 0, shown.stderr
        for words in ("train", "s3://b/train/", "bottleneck", "epoch", "2 objects", "requests", "B unread"):
            assert words in shown.stdout
        assert running.end() == 0


def test_the_figures_of_uploads(stub: S3Stub, tmp_path: Path) -> None:
    """In `/status`, in each event, and of a file that S3 does not take."""
    fill(stub, [1000], prefix="b/train/")
    document = job(stub.url, tmp_path / "ml", "b/train/") | {"CheckpointConfig": {"S3Uri": "s3://b/run"}}
    with sidecar(write_job(tmp_path / "job.yaml", document)) as running:
        running.wait_for("ready")
        assert running.status()["uploads"]["newest"] is None
        weights = tmp_path / "ml/checkpoints/weights"
        weights.write_bytes(bytes(1000))
        shown = next(each["uploads"] for each in events(running) if each["uploads"]["newest"] is not None)
        assert shown == running.status()["uploads"]
        assert shown["newest"] == pytest.approx(weights.stat().st_mtime)
        assert (shown["files"], shown["bytes"], shown["waiting_files"]) == ({"uploaded": 1}, 1000, 0)
        stub.puts.refused.extend([(403, "AccessDenied")] * 1000)
        weights.write_bytes(bytes(2000))
        shown = next(each["uploads"] for each in events(running) if "denied" in each["uploads"]["files"])
        assert (shown["waiting_files"], shown["waiting_bytes"]) == (1, 2000)


def test_events_flow_while_the_job_starts(credentials: None, tmp_path: Path) -> None:
    """From the first second, with the reason why it waits; `penstock top` shows them."""
    with raw_server(lambda _: answer(503)) as storage:
        path = write_job(tmp_path / "job.yaml", job(storage.url, tmp_path / "ml", "b/train/"))
        with sidecar(path) as running:
            running.wait_for("waiting for storage")
            seen = events(running)
            first, second = next(seen), next(seen)
            for event in (first, second):
                assert (event["phase"], event["ready"], event["channels"]) == ("starting", False, [])
                assert event["sources"] == {"train": "s3://b/train/"}
                assert "503" in event["why"]
            assert second["at"] > first["at"]
            shown = penstock("top", "--once", "--url", running.url)
            assert shown.returncode == 0, shown.stderr
            assert "503" in shown.stdout
            running.end()


def test_an_idle_channel_names_the_fifo_to_open_and_the_last_event_says_how_it_ended(
    stub: S3Stub, tmp_path: Path
) -> None:
    """A client that stays does not hold the end up."""
    truth = fill(stub, [10], prefix="b/train/")
    with serving(stub, tmp_path, "b/train/") as running:
        running.wait_for("ready")
        fifo = tmp_path / "ml/input/data/train_0"
        seen = events(running)
        event = next(seen)
        assert event["channels"][0]["bottleneck"]["remedy"] == f"Open {fifo} for reading."
        assert running.status()["channels"]["train"]["bottleneck"]["remedy"] == f"Open {fifo} for reading."
        assert read_all(fifo) == truth
        running.wait_for("epoch complete")
        assert running.end() == 0
        *others, last = seen
        assert {each["phase"] for each in others} <= {"ready", "ending"}
        assert (last["phase"], last["ready"]) == ("ended", False)
        assert last["why"] == "the job is ending: the sidecar offers no further epoch"
        assert last["channels"][0]["bottleneck"]["text"] == "stopped; epochs: 1 complete"


def test_a_trainer_that_takes_nothing_is_told_from_a_slow_one(stub: S3Stub, tmp_path: Path) -> None:
    """On page and metric at once, in the log after GiveUpAfter, and not once it reads again."""
    truth = fill(stub, [MORE_THAN_A_FIFO], prefix="b/train/")
    document = job(stub.url, tmp_path / "ml", "b/train/", GiveUpAfter=2)
    early = penstock_with("sidecar.observe.bottleneck.STUCK_AFTER = 1.0")
    with sidecar(write_job(tmp_path / "job.yaml", document), prefix=early) as running:
        running.wait_for("ready")
        with open(tmp_path / "ml/input/data/train_0", "rb", buffering=0) as reader:
            got = reader.read(1000)
            stated = running.wait_for("the trainer takes no byte", channel="train")
            assert stated["seconds"] >= 2
            found = running.status()["channels"]["train"]["bottleneck"]
            assert found["kind"] == "stuck"
            assert re.fullmatch(r"the trainer has taken no byte for \d+ s", found["text"])
            assert found["remedy"] == stated["do"]
            metrics = running.get("/metrics")[1]
            line = r'^penstock_fifo_untaken_seconds{channel="train"} (.*)$'
            assert float(re.findall(line, metrics, re.MULTILINE)[0]) >= 2
            while data := reader.read(1 << 20):
                got += data
        assert got == truth
        running.wait_for("the trainer takes bytes again", channel="train")
        assert running.end() == 0


def test_limits_change_while_it_runs(stub: S3Stub, tmp_path: Path, token: str) -> None:
    """Held to a trickle the epoch does not end; the limit lifted, it does."""
    truth = fill(stub, [MORE_THAN_A_FIFO], prefix="b/train/")
    options = {"Admin": {"Port": 0, "TokenFile": token}, "MemoryBudget": "32MiB"}
    document = job(stub.url, tmp_path / "ml", "b/train/", **options)
    document["InputDataConfig"][0]["Penstock"] = {"Bandwidth": 1}
    with sidecar(write_job(tmp_path / "job.yaml", document)) as running:
        running.wait_for("ready")
        got: list[bytes] = []
        begun = threading.Event()

        def read() -> None:
            with open(tmp_path / "ml/input/data/train_0", "rb", buffering=0) as fifo:
                got.append(fifo.read(1))
                begun.set()
                got.append(fifo.read())

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(60)
        metrics = running.get("/metrics")[1]
        assert 'penstock_channel_bandwidth_limit_bytes{channel="train"} 1.0' in metrics
        assert "penstock_bandwidth_limit_bytes +Inf" in metrics

        def set_(*limits: str) -> subprocess.CompletedProcess[Any]:
            return penstock("set", "--json", "--url", running.url, "--token-file", token, *limits)

        done = set_("requests_in_flight=3", "memory_budget=16MiB", "bandwidth=1GB")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {
            "bandwidth": 10**9, "requests_in_flight": 3, "requests_in_flight_adapt": False,
            "memory_budget": 16 * MIB,
            "channel_bandwidth": {"train": 1},
        }  # fmt: skip
        assert reader.is_alive()
        assert running.status()["channels"]["train"]["seconds"]["limited"] > 0
        assert running.status()["channels"]["train"]["requests_in_flight_limit"] == 3
        lifted = json.loads(set_("train.bandwidth=none", "bandwidth=none", "requests_in_flight=auto").stdout)
        assert (lifted["bandwidth"], lifted["requests_in_flight_adapt"]) == (None, True)
        assert lifted["channel_bandwidth"] == {"train": None}
        shown = penstock("set", "--url", running.url, "--token-file", token, "train.bandwidth=200MB")
        assert [line.split(maxsplit=1) for line in shown.stdout.splitlines()[:2]] == [
            ["bandwidth", "none"], ["train.bandwidth", "200 MB/s"],
        ]  # fmt: skip
        reader.join()
        assert b"".join(got) == truth
        assert running.end() == 0


REFUSED = {
    "memory_budget=64KiB": "the least is",
    "memory_budget=100TiB": "the most is",
    "eval.bandwidth=1MB": "no Pipe channel is called 'eval'",
    "requests_in_flight=0": "requests_in_flight",
    "requests_in_flight=many": "is no number",
    "requests_in_flight=\u0663": "is no number",
    "memory_budget=\u0663GB": "is no size",
    "memory_budget=1,5GB": "is no size",
    "bandwidth=6MB": "bandwidth is given twice",
    "train.requests_in_flight=3": "a channel has a bandwidth alone",
    "speed=3": "write bandwidth=200MB",
    "memory_budget=none": "must be a size",
}


def test_limits_that_cannot_be(stub: S3Stub, tmp_path: Path, token: str) -> None:
    """What is asked for beside them is not done either."""
    fill(stub, [10], prefix="b/train/")
    with serving(stub, tmp_path, "b/train/", Admin={"Port": 0, "TokenFile": token}) as running:
        running.wait_for("ready")
        for word, why in REFUSED.items():
            with pytest.raises(ConfigError, match=why):
                change_limits(running.url, parse_limits(("bandwidth=5MB", word)), TOKEN)
        with pytest.raises(ConfigError, match="this is not the token"):
            change_limits(running.url, {"bandwidth": 5}, TOKEN + "x")
        assert json.loads(running.get("/limits")[1])["bandwidth"] is None
        assert running.end() == 0


def test_without_a_token_limits_are_fixed(stub: S3Stub, tmp_path: Path, token: str) -> None:
    fill(stub, [10], prefix="b/train/")
    with serving(stub, tmp_path, "b/train/") as running:
        running.wait_for("ready")
        done = penstock("set", "--url", running.url, "--token-file", token, "requests_in_flight=3")
        assert done.returncode == 2
        assert "names no Penstock.Admin.TokenFile" in done.stderr
        assert running.end() == 0
    gone = penstock("set", "--url", running.url, "--token-file", token, "requests_in_flight=3")
    assert gone.returncode == 7
    assert "is it running" in gone.stderr


@pytest.mark.parametrize(
    "content", ["short", "with a space in it, and long enough", "ünicode-and-long-enough", ""]
)
def test_a_token_file_must_hold_a_token(tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content)
    with pytest.raises(ConfigError, match="must hold an admin token"):
        read_token(str(tmp_path / "token"))


@pytest.mark.parametrize("sizes", [[50_000] * 16, [3_000_000, *[50_000] * 7] * 2])
def test_plan_log_metrics_and_status_agree_on_the_requests(
    stub: S3Stub, tmp_path: Path, sizes: list[int]
) -> None:
    fill(stub, sizes, prefix="b/train/")
    settings = {"PartSize": "1MiB", "HedgeBudget": 0}
    path = write_job(tmp_path / "plan.yaml", job(stub.url, None, "b/train/", **settings))
    planned = json.loads(penstock("plan", "-c", path, "--json").stdout)["channels"]["train"]["parts"]
    with serving(stub, tmp_path, "b/train/", **settings) as running:
        running.wait_for("ready")
        lines = []
        for epoch in range(3):
            read_all(tmp_path / f"ml/input/data/train_{epoch}")
            lines.append(running.wait_for("epoch complete", epoch=epoch))
        outcomes = running.status()["channels"]["train"]["requests"]
        _, metrics = running.get("/metrics")
        assert running.end() == 0
    assert [line["requests"] for line in lines] == [planned] * 3
    # Epoch 3 may be fetched ahead, in whole or in part.
    assert set(outcomes) == {"ok"}
    assert 3 * planned <= outcomes["ok"] <= 4 * planned
    (counted,) = re.findall(r'penstock_requests_total\{channel="train",outcome="ok"\} ([\d.]+)', metrics)
    assert outcomes["ok"] <= float(counted) <= 4 * planned


def test_an_epoch_s_line_has_what_matters(stub: S3Stub, tmp_path: Path) -> None:
    """Requests of that epoch alone: what the one before it took is not counted again."""
    truth = fill(stub, [3_000_000], prefix="b/train/")
    stub.script(fails(500, "InternalError"))
    with serving(stub, tmp_path, "b/train/", PartSize="4MiB", HedgeBudget=0) as running:
        running.wait_for("ready")
        for epoch in range(2):
            assert read_all(tmp_path / f"ml/input/data/train_{epoch}") == truth
        first, second = (running.wait_for("epoch complete", epoch=epoch) for epoch in range(2))
        assert running.end() == 0
    # What was fetched ahead for the second counts there, though it ended in the first.
    assert first["retries"] + second["retries"] == 1
    for line in (first, second):
        assert line["requests"] == 1 + line["retries"]
        assert line["mb_per_second"] > 0
        assert line["waited_for_storage"] + line["waited_for_trainer"] <= line["seconds"] + 0.15
        assert "of the epoch" in line["summary"]


def test_probe_says_why_not_and_whether_a_sidecar_answers(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [10], prefix="b/train/")
    stub.script(*[fails(403, "AccessDenied")] * 100)
    with serving(stub, tmp_path, "b/train/") as running:
        running.wait_for("ready")
        done = penstock("probe", "--url", running.url)
        assert (done.returncode, done.stdout, done.stderr) == (0, "ready\n", "")
        reader = threading.Thread(target=lambda: read_all(tmp_path / "ml/input/data/train_0"))
        reader.start()
        running.wait_for("epoch failed")
        done = penstock("probe", "--url", running.url)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("not ready: train: ")
        assert "access denied" in done.stderr
        document = json.loads(penstock("probe", "--url", running.url, "--json").stdout)
        assert document["ready"] is False
        assert "access denied" in document["why"]
        quiet = penstock("probe", "--url", running.url, "--quiet")
        assert (quiet.returncode, quiet.stdout, quiet.stderr) == (1, "", "")
        url = running.url
        running.end()
        reader.join()
    assert f"no sidecar answers at {url} " in penstock("probe", "--url", url).stderr
    for page in (answer(200, b"<html></html>"), answer(503, b"busy"), b"SSH-2.0-OpenSSH\r\n"):
        with raw_server(always(page)) as other:
            done = penstock("probe", "--url", other.url)
            assert done.returncode == 1
            assert other.url in done.stderr
            assert "--url" in done.stderr


def test_the_path_and_the_query_of_an_admin_address_are_sent() -> None:
    """A proxy before the sidecar gets both."""
    with raw_server(always(answer(200, b"ready\n"))) as proxy:
        assert penstock("probe", "--url", f"{proxy.url}/jobs/a/?key=b").returncode == 0
    assert [request.target for request in proxy.seen] == ["/jobs/a/readyz?key=b"]


def always(page: bytes) -> Callable[[Request], bytes]:
    """Reply to every request with `page`."""
    return lambda _: page


def test_the_admin_token_goes_to_the_sidecar_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    """Not to a proxy of the environment, nor where a redirect leads."""
    with raw_server(lambda _: answer(200)) as other:
        for proxy in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(proxy, other.url)
        with raw_server(lambda request: answer(302, Location=other.url + request.target)) as own:
            done = penstock("set", "--url", own.url, "--token-file", token, "requests_in_flight=3")
            assert done.returncode == 2
            assert penstock("top", "--url", own.url, "--token-file", token).returncode == 2
            assert penstock("probe", "--url", own.url).returncode == 1
        assert len(own.seen) == 3
        assert not other.seen
