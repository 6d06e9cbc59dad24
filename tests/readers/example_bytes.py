"""Bytes of `tf.train.Example`, written field by field, so that unusual encodings can be made."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

_FIELDS = {"bytes": 1, "float32": 2, "int64": 3}


def varint(number: int) -> bytes:
    """A varint; of a negative number the ten bytes of its two's complement."""
    number &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def tagged(field: int, body: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(body)) + body


def feature(kind: str, values: Sequence[Any], *, packed: bool = True) -> bytes:
    """A Feature: a list of values in the field of its kind."""
    if kind == "bytes":
        inner = b"".join(tagged(1, value) for value in values)
    else:
        encoded = [struct.pack("<f", value) if kind == "float32" else varint(value) for value in values]
        tag = varint(1 << 3 | (5 if kind == "float32" else 0))
        inner = tagged(1, b"".join(encoded)) if packed else b"".join(tag + value for value in encoded)
    return tagged(_FIELDS[kind], inner)


def entry(key: bytes, value: bytes) -> bytes:
    """An entry of the map of Features."""
    return tagged(1, tagged(1, key) + tagged(2, value))


def example(*entries: bytes) -> bytes:
    return tagged(1, b"".join(entries))


def numbers(kind: str, count: int) -> list[Any]:
    return [float(number) if kind == "float32" else number for number in range(count)]
