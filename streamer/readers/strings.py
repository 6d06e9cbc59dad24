"""A string vector made of places in memory, without an object for each string.

    numpy: [size << 2 | 3, address, 0] per record --> string vector of views --> tf.strings.substr --> copies

A string of TensorFlow is 24 bytes (tsl/platform/ctstring_internal.h). One form of it is a view of foreign
memory, which NumPy can lay out for a whole block at once; an operation of ours (`streamer.readers.kernels`)
takes that as the content of a string tensor. Views must not outlive what they view, and copies of a view are
views; so `substr`, in the same graph, makes real strings of them: compiled, and without the interpreter's
lock. Only those leave here. The memory must stay as it is until the step that told of it is over.

TensorFlow promises this layout to nobody by name. So it is tried once, with records of several sizes; where
it does not hold, or there is no C API, records go over as objects.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from streamer.readers import kernels
from streamer.readers.spans import Spans

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from streamer.readers.kernels import Call

logger = logging.getLogger("penstock")

_OP = "PenstockStrings"
_VIEW = 3
_WORDS = 3
_STRING_BYTES = 24
_ALL = np.int32(2**31 - 1)

crossing: list[None] = []
"""One for each step whose string vector is not made yet: a thread that needs the interpreter's lock soon."""


@functools.cache
def views() -> bool:
    """Whether TensorFlow takes views."""
    memory = bytearray(range(256)) * 16
    tried = Spans(memory, np.array([0, 7, 9, 30, 96]), np.array([0, 1, 23, 64, 4000]))
    try:
        kernels.register(_OP, "places: int64", "strings: string", _lay)
        made = tf.function(_copied, autograph=False)(tf.constant(_places(tried))).numpy().tolist()
        crossing.clear()
        if made != tried.records():
            raise RuntimeError("strings have another layout")  # noqa: TRY301 - one warning for all causes
    except (OSError, AttributeError, RuntimeError, tf.errors.OpError) as error:
        logger.warning("records go to TensorFlow as objects, which is slower: %s", error)
        return False
    return True


def spec() -> tf.TensorSpec:
    """What `packed` gives."""
    return tf.TensorSpec([None], tf.int64 if views() else tf.string)


def packed(spans: Spans) -> Any:
    """The records of a step, for `unpacked`."""
    if views():
        return _places(spans)
    vector = np.empty(len(spans), dtype=object)
    vector[:] = spans.records()
    return vector


def unpacked(given: Any) -> Any:
    """The string vector, in the graph, of what a step gave."""
    return _copied(given) if views() else given


def _places(spans: Spans) -> NDArray[np.int64]:
    strings = np.zeros((len(spans), _WORDS), np.int64)
    strings[:, 0] = spans.sizes << 2 | _VIEW
    strings[:, 1] = spans.starts + np.frombuffer(spans.memory, np.uint8).ctypes.data
    crossing.append(None)
    return strings.reshape(-1)


def _lay(call: Call) -> None:
    strings = call.given()
    call.give(tf.string.as_datatype_enum, len(strings) // _STRING_BYTES, strings)
    crossing.pop()


def _copied(places: Any) -> Any:
    strings = kernels.operation(_OP, places=places).outputs[0]
    strings.set_shape([None])
    return tf.strings.substr(strings, 0, _ALL)
