"""A tf.data dataset of the steps of a Python generator.

    init -> number of a new generator
    turn(number) -> layout ---- step(number) -> arrays, step(number) -> arrays, ... until the layout ends
    turn(number) -> the next layout, a failure, or the end
    end(number), at the end or whenever TensorFlow drops the iterator

A layout has its own types of arrays and its own datasets after its steps (`BatchLayout`). The generator
begins with layout 0, unless it first yields a `NewLayout`. When it yields one later, the datasets of the
current layout end and those of the next one begin.

`tf.data.Dataset.from_generator` does the same with conversions and checks at every step, and with two changes
of thread: it schedules each step on TensorFlow's pool, while the thread that requested the element waits. Two
changes cost as much as a block of records. So here the steps are a `map` that runs in the requesting thread
(`use_inter_op_parallelism=False`). Only the turns, few in an epoch, use TensorFlow's generator, because
TensorFlow calls its `finalize` when an iterator is dropped. A step is a tuple of arrays, whose strings are
copied into TensorFlow's memory once (`streamer.readers.tensorflow.owned`).

An error becomes a failure that an operation of the graph raises at the next turn
(`streamer.readers.tensorflow.failures`). So the whole records before the fault come first, and the function
of a step has only its own operation. After a `FailedRecord` the current layout goes on. After any other error
each further turn is the same failure with the status CANCELLED, the only one that `ignore_errors` passes on:
with an end, a broken epoch would look whole to it, and with DATA_LOSS it would ask for ever.

Who may block whom. TensorFlow cannot cancel a step, and the thread that destroys the iterator (in most
programs the main thread) waits for the running step. So a step must never wait long. When TensorFlow drops an
iterator, it closes the generator in the same call.

A thread that needs the interpreter's lock while the interpreter shuts down stops for ever; a thread that
destroys the iterator would wait for it, and the program would hang. So an exit hook lets the running steps
finish and admits no more.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops.from_generator_op import _GeneratorDataset
from tensorflow.python.data.ops.map_op import _MapDataset
from tensorflow.python.ops import script_ops

from streamer.formats.window import FailedRecord
from streamer.readers.tensorflow.failures import CODES, encode_failure, raiser
from streamer.readers.tensorflow.owned import OwnedCall

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from types import FrameType

    from streamer.readers.tensorflow.failures import Failure

    Step = tuple[Any, ...]
    Turn = tuple[Any, ...]
    """A failure, `NewLayout.rows`, and for each layout the number of elements to take: 0, or -1 for all."""
    Steps = Generator["Step | NewLayout | FailedRecord", None, None]

PATIENCE_S = 0.2
"""Seconds that a step may wait for bytes."""
_NUMBER = tf.TensorSpec([], tf.int64)
_FAILURE = tf.TensorSpec([None], tf.uint8)
_NO_FAILURE = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Types of a step's arrays, and the datasets that take the steps."""

    signature: tuple[tf.TensorSpec, ...]
    finish: Callable[[tf.data.Dataset, tf.Tensor], tf.data.Dataset]
    """Returns the dataset of elements, given that of the steps, and `NewLayout.rows`."""


class NewLayout(NamedTuple):
    """Ends the current layout of a generator and begins another."""

    layout: int
    """Index among the dataset's layouts."""
    rows: int
    """Number of rows that the layout joins to an element."""


_FIRST = NewLayout(0, 1)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator] # nothing here is to be converted
def stepped(make: Callable[[], Steps], layouts: Sequence[BatchLayout]) -> tf.data.Dataset:
    """Return a dataset of a generator's steps, each a tuple of arrays as in its layout's signature.

    Each iterator has its own generator, which `make` returns at the iterator's first element. An error in
    `failures.CODES` ends the iterator with its status there, any other error with TensorFlow's status. All
    layouts have elements of one type.
    """
    fail = raiser()
    registry = _Registry(make, len(layouts), encode=fail is not None)
    counts = [_NUMBER] * (1 + len(layouts))

    def init(_: Any) -> Any:
        return _call(registry.begin, (), (_NUMBER,))[0]

    def turn(number: Any) -> Any:
        failure, *layout = _call(registry.turn, (number,), (_FAILURE, *counts))
        if fail is not None:
            with tf.control_dependencies([fail(failure)]):
                layout = [tf.identity(count) for count in layout]
        return number, *layout

    def finalize(number: Any) -> Any:
        return _call(registry.end, (number,), (_NUMBER,))[0]

    def elements(number: Any, rows: Any, *takes: Any) -> tf.data.Dataset:
        """Return the elements of the chosen layout.

        `take(0)` makes no iterator of its input, so TensorFlow prepares no other layout's functions; that
        costs milliseconds for each.
        """
        numbers = tf.data.Dataset.from_tensors(number).repeat()
        each = [kind.finish(_steps(registry, numbers, kind.signature), rows) for kind in layouts]
        if len(each) > 1:
            each = [kind.take(count) for kind, count in zip(each, takes, strict=True)]
        return functools.reduce(tf.data.Dataset.concatenate, each)

    # In flat_map, as in from_generator: after a bare _GeneratorDataset tf.data warns and does not optimise.
    nothing = tf.data.Dataset.from_tensors(tf.constant(0, tf.int64))
    return nothing.flat_map(
        lambda none: _GeneratorDataset(none, init, turn, finalize, (_NUMBER, *counts))
    ).flat_map(elements)


