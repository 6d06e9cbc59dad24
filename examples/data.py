"""Makes the small sample data of the examples, and the channels that stream them.

Every example has a train and an eval channel. The objects depend on a fixed seed only, so every run streams
the same bytes.
"""

from __future__ import annotations

import io
import json
import random
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from examples.demo.dataset import channels as demo_channels
from streamer.formats.recordio import encode as encode_recordio
from streamer.formats.tfrecord import encode

if TYPE_CHECKING:
    from collections.abc import Callable

BUCKET = "examples"
SEED = 7

LABEL = struct.Struct("<q")
VECTOR = 64
"""Numbers in a vector of the records of `torch_tfrecords`."""
SMALL = 0.2
"""Numbers that sparse vectors leave out."""
COLOURS = ((200, 60, 60), (60, 200, 60), (60, 60, 200))
"""Mean colour of the images of each class."""
TOPICS = {
    "sport": ["match", "team", "goal", "season", "player", "coach", "win", "league", "final", "score"],
    "weather": ["rain", "wind", "cloud", "sun", "storm", "degrees", "snow", "forecast", "cold", "front"],
}


class Example(NamedTuple):
    """One program, its data and its channels."""

    module: str
    objects: Callable[[], dict[str, bytes]]
    """Function that returns the objects' contents by key."""
    channels: list[dict[str, Any]]
    ranks: int = 0
    """Processes that torchrun starts; 0 for one process without torchrun."""


def prefix_channel(name: str, place: str) -> dict[str, Any]:
    """Return a channel of all objects below a prefix."""
    source = {"S3DataType": "S3Prefix", "S3Uri": f"s3://{BUCKET}/{place}/{name}/"}
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}}


def shared_channel(name: str, remainder: str) -> dict[str, Any]:
    """Return a channel of records of one size that two ranks share by record."""
    ranks = {"Count": 2, "GlobalBatch": 50, "Remainder": remainder}
    records = {"Format": f"fixed:{LABEL.size + 4 * VECTOR}"}
    return prefix_channel(name, "evaluation") | {"Penstock": {"Ranks": ranks, "Records": records}}


def image_channel(name: str) -> dict[str, Any]:
    """Return a channel of an augmented manifest: two records for each line, an image and its label."""
    source = {
        "S3DataType": "AugmentedManifestFile",
        "S3Uri": f"s3://{BUCKET}/images/{name}.jsonl",
        "AttributeNames": ["image-ref", "class"],
    }
    return {
        "ChannelName": name,
        "RecordWrapperType": "RecordIO",
        "ShuffleConfig": {"Seed": SEED},
        "DataSource": {"S3DataSource": source},
    }


def labelled_vectors() -> dict[str, bytes]:
    """Return tf.train.Example records, as in the demo."""
    made = demo_channels(megabytes=8, objects=4, seed=SEED)
    return {
        f"linear/{channel.key(index)}": bytes(channel.shard(index))
        for channel in made
        for index in range(channel.objects)
    }


def vectors(train: int, evaluation: int) -> dict[str, list[bytes]]:
    """Return records of each channel: a label, and a vector around the mean of its class."""
    numbers = np.random.default_rng(SEED)
    means = numbers.standard_normal((4, VECTOR))
    found = {}
    for name, count in (("train", train), ("eval", evaluation)):
        labels = numbers.integers(4, size=count)
        rows = (means[labels] + numbers.standard_normal((count, VECTOR))).astype("<f4")
        found[name] = [LABEL.pack(label) + row.tobytes() for label, row in zip(labels, rows, strict=True)]
    return found


def plain_vectors() -> dict[str, bytes]:
    """Return the vectors as TFRecords without protobuf."""
    return {
        f"torch/{name}/part-{part}.tfrecord": b"".join(map(encode, records[part::3]))
        for name, records in vectors(6000, 600).items()
        for part in range(3)
    }


