"""Rank FIFOs as channels, and the programs of readers.md that read several channels as one stream."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from streamer.formats import tfrecord
from streamer.readers import (
    PipeModeDatasetException,
    PipeReader,
    rank_channel,
    rank_channels,
)
from tests.readers.feeder import Feeder
from tests.readers.snippets import blocks

RANKS = ["train-0", "train-1", "train-2"]
RECORDS = {rank: [b"%s %d" % (rank.encode(), n) for n in range(20 + 7 * i)] for i, rank in enumerate(RANKS)}


def encoded(records: list[bytes]) -> bytes:
    return b"".join(map(tfrecord.encode, records))


@pytest.fixture
def ranks(feeder: Feeder) -> Feeder:
    """A feeder whose channel `train` has three rank FIFOs."""
    feeder.configure(dict.fromkeys([*RANKS, "validation"], "Pipe") | {"plain-0": "File"})
    return feeder


def feed(feeder: Feeder, epoch: int = 0) -> None:
    """One epoch of every rank FIFO."""
    for rank in RANKS:
        feeder.feed(epoch, encoded(RECORDS[rank]), channel=rank)


def test_the_names_of_rank_fifos(ranks: Feeder) -> None:
    assert rank_channels("train") == RANKS
    assert rank_channels("validation") == ["validation"]
    assert rank_channels("train", config_dir=ranks.config_dir) == RANKS
    assert rank_channel("train", 2) == "train-2"
    with pytest.raises(ValueError, match="counted from 0"):
        rank_channel("train", -1)
    with pytest.raises(PipeModeDatasetException, match=r"^Channel eval not found in Training Job"):
        rank_channels("eval")
    with pytest.raises(PipeModeDatasetException, match=r"^Channel plain-0 is not a PipeMode channel; the P"):
        rank_channels("plain")


def test_a_rank_fifo_is_a_channel_to_every_reader(ranks: Feeder) -> None:
    feed(ranks)
    for rank in rank_channels("train"):
        assert list(PipeReader(rank, "TFRecord")) == RECORDS[rank]
        assert ranks.next_epoch(rank) == 1


def shown(name: str) -> Callable[..., Iterator[bytes]]:
    """Return a function of readers.md, without the loop after it."""
    block = next(each for each in blocks("docs/how-to/readers.md", None) if f"def {name}(" in each)
    names: dict[str, Any] = {}
    exec(block.partition("\n\n\nfor ")[0], names)
    function: Callable[..., Iterator[bytes]] = names[name]
    return function


def test_several_channels_in_turn(ranks: Feeder) -> None:
    feed(ranks)
    columns = itertools.zip_longest(*RECORDS.values())
    due = [record for records in columns for record in records if record is not None]
    assert list(shown("in_turn")(rank_channels("train"))) == due


def test_several_channels_mixed_by_weights(ranks: Feeder) -> None:
    """Each has its share in every prefix, and goes on with its next epoch."""
    for epoch in range(5):
        feed(ranks, epoch)
    found = list(itertools.islice(shown("mixed")({"train-0": 0.7, "train-1": 0.3}), 100))
    for rank, share in (("train-0", 0.7), ("train-1", 0.3)):
        mine = [number for number, record in enumerate(found) if record.startswith(rank.encode())]
        assert [found[number] for number in mine] == list(
            itertools.islice(itertools.cycle(RECORDS[rank]), len(mine))
        )
        for count in range(1, 101):
            assert abs(sum(number < count for number in mine) - share * count) <= 1
