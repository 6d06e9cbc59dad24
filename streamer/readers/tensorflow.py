"""`PipeModeDataset`: a Pipe channel as a `tf.data.Dataset`, for TensorFlow 2.16 to 2.21, in plain Python.

    PipeStream -> record reader -> from_generator -> prefetch -> unbatch -> the user's pipeline
                                   (vectors)                  |  (scalars)
                                                              -> rebatch -> the user's pipeline
                                                                 (vectors of batch_size)

The step from Python into TensorFlow costs the same for a vector as for one record. So the generator yields
one vector of records per block of the stream, the prefetch lets it run ahead of the consumer by two of
them, and TensorFlow's own `unbatch` makes scalars of them. With `batch_size` there never are scalars:
TensorFlow's `rebatch` cuts the vectors anew, which for small records is many times as fast, since every
element of a dataset costs about a microsecond. Nothing here is compiled.

Who may block whom. TensorFlow cannot cancel a step of the generator, and whoever destroys the iterator (in
most programs the main thread, when the iterator is garbage) waits for the step that runs. So a step never
waits long: when the FIFO has nothing, it yields an empty vector after `PATIENCE_S`, which `unbatch` passes
over. Without that, leaving a loop while its channel is stalled hangs the program. And a step that meets the
end of the interpreter never returns, so an exit hook lets the running steps finish and admits no more.

When the FIFO is opened. The incumbent opens it when the iterator is made, so `repeat(n)`, which makes
n+1 iterators, consumes an epoch that nobody reads (contract §1.5). Here it is opened, and its epoch taken,
when the first element is asked for.

Errors. TensorFlow turns an exception of a Python step into `tf.errors.UnknownError`, whose text holds
ours: the class, the message, and the traceback. (Its `py_func` knows only ValueError, TypeError,
StopIteration, MemoryError and NotImplementedError as something else; `DataLossError` is not within reach,
and the incumbent's `InternalError` is neither.) After an error the iterator is over.

An iterator's checkpoint does not hold the position in a FIFO, and the graph of this dataset cannot be
moved to another process (tf.data service), as with every dataset made of Python.
"""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import script_ops

from streamer.readers.config import PipeModeDatasetException, check_channel, directories
from streamer.readers.plain import TIMEOUT, check_format, next_stream, record_reader
from streamer.readers.state import EpochState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from numpy.typing import NDArray

    from streamer.readers.config import Directories

__all__ = ["PipeModeDataset", "PipeModeDatasetException"]

PATIENCE_S = 0.2
"""Seconds after which a step that has no bytes returns to TensorFlow."""
AHEAD = 2
"""Vectors (of about one block each) that may wait between the generator and the consumer."""


