"""What the PyTorch programs share: the loader, the model, and the file that tells which record came when."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from streamer.readers import rank_channels
from streamer.readers.torch import PipeIterableDataset
from tests.machines.frameworks.programs.task import DIMENSIONS, EPOCHS, RATE, tell


def decode(records: list[bytes]) -> dict[str, torch.Tensor]:
    """Number, vector and label of each record: a 64-bit integer, and 32-bit floats."""
    raw = np.frombuffer(b"".join(records), dtype=np.uint8).reshape(len(records), -1)
    floats = torch.from_numpy(raw[:, 8:].copy().view(np.float32))
    numbers = torch.from_numpy(raw[:, :8].copy().view(np.int64)[:, 0])
    return {"numbers": numbers, "x": floats[:, :DIMENSIONS], "y": floats[:, DIMENSIONS]}


def dataset() -> PipeIterableDataset:
    """This rank's batches. The dataset finds its FIFO by LOCAL_RANK, which torchrun sets."""
    batch = int(os.environ["GLOBAL_BATCH"]) // int(os.environ["WORLD_SIZE"])
    return PipeIterableDataset(rank_channels("train"), "TFRecord", batch_size=batch, decode=decode)


def loader() -> DataLoader[dict[str, torch.Tensor]]:
    return DataLoader(dataset(), batch_size=None)


class Model(torch.nn.Module):  # type: ignore[misc] # torch is not followed by the checker
    """A linear model, with the same first weights everywhere. It keeps what each step had."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = torch.nn.Linear(DIMENSIONS, 1)
        self.steps: list[dict[str, Any]] = []

    def forward(self, numbers: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = torch.nn.functional.mse_loss(self.linear(x)[:, 0], y)
        self.steps.append({"records": numbers.tolist(), "loss": float(loss)})
        tell(**self.steps[-1])
        return {"loss": loss}

    def report(self) -> None:
        """Write the steps of this rank into the directory that the program was given, and leave the group."""
        Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(self.steps), encoding="utf-8")
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # a rank that goes early would end the others
            torch.distributed.destroy_process_group()


def train(model: Model, parallel: torch.nn.Module) -> None:
    """Train in this process of a group, and report. `parallel`: the model as the group shares it."""
    optimizer = torch.optim.SGD(parallel.parameters(), RATE)
    batches = loader()
    for _ in range(EPOCHS):
        for batch in batches:
            optimizer.zero_grad()
            parallel(**batch)["loss"].backward()
            optimizer.step()
    model.report()
