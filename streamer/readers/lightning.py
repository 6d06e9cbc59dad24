"""`step_state_callback`: Lightning saves a job's state beside its checkpoints, for `penstock run --resume`.

    ModelCheckpoint ─▶ checkpoint, with the loader's state ─▶ next hook of the trainer ─▶ file of --resume

Lightning itself saves the state of a `ResumableLoader` in each checkpoint, and `fit(ckpt_path=…)` loads it.
The sidecar needs the same state in a file. Lightning has no hook after a checkpoint is written, so the
callback writes the file at the first hook that follows: the file is never later than the checkpoint.

The channel must be shared by record, also by one rank. Then all ranks have one state, which the first one
writes. And Lightning knows the length of the loader; without it Lightning reads one batch ahead, which a
resumed training would miss. So the callback refuses any other channel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamer.readers.core.state_file import job_state, save_state, state_file

if TYPE_CHECKING:
    import os

    from streamer.readers.loader import ResumableLoader

__all__ = ["step_state_callback"]


def step_state_callback(loader: ResumableLoader, path: str | os.PathLike[str]) -> Any:
    """Return a Lightning callback that writes the state of each checkpoint into the file of `--resume`.

    `loader`: the ResumableLoader that `Trainer.fit` gets. `path`: the file, or a directory for its
    `penstock-state.json`. Checkpoints of weights alone are left out. Saving a checkpoint raises ChannelError
    if ranks do not share the loader's channel by record. Raises ValueError if `path` is an address of S3.
    """
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:  # the same package under its older name
        from pytorch_lightning import Callback

    class StepStateCallback(Callback):  # type: ignore[misc] # lightning may not be installed
        def __init__(self) -> None:
            super().__init__()
            self._path = state_file(path)
            self._unwritten: dict[str, Any] | None = None
            """State of the last checkpoint, until the file has it."""

        def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
            self._write(trainer)
            self._unwritten = job_state(loader)

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            self._write(trainer)

        def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
            self._write(trainer)

        def on_train_end(self, trainer: Any, *_: Any) -> None:
            self._write(trainer)

        def teardown(self, trainer: Any, *_: Any, **__: Any) -> None:
            self._write(trainer)

        def _write(self, trainer: Any) -> None:
            state, self._unwritten = self._unwritten, None
            if state is not None and trainer.is_global_zero:
                save_state(self._path, state)

    return StepStateCallback()
