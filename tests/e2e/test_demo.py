"""The demo as a user runs it, small; and that it leaves nothing behind when something dies."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from examples.demo.dataset import channels
from examples.demo.report import Outcome
from streamer.trailer import Trailer
from tests.kit.warm_python import warm_module

ROOT = Path(__file__).parents[2]
SMALL = ("--megabytes", "24", "--objects", "4")
LONG = ("--megabytes", "12", "--objects", "4", "--epochs", "50")
"""A tenth of the training, after which its progress is first told, is 60 MB."""


def command_lines() -> dict[int, str]:
    """Every process's command line, by process id."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            raw = Path("/proc", name, "cmdline").read_bytes()
            found[int(name)] = raw.replace(b"\0", b" ").decode(errors="replace")
    return found


class Demo:
    """A running demo whose temporary files, and so whose children's command lines, lie in one directory."""

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        self.process = process
        self.directory = directory
        self._output: list[str] = []

    def children(self) -> dict[int, str]:
        return {pid: line for pid, line in command_lines().items() if str(self.directory) in line}

    def await_training(self) -> None:
        """Return once the trainer has told of its progress."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._output.append(line)
            if line.startswith("train: "):
                return
        raise AssertionError("".join(self._output))

    def child(self, program: str) -> int:
        """The process id of the child whose command line has `program` in it."""
        (found,) = [pid for pid, line in self.children().items() if program in line]
        return found

    def finish(self) -> str:
        """What it printed, once it has ended; and nothing of it is left."""
        assert self.process.stdout is not None
        self._output += self.process.stdout
        self.process.wait()
        assert self.children() == {}
        assert list(self.directory.iterdir()) == []
        return "".join(self._output)


@pytest.fixture
def start_demo() -> Iterator[Callable[..., Demo]]:
    """Starts demos in a directory with a short path, as PyTorch's workers need for their socket."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="demo-"))

        def start(*arguments: str, framework: Literal["tensorflow", "torch"] = "tensorflow") -> Demo:
            command = [*warm_module("examples.demo", framework), "--framework", framework]
            process = stack.enter_context(
                subprocess.Popen(
                    [*command, *arguments],
                    cwd=ROOT,
                    env=os.environ | {"TMPDIR": directory, "COLUMNS": "100"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    process_group=0,
                )
            )
            stack.callback(process.kill)
            return Demo(process, Path(directory))

        yield start


@pytest.mark.e2e
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("framework", "name"), [("tensorflow", "TensorFlow"), ("torch", "PyTorch")])
def test_demo_trains_and_proves_every_epoch(
    start_demo: Callable[..., Demo], framework: Literal["tensorflow", "torch"], name: str
) -> None:
    demo = start_demo(*SMALL, framework=framework)
    output = demo.finish()
    assert re.search(rf"framework +{name} [\d.]+", output), output
    (admin,) = re.findall(r"watch it at (http://127\.0\.0\.1:\d+) in a browser", output)
    assert f"top --url {admin}\n" in output
    assert demo.process.returncode == 0, output
    train, held_out = channels(megabytes=24, objects=4, seed=7)
    accuracy = re.search(r"accuracy on eval +([\d.]+)", output)
    assert accuracy is not None, output
    assert float(accuracy[1]) > 0.95
    rows = [re.split(r"\s+", line.strip()) for line in output.splitlines()]
    for channel, epoch in ((train, "0"), (train, "1"), (held_out, "0")):
        amounts = [f"{channel.records:,}", f"{channel.total_bytes:,}"]
        assert [channel.name, epoch, *amounts, "complete"] in rows, output
    for channel, epochs in ((train, 2), (held_out, 1)):
        total = next(row for row in rows if row[:2] == [channel.name, "all"])
        assert total[2:4] == [f"{channel.records * epochs:,}", f"{channel.total_bytes * epochs:,}"]
        assert [word.strip("%").replace(".", "").isdigit() for word in total[4:7]] == [True] * 3
        assert total[7:] == [str(epochs), "proven"]
    assert re.search(r"[\d.]+ CPU-s/GB", output), output
    assert "the trainer held no credentials" in output
    assert "FAILED" not in output
    assert re.search(r"^demo: passed, (\d+) of \1 conditions hold$", output, re.MULTILINE), output


@pytest.mark.e2e
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("program", "reported"),
    [
        ("examples.demo.train", "the trainer ended with exit code -9"),
        ("penstock run", "the sidecar ended with exit code -9 in mid-training"),
    ],
)
def test_a_killed_child_fails_the_demo_and_leaves_nothing(
    start_demo: Callable[..., Demo], program: str, reported: str
) -> None:
    demo = start_demo(*LONG)
    demo.await_training()
    os.kill(demo.child(program), signal.SIGKILL)
    output = demo.finish()
    assert demo.process.returncode == 1, output
    assert f"demo: FAILED: {reported}" in output


@pytest.mark.e2e
@pytest.mark.timeout(150)
def test_ctrl_c_in_mid_training_leaves_nothing(start_demo: Callable[..., Demo]) -> None:
    demo = start_demo(*LONG)
    demo.await_training()
    demo.process.send_signal(signal.SIGINT)
    output = demo.finish()
    assert demo.process.returncode == 130, output


