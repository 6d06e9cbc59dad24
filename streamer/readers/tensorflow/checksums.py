"""Verifies the CRC-32C of many records by the CRC-32C of the block that contains them.

A call of the CRC function costs as much as 5 KB of data, so thousands of calls for small records cost more
than their bytes. But a block's CRC follows from the CRCs of its parts, by arithmetic over GF(2) that NumPy
does for all parts at once. So this module computes the block's CRC from the CRCs that the frames state, and
one pass over the block's bytes verifies it. If all records are right, both CRCs agree. One wrong record
always makes them differ; several wrong records go unnoticed once in 2**32, as often as with one CRC.

The arithmetic combines CRC registers that started at 0, because then concatenation is linear. To shift a
register by n is to append n zero bytes: a product with x**8n modulo the polynomial.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from streamer.formats.crc import MASK_DELTA
from streamer.formats.tfrecord import FRAME_BYTES, HEADER_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.uint32]

_POLYNOMIAL = 0x82F63B78
_ONE = 1 << 31
_WORD = 0xFFFFFFFF
_HALF = np.uint32(0xFFFF)
_TABLES = 32
"""Cached tables, of half a MiB each: one for every doubling of a block's frames."""


def leading_run(memory: memoryview, start: int, count: int, length: int, stored: int) -> NDArray[np.void]:
    """Return the first of `count` TFRecord frames that have one header, as rows with `data` and `crc`.

    `start`: index of the first one in `memory`. `length`, `stored`: the header.
    """
    layout = np.dtype([("length", "<u8"), ("check", "<u4"), ("data", f"V{length}"), ("crc", "<u4")])
    frames: NDArray[np.void] = np.frombuffer(memory, layout, count, start)
    same = (frames["length"] == length) & (frames["check"] == stored)
    return frames if same.all() else frames[: int(same.argmin())]


def masked(crcs: Words) -> Words:
    """Return CRCs as TFRecord frames store them, as `streamer.formats.crc.mask` does for one."""
    return (crcs >> np.uint32(15) | crcs << np.uint32(17)) + np.uint32(MASK_DELTA)


def frames_crc(stored: Words, length: int, head_crc: int) -> int:
    """Return the CRC of successive TFRecord frames whose stored data CRCs are all right.

    `stored`: the masked CRC after each frame's data. `length`: bytes of data of each frame. `head_crc`: CRC
    of the 12 bytes before a frame's data.
    """
    turned = stored - np.uint32(MASK_DELTA)
    data = turned << np.uint32(15) | turned >> np.uint32(17)
    begun = _shift(_WORD, HEADER_BYTES)  # a CRC begins with ones, and ends with their complement
    same = _shift(head_crc ^ begun, length) ^ _WORD
    registers = data ^ stored ^ np.uint32(same)  # of each frame without its last 4 bytes
    registers[0] ^= np.uint32(_shift(begun, length))
    return _shift(_combined(registers, length + FRAME_BYTES), 4) ^ _WORD


def _combined(registers: Words, size: int) -> int:
    """Return the register of the concatenation of parts of `size` bytes, from the register of each."""
    while len(registers) > 1:
        odd = len(registers) % 2  # the first register has no partner in this round
        pairs = registers[odd:]
        low, high = _table(size)
        first = pairs[0::2]
        joined = low.take(first & _HALF)
        joined ^= high.take(first >> np.uint32(16))
        joined ^= pairs[1::2]
        registers = np.concatenate([registers[:1], joined]) if odd else joined
        size *= 2
    return int(registers[0])


@functools.lru_cache(maxsize=_TABLES)
def _table(size: int) -> tuple[Words, Words]:
    """Return the tables that shift the lower and the upper half of a register by `size` bytes."""
    power = _power(size)
    halves = np.zeros((2, 1 << 16), np.uint32)
    for number in range(2):
        for bit in range(16):
            low = 1 << bit
            image = np.uint32(_product(power, 1 << 16 * number + bit))
            halves[number, low : 2 * low] = halves[number, :low] ^ image
    return halves[0], halves[1]


def _shift(register: int, size: int) -> int:
    return _product(_power(size), register)


@functools.lru_cache(maxsize=1024)
def _power(size: int) -> int:
    """Return x to the power of 8 * `size`, modulo the polynomial."""
    power, square, left = _ONE, _ONE >> 1, 8 * size
    while left:
        if left & 1:
            power = _product(square, power)
        square = _product(square, square)
        left >>= 1
    return power


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials modulo the CRC's; the highest bit is the constant term."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & _WORD
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
