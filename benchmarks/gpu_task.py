"""What the parts of `benchmarks.gpu` share: a record, what a feed is told, what is done with a batch."""

from __future__ import annotations

from dataclasses import dataclass

IMAGE = 3 * 224 * 224
"""Bytes of an image, as its pixels."""
MARK = b"a record"
"""What ends each record, so that one that is not whole shows."""
RECORD = IMAGE + len(MARK)
AHEAD = 4
"""Batches that each DataLoader worker makes ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One run."""

    feed: str
    url: str
    bucket: str
    keys: list[str]
    directory: str
    """Where the shards lie as files."""
    size: int
    """Bytes of every shard, which holds whole records."""
    workers: int
    """Of the DataLoader."""
    seconds: float
    """From the first batch on."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is done with a batch."""

    text: str
    model: str
    """Of torchvision; none for a linear one."""
    train: bool
    batch: int
    """Records."""


LOADS = {
    "resnet50": Load("ResNet-50, training", "resnet50", train=True, batch=256),
    "resnet18": Load("ResNet-18, training", "resnet18", train=True, batch=256),
    "embed": Load("ResNet-18, inference", "resnet18", train=False, batch=512),
    "tiny": Load("a linear model, to try things out", "", train=True, batch=16),
}
