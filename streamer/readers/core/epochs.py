"""Counts the epochs of a channel and returns the stream of the next one.

The state file counts the epochs for all readers of the container (`streamer.readers.core.state`). A reader
with the argument `epoch` counts from that epoch in its own object and does not use the state file. The first
read of a stream opens its FIFO. An epoch whose FIFO was not opened goes back to the state file.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from streamer.errors import ChannelError
from streamer.readers.core.position import RankSteps, ReaderPosition
from streamer.readers.core.proof import Proof
from streamer.readers.core.read_end import STDIN
from streamer.readers.core.state import EpochState
from streamer.readers.core.stream import PipeStream
from streamer.step_state import StepState
from streamer.trailer import SIDECAR_LOCK, fifo_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.readers.core.config import Directories
    from streamer.readers.core.shuffle import Shuffle
    from streamer.trailer import Trailer

TIMEOUT = 120.0
"""Seconds to wait for a FIFO; the incumbent's documented value (contract §6.2)."""

_counting = threading.Lock()
"""Held while an epoch is taken: two threads may iterate one reader. The lock is the module's, so that a
reader can be pickled."""


class EpochCounts(NamedTuple):
    """Records and steps of every epoch, for a channel whose ranks share it by record."""

    records: int
    """Records of this rank."""
    steps: int
    """Global batches."""
    padding: int
    """How many of the records, at the end of the epoch, are padding."""


