"""Hugging Face's `Trainer`.

It would divide an iterable dataset over the ranks itself, so it is given the loader and not the dataset.
"""

from __future__ import annotations

import sys

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from tests.machines.frameworks.programs.model import Model, loader
from tests.machines.frameworks.programs.task import EPOCHS, RATE


class OwnLoader(Trainer):  # type: ignore[misc] # it may not be installed
    def get_train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        return loader()


def main() -> None:
    model = Model()
    arguments = TrainingArguments(
        output_dir=sys.argv[1], num_train_epochs=EPOCHS, learning_rate=RATE, lr_scheduler_type="constant",
        optim="sgd", max_grad_norm=0.0, use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    OwnLoader(model=model, args=arguments, train_dataset=[0]).train()
    model.report()


if __name__ == "__main__":
    main()
