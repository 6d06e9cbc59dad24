"""The benchmark of how idle a GPU is, without one."""

from __future__ import annotations

import io
import itertools
import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import gpu, origin
from tests.kit.warm_python import warm_python


@pytest.fixture(autouse=True)
def no_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the deadline of the test ends a wait for a program that a benchmark has started."""
    for name in ("clients.START_SECONDS", "gpu._PATIENCE"):
        monkeypatch.setattr(f"benchmarks.{name}", 1e6)


@pytest.mark.timeout(120)
def test_a_training_job_is_fed_by_whoever_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, without a real model: every feed's records are whole, and the page gets its table."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("the origin wants a core of its own")
    monkeypatch.setattr(sys, "executable", warm_python("torch"))
    page, out = tmp_path / "page.md", tmp_path / "gpu.json"
    page.write_text(f"before\n{gpu.BEGIN}\nold\n{gpu.END}\nafter\n")
    feeds = ("memory", "files", "penstock")
    command = ["--device", "cpu", "--loads", "tiny", "--feeds", ",".join(feeds), "--workers", "1"]
    command += ["--rounds", "1", "--seconds", "0.2", "--out", str(out), "--into", str(page)]
    assert gpu.main(command) == 0
    found = json.loads(out.read_text())["loads"]["tiny"]["feeds"]
    for feed in feeds:
        (run,) = found[feed]["runs"]
        assert run["right"]
        assert run["images"] > 0
        assert 0 <= run["idle"] < 1
        assert f"| {feed} |" in page.read_text()
    assert 0 < sum(found["penstock"]["runs"][0]["waits"].values()) <= 1
    assert "old" not in page.read_text()


def test_a_record_that_is_not_whole_is_no_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A feed that loses a byte is found out by every record behind it."""
    torch = pytest.importorskip("torch")
    from benchmarks import gpu_task, gpu_trainer

    batch = torch.zeros((16, gpu_task.RECORD), dtype=torch.uint8)
    batch[:, gpu_task.IMAGE :] = torch.frombuffer(bytearray(gpu_task.MARK), dtype=torch.uint8)
    output: list[str] = []
    monkeypatch.setattr(gpu_trainer, "say", output.append)
    monkeypatch.setattr(sys, "stdin", io.StringIO("end\nend\n"))
    order = gpu_task.Order(
        feed="memory", url="", bucket="", keys=[], directory="", size=0, workers=0, seconds=0.05
    )
    load = gpu_task.LOADS["tiny"]
    for brought in (batch, batch.roll(-1)):
        monkeypatch.setattr(gpu_trainer, "loader", lambda *_, brought=brought: itertools.repeat(brought))
        gpu_trainer.run(order, load, lambda _: None, "cpu")
    assert [json.loads(line)["right"] for line in output if line != "begin"] == [True, False]


def test_gpu_mistakes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--feeds", "penstock,carrier-pigeon"])
    assert "no 'carrier-pigeon'; there are memory" in capsys.readouterr().err
    if len(os.sched_getaffinity(0)) < 100 and not origin.missing():
        assert gpu.main(["--device", "cpu", "--loads", "tiny", "--cores", "100"]) == 1
        assert "give fewer --cores" in capsys.readouterr().err
