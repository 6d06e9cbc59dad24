"""`penstock run` as a process: start, readiness, probes, signals, exit codes."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import signal
import stat
import subprocess
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from sidecar.observe.metrics import METRICS
from tests.kit.harness import MORE_THAN_A_FIFO, fill
from tests.kit.pipes import read_all
from tests.kit.processes import PENSTOCK, Sidecar, job, leftovers, penstock, sidecar, write_job
from tests.kit.stub import S3Stub, fails
from tests.kit.terminal import terminal
from tests.kit.trailers import published_trailer

SIZES = [3_000_000, 0, 1, 1_500_000]


def serving(
    stub: S3Stub, tmp_path: Path, *prefixes: str, **penstock: float
) -> AbstractContextManager[Sidecar]:
    """A running sidecar with `tmp_path/ml` as its base directory."""
    return sidecar(write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", *prefixes, **penstock)))


def test_two_channels_two_epochs_and_an_orderly_end(stub: S3Stub, tmp_path: Path) -> None:
    train, evaluation = fill(stub, SIZES, prefix="b/train/"), fill(stub, [10], prefix="b/eval/", seed=2)
    with sidecar(
        write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/", "b/eval/"))
    ) as running:
        data = tmp_path / "ml" / "input" / "data"
        running.wait_for("ready")
        assert stat.S_ISFIFO(os.stat(data / "train_0").st_mode)
        assert stat.S_ISFIFO(os.stat(data / "eval_0").st_mode)
        assert (tmp_path / "ml" / "input" / "config" / "inputdataconfig.json").exists()
        assert running.get("/readyz") == (200, "ready\n")
        assert running.get("/livez")[0] == 200
        assert penstock("probe", "--url", running.url).returncode == 0
        for epoch in range(2):
            assert read_all(data / f"train_{epoch}") == train
        assert read_all(data / "eval_0") == evaluation
        running.wait_for("epoch complete", channel="train", epoch=1)
        running.wait_for("epoch complete", channel="eval", epoch=0)
        status = running.status()["channels"]["train"]
        assert status["epochs"] == {"complete": 2}
        assert status["written_bytes"] == 2 * len(train)
        assert status["objects_completed"] == 2 * 3  # an empty object has no last byte
        assert running.end() == 0
    assert leftovers(tmp_path / "ml") == [
        ".eval_0.penstock.json",
        ".train_0.penstock.json",
        ".train_1.penstock.json",
    ]
    assert published_trailer(data, "train", 1).state == "complete"
    assert penstock("probe", "--url", running.url).returncode == 1


def test_metrics_are_the_registry_s(stub: S3Stub, tmp_path: Path) -> None:
    """Every metric of the table is exported, with its labels, and nothing else of ours is."""
    fill(stub, SIZES, prefix="b/train/")
    document = job(stub.url, tmp_path / "ml", "b/train/")
    document["InputDataConfig"][0]["RecordWrapperType"] = "RecordIO"  # only then are records counted
    with sidecar(write_job(tmp_path / "job.yaml", document)) as running:
        running.wait_for("ready")
        read_all(tmp_path / "ml" / "input" / "data" / "train_0")
        running.wait_for("epoch complete")
        text = running.get("/metrics")[1]
        assert running.end() == 0
    found = {}
    for family in text_string_to_metric_families(text):
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        name = family.name if family.name.endswith(suffix) else family.name + suffix
        if name.startswith("penstock_"):
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            found[name] = labels
            assert family.documentation == METRICS[name].help
    # This job has no File channel, no ranks by record, learns no index, and uploads nothing.
    absent = ("penstock_download_", "penstock_order_", "penstock_mix_", "penstock_index_", "penstock_upload_")
    assert found == {
        name: set() if name.startswith(absent) else set(spec.labels) for name, spec in METRICS.items()
    }
    assert re.search(r'penstock_epochs_total\{channel="train",trailer_state="complete"\} 1\.0', text)
    assert re.search(r'penstock_retries_total\{channel="train",kind="throttled"\} 0\.0', text)
    assert "process_cpu_seconds_total" in text


@pytest.mark.parametrize(("left", "words"), [(0, "no such bucket"), (1, "no object matches")])
def test_nothing_is_offered_if_a_channel_cannot_be_listed(
    stub: S3Stub, tmp_path: Path, left: int, words: str
) -> None:
    fill(stub, [10], prefix="b/train/")
    fill(stub, [10], prefix="b/eval/")
    stub.objects = dict(list(stub.objects.items())[:left])
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/", "b/eval/"))
    done = penstock("run", "-c", path)
    assert (done.returncode, words in done.stderr) == (4, True), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "ml").exists()


def test_second_sidecar_on_the_same_directory(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [10], prefix="b/train/")
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    with sidecar(path) as first:
        first.wait_for("ready")
        second = penstock("run", "-c", path)
        assert second.returncode == 7
        assert "another sidecar serves" in second.stderr
        assert read_all(tmp_path / "ml" / "input" / "data" / "train_0")
        assert first.end() == 0


def test_sigterm_lets_the_running_epoch_finish(stub: S3Stub, tmp_path: Path) -> None:
    truth = fill(stub, [MORE_THAN_A_FIFO], prefix="b/train/")
    with serving(stub, tmp_path, "b/train/") as running:
        running.wait_for("ready")
        with open(tmp_path / "ml" / "input" / "data" / "train_0", "rb", buffering=0) as reader:
            first = reader.read(1000)
            running.process.send_signal(signal.SIGTERM)
            running.wait_for("signal, draining")
            while running.get("/readyz")[0] != 503:
                pass  # told some turns of the loop after the line; the test's own time limit ends it
            assert first + reader.readall() == truth
        assert running.wait() == 0


def test_sigterm_cuts_off_an_epoch_that_nobody_reads_on(stub: S3Stub, tmp_path: Path) -> None:
    """And says how much was missing, to the log and to the reader."""
    fill(stub, [MORE_THAN_A_FIFO], prefix="b/train/")
    with serving(stub, tmp_path, "b/train/", DrainFor=0.2) as running:
        running.wait_for("ready")
        data = tmp_path / "ml" / "input" / "data"
        with open(data / "train_0", "rb", buffering=0) as reader:
            reader.read(1000)
            assert running.end() == 0
            assert 0 < len(reader.readall()) < MORE_THAN_A_FIFO
        missing = running.wait_for("cut off")["missing_bytes"]
        trailer = published_trailer(data, "train", 0)
        assert trailer.bytes_total is not None
        assert (trailer.state, trailer.bytes_total - trailer.bytes_delivered) == ("stopped", missing)


@pytest.mark.parametrize("numbers", [("SIGTERM", "SIGTERM"), ("SIGHUP", "SIGTERM"), ("SIGTERM", "SIGQUIT")])
def test_a_second_signal_ends_at_once(stub: S3Stub, tmp_path: Path, numbers: tuple[str, str]) -> None:
    """A terminal that hangs up, and Ctrl-\\, leave no FIFO either."""
    first, second = (signal.Signals[name] for name in numbers)
    fill(stub, [MORE_THAN_A_FIFO], prefix="b/train/")
    with serving(stub, tmp_path, "b/train/", DrainFor=3600) as running:
        running.wait_for("ready")
        with open(tmp_path / "ml" / "input" / "data" / "train_0", "rb", buffering=0) as reader:
            reader.read(1000)
            running.process.send_signal(first)
            running.wait_for("signal, draining", signal=first.name)
            assert running.end(second) == 130
    assert leftovers(tmp_path / "ml") == [".train_0.penstock.json"]


def test_nohup_is_respected(stub: S3Stub, tmp_path: Path) -> None:
    truth = fill(stub, [100], prefix="b/train/")
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    with sidecar(path, prefix=["nohup"]) as running:
        running.wait_for("ready")
        running.process.send_signal(signal.SIGHUP)
        assert read_all(tmp_path / "ml/input/data/train_0") == truth
        assert running.get("/readyz") == (200, "ready\n")
        assert running.end() == 0


@pytest.mark.parametrize(("command", "code"), [("run", 0), ("exec", 128 + signal.SIGTERM)])
def test_a_signal_before_the_start_ends_it_in_order(
    stub: S3Stub, tmp_path: Path, command: str, code: int
) -> None:
    """While modules are imported and the job file is read: a FIFO here, for which the test can wait."""
    fill(stub, [100], prefix="b/train/")
    path = tmp_path / "job.yaml"
    os.mkfifo(path)
    trainer = ["touch", str(tmp_path / "trained")] if command == "exec" else []
    starting = [*PENSTOCK, command, "-c", str(path), *trainer]
    with subprocess.Popen(starting, stderr=subprocess.PIPE, text=True) as process:
        with open(path, "w", encoding="utf-8") as file:
            process.send_signal(signal.SIGUSR2)
            process.send_signal(signal.SIGTERM)
            yaml.safe_dump(job(stub.url, tmp_path / "ml", "b/train/"), file)
        assert process.wait() == code, process.stderr and process.stderr.read()
    assert not [path for path in tmp_path.rglob("*train*") if not path.is_dir()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_after_the_end_does_not_replace_the_exit_code(
    stub: S3Stub, tmp_path: Path, number: signal.Signals
) -> None:
    """The event loop and the interpreter take a moment to end."""
    fill(stub, [100], prefix="b/train/")
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    with sidecar(path, cold=True) as running:
        running.wait_for("ready")
        running.process.send_signal(signal.SIGTERM)
        running.wait_for("ended", code=0)
        assert running.end(number) in ((0,) if number == signal.SIGUSR2 else (0, 130))


def test_a_failed_channel_is_held_and_the_others_go_on(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [100], prefix="b/train/")
    evaluation = fill(stub, [100], prefix="b/eval/")
    stub.script(*[fails(403, "AccessDenied")] * 9, key="b/train/0000")  # the next epoch asks, too
    with sidecar(
        write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/", "b/eval/"))
    ) as running:
        running.wait_for("ready")
        data = tmp_path / "ml" / "input" / "data"
        with open(data / "train_0", "rb", buffering=0) as reader:
            running.wait_for("epoch failed", channel="train")
            os.set_blocking(reader.fileno(), False)
            assert reader.read() is None
            code, why = running.get("/readyz")
            assert (code, "AccessDenied" in why) == (503, True)
            assert read_all(data / "eval_0") == evaluation
            assert running.end() == 3
    assert "REQERR" in (published_trailer(data, "train", 0).error or "")


def test_compressed_objects_are_inflated_and_a_damaged_one_has_its_exit_code(
    stub: S3Stub, tmp_path: Path
) -> None:
    contents = [b"one" * 100_000, b"two" * 7]
    stub.objects |= {f"b/train/{i}.gz": gzip.compress(content) for i, content in enumerate(contents)}
    stub.objects["b/eval/0.gz"] = gzip.compress(contents[0])[:-1]
    document = job(stub.url, tmp_path / "ml", "b/train/", "b/eval/")
    for channel in document["InputDataConfig"]:
        channel["CompressionType"] = "Gzip"
    with sidecar(write_job(tmp_path / "job.yaml", document)) as running:
        chosen = running.wait_for("transport")
        assert chosen["reason"] == "compressed objects are inflated in memory"
        data = tmp_path / "ml" / "input" / "data"
        running.wait_for("ready")
        assert read_all(data / "train_0") == b"".join(contents)
        ended = running.wait_for("epoch complete", channel="train")
        assert ended["delivered"] == ended["of"]
        assert running.status()["channels"]["train"]["bytes_total"] < 10_000
        with open(data / "eval_0", "rb", buffering=0):
            failed = running.wait_for("epoch failed", channel="eval")
            assert "it was cut off: s3://b/eval/0.gz" in failed["error"]
            assert "of" not in failed
            assert running.end() == 8


def test_a_killed_sidecar_leaves_no_proof(stub: S3Stub, tmp_path: Path) -> None:
    """SIGKILL in mid-epoch: the reader's end of file is covered by an `open` trailer, no complete one."""
    fill(stub, [MORE_THAN_A_FIFO], prefix="b/train/")
    with serving(stub, tmp_path, "b/train/") as running:
        running.wait_for("ready")
        data = tmp_path / "ml" / "input" / "data"
        with open(data / "train_0", "rb", buffering=0) as reader:
            reader.read(1000)
            running.end(signal.SIGKILL)
            assert len(reader.readall()) < MORE_THAN_A_FIFO - 1000
    trailer = published_trailer(data, "train", 0)
    assert (trailer.state, trailer.bytes_total) == ("open", MORE_THAN_A_FIFO)


