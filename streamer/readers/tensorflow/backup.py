"""`StepBackup`: a Keras callback that saves the weights with the step of the job, and restores them.

    <directory>/3-1250.weights.h5      weights and optimizer after global batch 1250 of epoch 3
    <directory>/penstock-state.json    the state of the job, which `penstock run --resume` reads

The state names the weights by its epoch and step. It is replaced after its weights were written, and older
weights are removed after that. So a trainer that is killed at any moment leaves weights and a state of the
same step.

tf.data reads ahead of the model, so the callback counts the batches that `fit` has trained on. Ranks must
share the channel by record, one rank too: then an epoch has a known number of steps.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import keras

from streamer.errors import ChannelError
from streamer.readers.core.state_file import load_state, save_state
from streamer.step_state import StepState, is_step_state

if TYPE_CHECKING:
    from streamer.readers.tensorflow import PipeModeDataset

__all__ = ["StepBackup"]

_WEIGHTS = re.compile(r"[0-9]+-[0-9]+\.weights\.h5")


class StepBackup(keras.callbacks.Callback):  # type: ignore[misc] # keras publishes no types
    """Saves the model's weights and the state of the job, and restores them when training begins.

    `dataset`: the PipeModeDataset below the pipeline that `fit` gets. Make it with
    `start=load_state(directory)`. `directory`: it is made if it is missing; one process saves there.
    `save_every`: global batches between two backups within an epoch; None for a backup at the end of each
    epoch only. `batches`: batches of the pipeline in a global batch.

    The model must be built. Training raises ChannelError if ranks do not share the channel by record, if the
    dataset does not begin at the step of the backup, if a Keras epoch ends within an epoch of the channel and
    `fit` has no `steps_per_epoch`, or if a later `fit` does not begin at the step that training has reached.
    """

    def __init__(
        self, dataset: PipeModeDataset, directory: str, *, save_every: int | None = None, batches: int = 1
    ) -> None:
        super().__init__()
        if batches < 1 or (save_every is not None and save_every < 1):
            raise ValueError(f"save_every is {save_every}, and batches is {batches}; both must be 1 or more")
        self._dataset = dataset
        self._save_every = save_every
        self._batches = batches
        self._directory = os.path.abspath(directory)
        os.makedirs(self._directory, exist_ok=True)
        saved = load_state(self._directory)
        if saved is not None and not is_step_state(saved):
            raise ValueError(
                f"the state in {self._directory} is no state of steps, and StepBackup needs one; give it a "
                "directory of its own"
            )
        self._saved = None if saved is None else StepState.of(saved)
        """The last backup."""
        self._begun = False
        """Whether training has begun, with the weights of the backup."""
        self._trained = 0
        """Batches since training began."""

    @property
    def epoch(self) -> int:
        """Epoch that training begins with: `initial_epoch` of `fit`."""
        return 0 if self._saved is None else self._saved.epoch

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras calls it so
        if self._begun:  # a later `fit` goes on
            state, rest = self._reached()
            if state.step or rest or state.epoch != self._dataset.next_epoch:
                raise ChannelError(
                    f"this fit would begin at epoch {self._dataset.next_epoch} of the channel, and training "
                    f"has reached step {state.step} of epoch {state.epoch}; make a new dataset and a new "
                    "StepBackup, and start the sidecar with --resume"
                )
            return
        if not self.model.built:
            raise ValueError("build the model before fit, so that StepBackup can restore its weights")
        if self.model.steps_per_execution != 1:
            raise ValueError("StepBackup counts batches one by one; leave steps_per_execution at 1")
        begin = StepState.of(self._dataset.step_state())
        if self._saved is None:
            self._begun = True
            return
        if (begin.epoch, begin.step) != (self._saved.epoch, self._saved.step):
            raise ChannelError(
                f"the backup in {self._directory} is of epoch {self._saved.epoch}, step {self._saved.step}, "
                f"and the dataset begins at epoch {begin.epoch}, step {begin.step}; make the dataset with "
                "start=load_state(directory)"
            )
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        self.model.load_weights(self._weights(self._saved))
        self._begun = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._trained += 1
        steps, rest = divmod(self._trained, self._batches)
        if self._save_every is not None and not rest and steps % self._save_every == 0:
            self._save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        state, rest = self._reached()
        if (state.step or rest) and self.params.get("steps") is None and not self.model.stop_training:
            raise ChannelError(
                f"Keras ended its epoch {epoch} at step {state.step} of epoch {state.epoch} of the channel: "
                "it takes the length of its first epoch, which was resumed, for that of all; call fit for "
                "each epoch"
            )
        self._save()

    def _reached(self) -> tuple[StepState, int]:
        """Return the state after the last whole global batch, and the batches trained on after it."""
        steps, rest = divmod(self._trained, self._batches)
        return StepState.of(self._dataset.step_state(steps)), rest

    def _save(self) -> None:
        state, rest = self._reached()
        if rest or state == self._saved:
            return
        path = self._weights(state)
        self.model.save_weights(path, overwrite=True)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        save_state(self._directory, state.document())
        self._saved = state
        for name in os.listdir(self._directory):
            if _WEIGHTS.fullmatch(name) and name != os.path.basename(path):
                os.unlink(os.path.join(self._directory, name))

    def _weights(self, state: StepState) -> str:
        return os.path.join(self._directory, f"{state.epoch}-{state.step}.weights.h5")