def _steps(
    registry: _Registry, numbers: tf.data.Dataset, signature: tuple[tf.TensorSpec, ...]
) -> tf.data.Dataset:
    """Return the steps of one layout. `numbers`: that of the generator, without end."""
    call = OwnedCall(registry.step, signature)
    registry.calls.append(call)

    def step(number: Any) -> Any:
        tensors = call.tensors(number)
        return tuple(tensors) if len(tensors) > 1 else tensors[0]

    return _MapDataset(
        numbers,
        step,
        use_inter_op_parallelism=False,
        preserve_cardinality=False,  # the steps end when the layout does
    )


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], specs: tuple[tf.TensorSpec, ...]) -> Any:
    arrays = tf.numpy_function(function, arguments, [spec.dtype for spec in specs])
    for array, spec in zip(arrays, specs, strict=True):
        array.set_shape(spec.shape)
    return arrays


class _Registry:
    """The generators of one dataset, by number."""

    _running: ClassVar[set[Steps]] = set()
    """Generators of all datasets that were stepped and that TensorFlow has not dropped."""
    _closing = False

    def __init__(self, make: Callable[[], Steps], layouts: int, *, encode: bool) -> None:
        self._make = make
        self._layouts = layouts
        self.calls: list[OwnedCall] = []
        """What the graph's operations call; TensorFlow keeps weak references to them."""
        self._encoded = tuple(kind for kind, _ in CODES) if encode else ()
        self._numbers = itertools.count()
        self._steps: dict[int, Steps] = {}
        self._turns: dict[int, Iterator[Turn]] = {}
        """The next turns of a generator: layouts and failures; empty after the generator's end."""
        self._layout: dict[int, NewLayout] = {}
        """Current layout of a generator."""
        self._first: dict[int, Step] = {}
        """The first step of a generator, which was made to find the first layout."""

    def begin(self) -> tuple[np.int64]:
        number = next(self._numbers)
        self._steps[number] = self._make()
        return (np.int64(number),)

    def turn(self, number: int) -> Turn:
        """Return the next layout or failure; raise StopIteration at the end."""
        key = int(number)
        if self._steps[key] not in self._running:
            try:
                self._first[key] = self.step(key)
            except StopIteration:
                pass
            else:
                return self._turn(_FIRST)
        return next(self._turns.get(key, iter(())))

    def step(self, number: int) -> Step:
        if _Registry._closing:
            raise StopIteration  # no data is lost: the program is past its last line
        key = int(number)
        if (first := self._first.pop(key, None)) is not None:
            return first
        steps = self._steps[key]
        self._running.add(steps)
        try:
            step = next(steps)
        except StopIteration:
            raise
        except Exception as error:
            if not self._encoded:
                raise
            again = itertools.repeat(self._turn(_FIRST, encode_failure(error, tf.errors.CANCELLED)))
            if not isinstance(error, self._encoded):
                self._turns[key] = again
                raise
            self._turns[key] = itertools.chain([self._turn(_FIRST, encode_failure(error))], again)
            raise StopIteration from error
        if isinstance(step, NewLayout):
            self._layout[key] = step
            self._turns[key] = iter([self._turn(step)])
            raise StopIteration
        if isinstance(step, FailedRecord):
            layout = self._turn(self._layout.get(key, _FIRST))
            self._turns[key] = iter([self._turn(_FIRST, encode_failure(step.error)), layout])
            raise StopIteration
        return step

    def _turn(self, layout: NewLayout, failure: Failure = _NO_FAILURE) -> Turn:
        takes = [-np.int64(index == layout.layout) for index in range(self._layouts)]
        return failure, np.int64(layout.rows), *takes

    def end(self, number: int) -> tuple[np.int64]:
        steps = self._steps.pop(int(number))
        self._turns.pop(int(number), None)
        self._layout.pop(int(number), None)
        self._first.pop(int(number), None)
        steps.close()
        self._running.discard(steps)
        return (np.int64(0),)

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
