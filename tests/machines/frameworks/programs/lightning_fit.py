"""Lightning's `Trainer.fit`."""

from __future__ import annotations

import os
import sys

import lightning.pytorch as lightning
import torch

from tests.machines.frameworks.programs.model import Model, loader
from tests.machines.frameworks.programs.task import EPOCHS, RATE


class Module(lightning.LightningModule):  # type: ignore[misc] # it may not be installed
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch)["loss"]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), RATE)


def main() -> None:
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp", max_epochs=EPOCHS,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        default_root_dir=sys.argv[1],
    )  # fmt: skip
    trainer.fit(module, loader())
    module.model.report()


if __name__ == "__main__":
    main()
