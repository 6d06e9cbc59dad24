"""`torch.distributed.checkpoint` of a model that the ranks share, in a directory for each step."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from streamer.readers import save_state
from streamer.readers.checkpoint import CheckpointedLoader
from streamer.readers.loader import ResumableLoader
from tests.machines.frameworks.programs.model import Model, dataset
from tests.machines.frameworks.programs.task import (
    EPOCHS,
    RATE,
    SAVE_EVERY,
    checkpoints,
    tell,
    tell_begin,
)


class Training(Stateful):  # type: ignore[misc] # torch is not followed by the checker
    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, object]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def main() -> None:
    torch.distributed.init_process_group("gloo")
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    loader = ResumableLoader(dataset())
    saved = {"training": Training(model, optimizer), "data": CheckpointedLoader(loader)}
    root, step, epoch = checkpoints(), 0, 0
    if whole := sorted(root.glob("step-*/.metadata")):
        dcp.load(saved, checkpoint_id=whole[-1].parent)
        step = int(whole[-1].parent.name.removeprefix("step-"))
        epoch = loader.state_dict()["epoch"]
    tell_begin(step)
    for _ in range(epoch, EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
            step += 1
            if step % SAVE_EVERY == 0:
                tell(save=step)
                path = root / f"step-{step:06d}"
                dcp.save(saved, checkpoint_id=path)
                if torch.distributed.get_rank() == 0:
                    save_state(path, loader.state_dict())
    model.report()


if __name__ == "__main__":
    main()
