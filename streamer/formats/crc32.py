"""CRC-32 as zlib has it; by ISA-L, which takes a tenth of zlib's time, where that is installed."""

try:
    from isal.isal_zlib import crc32
except ImportError:  # a training image with penstock-readers alone
    from zlib import crc32

__all__ = ["crc32"]
