"""Makes tensors of strings that are in the reader's memory, by functions of TensorFlow's C API.

TensorFlow moves a string out of a tensor, or changes it, only where nothing else refers to the tensor's
memory; else it copies the string. A string moved out of here would be freed as if malloc(3) had made it. So a
`Loan` has a reference of its own for as long as TensorFlow has one, also by a slice: a tensor of memory that
is not TensorFlow's own would not do, because a slice of it counts as TensorFlow's own. `TF_TensorMaybeMove`
tells when the reference is the last one. TensorFlow calls nothing here, so no thread of it waits for the
interpreter's lock.

The functions are those of TensorFlow 2.16 to 2.21. `tensor_functions` tries them once; where they are absent
or make a wrong tensor, the reader copies records, as it does for small batches.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.python import _pywrap_tfe
from tensorflow.python.eager import context

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

STRING_BYTES = 24
"""Size of a `TF_TString`."""
_LARGE = 1
"""Type of a `TF_TString` whose bytes are elsewhere, with a zero after them."""
_POINTER_BYTES = 8
_EAGER_TENSOR = "_Z21EagerTensorFromHandleP16TFE_TensorHandleb"
"""Name in the library of `PyObject* EagerTensorFromHandle(TFE_TensorHandle* handle, bool is_packed)`."""
_PROBE = b"penstock\0!\0"


class TensorFunctions:
    """The functions of C. Raises AttributeError or OSError where one of them is absent."""

    def __init__(self) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        library = ctypes.PyDLL(_pywrap_tfe.__file__)  # also finds the functions of what it is linked with
        library.TF_NewStatus.restype = pointer
        self._status = library.TF_NewStatus()
        self._allocate = library.TF_AllocateTensor
        self._allocate.restype = pointer
        self._allocate.argtypes = [ctypes.c_int, pointer, ctypes.c_int, size]
        self._data = library.TF_TensorData
        self._data.restype, self._data.argtypes = pointer, [pointer]
        self.maybe_move = library.TF_TensorMaybeMove
        self.maybe_move.restype, self.maybe_move.argtypes = pointer, [pointer]
        self.delete = library.TF_DeleteTensor
        self.delete.restype, self.delete.argtypes = None, [pointer]
        self._handle = library.TFE_NewTensorHandle
        self._handle.restype, self._handle.argtypes = pointer, [pointer, pointer]
        self._tensor = library[_EAGER_TENSOR]
        self._tensor.restype, self._tensor.argtypes = ctypes.py_object, [pointer, ctypes.c_bool]
        self._kind = tf.string.as_datatype_enum

    def lend(self, address: int, offsets: Integers, lengths: Integers) -> tuple[Loan, Any]:
        """Return a tensor of the strings at `offsets` from `address`, and the loan of their memory.

        The byte after each string is 0.
        """
        count = len(offsets)
        reference = self._allocate(self._kind, (ctypes.c_int64 * 1)(count), 1, count * STRING_BYTES)
        memory = (ctypes.c_char * (count * STRING_BYTES)).from_address(self._data(reference))
        strings = np.frombuffer(memoryview(memory).cast("B"), np.uint64).reshape(-1, 3)
        strings[:, 0] = lengths << 2 | _LARGE
        strings[:, 1] = lengths
        strings[:, 2] = offsets + address
        handle = self._handle(reference, self._status)
        tensor = self._tensor(handle, False)  # noqa: FBT003 - a C function, which takes the handle over
        return Loan(self, reference, strings), tensor


class Loan:
    """Memory that a tensor's strings are in."""

    def __init__(self, functions: TensorFunctions, reference: int, strings: Any) -> None:
        self._functions = functions
        self._reference = reference
        self._strings = strings

    @property
    def over(self) -> bool:
        """Whether TensorFlow needs the memory no more; if so, the strings are gone."""
        if self._reference and (reference := self._functions.maybe_move(self._reference)):
            self._reference = 0
            self._strings[:] = 0  # strings without memory, which TensorFlow need not free
            self._functions.delete(reference)
        return not self._reference


@functools.cache
def tensor_functions() -> TensorFunctions | None:
    """Return the functions, after they have made a right tensor; None if they are not to be used."""
    if sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != _POINTER_BYTES:
        return None
    try:
        functions = TensorFunctions()
        context.context().ensure_initialized()
    except (AttributeError, OSError):
        return None
    memory = np.array(list(_PROBE), np.uint8)
    loan, tensor = functions.lend(memory.ctypes.data, np.array([0, 10]), np.array([10, 0]))
    found = tensor.numpy().tolist()
    lent = not loan.over
    del tensor
    return functions if found == [_PROBE[:10], b""] and lent and loan.over else None
