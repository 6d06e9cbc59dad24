"""TFRecord frames that are not as they should be."""

from __future__ import annotations

from streamer.formats import tfrecord


def spoilt(payload: bytes) -> bytes:
    """A TFRecord whose data CRC does not hold."""
    frame = bytearray(tfrecord.encode(payload))
    frame[-1] ^= 1
    return bytes(frame)
