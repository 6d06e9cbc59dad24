"""PyTorch's DistributedDataParallel."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.machines.frameworks.programs.model import Model, train


def main() -> None:
    torch.distributed.init_process_group("gloo")
    model = Model()
    train(model, DistributedDataParallel(model))


if __name__ == "__main__":
    main()
