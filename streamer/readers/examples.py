"""Decodes `tf.train.Example` and `tf.train.SequenceExample` into NumPy arrays, without TensorFlow.

    TFRecord -> payload -> protobuf message -> dict from feature to array

    decoder = ExampleDecoder({"image": Fixed("bytes"), "label": Fixed("int64"), "boxes": Var("float32")})
    for payload in PipeReader("train", "TFRecord"):
        example = decoder.decode(payload)

The values are those of `tf.io.parse_single_example`. Records that protobuf's own writers do not make, such as
a feature of two kinds, follow protobuf's rules; TensorFlow's parser refuses most of them. Values of a wrong
wire type, which protobuf skips as unknown fields, are an error.

The protobuf package parses the messages. `streamer.readers.example_messages` has their descriptors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from streamer.errors import CorruptRecord
from streamer.readers.example_messages import message_classes, wrong_fields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LISTS = {"bytes": "bytes_list", "float32": "float_list", "int64": "int64_list"}
"""By type of a value, the field of Feature that has such values."""
_FEW = 64
"""Numbers up to which `np.fromiter` copies faster than `np.array`."""
Kind = Literal["bytes", "float32", "int64"]


@dataclass(frozen=True)
class Fixed:
    """A feature with a fixed number of values, as `tf.io.FixedLenFeature`.

    It becomes an array of `shape`; of the kind bytes an array of objects, or `bytes` if the shape is (). The
    first size may be None for any, as `tf.io.FixedLenSequenceFeature` with allow_missing. `default`: values
    of a feature that a record lacks; None if that is an error.
    """

    kind: Kind
    shape: tuple[int | None, ...] = ()
    default: Any = None

    def __post_init__(self) -> None:
        _check_kind(self.kind)
        if any(size is None for size in self.shape[1:]) or any(
            size is not None and size < 1 for size in self.shape
        ):
            raise ValueError(
                f"the shape of a feature is {self.shape}: sizes are 1 or more, the first may be None"
            )
        if self.default is not None:
            if self.any_length:
                raise ValueError(
                    "a feature of any length has no default: a record that lacks it has 0 values"
                )
            self.array(_flat(self.default, self.kind))

    @cached_property
    def any_length(self) -> bool:
        """Whether the first size may be any."""
        return self.shape[:1] == (None,)

    def array(self, values: Any) -> Any:
        """Return the values in the feature's shape. Raises ValueError for another number of values."""
        count, (rows, shape) = len(values), self._sizes
        if count % rows if self.any_length else count != rows:
            raise ValueError(f"{count} values, and its shape is {self.shape}")
        if not shape and self.kind == "bytes":
            return values[0]
        return _array(values, self.kind).reshape(shape)

    @cached_property
    def _sizes(self) -> tuple[int, tuple[int, ...]]:
        """Values of the shape, of one row if the first size may be any; and the shape for NumPy."""
        return math.prod(size or 1 for size in self.shape), tuple(size or -1 for size in self.shape)

    def absent(self) -> Any:
        """Return the values where a record lacks the feature. Raises ValueError if there are none."""
        if self.any_length:
            return self.array([])
        if self.default is None:
            raise ValueError("the record lacks it, and it has no default")
        return self.array(_flat(self.default, self.kind))


@dataclass(frozen=True)
class Var:
    """A feature with any number of values: a flat array, the `values` of `tf.io.VarLenFeature`."""

    kind: Kind

    def __post_init__(self) -> None:
        _check_kind(self.kind)

    def array(self, values: Any) -> Any:
        """Return the values."""
        return _array(values, self.kind)

    def absent(self) -> Any:
        """Return no values."""
        return self.array([])


