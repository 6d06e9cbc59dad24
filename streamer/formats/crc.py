"""CRC-32C (Castagnoli), the checksum of TFRecord frames.

`awscrt`, if installed, computes the checksum at tens of GB/s. Without `awscrt`, a table-driven loop in Python
computes it at some MB/s, too slowly for a training job, and a warning is logged once. The choice is made at
the first use, so that importing this module costs nothing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

logger = logging.getLogger("penstock")

MASK_DELTA = 0xA282EAD8
"""Constant that the mask adds; a masked CRC protects data that contain CRCs themselves (contract §5.3)."""
_POLYNOMIAL = 0x82F63B78
_WORD = 0xFFFFFFFF


@functools.cache
def crc32c() -> Callable[..., int]:
    """Return the function that computes the CRC-32C of a buffer; from `awscrt` if that is installed.

    Its arguments are those of `crc32c_in_python`.
    """
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
    """Return a CRC as a TFRecord frame stores it: rotated right by 15 bits, plus a constant."""
    return ((checksum >> 15 | checksum << 17) + MASK_DELTA) & _WORD


def masked_crc32c(data: bytes | bytearray | memoryview) -> int:
    """Return the masked CRC-32C of `data`."""
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


def crc32c_in_python(data: bytes | bytearray | memoryview, before: int = 0, /) -> int:
    """Return the CRC-32C of `data`, or of the bytes with the CRC `before` and then `data`; byte by byte."""
    table = _table()
    value = before ^ _WORD
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ _WORD
