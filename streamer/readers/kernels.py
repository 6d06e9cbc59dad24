"""Operations of our own in TensorFlow's graphs, in Python: nothing is compiled.

TensorFlow's Python package exports its C API, and ctypes can call it: define an operation, register a kernel
that calls back into Python. A kernel may do what no Python step can: end with any status, and lay out a
string tensor itself. The callback needs the interpreter's lock, as every step does.

Operations have one input, are stateful, so that they are never folded away, and of unknown shape. TensorFlow
may call a kernel as long as the process lives.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.framework import op_def_library, op_def_registry

if TYPE_CHECKING:
    from collections.abc import Callable

_LIBRARY = "libtensorflow_cc.so.2"
_POINTER = ctypes.c_void_p
_COMPUTE = ctypes.CFUNCTYPE(None, _POINTER, _POINTER)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "TF_NewStatus": (_POINTER,),
    "TF_DeleteStatus": (None, _POINTER),
    "TF_SetStatus": (None, _POINTER, ctypes.c_int, ctypes.c_char_p),
    "TF_GetCode": (ctypes.c_int, _POINTER),
    "TF_Message": (ctypes.c_char_p, _POINTER),
    "TF_GetInput": (None, _POINTER, ctypes.c_int, ctypes.POINTER(_POINTER), _POINTER),
    "TF_AllocateOutput": (
        _POINTER, _POINTER, ctypes.c_int, ctypes.c_int, _POINTER, ctypes.c_int, ctypes.c_size_t, _POINTER,
    ),
    "TF_TensorData": (_POINTER, _POINTER),
    "TF_TensorByteSize": (ctypes.c_size_t, _POINTER),
    "TF_DeleteTensor": (None, _POINTER),
    "TF_OpKernelContext_Failure": (None, _POINTER, _POINTER),
    "TF_NewOpDefinitionBuilder": (_POINTER, ctypes.c_char_p),
    "TF_OpDefinitionBuilderAddInput": (None, _POINTER, ctypes.c_char_p),
    "TF_OpDefinitionBuilderAddOutput": (None, _POINTER, ctypes.c_char_p),
    "TF_OpDefinitionBuilderSetIsStateful": (None, _POINTER, ctypes.c_bool),
    "TF_OpDefinitionBuilderSetShapeInferenceFunction": (None, _POINTER, _POINTER),
    "TF_ShapeInferenceContextSetUnknownShape": (None, _POINTER, _POINTER),
    "TF_RegisterOpDefinition": (None, _POINTER, _POINTER),
    "TF_NewKernelBuilder": (
        _POINTER, ctypes.c_char_p, ctypes.c_char_p, _POINTER, _COMPUTE, _POINTER,
    ),
    "TF_RegisterKernelBuilder": (None, ctypes.c_char_p, _POINTER, _POINTER),
}  # fmt: skip
_kept: list[Any] = []
"""The callbacks."""


@functools.cache
def library() -> Any:
    """TensorFlow's C API, with the types of what is used here. Raises OSError, AttributeError."""
    found = ctypes.CDLL(os.path.join(tf.sysconfig.get_lib(), _LIBRARY))
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


class Call:
    """One call of a kernel: its input, and what becomes of it."""

    def __init__(self, context: Any) -> None:
        self._api = library()
        self._context = context
        self._status = self._api.TF_NewStatus()

    def close(self) -> None:
        """Let go of the status."""
        self._api.TF_DeleteStatus(self._status)

    def given(self) -> bytes:
        """The bytes of the input."""
        tensor = _POINTER()
        self._api.TF_GetInput(self._context, 0, ctypes.byref(tensor), self._status)
        data = ctypes.string_at(self._api.TF_TensorData(tensor), self._api.TF_TensorByteSize(tensor))
        self._api.TF_DeleteTensor(tensor)
        return data

    def give(self, kind: int, length: int, data: bytes) -> None:
        """Make the output a vector of so many elements of a type, that are `data` in memory."""
        shape = ctypes.c_int64(length)
        tensor = self._api.TF_AllocateOutput(
            self._context, 0, kind, ctypes.byref(shape), 1, len(data), self._status
        )
        ctypes.memmove(self._api.TF_TensorData(tensor), data, len(data))
        self._api.TF_DeleteTensor(tensor)

    def fail(self, code: int, message: bytes) -> None:
        """End the operation with a status."""
        self._api.TF_SetStatus(self._status, code, message)
        self._api.TF_OpKernelContext_Failure(self._context, self._status)


def register(name: str, given: str, result: str | None, compute: Callable[[Call], None]) -> None:
    """Define the operation and its kernel, once per process.

    `given`, `result`: as in "name: type". Raises OSError, AttributeError where there is no C API, and
    RuntimeError where it does not want the operation.
    """
    api = library()
    if op_def_registry.get(name) is not None:
        return

    def called(_: Any, context: Any) -> None:
        call = Call(context)
        try:
            compute(call)
        except Exception as error:  # noqa: BLE001 - nothing may leave a callback; it is the operation's error
            call.fail(tf.errors.INTERNAL, f"{type(error).__name__}: {error}".encode())
        finally:
            call.close()

    run = _COMPUTE(called)
    _kept.append(run)
    # A compiled function for the shapes: Ctrl-C would be lost in one of Python.
    shapes = ctypes.cast(api.TF_ShapeInferenceContextSetUnknownShape, _POINTER)
    status = api.TF_NewStatus()
    try:
        definition = api.TF_NewOpDefinitionBuilder(name.encode())
        api.TF_OpDefinitionBuilderAddInput(definition, given.encode())
        if result is not None:
            api.TF_OpDefinitionBuilderAddOutput(definition, result.encode())
        api.TF_OpDefinitionBuilderSetIsStateful(definition, True)  # noqa: FBT003 - the C function's argument
        api.TF_OpDefinitionBuilderSetShapeInferenceFunction(definition, shapes)
        api.TF_RegisterOpDefinition(definition, status)
        if not api.TF_GetCode(status):
            kernel = api.TF_NewKernelBuilder(name.encode(), b"CPU", None, run, None)
            api.TF_RegisterKernelBuilder(name.encode(), kernel, status)
        if api.TF_GetCode(status):
            raise RuntimeError(api.TF_Message(status).decode())
    finally:
        api.TF_DeleteStatus(status)


def operation(name: str, **given: Any) -> Any:
    """The operation, in the graph that is being built."""
    return op_def_library._apply_op_helper(name, **given)[2]  # noqa: SLF001 - the only way to an op by name
