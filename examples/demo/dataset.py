"""Makes the sample data: labelled vectors around class means, as tf.train.Example records in TFRecord shards.

A record has `label` (int64) and `data` (the 8192 bytes of 1024 little-endian float64), a vector drawn from a
Gaussian of unit variance around the mean of its class. At the distance of the means a linear classifier is
right nearly always, but not always.

A shard depends on (seed, channel, index) only, so a failed upload can be repeated object by object, and every
run with the same seed streams the same bytes. All records have the same length: a shard is an array of one
structured type, filled in place, and only the CRC is computed record by record. This module writes the few
bytes of protobuf around label and vector without TensorFlow; a test reads them with TensorFlow.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from streamer.formats.crc import crc32c, mask
from streamer.formats.tfrecord import encode

if TYPE_CHECKING:
    from numpy.typing import NDArray

DIMENSIONS = 1024
CLASSES = 10
SPREAD = 0.19
"""Standard deviation of a mean's coordinates: two means are 8.6 standard deviations of the noise apart."""
EVAL_SHARE = 10
"""Size of the train channel divided by the size of the eval channel."""

_VECTOR = f"({DIMENSIONS},)<f8"
_BLOCK = 512
"""Number of records whose vectors are drawn at a time: 4 MiB, which fit the CPU's cache."""


def _field(number: int, payload: bytes) -> bytes:
    """Return a length-delimited protobuf field."""
    length, size = b"", len(payload)
    while size >= 0x80:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + payload


def _feature(name: str, value: bytes) -> bytes:
    """Return one entry of the map `Features.feature`."""
    return _field(1, _field(1, name.encode()) + _field(2, value))


# A Feature is one of bytes_list (1), float_list (2) and int64_list (3), whose values are field 1; a label
# below 128 is one byte of varint. Label and vector are zero in this template, and are the last bytes of
# their entries.
_LABEL = _feature("label", _field(3, _field(1, bytes(1))))
_DATA = _feature("data", _field(1, _field(1, bytes(8 * DIMENSIONS))))
_FRAME = encode(_field(1, _LABEL + _DATA))
_CRC_BYTES = 4
_PAYLOAD_AT = struct.calcsize("<QI")
_PAYLOAD_END = len(_FRAME) - _CRC_BYTES
_RECORD = np.dtype(
    {
        "names": ["label", "vector", "crc"],
        "formats": ["u1", _VECTOR, "<u4"],
        "offsets": [_PAYLOAD_END - len(_DATA) - 1, _PAYLOAD_END - 8 * DIMENSIONS, _PAYLOAD_END],
        "itemsize": len(_FRAME),
    }
)
RECORD_BYTES = len(_FRAME)
"""Bytes of every record in its TFRecord frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """The data of one channel: a number of records, spread evenly over a number of objects."""

    name: str
    number: int
    """Part of the seed, different for each channel."""
    records: int
    objects: int
    seed: int
    classes: int = CLASSES

    @property
    def total_bytes(self) -> int:
        return self.records * RECORD_BYTES

    def key(self, index: int) -> str:
        """Return the key of the object with shard `index`."""
        return f"{self.name}/part-{index:05d}.tfrecord"

    def shard(self, index: int) -> bytearray:
        """Return the bytes of one object."""
        count = self.records // self.objects + (index < self.records % self.objects)
        raw = bytearray(_FRAME * count)
        frames: NDArray[Any] = np.frombuffer(raw, dtype=_RECORD)
        random = np.random.default_rng([self.seed, self.number, index])
        means = class_means(self.seed, self.classes)
        frames["label"] = labels = random.integers(self.classes, size=count)
        for start in range(0, count, _BLOCK):
            chosen = slice(start, start + _BLOCK)
            vectors = means[labels[chosen]]
            vectors += random.standard_normal(vectors.shape)
            frames["vector"][chosen] = vectors
        checksum, view = crc32c(), memoryview(raw)
        starts = range(_PAYLOAD_AT, len(raw), RECORD_BYTES)
        size = _PAYLOAD_END - _PAYLOAD_AT
        frames["crc"] = [mask(checksum(view[start : start + size])) for start in starts]
        return raw


def class_means(seed: int, classes: int) -> NDArray[np.float64]:
    """Return one mean vector per class, the same for every channel."""
    return SPREAD * np.random.default_rng([seed, 0]).standard_normal((classes, DIMENSIONS))


def channels(*, megabytes: float, objects: int, seed: int, classes: int = CLASSES) -> tuple[Channel, Channel]:
    """Return channel `train`, about `megabytes` (1e6 bytes) in `objects` objects, and `eval`, a tenth of it.

    Raises ValueError for a number out of range, or if an object would have no record.
    """
    if not 2 <= classes <= 0x7F:
        raise ValueError(f"{classes} classes: there must be 2 to 127")
    records = round(megabytes * 1e6 / RECORD_BYTES)
    fewer = max(1, objects // 4)
    if objects < 1 or seed < 0 or records < objects or records // EVAL_SHARE < fewer:
        raise ValueError(f"{megabytes:g} MB in {objects} objects with seed {seed} cannot be made")
    train = Channel(name="train", number=1, records=records, objects=objects, seed=seed, classes=classes)
    held_out = records // EVAL_SHARE
    return train, Channel(name="eval", number=2, records=held_out, objects=fewer, seed=seed, classes=classes)