class PipeModeDataset(tf.data.Dataset):  # type: ignore[misc] # tensorflow publishes no types
    """The records of a Pipe channel, each a scalar `tf.string`; every iterator reads the next epoch.

    The arguments are the incumbent's (contract §6.1). `record_format`: 'RecordIO', 'TFRecord' or
    'TextLine'. `state_dir`, `pipe_dir`, `config_dir` default to `pipe_state`, `input/data` and
    `input/config` below `$SAGEMAKER_BASE_DIR` (default /opt/ml). `benchmark` prints time and throughput of
    an iterator when it is over; `benchmark_records_interval`, if not 0, prints the number of records at
    every multiple of it, with the time and bytes since the last such lines (the incumbent prints those of
    the one record). Records come in blocks, so a block's time is divided equally among its records.
    `max_corrupted_records_to_skip`, for TFRecord only: how many records in a row may fail their data CRC
    and be left out.

    `batch_size`, an extension: elements are vectors of so many records, ready for `tf.io.parse_example`; the
    last one of an epoch is shorter, or left out with `drop_remainder`.

    Raises PipeModeDatasetException (a ChannelError) if the channel is unknown or is not a Pipe channel, or
    the skip has no meaning; `tf.errors.InvalidArgumentError` for an unknown format; ChannelError if the
    state directory cannot be made. Iterating raises `tf.errors.UnknownError` with the text of
    TruncatedStream, CorruptRecord or ChannelError, the latter if the FIFO does not appear in 120 s.

    Every host reads a FIFO of its own, so tf.distribute must not divide it again: auto-sharding is off.
    """

    def __init__(  # noqa: PLR0917 - the incumbent's signature
        self,
        channel: str,
        record_format: str = "RecordIO",
        state_dir: str | None = None,
        pipe_dir: str | None = None,
        config_dir: str | None = None,
        benchmark: bool = False,  # noqa: FBT001, FBT002 - the incumbent's signature
        benchmark_records_interval: int = 0,
        max_corrupted_records_to_skip: int = 0,
        *,
        batch_size: int | None = None,
        drop_remainder: bool = False,
    ) -> None:
        try:
            check_format(record_format, max_corrupted_records_to_skip)
        except ValueError as error:
            raise tf.errors.InvalidArgumentError(None, None, str(error)) from error
        if benchmark_records_interval < 0:
            raise PipeModeDatasetException(
                f"benchmark_records_interval is {benchmark_records_interval}; it cannot be negative"
            )
        if batch_size is not None and batch_size < 1:
            raise PipeModeDatasetException(f"batch_size is {batch_size}; it must be 1 or more")
        if drop_remainder and batch_size is None:
            raise PipeModeDatasetException("drop_remainder has no meaning without batch_size")
        where = directories(pipe_dir, config_dir, state_dir)
        check_channel(channel, where.config)
        EpochState(where.state, channel).prepare()
        self.channel = channel
        self.record_format = record_format
        self.pipe_dir, self.config_dir, self.state_dir = where.pipe, where.config, where.state
        self.benchmark = benchmark
        self.benchmark_records_interval = benchmark_records_interval
        self.max_corrupted_records_to_skip = max_corrupted_records_to_skip
        # The closure must not hold `self`: the dataset would keep itself alive.
        meter = _meters(benchmark=benchmark, interval=benchmark_records_interval)
        vectors = tf.data.Dataset.from_generator(
            lambda: _Steps(_epoch(channel, record_format, where, max_corrupted_records_to_skip, meter())),
            output_signature=tf.TensorSpec([None], tf.string),
        ).prefetch(AHEAD)
        elements = vectors.unbatch() if batch_size is None else vectors.rebatch(batch_size, drop_remainder)
        self._dataset = elements.with_options(_options())
        super().__init__(self._dataset._variant_tensor)  # noqa: SLF001 - how datasets wrap each other

    def _inputs(self) -> list[Any]:
        return [self._dataset]

    @property
    def element_spec(self) -> tf.TensorSpec:
        return self._dataset.element_spec

    @property
    def output_classes(self) -> Any:
        """As the incumbent has it, from TensorFlow 1; so have the next two."""
        return tf.Tensor

    @property
    def output_shapes(self) -> tf.TensorShape:
        return self.element_spec.shape

    @property
    def output_types(self) -> tf.DType:
        return tf.string


def _options() -> tf.data.Options:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return options


class _Steps:
    """An iterator that TensorFlow's threads step, and that ends before the interpreter does.

    A thread that needs the interpreter's lock while the interpreter is being torn down is frozen for good;
    the iterator that waits for its step is then destroyed, and the program hangs instead of ending.
    """

    _begun: ClassVar[weakref.WeakSet[_Steps]] = weakref.WeakSet()
    """Those that were stepped and not dropped by TensorFlow yet, which does so after their last step."""
    _closing = False

    def __init__(self, steps: Iterator[NDArray[np.object_]]) -> None:
        self._steps = steps

    def __iter__(self) -> Iterator[NDArray[np.object_]]:
        return self

    def __next__(self) -> NDArray[np.object_]:
        if _Steps._closing:
            raise StopIteration  # nobody sees this end: the program is past its last line
        self._begun.add(self)
        return next(self._steps)

    @classmethod
    def close_all(cls) -> None:
        """Admit no further step and wait for the running ones; costs nothing if no iterator is left.

        TensorFlow does not say whether it will step an iterator again or has read far enough ahead; the
        wait for that is short and bounded, and so is the one for threads on their way out of Python.
        """
        cls._closing = True
        deadline = time.monotonic() + 2 * PATIENCE_S
        while cls._begun or _steps_run():
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)  # they need the interpreter's lock, which this thread holds


