"""Memory for batches whose records stay where the FIFO was read into.

A slot is a mapping. A reader takes it and reads the FIFO into it. When a batch is complete, the reader makes
a tensor whose strings point into it (`streamer.readers.tensorflow.foreign`). Once TensorFlow needs the tensor
no more, the slot is free, and the next batch uses it again, so that its pages are neither faulted in nor
zeroed anew.

The slots are the process's. A tensor may outlast its dataset, so a slot is unmapped only while it is free. At
most `KEPT_SLOTS` free slots stay, or more of up to `KEPT_BYTES` in all.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from streamer.units import MIB

if TYPE_CHECKING:
    from streamer.readers.tensorflow.foreign import Integers, Loan, TensorFunctions

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
