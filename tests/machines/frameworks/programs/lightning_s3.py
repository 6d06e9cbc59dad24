"""Lightning's `Trainer.fit` with checkpoints: one file that is replaced, or several and a link."""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from streamer.readers.lightning import step_state_callback
from streamer.readers.loader import ResumableLoader
from tests.machines.frameworks.programs.lightning_fit import Module
from tests.machines.frameworks.programs.model import dataset
from tests.machines.frameworks.programs.task import (
    EPOCHS,
    RATE,
    SAVE_EVERY,
    checkpoints,
    tell,
    tell_begin,
)


class Recorder(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), RATE)

    def on_train_start(self) -> None:
        tell_begin(self.trainer.global_step)

    def on_save_checkpoint(self, _: dict[str, Any]) -> None:
        tell(save=self.trainer.global_step)


def main() -> None:
    module, root = Recorder(), checkpoints()
    loader = ResumableLoader(dataset())
    options = {"filename": "last"} if sys.argv[2] == "file" else {"filename": "{step}", "save_last": "link"}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp", max_epochs=EPOCHS,
        logger=False, enable_progress_bar=False, default_root_dir=root,
        callbacks=[
            step_state_callback(loader, root),
            ModelCheckpoint(root, every_n_train_steps=SAVE_EVERY, enable_version_counter=False, **options),
        ],
    )  # fmt: skip
    last = root / "last.ckpt"
    trainer.fit(module, loader, ckpt_path=last if last.exists() else None)
    module.model.report()


if __name__ == "__main__":
    main()
