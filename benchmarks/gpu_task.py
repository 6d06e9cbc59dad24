"""Definitions that the parts of `benchmarks.gpu` share: the record, the run, the load."""

from __future__ import annotations

from dataclasses import dataclass

IMAGE = 3 * 224 * 224
"""Bytes of an image's pixels."""
MARK = b"a record"
"""Last bytes of each record, by which a record that is not whole is recognised."""
RECORD = IMAGE + len(MARK)
AHEAD = 4
"""Batches that each DataLoader worker makes ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Parameters of one run."""

    feed: str
    url: str
    bucket: str
    keys: list[str]
    directory: str
    """Directory with the shards as files."""
    size: int
    """Bytes of every shard, which has whole records."""
    workers: int
    """Workers of the DataLoader."""
    seconds: float
    """Length of the run from its first batch."""


@dataclass(frozen=True, slots=True)
class Load:
    """The model that trains on each batch."""

    text: str
    model: str
    """Name of a torchvision model; empty for a linear model."""
    train: bool
    batch: int
    """Records of a batch."""


LOADS = {
    "resnet50": Load("ResNet-50, training", "resnet50", train=True, batch=256),
    "resnet18": Load("ResNet-18, training", "resnet18", train=True, batch=256),
    "embed": Load("ResNet-18, inference", "resnet18", train=False, batch=512),
    "tiny": Load("a linear model, to try things out", "", train=True, batch=16),
}
