"""`PipeModeDataset`: a Pipe channel as a `tf.data.Dataset`, for TensorFlow 2.16 to 2.21, in plain Python.

    PipeStream -> record reader -> step -> prefetch -> unbatch -> the user's pipeline
                  (a block)        (vector of records)  (scalars, or vectors of batch_size)

A call from TensorFlow into Python costs the same for a vector as for one record. So a step returns the
records of a whole block as one vector, `prefetch` runs two vectors ahead of the consumer, and TensorFlow's
`unbatch` makes scalars of them, without a copy (`streamer.readers.tensorflow.owned`). With `batch_size` a
step returns whole batches or parts of them (`streamer.readers.tensorflow.batches`). Nothing here is compiled.
docs/design/measured.md has the other ways that were measured.

A step waits at most `PATIENCE_S` (`streamer.readers.tensorflow.steps` gives the reason). A step without bytes
returns an empty vector, which `unbatch` skips, and checks for Ctrl-C
(`streamer.readers.tensorflow.interrupts`).

When the FIFO is opened. The incumbent opens it when the iterator is made, so `repeat(n)`, which makes
n+1 iterators, uses up an epoch that is not read (contract §1.5). This dataset takes the epoch and opens its
FIFO when the first element is requested.

Errors are raised by an operation of the graph (`streamer.readers.tensorflow.failures`):
`tf.errors.DataLossError` for a stream that broke, `tf.errors.InternalError` for bytes that are no record, as
the incumbent does (contract §6.3), `tf.errors.NotFoundError` for a FIFO that did not appear or has no writer.
Their text is class and text of Penstock's error. The iterator first returns the whole records before the
fault, then raises the error. At the next request it goes on after a TFRecord whose data is corrupt; `skipped`
counts that record. After any other error every request raises `tf.errors.CancelledError`, so that
`ignore_errors` cannot end a broken epoch as a whole one.

An iterator cannot be saved, because TensorFlow refuses the stateful steps of this pipeline.
`streamer.readers.tensorflow.spec` has positions that can be saved. The graph of this dataset cannot be
moved to another process (tf.data service), as with every dataset made of Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.eager import core, executor
from tensorflow.python.framework import tensor_shape
from tensorflow.python.ops import script_ops

from streamer.errors import ChannelError
from streamer.formats.tfrecord import Skipped
from streamer.readers.core.config import PipeModeDatasetException, check_channel, directories, rank_channel
from streamer.readers.core.epochs import TIMEOUT, ChannelEpochs, path_streams
from streamer.readers.core.memory import keep_memory_of_threads
from streamer.readers.core.record_spec import format_of
from streamer.readers.core.shuffle import Shuffle
from streamer.readers.core.state import EpochState
from streamer.readers.tensorflow import failures, interrupts
from streamer.readers.tensorflow.epoch_steps import epochs_dataset
from streamer.readers.tensorflow.spec import DatasetSpec, parse_start
from streamer.readers.tensorflow.steps import PATIENCE_S
from streamer.step_state import StepState, is_step_state
from streamer.units import counted

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from streamer.readers.core.epochs import EpochCounts
    from streamer.readers.core.skipping import SkipPolicy
    from streamer.readers.core.stream import PipeStream

__all__ = ["PipeModeDataset", "PipeModeDatasetException"]

_CALLED = tuple(str(module.__file__) for module in (core, executor, script_ops, tensor_shape, failures))
"""Files whose functions TensorFlow calls while the main thread waits for an element. They make an error, end
an executor (by `__del__`), run a step, return a shape's length and encode a failure."""


