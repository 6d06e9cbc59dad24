"""Lightning's `Trainer.fit` with checkpoints: stopped after some steps, or resumed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import lightning.pytorch as lightning
from lightning.pytorch.callbacks import ModelCheckpoint

from streamer.readers.lightning import step_state_callback
from streamer.readers.loader import ResumableLoader
from tests.machines.frameworks.programs.lightning_fit import Module
from tests.machines.frameworks.programs.model import dataset
from tests.machines.frameworks.programs.task import EPOCHS


def main() -> None:
    module, out = Module(), Path(sys.argv[1])
    checkpoint = out / "last.ckpt"
    resumed = checkpoint.exists()
    loader = ResumableLoader(dataset())
    trainer = lightning.Trainer(
        accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp", max_epochs=EPOCHS,
        max_steps=-1 if resumed else int(os.environ["STOP"]), logger=False, enable_progress_bar=False,
        default_root_dir=out,
        callbacks=[
            step_state_callback(loader, out),
            ModelCheckpoint(out, filename="last", every_n_train_steps=10, enable_version_counter=False),
        ],
    )  # fmt: skip
    trainer.fit(module, loader, ckpt_path=checkpoint if resumed else None)
    module.model.report()


if __name__ == "__main__":
    main()
