"""CRC-32C (Castagnoli), as TFRecord frames carry it.

The checksum comes from `awscrt` where that is installed (tens of GB/s). Without it a table-driven loop
in Python does the same at some MB/s, which no training job should run on: it says so once, in the log.
The choice is made at the first use, so that importing this module costs nothing.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Checksum = Callable[[bytes | bytearray | memoryview], int]

logger = logging.getLogger("penstock")

MASK_DELTA = 0xA282EAD8
"""Added by the mask, so that the CRC of data that holds CRCs stays sound (contract §5.3)."""
_POLYNOMIAL = 0x82F63B78
_WORD = 0xFFFFFFFF


@functools.cache
def crc32c() -> Checksum:
    """The function that computes the CRC-32C of a buffer: a compiled one if there is one."""
    try:
        from awscrt.checksums import crc32c as compiled
    except ImportError:
        logger.warning(
            "CRC-32C is computed in Python, at some MB/s: TFRecord channels will be slow. "
            "To mend it: pip install awscrt"
        )
        return crc32c_in_python
    return compiled  # type: ignore[no-any-return]


def mask(checksum: int) -> int:
    """The form in which a TFRecord frame stores a CRC: rotated right by 15 bits, plus a constant."""
    return ((checksum >> 15 | checksum << 17) + MASK_DELTA) & _WORD


def masked_crc32c(data: bytes | bytearray | memoryview) -> int:
    """The masked CRC-32C of `data`."""
    return mask(crc32c()(data))


@functools.cache
def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


def crc32c_in_python(data: bytes | bytearray | memoryview) -> int:
    """The CRC-32C of `data`, a byte at a time."""
    table = _table()
    value = _WORD
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ _WORD