class PipeModeDataset(tf.data.Dataset):  # type: ignore[misc] # tensorflow publishes no types
    """The records of a Pipe channel, each a scalar `tf.string`; every iterator reads the next epoch.

    The arguments are the incumbent's (contract §6.1). `record_format`: 'RecordIO', 'TFRecord', 'TextLine', or
    an extension: 'MXRecordIO', 'fixed:BYTES', or None for the channel's `Records.Format`. `state_dir`,
    `pipe_dir`, `config_dir` default to `pipe_state`, `input/data` and `input/config` below
    `$SAGEMAKER_BASE_DIR` (default /opt/ml). `benchmark` prints time and throughput of an iterator at its end.
    `benchmark_records_interval`, if not 0, prints the number of records at every multiple of the interval,
    with time and bytes since the last print (the incumbent prints those of one record). A block's time is
    divided equally among its records. `max_corrupted_records_to_skip`, for TFRecord only: number of
    successive records that may fail their data CRC and be left out; `skipped` has their number and positions.

    Extensions, by keyword. `batch_size`: elements are vectors of `batch_size` records, ready for
    `tf.io.parse_example`; an epoch's last vector is shorter, or left out with `drop_remainder`. `epoch`: the
    epoch of the first iterator, from which the dataset counts without the state file. `timeout`: seconds to
    wait for a FIFO, and then for a writer. `from_path` reads a path instead of a channel. `positions`:
    elements are pairs of a record and the position after it, a scalar string for a `tf.Variable` that
    `tf.train.Checkpoint` saves. `start`: such a position, or the state of a PipeReader; the first iterator
    returns the rest of that epoch. An empty string, the variable's value before the first step, is ignored.
    `anyway`: use the position even if the plan's digest has changed. `rank`: read the channel's rank FIFO of
    this index, from 0 on. `cardinality`: wait until the sidecar offers the first epoch, and take the number
    of its elements from the trailer, for a channel whose ranks share it by record; `len(dataset)`,
    `dataset.cardinality()` and Keras then know it. An epoch whose trailer has another number raises
    `tf.errors.NotFoundError`. `key`: a record is a `KeyedRecord` of tensors: the record, the key of its
    object, its number there (int64), and the bucket; with `batch_size` each field is a vector. Errors name
    them too. The sidecar must keep key lists (`RecordKeys`). `skip`: corrupt records and objects that may be
    left out of each epoch (`SkipPolicy`); `skipped` counts them. Records are then parsed as by PipeReader.
    `shuffle`: permute records in windows of `shuffle` records, which are held in memory, as PipeReader does;
    positions and states are then inside a window too. `seed`: equal seeds make equal orders; 0 by default.

    Raises PipeModeDatasetException (a ChannelError) if the channel is unknown or is not a Pipe channel, if
    its `Records.Format` is another one, if arguments exclude each other, or if the trailer has no number of
    records for `cardinality`; `tf.errors.InvalidArgumentError` for an unknown format; ChannelError if the
    state directory cannot be made. Iterating raises `tf.errors.InternalError` for CorruptRecord and
    CutRecord, `tf.errors.DataLossError` for any other StreamError, `tf.errors.NotFoundError` for
    ChannelError.

    Every host reads its own FIFO, so auto-sharding is off: tf.distribute must not divide the data again.
    """

    _first_state: StepState | None = None
    """State before the first iterator, once `step_state` was called."""

    def __init__(  # noqa: PLR0913, PLR0917 - the incumbent's signature
        self,
        channel: str,
        record_format: str | None = "RecordIO",
        state_dir: str | None = None,
        pipe_dir: str | None = None,
        config_dir: str | None = None,
        benchmark: bool = False,  # noqa: FBT001, FBT002 - the incumbent's signature
        benchmark_records_interval: int = 0,
        max_corrupted_records_to_skip: int = 0,
        *,
        batch_size: int | None = None,
        drop_remainder: bool = False,
        epoch: int | None = None,
        timeout: float = TIMEOUT,
        start: Mapping[str, Any] | str | bytes | tf.Tensor | tf.Variable | None = None,
        anyway: bool = False,
        positions: bool = False,
        rank: int | None = None,
        cardinality: bool = False,
        key: bool = False,
        skip: SkipPolicy | None = None,
        shuffle: int | None = None,
        seed: int | None = None,
    ) -> None:
        try:
            window = Shuffle.of(shuffle, seed)
        except ValueError as error:
            raise PipeModeDatasetException(str(error)) from error
        if rank is not None:
            channel = rank_channel(channel, rank)
        if epoch is not None and epoch < 0:
            raise PipeModeDatasetException(f"epoch is {epoch}; it cannot be negative")
        saved = parse_start(start, channel, window, anyway=anyway)
        if saved is not None and epoch is not None:
            raise PipeModeDatasetException("start names the first epoch, so leave epoch out")
        if cardinality and (saved is not None or max_corrupted_records_to_skip):
            raise PipeModeDatasetException(
                "an epoch that begins at start, or that may skip records, has no known cardinality: leave "
                "start and max_corrupted_records_to_skip out, or cardinality"
            )
        paths = directories(pipe_dir, config_dir, state_dir)
        self.channel: str | None = channel
        self.pipe_dir: str | None = paths.pipe
        self.config_dir: str | None = paths.config
        self.state_dir: str | None = paths.state
        check_channel(channel, paths.config)
        spec = DatasetSpec(
            format_of([channel], paths.config, record_format),
            benchmark=benchmark,
            benchmark_records_interval=benchmark_records_interval,
            max_corrupted_records_to_skip=max_corrupted_records_to_skip,
            batch_size=batch_size,
            drop_remainder=drop_remainder,
            positions=positions,
            key=key,
            skip=skip,
            shuffle=window,
        )
        epochs = ChannelEpochs(channel, paths, epoch=epoch, timeout=timeout, patience=PATIENCE_S)
        self._epochs: ChannelEpochs | None = epochs
        self._starts = [] if saved is None else [saved]
        records: list[int] = []  # filled once the channel is checked
        dataset = self._become(
            spec, epochs.next_stream, channel=channel, starts=self._starts, records=records
        )
        if saved is not None:
            epochs.seek(saved.epoch)
        elif epoch is None:
            EpochState(paths.state, channel).prepare()
        if cardinality:
            records.append(_counts(epochs).records)
            cardinality_of = tf.data.experimental.assert_cardinality(spec.elements(records[0]))
            dataset = dataset.apply(cardinality_of)
        self._wrap(dataset)

    @classmethod
    def from_path(
        cls,
        path: str | os.PathLike[str],
        record_format: str,
        *,
        max_corrupted_records_to_skip: int = 0,
        batch_size: int | None = None,
        drop_remainder: bool = False,
        timeout: float = TIMEOUT,
        proof: bool = False,
    ) -> PipeModeDataset:
        """Return the records of a FIFO, a regular file or /dev/stdin; every iterator reads the path anew.

        Needs neither channel nor state file. Standard input can be read once; a second iterator raises an
        error. A sidecar's FIFO and a pipe from `penstock cat` must have a proof of their end, or iterating
        raises `tf.errors.DataLossError`. With `proof` any other file must have one too.
        """
        dataset: PipeModeDataset = cls.__new__(cls)
        dataset.channel = None
        dataset.pipe_dir = dataset.config_dir = dataset.state_dir = None
        dataset._epochs = None
        spec = DatasetSpec(
            record_format,
            max_corrupted_records_to_skip=max_corrupted_records_to_skip,
            batch_size=batch_size,
            drop_remainder=drop_remainder,
        )
        streams = path_streams(path, timeout=timeout, patience=PATIENCE_S, proof=proof)
        dataset._wrap(dataset._become(spec, streams))
        return dataset

    @property
    def steps_per_epoch(self) -> int:
        """Number of global batches of an epoch, the same on all ranks, if ranks share the channel by record.

        Waits until the sidecar offers the first epoch. Raises PipeModeDatasetException if the number is
        unknown.
        """
        if self._epochs is None:
            raise PipeModeDatasetException("the number of steps of a path is unknown; read a channel")
        return _counts(self._epochs).steps

    @property
    def padding(self) -> int:
        """Number of records at the end of each epoch of this rank that an evaluation leaves out, because they
        fill its last global batch (`Remainder: pad`). Waits, and raises, as `steps_per_epoch` does; raises
        PipeModeDatasetException too if there is padding that `shuffle` has moved.
        """
        if self._epochs is None:
            raise PipeModeDatasetException("the padding of a path is unknown; read a channel")
        padding = _counts(self._epochs).padding
        if padding and self._spec.shuffle is not None:
            raise PipeModeDatasetException(
                "a dataset with shuffle returns the padding of Remainder: pad among other records; read an "
                "evaluation without shuffle"
            )
        return padding

    @property
    def next_epoch(self) -> int:
        """Epoch that the next iterator reads. Raises PipeModeDatasetException for a path."""
        if self._epochs is None:
            raise PipeModeDatasetException("a path has no epochs; read a channel")
        return self._epochs.peek()

    def step_state(self, steps: int = 0) -> dict[str, Any]:
        """Return the state of the job after `steps` global batches of this dataset, for `--resume`.

        Call it before the first iterator too, because it counts from the position that it finds then. Waits,
        and raises, as `steps_per_epoch` does. Raises ChannelError if corrupt records were left out, or if
        it counts and was first called after the first iterator.
        """
        if self._epochs is None:
            raise PipeModeDatasetException("a path has no state of steps; read a channel")
        if isinstance(self.skipped, Skipped) and self.skipped.records:
            raise ChannelError(
                f"{self.channel} has no state, because "
                f"{counted(self.skipped.records, 'corrupt record was', 'corrupt records were')} left out and "
                "its steps cannot be counted; mend or leave out the objects, or do not skip corrupt "
                "records"
            )
        _counts(self._epochs)
        if self._first_state is None:
            if steps and self._epochs.begun:
                raise ChannelError(
                    f"the steps of {self.channel} count from where its first iterator began; call "
                    "step_state() once before that"
                )
            position = self._starts[0] if self._starts else self._epochs.position()
            state = position.state()
            if not is_step_state(state):
                raise ChannelError(
                    f"the first position of {self.channel} is no state of steps; begin with a state of "
                    "steps, and call step_state while the sidecar runs"
                )
            if position.rank is not None and position.rank.workers > 1:
                raise ChannelError(
                    f"{self.channel} has the steps of one DataLoader worker of {position.rank.workers}; "
                    "remove Ranks.Workers, which is for PyTorch"
                )
            self._first_state = StepState.of(state)
        return self._epochs.state_after(self._first_state, steps, self._spec.shuffle).document()

    def _become(
        self, spec: DatasetSpec, streams: Callable[[], PipeStream], **options: Any
    ) -> tf.data.Dataset:
        """Take the options and return the dataset of elements, which must not refer to `self`."""
        self._spec = spec
        self.record_format = spec.record_format
        self.benchmark = spec.benchmark
        self.benchmark_records_interval = spec.benchmark_records_interval
        self.max_corrupted_records_to_skip = spec.max_corrupted_records_to_skip
        left_out = Skipped()
        self.skipped: Any = left_out if spec.skip is None else spec.skipped
        """What all iterators of this dataset have left out: `Skipped`, or `SkipCounts` with `skip`."""
        keep_memory_of_threads()
        interrupts.watch(*_CALLED)
        return epochs_dataset(spec, streams, left_out, **options)

    def _wrap(self, dataset: tf.data.Dataset) -> None:
        """Become `dataset`."""
        self._dataset = dataset.with_options(_options())
        super().__init__(self._dataset._variant_tensor)  # noqa: SLF001 - how datasets wrap each other

    def _inputs(self) -> list[Any]:
        return [self._dataset]

    @property
    def element_spec(self) -> Any:
        return self._dataset.element_spec

    @property
    def output_classes(self) -> Any:
        """Classes of an element. This and the next two properties are of TensorFlow 1, as the incumbent's."""
        return tf.nest.map_structure(lambda _: tf.Tensor, self.element_spec)

    @property
    def output_shapes(self) -> Any:
        return tf.nest.map_structure(lambda spec: spec.shape, self.element_spec)

    @property
    def output_types(self) -> Any:
        return tf.nest.map_structure(lambda spec: spec.dtype, self.element_spec)


def _counts(epochs: ChannelEpochs) -> EpochCounts:
    try:
        return epochs.counts()
    except TypeError as error:
        raise PipeModeDatasetException(str(error)) from error


def _options() -> tf.data.Options:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return options
