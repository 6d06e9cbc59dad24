"""PyTorch's DistributedDataParallel."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.frameworks.programs.model import Model, loader
from tests.frameworks.programs.task import EPOCHS, RATE


def main() -> None:
    torch.distributed.init_process_group("gloo")
    model = Model()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), RATE)
    batches = loader()
    for _ in range(EPOCHS):
        for batch in batches:
            optimizer.zero_grad()
            parallel(**batch)["loss"].backward()
            optimizer.step()
    model.report()
    torch.distributed.barrier()  # a rank that goes early would end the others
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
