"""A tf.data dataset whose elements are the steps of a Python generator.

    init -> number of a new generator
    turn(number) -> number ---- step(number) -> arrays, step(number) -> arrays, ... until it stops
    turn(number) -> its failure: an error, once, or the end
    end(number), at the end or whenever TensorFlow drops the iterator

`tf.data.Dataset.from_generator` does the same with conversions and checks at every step, and with two changes
of thread: it schedules each step on TensorFlow's pool, while the thread that requested the element waits. Two
changes cost as much as a block of records. So here the steps are a `map` that runs in the requesting thread
(`use_inter_op_parallelism=False`). Only the turns, two in an epoch, use TensorFlow's generator, because
TensorFlow calls its `finalize` when an iterator is dropped. A step is a tuple of arrays, which TensorFlow
takes without conversion.

An error becomes a failure that an operation of the graph raises at the second turn
(`streamer.readers.tensorflow.failures`). So the whole records before the fault come first, and the function
of a step has only its own operation.

Who may block whom. TensorFlow cannot cancel a step, and the thread that destroys the iterator (in most
programs the main thread) waits for the running step. So a step must never wait long. When TensorFlow drops an
iterator, it closes the generator in the same call.

A thread that needs the interpreter's lock while the interpreter shuts down stops for ever; a thread that
destroys the iterator would wait for it, and the program would hang. So an exit hook lets the running steps
finish and admits no more.
"""

from __future__ import annotations

import atexit
import itertools
import sys
import time
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops.from_generator_op import _GeneratorDataset
from tensorflow.python.data.ops.map_op import _MapDataset
from tensorflow.python.ops import script_ops

from streamer.readers.tensorflow.failures import CODES, encode_failure, raiser

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import FrameType

    from streamer.readers.tensorflow.failures import Failure

    Step = tuple[Any, ...]
    Steps = Generator[Step, None, None]

PATIENCE_S = 0.2
"""Seconds that a step may wait for bytes."""
_NUMBER = tf.TensorSpec([], tf.int64)
_FAILURE = tf.TensorSpec([None], tf.uint8)
_NO_FAILURE = np.empty(0, np.uint8)


def stepped(make: Callable[[], Steps], signature: tuple[tf.TensorSpec, ...]) -> tf.data.Dataset:
    """Return a dataset of a generator's steps, each a tuple of arrays as in `signature`, or one array.

    Each iterator has its own generator, which `make` returns at the iterator's first element. An error in
    `failures.CODES` ends the iterator with its status there, any other error with TensorFlow's status.
    """
    fail = raiser()
    registry = _Registry(make, encode=fail is not None)

    def init(_: Any) -> Any:
        return _call(registry.begin, (), _NUMBER)

    def turn(number: Any) -> Any:
        failure = _call(registry.turn, (number,), _FAILURE)
        if fail is not None:
            ok = tf.cond(tf.equal(tf.size(failure), 0), lambda: True, lambda: _failing(fail, failure))
            with tf.control_dependencies([ok]):
                return tf.identity(number)
        return number

    def finalize(number: Any) -> Any:
        return _call(registry.end, (number,), _NUMBER)

    def step(number: Any) -> Any:
        arrays = tf.numpy_function(registry.step, [number], [spec.dtype for spec in signature])
        for array, spec in zip(arrays, signature, strict=True):
            array.set_shape(spec.shape)
        return tuple(arrays) if len(arrays) > 1 else arrays[0]

    def steps(number: Any) -> tf.data.Dataset:
        return _MapDataset(
            tf.data.Dataset.from_tensors(number).repeat(),
            step,
            use_inter_op_parallelism=False,
            preserve_cardinality=False,  # the steps end when the generator does
        )

    # In flat_map, as in from_generator: after a bare _GeneratorDataset tf.data warns and does not optimise.
    nothing = tf.data.Dataset.from_tensors(tf.constant(0, tf.int64))
    return nothing.flat_map(lambda none: _GeneratorDataset(none, init, turn, finalize, _NUMBER)).flat_map(
        steps
    )


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], spec: tf.TensorSpec) -> Any:
    result = tf.numpy_function(function, arguments, spec.dtype)
    result.set_shape(spec.shape)
    return result


def _failing(fail: Callable[[Any], None], failure: Any) -> bool:
    fail(failure)
    return True


class _Registry:
    """The generators of one dataset, by number."""

    _running: ClassVar[set[Steps]] = set()
    """Generators of all datasets that were stepped and that TensorFlow has not dropped."""
    _closing = False

    def __init__(self, make: Callable[[], Steps], *, encode: bool) -> None:
        self._make = make
        self._encoded = tuple(kind for kind, _ in CODES) if encode else ()
        self._numbers = itertools.count()
        self._steps: dict[int, Steps] = {}
        self._failures: dict[int, Failure | None] = {}
        """Failures of the generators that had their first turn; None at a proper end, or before the end."""

    def begin(self) -> np.int64:
        number = next(self._numbers)
        self._steps[number] = self._make()
        return np.int64(number)

    def turn(self, number: int) -> Failure:
        """Return no failure at the first turn, then a failure if there is one; then raise StopIteration."""
        key = int(number)
        failure = self._failures.get(key, _NO_FAILURE)
        if failure is None:
            raise StopIteration
        self._failures[key] = None
        return failure

    def step(self, number: int) -> Step:
        if _Registry._closing:
            raise StopIteration  # no data is lost: the program is past its last line
        key = int(number)
        steps = self._steps[key]
        self._running.add(steps)
        try:
            return next(steps)
        except self._encoded as error:
            self._failures[key] = encode_failure(error)
            raise StopIteration from error

    def end(self, number: int) -> np.int64:
        steps = self._steps.pop(int(number))
        self._failures.pop(int(number), None)
        steps.close()
        self._running.discard(steps)
        return np.int64(0)

    @classmethod
    def close_all(cls) -> None:
        """Admit no further step and wait for the running ones; return at once if no iterator is left.

        TensorFlow does not report whether it will step an iterator again. So the wait, also for threads that
        are returning from Python, is at most 2 * `PATIENCE_S`.
        """
        cls._closing = True
        deadline = time.monotonic() + 2 * PATIENCE_S
        while cls._running or _steps_run():
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)  # gives the steps the interpreter's lock


def _steps_run() -> bool:
    """Return whether any thread runs Python code that TensorFlow has called."""
    return any(map(_runs_a_step, sys._current_frames().values()))  # noqa: SLF001 - documented, in spite of its name


def _runs_a_step(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != script_ops.__file__:
        frame = frame.f_back
    return frame is not None


atexit.register(_Registry.close_all)
