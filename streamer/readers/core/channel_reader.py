"""`ChannelReader`: base of the readers in plain Python that read one channel and have a position in it.

    load_state_dict ─▶ start ─▶ FIFO opened, start reached ─▶ position, which moves with each record

The start is the state until the position is reached. So an iteration whose FIFO does not appear, or that
fails before the start, leaves the state as it was loaded, and the next iteration begins there.

`ReadOptions` are the keyword arguments that all readers of a channel share, but that of
`streamer.readers.tensorflow`, which has the incumbent's arguments instead.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypedDict

from streamer.readers.core.config import Directories, directories
from streamer.readers.core.epochs import TIMEOUT, ChannelEpochs
from streamer.readers.core.position import ReaderPosition
from streamer.readers.core.read_loop import ReadLoop
from streamer.readers.core.start import reach_start
from streamer.readers.core.wrappers import check_wrappers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from streamer.readers.core.record_spec import RecordSpec
    from streamer.readers.core.skipping import SkipPolicy
    from streamer.readers.core.stream import PipeStream


class ReadOptions(TypedDict, total=False):
    """Keyword arguments of every reader of a channel."""

    pipe_dir: str | None
    """Directory of the FIFOs; None for `input/data` below `$SAGEMAKER_BASE_DIR` (default /opt/ml)."""
    state_dir: str | None
    """Directory of the state file; None for `pipe_state` there."""
    config_dir: str | None
    """Directory of inputdataconfig.json; None for `input/config` there."""
    timeout: float
    """Seconds to wait for a FIFO, and then for its writer."""
    skip: SkipPolicy | None
    """Corrupt records and objects that may be left out of each epoch; `skipped` of the reader counts them."""
    key: bool
    """Whether each record has the key of its object, its number there, and the bucket (`KeyedRecord`); errors
    name them too. The sidecar must keep key lists (`RecordKeys`).
    """


class ShuffledReadOptions(ReadOptions, total=False):
    """Keyword arguments of a reader that can shuffle records."""

    shuffle: int | None
    """Records of a window, which are permuted in memory; None for the order of the FIFO. If ranks share the
    channel by record, a window has whole steps. States have the place in a window.
    """
    seed: int | None
    """Seed of the shuffle: equal seeds make equal orders. None for 0."""


DEFAULTS: ShuffledReadOptions = {
    "pipe_dir": None,
    "state_dir": None,
    "config_dir": None,
    "timeout": TIMEOUT,
    "skip": None,
    "key": False,
    "shuffle": None,
    "seed": None,
}


def with_defaults(given: ReadOptions, kind: Any = ReadOptions) -> ShuffledReadOptions:
    """Return options of `kind`, and the defaults of those not given.

    Raises TypeError for an option that `kind` does not have, as Python does for an unknown argument.
    """
    for name in given.keys() - kind.__optional_keys__:
        raise TypeError(f"a reader got an unexpected keyword argument '{name}'")
    return {**DEFAULTS, **given}


def paths_of(options: ReadOptions) -> Directories:
    """Return the directories that `with_defaults` has."""
    return directories(options["pipe_dir"], options["config_dir"], options["state_dir"])


class ChannelReader:
    """A channel with a position. Other arguments are those of `PipeReader`."""

    def __init__(self, channel: str, spec: RecordSpec, options: ReadOptions, *, epoch: int | None) -> None:
        """`options`: with all defaults."""
        paths = paths_of(options)
        self.channel = channel
        self._spec = spec
        self.skipped = spec.skipped
        """What `skip` has left out so far."""
        self._config_dir = paths.config
        self._epochs = ChannelEpochs(channel, paths, epoch=epoch, timeout=options["timeout"])
        self._position: ReaderPosition | None = None
        """Position in the epoch that was begun last."""
        self.left = 0
        """Records of the present batch that have not been returned yet."""
        self._start: ReaderPosition | None = None
        """Start of the next iteration, if that resumes inside an epoch; None once it is reached."""
        self._tried = False
        """Whether an iteration has taken an epoch for the start."""

    def __bool__(self) -> bool:
        """Return True; without this method `bool` would call `len`."""
        return True

    @property
    def steps_per_epoch(self) -> int:
        """Number of global batches of an epoch, the same on all ranks. Raises TypeError as `len` does."""
        return self._epochs.counts().steps

    @property
    def padding(self) -> int:
        """Number of records at the end of each epoch of this rank that an evaluation leaves out, because they
        fill its last global batch (`Remainder: pad`). Raises TypeError as `len` does, and if there is padding
        that a shuffle has moved.
        """
        padding = self._epochs.counts().padding
        if padding and self._spec.shuffle is not None:
            raise TypeError(
                "a reader with shuffle returns the padding of Remainder: pad among other records; read an "
                "evaluation without shuffle"
            )
        return padding

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last record that was returned."""
        return self.reached.state()

    @property
    def reached(self) -> ReaderPosition:
        """The position after the last record that was returned."""
        if self._start is not None:
            return self._start
        if self._position is None:
            return self._epochs.position()
        return self._position.before(self.left)

    def load_state_dict(self, state: Mapping[str, Any], *, anyway: bool = False) -> None:
        """Begin the next iteration at the position `state`, with the rest of that epoch.

        The sidecar must offer that epoch; `penstock run --resume` offers it and does not fetch the bytes
        before the position. Raises ValueError if `state` is no state of this channel, or inside a window of
        another shuffle. Iterating raises ChannelError if the plan has changed since, unless `anyway`.
        """
        position = ReaderPosition.of(state, self.channel, self._spec.shuffle, anyway=anyway)
        self._epochs.seek(position.epoch)
        self._start, self._tried = position, False

    @contextlib.contextmanager
    def _next_epoch(self) -> Iterator[ReadLoop]:
        """Take the next epoch, or that of the start, and yield the loop over its records from the start on.

        Raises ChannelError as `check_wrappers`.
        """
        check_wrappers([self.channel], self._config_dir)
        if self._start is not None and self._tried:  # that iteration failed before the start
            self._epochs.seek(self._start.epoch)
        self._tried = True
        with self._epochs.next_stream() as stream:
            position = reach_start(stream, self.channel, self._start)
            with contextlib.closing(self._loop(stream, position)) as loop:
                self._position, self.left, self._start = position, 0, None
                yield loop

    def _loop(self, stream: PipeStream, position: ReaderPosition) -> ReadLoop:
        """Return the loop over the records of `stream`, which has reached `position`. Raises ChannelError."""
        return ReadLoop(stream, self._spec.reader(stream), self._spec, position)
