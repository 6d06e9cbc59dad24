"""An operation of TensorFlow's graph that fails with a chosen status.

Programs that were written for SageMaker's reader catch `DataLossError` for a broken stream and
`InternalError` for a bad record (docs/reference/contract.md §6.3, tests/readers/test_incumbent.py). A Python
step cannot raise them: TensorFlow turns every exception of a step, even `tf.errors.DataLossError`, into
`UnknownError`, and only a kernel may end with another status. This module registers a kernel through
TensorFlow's C API by ctypes; nothing is compiled. The kernel runs a few times in an epoch (a `tf.cond` around
it would cost each epoch two more functions that TensorFlow optimises).

    failure (uint8 vector): one byte of status code, then the text; empty: no failure

If the C API is missing, `raiser` returns None and the step raises its exception in Python.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_library, op_def_registry

from streamer.errors import ChannelError, CorruptRecord, CutRecord, StreamError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Failure = NDArray[np.uint8]

logger = logging.getLogger("penstock")

_OP = b"PenstockFailure"
_LIBRARY = "libtensorflow_cc.so.2"
_POINTER = ctypes.c_void_p
_COMPUTE = ctypes.CFUNCTYPE(None, _POINTER, _POINTER)


class Interrupted(Exception):
    """SIGINT came while the main thread was inside TensorFlow."""


CODES: tuple[tuple[type[Exception], int], ...] = (
    (CorruptRecord, tf.errors.INTERNAL),
    (CutRecord, tf.errors.INTERNAL),
    (StreamError, tf.errors.DATA_LOSS),
    (ChannelError, tf.errors.NOT_FOUND),
    (Interrupted, tf.errors.CANCELLED),
)
"""Penstock's errors and the status of each; the first class that fits counts."""


def encode_failure(error: Exception, code: int | None = None) -> Failure:
    """Return the operation's input for an error. `code`: its status; None for that in `CODES`."""
    if code is None:
        code = next(code for kind, code in CODES if isinstance(error, kind))
    text = f"{type(error).__name__}: {error}".encode()
    return np.frombuffer(bytes([code]) + text, np.uint8)


@functools.cache
def raiser() -> Callable[[Any], None] | None:
    """Return a function that puts the operation into the graph being built; None without the C API."""
    try:
        _register(ctypes.CDLL(os.path.join(tf.sysconfig.get_lib(), _LIBRARY)))
    except (OSError, AttributeError, RuntimeError) as error:
        logger.warning(
            "errors of a stream will be UnknownError, because TensorFlow's C API is missing: %s", error
        )
        return None
    return lambda failure: op_def_library._apply_op_helper(_OP.decode(), failure=failure)  # noqa: SLF001 - the only way to an op by name


_callbacks: list[Any] = []
"""The kernel's function, which must exist as long as the process."""


def _register(library: Any) -> None:
    """Define the operation and its kernel, once. Raises AttributeError, RuntimeError."""
    if op_def_registry.get(_OP.decode()) is not None:
        return

    def function(name: str, result: Any, *arguments: Any) -> Any:
        symbol = getattr(library, name)
        symbol.restype, symbol.argtypes = result, arguments
        return symbol

    new_status = function("TF_NewStatus", _POINTER)
    delete_status = function("TF_DeleteStatus", None, _POINTER)
    set_status = function("TF_SetStatus", None, _POINTER, ctypes.c_int, ctypes.c_char_p)
    code = function("TF_GetCode", ctypes.c_int, _POINTER)
    message = function("TF_Message", ctypes.c_char_p, _POINTER)
    get_input = function("TF_GetInput", None, _POINTER, ctypes.c_int, ctypes.POINTER(_POINTER), _POINTER)
    data = function("TF_TensorData", _POINTER, _POINTER)
    size = function("TF_TensorByteSize", ctypes.c_size_t, _POINTER)
    delete_tensor = function("TF_DeleteTensor", None, _POINTER)
    fail = function("TF_OpKernelContext_Failure", None, _POINTER, _POINTER)
    new_op = function("TF_NewOpDefinitionBuilder", _POINTER, ctypes.c_char_p)
    add_input = function("TF_OpDefinitionBuilderAddInput", None, _POINTER, ctypes.c_char_p)
    set_stateful = function("TF_OpDefinitionBuilderSetIsStateful", None, _POINTER, ctypes.c_bool)
    set_shapes = function("TF_OpDefinitionBuilderSetShapeInferenceFunction", None, _POINTER, _POINTER)
    register_op = function("TF_RegisterOpDefinition", None, _POINTER, _POINTER)
    new_kernel = function(
        "TF_NewKernelBuilder", _POINTER, ctypes.c_char_p, ctypes.c_char_p, _POINTER, _COMPUTE, _POINTER
    )
    register_kernel = function("TF_RegisterKernelBuilder", None, ctypes.c_char_p, _POINTER, _POINTER)

    def compute(_: Any, context: Any) -> None:
        status, tensor = new_status(), _POINTER()
        get_input(context, 0, ctypes.byref(tensor), status)
        failure = ctypes.string_at(data(tensor), size(tensor))
        delete_tensor(tensor)
        if failure:
            set_status(status, failure[0], failure[1:])
            fail(context, status)
        delete_status(status)

    run = _COMPUTE(compute)
    _callbacks.append(run)
    # Without outputs any shape function is right. This one is compiled: a Python function would lose Ctrl-C.
    shapes = ctypes.cast(library.TF_ShapeInferenceContextSetUnknownShape, _POINTER)
    status = new_status()
    try:
        definition = new_op(_OP)
        add_input(definition, b"failure: uint8")
        set_stateful(definition, True)  # noqa: FBT003 - the C function's argument; never folded away
        set_shapes(definition, shapes)
        register_op(definition, status)
        if not code(status):
            register_kernel(_OP, new_kernel(_OP, b"CPU", None, run, None), status)
        if code(status):
            raise RuntimeError(message(status).decode())
    finally:
        delete_status(status)