def perfect_outcome() -> Outcome:
    """What a job leaves that read 2 epochs of `train` and 1 of `eval` without a fault."""
    wanted = channels(megabytes=1.2, objects=2, seed=3)
    epochs = {"train": 2, "eval": 1}
    planned = {
        each.name: {"objects": each.objects, "bytes": each.total_bytes, "digest": each.name * 4}
        for each in wanted
    }
    seconds = {"idle": 1.0, "blocked": 0.5, "starved": 0.25, "moving": 0.25}
    status = {each.name: {"written_bytes": each.total_bytes, "seconds": seconds} for each in wanted}
    process = {"cpu_seconds": 1.0, "max_rss_bytes": 1 << 20}
    document = {"process": process, "channels": status, "transport": "aiobotocore"}
    return Outcome(
        channels=wanted,
        epochs=epochs,
        plan={"channels": planned},
        ready=document,
        done=document,
        training={
            "accuracy": 0.96,
            "records": {each.name: [each.records] * epochs[each.name] for each in wanted},
            "storage": [],
            "seconds": {"import": 1.0, "train": 1.0, "evaluate": 1.0},
            "devices": ["CPU"],
            "framework": "TensorFlow 2.21.0",
        },
        trailers={
            (each.name, epoch): Trailer(
                channel=each.name,
                epoch=epoch,
                state="complete",
                bytes_total=each.total_bytes,
                bytes_delivered=each.total_bytes,
                digest=each.name * 4,
            )
            for each in wanted
            for epoch in range(epochs[each.name])
        },
        exit_code=0,
        left_over=[],
    )


def with_trailer(outcome: Outcome, **changes: Any) -> Outcome:
    trailer = outcome.trailers["train", 1]
    assert trailer is not None
    spoilt = replace(trailer, **changes)
    return replace(outcome, trailers={**outcome.trailers, ("train", 1): spoilt})


def with_training(outcome: Outcome, **changes: Any) -> Outcome:
    return replace(outcome, training={**outcome.training, **changes})


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda fine: with_training(fine, accuracy=0.95), "accuracy"),
        (lambda fine: with_training(fine, storage=["botocore"]), "the trainer held no credentials"),
        (lambda fine: with_training(fine, records={"train": [146], "eval": [14]}), "train: records"),
        (lambda fine: with_trailer(fine, state="abandoned"), "train: the trailer of epoch 1"),
        (lambda fine: with_trailer(fine, bytes_delivered=1), "train: the trailer of epoch 1"),
        (lambda fine: with_trailer(fine, digest="another plan"), "train: the trailer of epoch 1"),
        (
            lambda fine: replace(fine, trailers={**fine.trailers, ("eval", 0): None}),
            "eval: the trailer of epoch 0",
        ),
        (lambda fine: replace(fine, exit_code=5), "the sidecar ended with exit code 5"),
        (lambda fine: replace(fine, left_over=["train_2"]), "FIFOs left behind: 1"),
    ],
)
def test_each_condition_that_does_not_hold_is_named(
    capsys: pytest.CaptureFixture[str], spoil: Callable[[Outcome], Outcome], named: str
) -> None:
    assert perfect_outcome().show()
    assert "FAILED" not in capsys.readouterr().out
    assert not spoil(perfect_outcome()).show()
    output = capsys.readouterr().out
    assert re.search(rf"^FAILED  {named}", output, re.MULTILINE), output
    assert output.count("FAILED") == 2, output  # the condition and the outcome


@pytest.mark.parametrize("held", ["environment", "home"])
def test_trainer_refuses_credentials(tmp_path: Path, held: str) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    if held == "environment":
        environment["AWS_SECRET_ACCESS_KEY"] = "not-a-secret"
        named = "AWS_SECRET_ACCESS_KEY"
    else:
        (tmp_path / ".aws").mkdir()
        named = str(tmp_path / ".aws")
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "examples.demo.train"]
    done = subprocess.run(
        [*command, "--base-directory", str(tmp_path), "--result", str(result)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert named in done.stderr
    assert not result.exists()


def test_sample_data_is_a_function_of_its_seed() -> None:
    train, held_out = channels(megabytes=1.2, objects=2, seed=3)
    again, _ = channels(megabytes=1.2, objects=2, seed=3)
    other, _ = channels(megabytes=1.2, objects=2, seed=4)
    assert train.shard(1) == again.shard(1)
    assert (
        len({bytes(shard) for shard in (train.shard(0), train.shard(1), other.shard(0), held_out.shard(0))})
        == 4
    )


@pytest.mark.parametrize(
    "size",
    [
        {"megabytes": 0.001, "objects": 1},
        {"megabytes": 1, "objects": 0},
        {"megabytes": 0.2, "objects": 16},
        {"megabytes": 1, "objects": 1, "classes": 128},
        {"megabytes": 1, "objects": 1, "classes": 1},
        {"megabytes": 1, "objects": 1, "seed": -1},
    ],
)
def test_senseless_sizes_are_refused(size: dict[str, float] | dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"cannot be made|must be"):
        channels(**({"seed": 7} | size))