def test_a_restarted_sidecar_serves_a_reader_that_waits(stub: S3Stub, tmp_path: Path) -> None:
    truth = fill(stub, [1000], prefix="b/train/")
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    data = tmp_path / "ml" / "input" / "data"
    with sidecar(path) as running:
        running.wait_for("ready")
        running.end(signal.SIGKILL)
    assert (data / "train_0").exists()
    got: list[bytes] = []
    waiting = threading.Thread(target=lambda: got.append(read_all(data / "train_0")))
    waiting.start()
    with sidecar(path) as running:
        running.wait_for("epoch complete")
        waiting.join()
        assert running.end() == 0
    assert got == [truth]


@pytest.mark.parametrize("command", ["run", "exec"])
def test_every_line_of_the_log_is_json_the_last_too(stub: S3Stub, tmp_path: Path, command: str) -> None:
    fill(stub, [10], prefix="b/train/")
    trainer = ["sh", "-c", "exit 7"] if command == "exec" else []

    def log(path: Path | str) -> list[dict[str, Any]]:
        done = penstock(command, "-c", str(path), *trainer)
        lines = [json.loads(line) for line in done.stderr.splitlines()]
        assert lines[-1]["event"] == "ended"
        assert lines[-1]["code"] == done.returncode
        return lines

    assert "No such file" in log(tmp_path / "none.yaml")[-1]["error"]
    (tmp_path / "wrong.yaml").write_text("Penstok: {}\n")
    first, second, last = log(tmp_path / "wrong.yaml")
    assert (first["event"], first["line"], first["key"]) == (
        "mistake in the job file",
        None,
        "InputDataConfig",
    )
    assert (second["line"], second["key"]) == (1, "Penstok")
    assert "did you mean Penstock?" in second["error"]
    assert last["code"] == 2
    if command == "exec":
        path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
        assert log(path)[-1]["code"] == 7
        return
    with sidecar(write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))) as running:
        running.wait_for("ready")
        assert running.end() == 0
    assert running.events[-2]["event"] == "ended"
    assert running.events[-2]["code"] == 0
    assert all("timestamp" in event for event in running.events[:-1])


def test_in_a_terminal_the_last_line_is_for_people(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("Penstok: {}\n")
    command = [*PENSTOCK, "run", "-c", "job.yaml"]
    with contextlib.chdir(tmp_path), terminal(command, columns=100, rows=10) as window:
        assert window.end() == 2
        assert "\njob.yaml:1: Penstok: is not a key" in window.screen.text
    with contextlib.chdir(tmp_path), terminal([*command, "--json"], columns=300, rows=10) as window:
        assert window.end() == 2
        assert '"event": "ended"' in window.screen.text