class ChannelEpochs:
    """The epochs of one channel. Every method raises ChannelError if the state file cannot be used.

    `epoch`: the first epoch; None for the one in the state file. `timeout`, `patience`: as for `PipeStream`.
    """

    def __init__(
        self,
        channel: str,
        directories: Directories,
        *,
        epoch: int | None = None,
        timeout: float = TIMEOUT,
        patience: float | None = None,
    ) -> None:
        self.channel = channel
        self._pipe_dir = directories.pipe
        self._state = EpochState(directories.state, channel)
        self._epoch = epoch
        self._timeout = timeout
        self._patience = patience
        self._first = epoch
        """Epoch that this object was told to begin with. No earlier epoch is known to be of this job."""
        self._sought: int | None = None
        """Epoch of the state that was loaded last."""
        self.begun = False
        """Whether this object has taken an epoch."""
        self._counts: EpochCounts | None = None
        """Counts in the trailer that `counts` read last. A sidecar that ends may remove its trailers."""

    def peek(self) -> int:
        """Return the next epoch without taking it."""
        return self._state.peek() if self._epoch is None else self._epoch

    def position(self) -> ReaderPosition:
        """Return the position of the next epoch's first record, by its trailer, or by the one before it."""
        epoch = self.peek()
        rank = self.rank(epoch)
        if rank is None and epoch and (before := self.rank(epoch - 1)) is not None:
            rank = replace(before, first=0)
        first = 0 if rank is None else rank.first
        return ReaderPosition(self.channel, epoch, records=first, rank=rank)

    def rank(self, epoch: int) -> RankSteps | None:
        """Return the steps of an epoch by its present trailer; None if that has none."""
        return RankSteps.of(self._trailer(epoch))

    def state_after(self, state: StepState, steps: int, shuffle: Shuffle | None = None) -> StepState:
        """Return a job's state `steps` global batches after `state`, where `shuffle` begins windows.

        Its order is that of the present trailer: a state may be loaded `anyway`. Raises as `counts`.
        """
        counts = self.counts()
        epochs, step = divmod(state.step + steps, counts.steps)
        epoch = state.epoch + epochs
        trailer = self._trailer(epoch) or self._trailer(epoch - 1)
        order = trailer.order if trailer is not None else None
        inside = None
        if shuffle is not None:
            first = 0 if epochs else state.begin
            inside = shuffle.inside(step, first=first, batch=counts.records // counts.steps)
        return StepState(state.channel, epoch, step, order or state.order, inside)

    def seek(self, epoch: int) -> None:
        """Make `epoch` the next one."""
        self._first = self._sought = epoch
        if self._epoch is None:
            self._state.put(epoch)
        else:
            self._epoch = epoch

    def counts(self) -> EpochCounts:
        """Return the counts, which are equal for all epochs of a job.

        Waits until the first epoch is offered; with --resume that is a later one than epoch 0. After an epoch
        was taken, by any reader of the state file, the counts are in its trailer, and there is no wait: the
        next epoch may never be offered.
        Raises TypeError, as `len` does, if the sidecar does not know them; ChannelError as `PipeStream.open`.
        """
        epoch = self.peek()
        trailer, first = None, epoch in (0, self._first)
        if not first:
            trailer = self._trailer(epoch - 1) or self._trailer(epoch)
            if trailer is None and self._counts is not None:
                return self._counts
            # Another program that serves FIFOs publishes no counts, so nothing is worth a wait.
            first = trailer is None and os.path.lexists(os.path.join(self._pipe_dir, SIDECAR_LOCK))
        if first:
            stream = self._stream(epoch, hint=self._hint(epoch))
            # Another reader of the state file may take this epoch, whose FIFO is then seen no more.
            trailer = stream.offered(over=lambda: self.peek() != epoch)
        if trailer is None or trailer.records is None or trailer.steps is None:
            raise TypeError(
                f"the number of records of channel {self.channel} is unknown: only a channel whose Ranks "
                "have GlobalBatch has it"
            )
        self._counts = EpochCounts(trailer.records, trailer.steps, trailer.padding)
        return self._counts

    def next_stream(self) -> PipeStream:
        """Take the next epoch and return its stream, not yet open.

        If the stream is closed before its FIFO was opened, the epoch goes back to the state file. Raises
        ChannelError also if there is no directory of FIFOs.
        """
        self.begun = True
        with _counting:
            epoch = self._epoch
            if epoch is not None:
                self._epoch = epoch + 1
        if epoch is not None:
            return self._stream(epoch)
        if not os.path.isdir(self._pipe_dir):
            raise ChannelError(
                f"{self._pipe_dir} does not exist, so no sidecar has started; start it first, or set "
                "SAGEMAKER_BASE_DIR to its base directory"
            )
        taken = self._state.take()
        return self._stream(taken, hint=self._hint(taken), unused=lambda: self._state.give_back(taken))

    def _trailer(self, epoch: int) -> Trailer | None:
        """Return the present trailer of an epoch. Raises StreamError if it cannot be read."""
        proof = Proof(fifo_path(self._pipe_dir, self.channel, epoch))
        proof.look()
        return proof.trailer

    def _hint(self, epoch: int) -> str:
        """Return what to do if the epoch does not appear; empty if it is not of the state file."""
        if self._epoch is not None:
            return ""
        return (
            f"the state file {self._state.path} says {epoch}; "
            "to resume from a saved state, start the sidecar with --resume; "
            "if the sidecar was restarted, delete that file"
        )

    def _stream(self, epoch: int, *, hint: str = "", unused: Callable[[], None] | None = None) -> PipeStream:
        stream = PipeStream(
            fifo_path(self._pipe_dir, self.channel, epoch),
            timeout=self._timeout,
            patience=self._patience,
            hint=hint,
            unused=unused,
        )
        if epoch == self._sought:
            stream.leave_earlier()
        return stream


def path_streams(
    path: str | os.PathLike[str],
    *,
    timeout: float = TIMEOUT,
    patience: float | None = None,
    proof: bool = False,
) -> Callable[[], PipeStream]:
    """Return a function that opens `path` anew at each call: a FIFO, a regular file, or /dev/stdin.

    The second call for standard input raises ChannelError: the first stream has read its bytes, and an empty
    epoch would be wrong.
    """
    used = False

    def next_stream() -> PipeStream:
        nonlocal used
        if used and os.fspath(path) == STDIN:
            raise ChannelError(
                "standard input was read already and can be read only once; read a channel for several epochs"
            )
        used = True
        return PipeStream(path, timeout=timeout, patience=patience, proof=proof)

    return next_stream