def _steps_run() -> bool:
    """Whether any thread is inside Python code that TensorFlow called."""
    return any(map(_runs_a_step, sys._current_frames().values()))  # noqa: SLF001 - documented, in spite of its name


def _runs_a_step(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != script_ops.__file__:
        frame = frame.f_back
    return frame is not None


atexit.register(_Steps.close_all)


def _epoch(
    channel: str, record_format: str, where: Directories, skip: int, meter: _Meter | None
) -> Iterator[NDArray[np.object_]]:
    """One epoch as vectors of records; empty ones while nothing arrives."""
    nothing = np.empty(0, dtype=object)
    with next_stream(channel, where, timeout=TIMEOUT, patience=PATIENCE_S) as stream:
        batches = record_reader(stream, record_format, skip=skip).batches()
        for batch in batches if meter is None else meter.measure(batches):
            if not batch:
                yield nothing
                continue
            vector = np.empty(len(batch), dtype=object)
            vector[:] = batch
            yield vector


def _meters(*, benchmark: bool, interval: int) -> Callable[[], _Meter | None]:
    if not benchmark and not interval:
        return lambda: None
    return lambda: _Meter(benchmark=benchmark, interval=interval)


class _Meter:
    """The incumbent's lines about reading speed, on stdout (contract §6.3); its "GB" is 2**30 bytes."""

    def __init__(self, *, benchmark: bool, interval: int) -> None:
        self._benchmark = benchmark
        self._interval = interval
        self._records = 0
        self._bytes = 0
        self._nanoseconds = 0
        self._reported = (0, 0)
        """Bytes and nanoseconds up to the last lines."""

    def measure(self, batches: Iterator[list[bytes]]) -> Iterator[list[bytes]]:
        """Pass `batches` on; print the totals when they end, or are no longer wanted."""
        try:
            while True:
                started = time.perf_counter_ns()
                batch = next(batches, None)
                self._count(batch or [], time.perf_counter_ns() - started)
                if batch is None:
                    return
                yield batch
        finally:
            self._total()

    def _count(self, batch: list[bytes], nanoseconds: int) -> None:
        if self._interval:
            self._report(batch, nanoseconds)
        self._records += len(batch)
        self._bytes += sum(map(len, batch))
        self._nanoseconds += nanoseconds

    def _report(self, batch: list[bytes], nanoseconds: int) -> None:
        """Say every multiple of the interval that this batch reaches."""
        start = 0
        size, spent = self._bytes, self._nanoseconds
        for stop in range(self._interval - self._records % self._interval, len(batch) + 1, self._interval):
            size += sum(map(len, batch[start:stop]))
            spent = self._nanoseconds + nanoseconds * stop // len(batch)
            self._say("records", self._records + stop)
            self._say("records read_time_ns", spent - self._reported[1])
            self._say("records read_bytes", size - self._reported[0])
            self._reported = (size, spent)
            start = stop

    def _total(self) -> None:
        if not self._benchmark:
            return
        seconds = self._nanoseconds / 1e9
        self._say("total read_time_ms", self._nanoseconds // 1_000_000)
        self._say("total read_bytes", self._bytes)
        self._say("total read_GB/s", f"{self._bytes / 2**30 / seconds if seconds else 0.0:g}")

    def _say(self, what: str, value: object) -> None:
        print(f"PipeModeDatasetOp::Dataset::Iterator {what}: {value}", flush=True)  # noqa: T201 - the incumbent's output
