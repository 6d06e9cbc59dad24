"""An operation that fails with a status of our choice, so that a broken stream is a `DataLossError`.

TensorFlow makes `UnknownError` of nearly every exception that leaves a Python step. A kernel, though, may
end with any status, and so this one is ours (`streamer.readers.kernels`). It runs only when a stream has
failed; a step that went well does not pass it.

    verdict (uint8 vector): one byte of status code, then the text

Where the C API cannot be had, `raiser` gives None, and the reader raises in Python as everybody does.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from streamer.errors import ChannelError, StreamError
from streamer.readers import kernels

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from streamer.readers.kernels import Call

    Verdict = NDArray[np.uint8]

logger = logging.getLogger("penstock")

_OP = "PenstockVerdict"


class Interrupted(Exception):
    """SIGINT came while the main thread was inside TensorFlow."""


CODES: tuple[tuple[type[Exception], int], ...] = (
    (StreamError, tf.errors.DATA_LOSS),
    (ChannelError, tf.errors.NOT_FOUND),
    (Interrupted, tf.errors.CANCELLED),
)
"""Our errors and the status that stands for each."""


def verdict(error: Exception) -> Verdict:
    """What the operation takes, for an error among `CODES`."""
    code = next(code for kind, code in CODES if isinstance(error, kind))
    text = f"{type(error).__name__}: {error}".encode()
    return np.frombuffer(bytes([code]) + text, np.uint8)


@functools.cache
def raiser() -> Callable[[Any], None] | None:
    """A function that puts the operation into the graph being built; None if there can be none."""
    try:
        kernels.register(_OP, "verdict: uint8", None, _fail)
    except (OSError, AttributeError, RuntimeError) as error:
        logger.warning(
            "errors of a stream will be UnknownError, for TensorFlow's C API is not there: %s", error
        )
        return None
    return lambda given: kernels.operation(_OP, verdict=given)


def _fail(call: Call) -> None:
    given = call.given()
    call.fail(given[0], given[1:])
