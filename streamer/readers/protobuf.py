"""SageMaker's protobuf records as NumPy arrays (contract §5.2).

Channels of content type `application/x-recordio-protobuf` have one `aialgs.data.Record` in every RecordIO
record: two maps from name to tensor, features and labels. With the plain reader:

    for payload in PipeReader("train", "RecordIO"):
        record = decode(payload)
        record.features["values"], record.label["values"]        # numpy arrays

This module decodes the wire format (protobuf's documentation, "Encoding") itself, because the protobuf
package makes a Python object of every number. A packed float tensor becomes a view of the payload, without a
copy. Unknown fields are skipped, as protobuf demands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from streamer.errors import CorruptRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FLOATS: dict[int, np.dtype[Any]] = {2: np.dtype("<f4"), 3: np.dtype("<f8")}
"""Types of the float tensors of a `Value`, by field number; field 7 is of 32-bit integers, 9 of bytes."""
_INTEGERS, _BLOBS = 7, 9


@dataclass(frozen=True, slots=True)
class Sparse:
    """A sparse tensor: `values` at the flat indices `keys`, 0 elsewhere."""

    values: NDArray[Any]
    keys: NDArray[np.uint64]
    shape: tuple[int, ...]
    """Sizes of the dimensions; empty if the record has none."""

    def dense(self) -> NDArray[Any]:
        """Return the whole tensor. Raises CorruptRecord if the record has no shape, or keys beyond it."""
        if not self.shape:
            raise CorruptRecord("a sparse tensor of a protobuf record has no shape")
        try:
            whole = np.zeros(self.shape, self.values.dtype)
            whole.reshape(-1)[self.keys] = self.values
        except (ValueError, IndexError) as error:
            raise CorruptRecord(f"a sparse tensor of a protobuf record: {error}") from error
        return whole


@dataclass(frozen=True, slots=True)
class Blobs:
    """Bytes that are not numbers, such as images."""

    values: list[bytes]
    content_type: str | None


Value: TypeAlias = "NDArray[Any] | Sparse | Blobs"


@dataclass(frozen=True, slots=True)
class Record:
    """One record. Dense tensors of floats are read-only views of the payload if they are in one piece."""

    features: dict[str, Value] = field(default_factory=dict)
    """Tensors by name; a vector is one tensor with the name `values`."""
    label: dict[str, Value] = field(default_factory=dict)
    """Tensors by name, as for `features`."""
    uid: str | None = None
    metadata: str | None = None
    configuration: str | None = None


def decode(payload: bytes) -> Record:
    """Decode one record. Raises CorruptRecord if the payload is no record."""
    features: dict[str, Value] = {}
    label: dict[str, Value] = {}
    texts: dict[int, str] = {}
    try:
        for number, wire, value in _fields(memoryview(payload)):
            if number in (1, 2) and wire == _BYTES:
                name, tensor = _entry(value)
                (features if number == 1 else label)[name] = tensor
            elif number in (3, 4, 5) and wire == _BYTES:
                texts[number] = str(value, "utf-8")
    except ValueError as error:
        raise CorruptRecord(f"not a protobuf record of SageMaker's: {error}") from error
    return Record(features, label, texts.get(3), texts.get(4), texts.get(5))


def _entry(data: memoryview) -> tuple[str, Value]:
    name, body = "", memoryview(b"")
    for number, wire, value in _fields(data):
        if number == 1 and wire == _BYTES:
            name = str(value, "utf-8")
        elif number == 2 and wire == _BYTES:
            body = value
    return name, _value(name, body)


def _value(name: str, data: memoryview) -> Value:
    # The last member of a oneof that is set counts.
    kinds = {*_FLOATS, _INTEGERS, _BLOBS}
    set_ = [(number, value) for number, wire, value in _fields(data) if number in kinds and wire == _BYTES]
    if not set_:
        raise ValueError(f"{name!r} has no value")
    number, body = set_[-1]
    return _blobs(body) if number == _BLOBS else _tensor(name, number, body)


def _blobs(data: memoryview) -> Blobs:
    values, kind = [], None
    for number, wire, value in _fields(data):
        if number == 1 and wire == _BYTES:
            values.append(bytes(value))
        elif number == 2 and wire == _BYTES:
            kind = str(value, "utf-8")
    return Blobs(values, kind)


def _tensor(name: str, kind: int, data: memoryview) -> Value:
    parts: list[NDArray[Any]] = []
    keys: list[NDArray[np.uint64]] = []
    shape: list[NDArray[np.uint64]] = []
    for number, wire, value in _fields(data):
        if number in (2, 3):
            (keys if number == 2 else shape).append(_integers(wire, value))
        elif number == 1 and kind == _INTEGERS:
            parts.append(_integers(wire, value).astype(np.int32))
        elif number == 1:
            if wire == _VARINT or len(value) % _FLOATS[kind].itemsize:
                raise ValueError(f"{name!r} ends in the middle of a number")
            parts.append(np.frombuffer(value, _FLOATS[kind]))
    dtype: np.dtype[Any] = np.dtype(np.int32) if kind == _INTEGERS else _FLOATS[kind]
    values: NDArray[Any] = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])
    extent = tuple(int(size) for part in shape for size in part)
    if keys:
        flat = np.concatenate(keys)
        if len(flat) != len(values):
            raise ValueError(f"{name!r} has {len(values)} values at {len(flat)} keys")
        return Sparse(values, flat, extent)
    return values.reshape(extent) if extent else values


def _integers(wire: int, value: Any) -> NDArray[np.uint64]:
    """Return the numbers of one varint, or of a packed run of varints."""
    if wire == _VARINT:
        return np.array([value], np.uint64)
    if wire != _BYTES:
        raise ValueError("a number of the wrong width")
    data = np.frombuffer(value, np.uint8)
    if not len(data):
        return np.empty(0, np.uint64)
    ends = np.flatnonzero(data < 0x80)
    if not len(ends) or ends[-1] != len(data) - 1:
        raise ValueError("a number is cut")
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts + 1
    if np.max(lengths) > 10:
        raise ValueError("a number of more than 64 bits")
    index = np.arange(len(data)) - np.repeat(starts, lengths)
    digits = (data & 0x7F).astype(np.uint64) << (7 * index).astype(np.uint64)
    numbers: NDArray[np.uint64] = np.bitwise_or.reduceat(digits, starts)
    return numbers


def _fields(data: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Yield number, wire type and value of every field; the value is an integer, or the field's bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, wire, value
            continue
        if wire == _BYTES:
            length, at = _varint(data, at)
        elif wire in (_FIXED64, _FIXED32):
            length = 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + length > len(data):
            raise ValueError(f"a field of {length} bytes where {len(data) - at} are left")
        yield tag >> 3, wire, data[at : at + length]
        at += length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
    raise ValueError("a number is cut, or has more than 64 bits")