class ExampleDecoder:
    """Decodes examples into a dict with an array for each of `features`; other features are left out.

    `sequences`: the feature lists of a SequenceExample; `features` are then those of its context. Each
    becomes a list with an array for each step. A record may lack a list of `Var`, which is then empty.

    Raises ValueError for no feature, ModuleNotFoundError without protobuf.
    """

    def __init__(
        self, features: Mapping[str, Fixed | Var], *, sequences: Mapping[str, Fixed | Var] | None = None
    ) -> None:
        if not features and not sequences:
            raise ValueError("no feature to decode: name one")
        if both := sorted(features.keys() & (sequences or {}).keys()):
            raise ValueError(f"feature {both[0]!r} is in features and in sequences; name it in one of them")
        message_classes()
        self._features, self._sequences = dict(features), dict(sequences or {})
        self._is_sequence = sequences is not None

    def decode(self, payload: bytes, *, name: str = "the record") -> dict[str, Any]:
        """Return the values of one record. `name`: the record's, for errors.

        Raises CorruptRecord if the payload is no such message, and for a feature of another type or number
        of values, or one that the record lacks.
        """
        message = self._message(payload, name)
        features = (message.context if self._is_sequence else message.features).feature
        values: dict[str, Any] = {}
        key = ""
        try:
            for key, wanted in self._features.items():
                values[key] = _values(features[key], wanted) if key in features else wanted.absent()
            for key, wanted in self._sequences.items():
                values[key] = _steps(message.feature_lists.feature_list, key, wanted)
        except ValueError as error:
            raise CorruptRecord(f"feature {key!r} of {name}: {error}") from error
        return values

    def decode_batch(self, payloads: Sequence[bytes], *, name: str = "the batch") -> dict[str, Any]:
        """Return the values of several records: arrays of `Fixed` features, stacked; lists of all others.

        For `decode` of `PipeIterableDataset` with a `batch_size`. Raises as `decode`.
        """
        records = [
            self.decode(payload, name=f"record {number} of {name}") for number, payload in enumerate(payloads)
        ]
        batch: dict[str, Any] = {}
        for key in [*self._features, *self._sequences]:
            column, wanted = [record[key] for record in records], self._features.get(key)
            if isinstance(wanted, Fixed) and not wanted.any_length and records:
                batch[key] = _objects(column) if isinstance(column[0], bytes) else np.stack(column)
            else:
                batch[key] = column
        return batch

    def _message(self, payload: bytes, name: str) -> Any:
        example, sequence_example, failures = message_classes()
        kind = sequence_example if self._is_sequence else example
        try:
            message = kind.FromString(payload)
        except failures as error:
            raise CorruptRecord(f"{name} is no tf.train.{kind.DESCRIPTOR.name}: {error}") from error
        if payload and not message.ListFields():
            raise CorruptRecord(f"{name} is no tf.train.{kind.DESCRIPTOR.name}: it has no features")
        return message


def _values(feature: Any, wanted: Fixed | Var) -> Any:
    """Return the values of a Feature. Raises ValueError if it is not as wanted."""
    given, due = feature.WhichOneof("kind"), _LISTS[wanted.kind]
    if given is None:
        if wrong_fields(feature):
            raise ValueError("it has values of an unknown type")
        return wanted.absent()
    if given != due:
        raise ValueError(f"it is a {given}, and {due} is due")
    values = getattr(feature, given)
    if wrong_fields(values):
        raise ValueError(f"its {given} has values of another type")
    return wanted.array(values.value)


def _steps(lists: Any, key: str, wanted: Fixed | Var) -> list[Any]:
    """Return the values of each step of a feature list. Raises ValueError if they are not as wanted."""
    if key in lists:
        return [_values(step, wanted) for step in lists[key].feature]
    if isinstance(wanted, Fixed):
        raise ValueError("the record lacks it")  # noqa: TRY004 - the value is wrong, not the type
    return []


def _array(values: Any, kind: Kind) -> Any:
    if kind == "bytes":
        return _objects(values)
    return np.fromiter(values, kind, len(values)) if len(values) < _FEW else np.array(values, kind)


def _objects(values: Any) -> Any:
    """Return an array of `bytes`; NumPy's own type of strings drops zeros at their end."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _flat(default: Any, kind: Kind) -> Any:
    """Return the values of a default, in one dimension."""
    if kind == "bytes":
        return [default] if isinstance(default, bytes) else list(np.ravel(np.array(default, object)))
    return np.ravel(np.array(default, kind))


def _check_kind(kind: str) -> None:
    if kind not in _LISTS:
        raise ValueError(f"the type of a feature is {kind!r}: write {', '.join(_LISTS)}")
