"""Hugging Face's `Trainer` with checkpoints, of which it keeps two."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from streamer.readers import load_state, save_state
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


class OwnLoader(Trainer):  # type: ignore[misc] # it may not be installed
    loader: ResumableLoader

    def get_train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        return self.loader


class SaveState(TrainerCallback):  # type: ignore[misc] # as above
    def __init__(self, loader: ResumableLoader) -> None:
        self.loader = loader

    def on_train_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        tell_begin(state.global_step)

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step % SAVE_EVERY == 0:
            tell(save=state.global_step)

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        torch.distributed.barrier()  # every rank has written its files
        if state.is_world_process_zero:
            save_state(f"{args.output_dir}/checkpoint-{state.global_step}/", self.loader.state_dict())


def main() -> None:
    model, loader, root = Model(), ResumableLoader(dataset()), checkpoints()
    arguments = TrainingArguments(
        output_dir=str(root), num_train_epochs=EPOCHS, learning_rate=RATE, use_cpu=True, report_to=[],
        disable_tqdm=True, save_strategy="steps", save_steps=SAVE_EVERY, save_total_limit=2,
        ignore_data_skip=True,
    )  # fmt: skip
    whole = [each.parent for each in root.glob("checkpoint-*/penstock-state.json")]
    newest = max(whole, key=lambda each: int(each.name.removeprefix("checkpoint-")), default=None)
    if newest is not None:
        loader.load_state_dict(load_state(newest) or {})
    trainer = OwnLoader(model=model, args=arguments, train_dataset=[0], callbacks=[SaveState(loader)])
    trainer.loader = loader
    trainer.train(resume_from_checkpoint=newest and str(newest))
    model.report()


if __name__ == "__main__":
    main()
