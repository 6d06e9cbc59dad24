"""Calls Python from a graph and makes its results tensors whose memory is TensorFlow's own.

    step -> lists of bytes -> strings in TensorFlow's memory -> unbatch, batch: moved

TensorFlow moves the strings of a tensor only if its memory is TensorFlow's own and nothing else refers to it.
The results of `tf.numpy_function` are in NumPy's memory, so `unbatch` copied every record once more. Here
TensorFlow allocates a vector for the strings of a step and copies each of them once, while the records are in
the processor's cache. (A part of a tensor, as of `batch[:8]`, counts as TensorFlow's own even if the tensor
does not; `streamer.readers.tensorflow.foreign` has what follows.)

`tf.py_function` can do this too, but enters contexts of devices and looks for gradients at each call. So this
module uses the operation of `tf.py_function` and calls the function directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import ops
from tensorflow.python.ops import gen_script_ops, script_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class OwnedCall(script_ops.EagerFunc):  # type: ignore[misc] # tensorflow publishes no types
    """A Python function that operations of a graph call, as long as this object exists.

    `function` takes tensors and returns NumPy arrays as `specs` describes them; arrays of strings have
    elements of type bytes. An array may be a tensor.
    """

    def __init__(self, function: Callable[..., Sequence[Any]], specs: Sequence[tf.TensorSpec]) -> None:
        # EagerFunc's own state is for gradients only.
        self._function = function
        self._specs = specs
        self._types = [spec.dtype.as_datatype_enum for spec in specs]
        self._token = script_ops._py_funcs.insert(self)  # noqa: SLF001 - TensorFlow's registry of functions

    def __call__(self, device: str | None, token: str, arguments: Sequence[Any]) -> list[Any]:
        """Return tensors for TensorFlow, which calls this in any of its threads."""
        del device, token
        arrays = self._function(*arguments)
        with context.eager_mode():  # the calling thread may be one that builds a graph
            return [_tensor(array, kind) for array, kind in zip(arrays, self._types, strict=True)]

    def tensors(self, *arguments: Any) -> list[Any]:
        """Put a call into the graph being built; return its results."""
        with tf.device("/device:CPU:0"):
            tensors = gen_script_ops.eager_py_func(
                input=list(arguments),
                token=self._token,
                is_async=False,
                Tout=[spec.dtype for spec in self._specs],
            )
        for tensor, spec in zip(tensors, self._specs, strict=True):
            tensor.set_shape(spec.shape)
        return list(tensors)


def _tensor(array: Any, kind: int) -> Any:
    return array if isinstance(array, ops.EagerTensor) else ops.EagerTensor(_values(array), None, kind)


def _values(array: Any) -> Any:
    """Return strings as nested lists, because TensorFlow uses an array's memory but allocates a list's."""
    return array.tolist() if array.dtype == object and array.size else array
