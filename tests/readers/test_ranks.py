"""Ranks of one job that read one channel, as processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from streamer.errors import ChannelError
from streamer.formats import tfrecord
from streamer.launchers import RANKS
from streamer.readers import PipeReader
from tests.kit.children import output_of
from tests.readers.feeder import Feeder

READER = """
import os, sys
{imports}
def read():
    print(len(list({reader})), flush=True)
read()
for line in sys.stdin:
    if line == "fork\\n" and (child := os.fork()):
        os.waitpid(child, 0)
        continue
    read()
    if line == "fork\\n":
        os._exit(0)
"""
READERS = {
    "PipeReader": READER.format(
        imports="from streamer.readers import PipeReader",
        reader='PipeReader(os.environ.get("CHANNEL", "train"), "TFRecord")',
    ),
    "open_channel": READER.format(
        imports="from streamer.readers import open_channel", reader='[*open_channel("train").readall()[:5]]'
    ),
}
DATA = b"".join(map(tfrecord.encode, [b"record"] * 5))


@contextlib.contextmanager
def reader(how: str = "PipeReader", **environment: str) -> Iterator[subprocess.Popen[str]]:
    """One that reads an epoch, and one more for each line that it is sent."""
    clean = {name: value for name, value in os.environ.items() if name not in RANKS}
    process = subprocess.Popen(
        [sys.executable, "-c", READERS[how]],
        env=clean | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


SECOND = "LOCAL_RANK 0 reads channel train, and LOCAL_RANK 1 requests its next epoch"


@pytest.mark.parametrize("how", list(READERS))
def test_a_second_rank_is_refused(feeder: Feeder, how: str) -> None:
    """While the first lives; and takes no epoch from it."""
    for epoch in range(3):
        feeder.feed(epoch, DATA)
    with reader(LOCAL_RANK="0", LOCAL_WORLD_SIZE="2") as first:
        assert output_of(first).readline() == "5\n"
        with reader(how, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2") as second:
            _, errors = second.communicate()
            assert SECOND in errors
        assert feeder.next_epoch() == 1
    if how == "PipeReader":
        with reader(how, LOCAL_RANK="1") as later:  # of another job: the first one is over
            assert output_of(later).readline() == "5\n"


def test_a_second_rank_with_tensorflow_is_refused(feeder: Feeder, monkeypatch: pytest.MonkeyPatch) -> None:
    """PipeModeDataset behaves so too, in this process, because TensorFlow takes seconds to import."""
    tf = pytest.importorskip("tensorflow")
    from streamer.readers.tensorflow import PipeModeDataset

    for epoch in range(2):
        feeder.feed(epoch, DATA)
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    with reader(LOCAL_RANK="0", LOCAL_WORLD_SIZE="2") as first:
        assert output_of(first).readline() == "5\n"
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        with pytest.raises(tf.errors.OpError, match=SECOND):
            list(PipeModeDataset("train", "TFRecord"))
        assert feeder.next_epoch() == 1


@pytest.mark.parametrize("variable", [name for name in RANKS if name != "LOCAL_RANK"])
def test_every_launcher_says_which_rank(feeder: Feeder, variable: Any) -> None:
    for epoch in range(2):
        feeder.feed(epoch, DATA)
    first_rank, second_rank = "0", "1"
    if variable == "TF_CONFIG":
        cluster = {"chief": ["a:1"], "worker": ["a:2"]}
        tasks = {"type": "chief", "index": 0}, {"type": "worker", "index": 0}
        first_rank, second_rank = (json.dumps({"cluster": cluster, "task": task}) for task in tasks)
    with reader(**{variable: first_rank}) as first:
        assert output_of(first).readline() == "5\n"
        with reader(**{variable: second_rank}) as second:
            assert f"{variable} 0 reads channel train" in second.communicate()[1]


def test_the_advice_for_a_rank_fifo_is_not_to_make_one(
    feeder: Feeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    feeder.configure({"train-0": "Pipe", "train-1": "Pipe"})
    feeder.feed(0, DATA, channel="train-0")
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    with reader(PMIX_RANK="0", CHANNEL="train-0") as first:
        assert output_of(first).readline() == "5\n"
        monkeypatch.setenv("PMIX_RANK", "1")
        with pytest.raises(ChannelError, match="train-0 is the FIFO of one rank of channel train: let each"):
            list(PipeReader("train-0", "TFRecord"))


@pytest.mark.parametrize("rank", [{}, {"LOCAL_RANK": "3"}])
def test_processes_of_one_rank_read_in_turn(feeder: Feeder, rank: dict[str, str]) -> None:
    """One after the other, a fork, and one that comes while the first waits; without a rank that is told."""
    for epoch in range(4):
        feeder.feed(epoch, DATA)
    with reader(**rank) as first:
        assert output_of(first).readline() == "5\n"
        assert first.stdin is not None
        first.stdin.write("fork\nread\n")
        first.stdin.flush()
        assert [output_of(first).readline(), output_of(first).readline()] == ["5\n", "5\n"]
        with reader(**rank) as second:
            output, errors = second.communicate()
        assert output == "5\n"
        assert ("each epoch goes to one of them only" in errors) == (not rank)
        _, errors = first.communicate()
        assert errors == ""
