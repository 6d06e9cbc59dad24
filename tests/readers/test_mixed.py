"""Several channels mixed by weights: shares, epochs, states, errors."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Generator
from fractions import Fraction
from typing import Any

import pytest

from sidecar.job.resume import parse_saved
from streamer.errors import ChannelError, TruncatedStream
from streamer.formats import tfrecord
from streamer.readers import MixedReader
from streamer.shares import next_source
from tests.readers.feeder import Feeder

SIZES = {"train": 50, "validation": 13}
"""Records of an epoch."""
WEIGHTS = {"train": 0.7, "validation": 0.3}


def records(channel: str, epoch: int) -> list[bytes]:
    return [f"{channel} {epoch} {number}".encode() for number in range(SIZES[channel])]


def every_record(channel: str) -> Any:
    """The records of all epochs, one after the other."""
    return itertools.chain.from_iterable(records(channel, epoch) for epoch in itertools.count())


def feed(feeder: Feeder, channel: str, epochs: range) -> None:
    for epoch in epochs:
        feeder.feed(epoch, b"".join(map(tfrecord.encode, records(channel, epoch))), channel=channel)


@pytest.fixture
def fed(feeder: Feeder) -> Feeder:
    feed(feeder, "train", range(4))
    feed(feeder, "validation", range(7))
    return feeder


def begun(mixed: MixedReader) -> Generator[bytes, None, None]:
    return mixed.__iter__()


def take(mixed: Any, count: int) -> list[bytes]:
    return list(itertools.islice(mixed, count))


@pytest.mark.parametrize("seed", range(20))
def test_every_prefix_has_each_share_to_within_one_record(seed: int) -> None:
    draw = random.Random(seed)
    weights = [draw.randrange(1, 50) for _ in range(draw.randrange(1, 6))]
    returned, ones = [0] * len(weights), [1] * len(weights)
    for total in range(1, 2 * sum(weights) + 1):
        returned[next_source(returned, ones, weights, sum(weights))] += 1
        shares = [Fraction(total * weight, sum(weights)) for weight in weights]
        assert all(abs(have - share) < 1 for have, share in zip(returned, shares, strict=True))
    assert returned == [2 * weight for weight in weights]


def test_records_of_both_channels_epoch_after_epoch(fed: Feeder) -> None:
    found = take(MixedReader(WEIGHTS, "TFRecord"), 150)
    assert Counter(record.split()[0] for record in found) == {b"train": 105, b"validation": 45}
    for channel in SIZES:
        of_channel = [record for record in found if record.startswith(channel.encode())]
        assert of_channel == take(every_record(channel), len(of_channel))
    assert (fed.next_epoch(), fed.next_epoch("validation")) == (3, 4)


def test_a_second_iteration_begins_the_next_epoch_of_each(fed: Feeder) -> None:
    mixed = MixedReader(WEIGHTS, "TFRecord")
    take(mixed, 5)
    assert take(mixed, 3) == [b"train 1 0", b"validation 1 0", b"train 1 1"]
    assert mixed.state_dict()["returned"] == {"train": 2, "validation": 1}


@pytest.mark.parametrize("count", [0, 1, 9, 43, 44, 71, 72, 100])
def test_a_state_goes_on_with_the_next_record(fed: Feeder, count: int) -> None:
    mixed = MixedReader(WEIGHTS, "TFRecord", epoch=0)
    whole = take(MixedReader(WEIGHTS, "TFRecord", epoch=0), 120)
    feed_again(fed)
    found = begun(mixed)
    assert take(found, count) == whole[:count]
    state = json.loads(json.dumps(mixed.state_dict()))
    found.close()
    feed_again(fed)
    resumed = MixedReader(WEIGHTS, "TFRecord", epoch=0)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert take(resumed, 120 - count) == whole[count:]
    positions = parse_saved(json.dumps(state))
    assert {name: position.epoch for name, position in positions.items()} == {
        name: have // SIZES[name] for name, have in state["returned"].items()
    }


def feed_again(feeder: Feeder) -> None:
    """Offer all epochs anew, as another sidecar does."""
    feeder.close()
    feed(feeder, "train", range(4))
    feed(feeder, "validation", range(7))


def test_a_mix_of_steps_has_no_state(feeder: Feeder) -> None:
    """Mid-step the state of the channel is before records that the mix has returned."""
    feed(feeder, "train", range(1))
    order = {"digest": "00"}
    feeder.feed(0, tfrecord.encode(b"one") * 4, channel="validation", records=4, steps=2, order=order)
    mixed = MixedReader(WEIGHTS, "TFRecord")
    assert len(take(mixed, 3)) == 3
    with pytest.raises(ChannelError, match="a mix with validation has no state"):
        mixed.state_dict()


def test_the_end_of_an_iteration_ends_every_epoch(fed: Feeder) -> None:
    mixed = begun(MixedReader(WEIGHTS, "TFRecord"))
    take(mixed, 2)
    mixed.close()
    assert take(MixedReader(WEIGHTS, "TFRecord"), 2) == [b"train 1 0", b"validation 1 0"]


def test_the_error_of_a_channel_ends_the_mix(feeder: Feeder) -> None:
    feed(feeder, "train", range(1))
    feeder.feed(0, tfrecord.encode(b"one"), state="failed", error="no such key", channel="validation")
    with pytest.raises(TruncatedStream, match="no such key"):
        take(MixedReader(WEIGHTS, "TFRecord"), 20)


def test_an_epoch_without_records_is_refused(feeder: Feeder) -> None:
    feed(feeder, "train", range(1))
    feeder.feed(0, b"", channel="validation")
    with pytest.raises(ChannelError, match="an epoch of channel validation has no record"):
        take(MixedReader(WEIGHTS, "TFRecord"), 20)


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), True, "1"])
def test_weights_are_numbers_above_0(feeder: Feeder, weight: Any) -> None:
    del feeder
    with pytest.raises(ValueError, match="weight of channel train is"):
        MixedReader({"train": weight})


def test_a_mix_has_channels(feeder: Feeder) -> None:
    del feeder
    with pytest.raises(ValueError, match="no channel to mix"):
        MixedReader({})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"weights": {"train": "1/2", "validation": "1/2"}}, "is of the weights"),
        ({"returned": {"train": 1}}, "lacks channels"),
        ({"channels": []}, "lacks channels"),
        ({"returned": {"train": 1, "validation": -1}}, "records by channel are invalid"),
        ({"format": 2}, "not what MixedReader"),
        ({"more": 1}, "not what MixedReader"),
        ({"returned": None}, "not what MixedReader"),
        ({"channels": ["train", "validation"]}, "not what MixedReader"),
    ],
)
def test_a_state_of_another_mix_is_refused(feeder: Feeder, change: dict[str, Any], text: str) -> None:
    del feeder
    mixed = MixedReader(WEIGHTS, "TFRecord")
    state = mixed.state_dict()
    with pytest.raises(ValueError, match=text):
        mixed.load_state_dict(state | change)
    assert mixed.state_dict() == state
