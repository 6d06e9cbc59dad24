"""PyTorch's fully sharded data parallel: each rank holds a share of the weights."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.frameworks.programs.model import Model, loader
from tests.frameworks.programs.task import EPOCHS, RATE


def main() -> None:
    torch.distributed.init_process_group("gloo")
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    batches = loader()
    for _ in range(EPOCHS):
        for batch in batches:
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
    model.report()
    torch.distributed.barrier()  # a rank that goes early would end the others
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