def sized_vectors() -> dict[str, bytes]:
    """Return the vectors without a frame; those of `eval` fill no whole number of global batches."""
    return {
        f"evaluation/{name}/part-{part}.bin": b"".join(records[part::3])
        for name, records in vectors(6000, 617).items()
        for part in range(3)
    }


def protobuf_vectors() -> dict[str, bytes]:
    """Return the vectors as SageMaker's protobuf records in RecordIO; every fourth one is sparse."""
    from examples.sagemaker_protobuf import record_class

    found: dict[str, bytes] = {}
    for name, records in vectors(2000, 400).items():
        frames = []
        for number, packed in enumerate(records):
            record, vector = record_class()(), np.frombuffer(packed, "<f4", offset=LABEL.size)
            tensor, (label,) = record.features["values"].float32_tensor, LABEL.unpack_from(packed)
            record.label["values"].float32_tensor.values.append(label)
            if number % 4 == 0:
                tensor.shape.append(VECTOR)
                tensor.keys.extend(np.flatnonzero(abs(vector) > SMALL).tolist())
                vector = vector[abs(vector) > SMALL]
            tensor.values.extend(vector.tolist())
            frames.append(encode_recordio(record.SerializeToString()))
        found |= {f"protobuf/{name}/part-{part}.rec": b"".join(frames[part::2]) for part in range(2)}
    return found


def images() -> dict[str, bytes]:
    """Return JPEGs of three classes, which differ in colour, and a manifest for each channel."""
    from PIL import Image

    numbers = np.random.default_rng(SEED)
    found = {}
    for name, count in (("train", 180), ("eval", 60)):
        lines = []
        for index in range(count):
            kind = index % len(COLOURS)
            pixels = np.clip(numbers.normal(COLOURS[kind], 60, (32, 32, 3)), 0, 255).astype(np.uint8)
            sink = io.BytesIO()
            Image.fromarray(pixels).save(sink, "JPEG")
            key = f"images/{name}/{index:04}.jpg"
            found[key] = sink.getvalue()
            lines.append(json.dumps({"image-ref": f"s3://{BUCKET}/{key}", "class": kind}))
        found[f"images/{name}.jsonl"] = "\n".join(lines).encode()
    return found


def texts() -> dict[str, bytes]:
    """Return lines `topic TAB words`, mostly with the topic's own words."""
    source = random.Random(SEED)  # noqa: S311 - sample data
    every = [word for words in TOPICS.values() for word in words]
    found = {}
    for name, count in (("train", 4000), ("eval", 400)):
        lines = []
        for _ in range(count):
            topic = source.choice(list(TOPICS))
            words = source.choices(TOPICS[topic], k=6) + source.choices(every, k=4)
            lines.append(f"{topic}\t{' '.join(words)}\n".encode())
        for part in range(2):
            found[f"text/{name}/{part}.tsv"] = b"".join(lines[part::2])
    return found


EXAMPLES = {
    "linear_classifier": Example(
        "examples.linear_classifier",
        labelled_vectors,
        [prefix_channel(name, "linear") for name in ("train", "eval")],
    ),
    "images": Example("examples.images", images, [image_channel(name) for name in ("train", "eval")]),
    "torch_tfrecords": Example(
        "examples.torch_tfrecords",
        plain_vectors,
        [prefix_channel(name, "torch") for name in ("train", "eval")],
    ),
    "evaluation": Example(
        "examples.evaluation",
        sized_vectors,
        [shared_channel("train", "drop"), shared_channel("eval", "pad")],
        ranks=2,
    ),
    "sagemaker_protobuf": Example(
        "examples.sagemaker_protobuf",
        protobuf_vectors,
        [prefix_channel(name, "protobuf") for name in ("train", "eval")],
    ),
    "text_lines": Example(
        "examples.text_lines", texts, [prefix_channel(name, "text") for name in ("train", "eval")]
    ),
}
