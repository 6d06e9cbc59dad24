"""PyTorch's fully sharded data parallel: each rank holds a share of the weights."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.machines.frameworks.programs.model import Model, train


def main() -> None:
    torch.distributed.init_process_group("gloo")
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    train(model, model)


if __name__ == "__main__":
    main()
