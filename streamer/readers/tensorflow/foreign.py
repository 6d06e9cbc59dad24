"""Makes tensors of strings that are in the reader's memory, by functions of TensorFlow's C API.

TensorFlow moves a string out of a tensor, or changes it, only where nothing else refers to the tensor's
memory; else it copies the string. A string moved out of here would be freed as if malloc(3) had made it. So a
`Loan` has a reference of its own for as long as TensorFlow has one, also by a slice: a tensor of memory that
is not TensorFlow's own would not do, because a slice of it counts as TensorFlow's own. `TF_TensorMaybeMove`
tells when the reference is the last one. TensorFlow calls nothing here, so no thread of it waits for the
interpreter's lock.

The functions are those of TensorFlow 2.16 to 2.21. `tensor_functions` tries them once; where they are absent
or make a wrong tensor, the reader copies records, as it does for small batches.

Slots are the memory of batches whose records stay where the FIFO was read into. A slot is a mapping. A reader
takes it and reads the FIFO into it. When a batch is complete, the reader makes a tensor whose strings point
into it. Once TensorFlow needs the tensor no more, the slot is free, and the next batch uses it again, so that
its pages are neither faulted in nor zeroed anew. The slots are the process's. A tensor may outlast its
dataset, so a slot is unmapped only while it is free. At most `KEPT_SLOTS` free slots stay, or more of up to
`KEPT_BYTES` in all.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.python import _pywrap_tfe
from tensorflow.python.eager import context

from streamer.units import MIB

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


KEPT_BYTES = 64 * MIB
KEPT_SLOTS = 2
_PAGE = 4096
_READ_WRITE, _PRIVATE_ANONYMOUS, _MAY_MOVE = 0x3, 0x22, 1
"""From <sys/mman.h>: PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, MREMAP_MAYMOVE."""
_FAILED = ctypes.c_void_p(-1).value


class BatchMemory:
    """A mapping. Raises MemoryError."""

    def __init__(self, size: int) -> None:
        self.taken = True
        """Whether a reader fills it."""
        self._loan: Loan | None = None
        self._use(_libc().mmap(None, size, _READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0), size)

    def _use(self, address: int, size: int) -> None:
        if address == _FAILED:
            raise MemoryError(f"no memory for a batch of more than {size // 2} bytes")
        self._address, self.size = address, size
        self.view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")

    def grow(self, size: int) -> None:
        """Make it larger, without a copy. Its view is another one then. Raises MemoryError."""
        size = _pages(size)
        self._use(_libc().mremap(self._address, self.size, size, _MAY_MOVE), size)

    @property
    def free(self) -> bool:
        """Whether neither a reader nor a tensor uses it."""
        return not self.taken and (self._loan is None or self._loan.over)

    def lend(self, functions: TensorFunctions, offsets: Integers, lengths: Integers) -> Any:
        """Return a tensor of the records there, and leave the slot to it; write a 0 after each record."""
        np.frombuffer(self.view, np.uint8)[offsets + lengths] = 0
        self._loan, tensor = functions.lend(self._address, offsets, lengths)
        self.taken = False
        return tensor

    def unmap(self) -> None:
        """Return it to the system; it cannot be used any more."""
        _libc().munmap(self._address, self.size)


class SlotPool:
    """Slots that several readers use in turn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: list[BatchMemory] = []
        """In the order in which they were taken."""

    def __repr__(self) -> str:
        with self._lock:
            free = sum(slot.free for slot in self._slots)
            size = sum(slot.size for slot in self._slots) / MIB
            return f"<SlotPool of {size:.0f} MiB in {len(self._slots)} slots, {free} of them free>"

    def take(self, size: int) -> BatchMemory:
        """Return a slot of at least `size` bytes, which is taken. Raises MemoryError."""
        size = _pages(size)
        with self._lock:
            free = [slot for slot in self._slots if slot.free]
            slot = free.pop(0) if free else BatchMemory(size)
            if slot.size < size:
                slot.grow(size)
            slot.taken = True
            kept = sum(each.size for each in free)
            while len(free) > KEPT_SLOTS and kept > KEPT_BYTES:
                dropped = free.pop()
                kept -= dropped.size
                self._slots.remove(dropped)
                dropped.unmap()
            if slot in self._slots:
                self._slots.remove(slot)
            self._slots.append(slot)
        return slot


POOL = SlotPool()


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype = libc.mremap.restype = pointer
    libc.mmap.argtypes = [pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mremap.argtypes = [pointer, size, size, ctypes.c_int]
    libc.munmap.argtypes = [pointer, size]
    return libc
