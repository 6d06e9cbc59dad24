"""The state file: the incumbent's format, one locked step, and no epoch for two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamer.errors import ChannelError
from streamer.readers.core.state import EpochState

TAKE_MANY = """
import sys
from streamer.readers.core.state import EpochState
state = EpochState(sys.argv[1], "train")
print("ready", flush=True)
sys.stdin.readline()
print(*[state.take() for _ in range(200)])
"""


def test_counts_from_zero_in_the_incumbents_file(tmp_path: Path) -> None:
    state = EpochState(str(tmp_path), "train")
    assert [state.take(), state.take(), EpochState(str(tmp_path), "train").take()] == [0, 1, 2]
    assert (tmp_path / ".train-pipe_mode-state").read_bytes() == b"3"
    assert sorted(os.listdir(tmp_path)) == [".train-pipe_mode-lock", ".train-pipe_mode-state"]


def test_follows_a_file_that_the_incumbent_wrote(tmp_path: Path) -> None:
    (tmp_path / ".train-pipe_mode-state").write_text("41")
    assert EpochState(str(tmp_path), "train").take() == 41
    assert (tmp_path / ".train-pipe_mode-state").read_text() == "42"


def test_channels_do_not_share_a_count(tmp_path: Path) -> None:
    assert EpochState(str(tmp_path), "a").take() == 0
    assert EpochState(str(tmp_path), "b").take() == 0


def test_gives_back_only_the_last_one_taken(tmp_path: Path) -> None:
    state = EpochState(str(tmp_path), "train")
    first, second = state.take(), state.take()
    state.give_back(first)
    assert state.take() == 2
    state.give_back(2)
    state.give_back(second)
    assert state.take() == 1


def test_makes_its_directory(tmp_path: Path) -> None:
    assert EpochState(str(tmp_path / "deep" / "down"), "train").take() == 0


@pytest.mark.parametrize("text", [b"", b"seven", b"-1", b"1 2"])
def test_a_file_that_holds_no_index_is_an_error(tmp_path: Path, text: bytes) -> None:
    (tmp_path / ".train-pipe_mode-state").write_bytes(text)
    with pytest.raises(ChannelError, match="not an index: delete it"):
        EpochState(str(tmp_path), "train").take()


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ChannelError, match="cannot make the state directory"):
        EpochState(str(tmp_path / "file" / "state"), "train").take()


def test_two_processes_never_take_the_same_epoch(tmp_path: Path) -> None:
    takers = [
        subprocess.Popen(
            [sys.executable, "-c", TAKE_MANY, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for taker in takers:
        assert taker.stdout is not None
        assert taker.stdout.readline() == "ready\n"
    for taker in takers:
        assert taker.stdin is not None
        taker.stdin.write("go\n")
        taker.stdin.flush()
    taken = [int(epoch) for taker in takers for epoch in taker.communicate()[0].split()]
    assert sorted(taken) == list(range(400))
