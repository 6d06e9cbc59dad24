"""What every program trains on: the objects and their records, the batch, the learning rate, the epochs.

A program that may be killed tells the machine of each step by a line in a FIFO, and of each save.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

DIMENSIONS = 16
"""32-bit floats of a vector; one more is the label. A 64-bit number of the record comes first."""
UNEVEN = [3, 0, 410, 1, 170, 218, 77, 124]
"""Records of the objects."""
GLOBAL_BATCH = 24
"""A multiple of each number of ranks."""
TOLERANCE = 1e-5
"""Most that two losses differ by, of sums that were rounded in another order."""
RATE = 0.05
EPOCHS = 2
SAVE_EVERY = 5
"""Steps between two checkpoints."""


def checkpoints() -> Path:
    """The directory whose files the sidecar uploads."""
    return Path(os.environ["SAGEMAKER_BASE_DIR"], "checkpoints")


def tell(**line: Any) -> None:
    """Write a line for the machine, if it is to be told; whole, because it is short."""
    if path := os.environ.get("STEPS"):
        with open(path, "a", encoding="utf-8") as lines:
            lines.write(json.dumps({"rank": int(os.environ.get("RANK", "0")), **line}) + "\n")


def tell_begin(step: int) -> None:
    """Tell with which step this process begins, and which processes a kill must end."""
    tell(begin=step, pid=os.getpid(), parent=os.getppid())
