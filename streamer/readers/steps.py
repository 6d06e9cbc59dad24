"""Python generators stepped by TensorFlow's threads, and ended before the interpreter is.

    TensorFlow: init -> number of a new generator; next(number) -> one step; finalize(number)

`tf.data.Dataset.from_generator` is the same with conversions and checks around every step that cost more
than a step of ours does. A step is a tuple of arrays that go to TensorFlow as they are.

Who may block whom. TensorFlow cannot cancel a step, and whoever destroys the iterator (in most programs the
main thread, when the iterator is garbage) waits for the step that runs. So a step must never wait long. The
generator is closed when TensorFlow drops its iterator, in the same call.

A thread that needs the interpreter's lock while the interpreter is being torn down is frozen for good; the
iterator that waits for its step is then destroyed, and the program hangs instead of ending. So an exit hook
lets the running steps finish and admits no more.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import sys
import time
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops.from_generator_op import _GeneratorDataset
from tensorflow.python.ops import script_ops

from streamer.readers import strings

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import FrameType

    Step = tuple[Any, ...]
    Steps = Generator[Step, None, None]

PATIENCE_S = 0.2
"""Seconds that a step may wait for bytes; about the longest that anybody waits for a step."""


def stepped(
    make: Callable[[], Steps],
    signature: tuple[tf.TensorSpec, ...],
    result: tf.TensorSpec,
    finish: Callable[..., Any],
) -> tf.data.Dataset:
    """A dataset of what `finish`, in the graph, makes of every step of a generator.

    Each iterator has a generator of its own, made at its first element. `signature`: of a step; `result`:
    of what `finish` gives.
    """
    registry = _Registry(make)

    def init(_: Any) -> Any:
        number = tf.numpy_function(registry.begin, [], tf.int64)
        number.set_shape([])
        return number

    def following(number: Any) -> Any:
        arrays = tf.numpy_function(registry.step, [number], [spec.dtype for spec in signature])
        for array, spec in zip(arrays, signature, strict=True):
            array.set_shape(spec.shape)
        return finish(*arrays)

    def finalize(number: Any) -> Any:
        return tf.numpy_function(registry.end, [number], tf.int64)

    # Inside a function, as in from_generator: tf.data does not optimise what follows a bare one, and warns.
    return tf.data.Dataset.from_tensors(tf.constant(0, tf.int64)).flat_map(
        lambda nothing: _GeneratorDataset(nothing, init, following, finalize, result)
    )


class _Registry:
    """The generators of one dataset, by number."""

    _running: ClassVar[set[Steps]] = set()
    """Those, of all datasets, that were stepped and that TensorFlow has not dropped."""
    _closing = False

    def __init__(self, make: Callable[[], Steps]) -> None:
        self._make = make
        self._numbers = itertools.count()
        self._steps: dict[int, Steps] = {}

    def begin(self) -> np.int64:
        number = next(self._numbers)
        self._steps[number] = self._make()
        return np.int64(number)

    def step(self, number: int) -> Step:
        if _Registry._closing:
            raise StopIteration  # nobody sees this end: the program is past its last line
        steps = self._steps[int(number)]
        self._running.add(steps)
        return next(steps)

    def end(self, number: int) -> np.int64:
        steps = self._steps.pop(int(number))
        steps.close()
        self._running.discard(steps)
        return np.int64(0)

    @classmethod
    def close_all(cls) -> None:
        """Admit no further step and wait for the running ones; costs nothing if no iterator is left.

        TensorFlow does not say whether it will step an iterator again or has read far enough ahead; the
        wait for that is short and bounded, and so is the one for threads on their way out of Python.
        """
        cls._closing = True
        # What is copied from a generator's window, outside of Python, must not be freed under it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(list(cls._running)))
        deadline = time.monotonic() + 2 * PATIENCE_S
        while cls._running or _steps_run() or strings.crossing:
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


atexit.register(_Registry.close_all)
