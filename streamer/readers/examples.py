"""Decodes `tf.train.Example` into NumPy arrays, without TensorFlow.

    TFRecord -> payload -> protobuf message -> dict from feature to array

    decoder = ExampleDecoder({"image": Fixed("bytes"), "label": Fixed("int64"), "boxes": Var("float32")})
    for payload in PipeReader("train", "TFRecord"):
        example = decoder.decode(payload)

The values are those of `tf.io.parse_single_example`. Records that protobuf's own writers do not make, such as
a feature of two kinds, follow protobuf's rules; TensorFlow's parser refuses most of them. Values of a wrong
wire type, which protobuf skips as unknown fields, are an error.

The protobuf package parses the messages; it is imported when a decoder is made (the extra `examples` of
penstock-readers). Its parser in C takes 4.2 µs for an example of 100 bytes and a label.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from streamer.errors import CorruptRecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Kind = Literal["bytes", "float32", "int64"]
_LISTS = {"bytes": "bytes_list", "float32": "float_list", "int64": "int64_list"}
"""By type of a value, the field of Feature that has such values."""
_FEW = 64
"""Numbers up to which `np.fromiter` copies faster than `np.array`."""
_MESSAGES = """
name: "penstock.proto" package: "penstock" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: "BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: "FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: "Int64List" oneof_index: 0 } }
message_type { name: "Features"
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: "Feature" } }
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "FeatureEntry" } }
message_type { name: "Example" field { name: "features" number: 1 type: TYPE_MESSAGE type_name: "Features" } }
"""
"""Names and numbers of TensorFlow's example.proto and feature.proto, in a package of their own: in a process
that has imported TensorFlow, the two would collide otherwise."""


@dataclass(frozen=True)
class Var:
    """A feature with any number of values: a flat array, the `values` of `tf.io.VarLenFeature`."""

    kind: Kind

    def __post_init__(self) -> None:
        if self.kind not in _LISTS:
            raise ValueError(f"the type of a feature is {self.kind!r}: write {', '.join(_LISTS)}")

    def array(self, values: Any) -> Any:
        """Return the values; None: those of a record that lacks the feature."""
        return _array(values or (), self.kind)


@dataclass(frozen=True)
class Fixed(Var):
    """A feature with a fixed number of values, as `tf.io.FixedLenFeature`.

    It becomes an array of `shape`; of the kind bytes an array of objects, or `bytes` if the shape is ().
    `default`: values of a feature that a record lacks; None if that is an error.
    """

    shape: tuple[int, ...] = ()
    default: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(type(size) is int and size > 0 for size in self.shape):
            raise ValueError(f"the shape of a feature is {self.shape}: sizes are 1 or more; or use Var")
        if self.default is not None:
            self.array(None)

    def array(self, values: Any) -> Any:
        """Return the values in the feature's shape; None: those of a record that lacks the feature.

        Raises ValueError for another number of values, or if there is no default.
        """
        if values is None:
            if self.default is None:
                raise ValueError("the record lacks it, and it has no default")
            values = np.ravel(np.array(self.default, object if self.kind == "bytes" else self.kind))
        if len(values) != math.prod(self.shape):
            raise ValueError(f"{len(values)} values, and its shape is {self.shape}")
        if self.kind == "bytes" and not self.shape:
            return values[0]
        return _array(values, self.kind).reshape(self.shape)


class ExampleDecoder:
    """Decodes examples into a dict with an array for each of `features`; other features are left out.

    Raises ValueError for no feature, ModuleNotFoundError without protobuf.
    """

    def __init__(self, features: Mapping[str, Fixed | Var]) -> None:
        if not features:
            raise ValueError("no feature to decode: name one")
        _protobuf()
        self._features = dict(features)

    def decode(self, payload: bytes, *, name: str = "the record") -> dict[str, Any]:
        """Return the values of one record. `name`: the record's, for errors.

        Raises CorruptRecord if the payload is no Example, and for a feature of another type or number of
        values, or one that the record lacks.
        """
        example, failure, _ = _protobuf()
        try:
            message = example.FromString(payload)
        except failure as error:
            raise CorruptRecord(f"{name} is no tf.train.Example: {error}") from error
        if payload and not message.ListFields():
            raise CorruptRecord(f"{name} is no tf.train.Example: it has no features")
        found, values, key = message.features.feature, dict[str, Any](), ""
        try:
            for key, wanted in self._features.items():
                values[key] = wanted.array(_values(found[key], wanted.kind) if key in found else None)
        except ValueError as error:
            raise CorruptRecord(f"feature {key!r} of {name}: {error}") from error
        return values

    def decode_batch(self, payloads: Sequence[bytes], *, name: str = "the batch") -> dict[str, Any]:
        """Return the values of several records: arrays of `Fixed` features, stacked; lists of all others.

        For `decode` of `PipeIterableDataset` with a `batch_size`. Raises as `decode`.
        """
        records = [
            self.decode(each, name=f"record {number} of {name}") for number, each in enumerate(payloads)
        ]
        batch: dict[str, Any] = {key: [record[key] for record in records] for key in self._features}
        for key, wanted in self._features.items():
            if records and isinstance(wanted, Fixed):
                scalars = wanted.kind == "bytes" and not wanted.shape
                batch[key] = _array(batch[key], "bytes") if scalars else np.stack(batch[key])
        return batch


def _values(feature: Any, kind: Kind) -> Any:
    """Return the values of a Feature; None if it has none. Raises ValueError for those of another kind."""
    given, due = feature.WhichOneof("kind"), _LISTS[kind]
    if given is None:
        if _skipped(feature):
            raise ValueError("it has values of an unknown type")
        return None
    if given != due:
        raise ValueError(f"it is a {given}, and {due} is due")
    values = getattr(feature, given)
    if _skipped(values):
        raise ValueError(f"its {given} has values of another type")
    return values.value


def _skipped(message: Any) -> bool:
    """Return whether a Feature or a list has one of its fields in a wire type that protobuf does not take."""
    unknown, known = _protobuf()[2](message), message.DESCRIPTOR.fields_by_number
    return any(each.field_number in known for each in unknown)


def _array(values: Any, kind: Kind) -> Any:
    if kind != "bytes":
        return np.fromiter(values, kind, len(values)) if len(values) < _FEW else np.array(values, kind)
    array = np.empty(len(values), object)  # NumPy's own type of strings drops zeros at their end
    array[:] = values
    return array


@cache
def _protobuf() -> tuple[Any, Any, Any]:
    """Return the classes of Example, of the error of a payload that is not one, and of unknown fields."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory, text_format
        from google.protobuf.unknown_fields import UnknownFieldSet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "decoding needs protobuf, which is not installed: install penstock-readers[examples]",
            name=error.name,
        ) from error
    file, pool = descriptor_pb2.FileDescriptorProto(), descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(text_format.Parse(_MESSAGES, file).SerializeToString())
    example = message_factory.GetMessageClass(pool.FindMessageTypeByName("penstock.Example"))
    return example, message.DecodeError, UnknownFieldSet
