"""Protobuf records against Google's own implementation, with the schema that SageMaker publishes."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors import CorruptRecord
from streamer.readers.protobuf import Blobs, Sparse, decode

F = descriptor_pb2.FieldDescriptorProto


def schema(packed: bool) -> Any:
    """`aialgs.data` (contract §5.2); proto2 writes repeated numbers packed only where told to."""
    file = descriptor_pb2.FileDescriptorProto(name=f"record-{packed}.proto", package=f"aialgs{packed:d}")
    for name, kind in (("Float32", F.TYPE_FLOAT), ("Float64", F.TYPE_DOUBLE), ("Int32", F.TYPE_INT32)):
        tensor = file.message_type.add(name=f"{name}Tensor")
        for number, (part, type_) in enumerate(
            [("values", kind), ("keys", F.TYPE_UINT64), ("shape", F.TYPE_UINT64)]
        ):
            made = tensor.field.add(name=part, number=number + 1, type=type_, label=F.LABEL_REPEATED)
            made.options.packed = packed
    blobs = file.message_type.add(name="Bytes")
    blobs.field.add(name="value", number=1, type=F.TYPE_BYTES, label=F.LABEL_REPEATED)
    blobs.field.add(name="content_type", number=2, type=F.TYPE_STRING, label=F.LABEL_OPTIONAL)
    value = file.message_type.add(name="Value")
    value.oneof_decl.add(name="value")
    for name, number, type_ in (
        ("float32_tensor", 2, "Float32Tensor"), ("float64_tensor", 3, "Float64Tensor"),
        ("int32_tensor", 7, "Int32Tensor"), ("bytes", 9, "Bytes"),
    ):  # fmt: skip
        value.field.add(
            name=name, number=number, type=F.TYPE_MESSAGE, type_name=f".{file.package}.{type_}",
            label=F.LABEL_OPTIONAL, oneof_index=0,
        )  # fmt: skip
    record = file.message_type.add(name="Record")
    for number, name in enumerate(["features", "label"], 1):
        entry = record.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, type=F.TYPE_STRING, label=F.LABEL_OPTIONAL)
        entry.field.add(
            name="value",
            number=2,
            type=F.TYPE_MESSAGE,
            type_name=f".{file.package}.Value",
            label=F.LABEL_OPTIONAL,
        )
        record.field.add(
            name=name, number=number, type=F.TYPE_MESSAGE, label=F.LABEL_REPEATED,
            type_name=f".{file.package}.Record.{entry.name}",
        )  # fmt: skip
    for number, name in enumerate(["uid", "metadata", "configuration"], 3):
        record.field.add(name=name, number=number, type=F.TYPE_STRING, label=F.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.Record"))


RECORDS = {packed: schema(packed) for packed in (True, False)}
TENSORS = {
    "float32_tensor": (np.float32, st.floats(width=32, allow_nan=False)),
    "float64_tensor": (np.float64, st.floats(allow_nan=False)),
    "int32_tensor": (np.int32, st.integers(-(2**31), 2**31 - 1)),
}


@given(
    st.data(), st.sampled_from(list(TENSORS)), st.booleans(), st.booleans(),
    st.lists(st.integers(0, 2**64 - 1), max_size=30),
)  # fmt: skip
def test_tensors(data: st.DataObject, kind: str, packed: bool, sparse: bool, keys: list[int]) -> None:
    dtype, numbers = TENSORS[kind]
    values = data.draw(st.lists(numbers, min_size=len(keys), max_size=len(keys)))
    message = RECORDS[packed]()
    tensor = getattr(message.features["values"], kind)
    tensor.values.extend(values)
    tensor.SetInParent()
    if sparse and keys:
        tensor.keys.extend(keys)
        tensor.shape.extend([7, 2**40])
    found = decode(message.SerializeToString()).features["values"]
    if sparse and keys:
        assert isinstance(found, Sparse)
        assert found.keys.tolist() == keys
        assert found.shape == (7, 2**40)
        found = found.values
    assert isinstance(found, np.ndarray)
    assert found.dtype == dtype
    assert found.tolist() == values


def test_a_whole_record() -> None:
    message = RECORDS[True](uid="u", metadata="{}", configuration="c")
    message.features["matrix"].float32_tensor.values.extend(range(6))
    message.features["matrix"].float32_tensor.shape.extend([2, 3])
    message.features["image"].bytes.value.append(b"\xff\xd8")
    message.features["image"].bytes.content_type = "image/jpeg"
    message.label["values"].float32_tensor.values.append(3.0)
    record = decode(message.SerializeToString())
    matrix, label = record.features["matrix"], record.label["values"]
    assert isinstance(matrix, np.ndarray)
    assert matrix.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert record.features["image"] == Blobs([b"\xff\xd8"], "image/jpeg")
    assert isinstance(label, np.ndarray)
    assert label.tolist() == [3.0]
    assert (record.uid, record.metadata, record.configuration) == ("u", "{}", "c")
    assert decode(b"") == type(record)()


def test_dense_from_sparse() -> None:
    found = Sparse(np.array([1.5, 2.5]), np.array([0, 5], np.uint64), (2, 3))
    assert found.dense().tolist() == [[1.5, 0, 0], [0, 0, 2.5]]
    for broken in (Sparse(found.values, found.keys, (5,)), Sparse(found.values, found.keys, ())):
        with pytest.raises(CorruptRecord, match="a sparse tensor of a protobuf record"):
            broken.dense()


def test_unknown_fields_are_passed_over() -> None:
    message = RECORDS[True](uid="u")
    unknown = bytes.fromhex("f00101f1010000000000000000f50100000000f20102ffff")
    assert decode(unknown + message.SerializeToString() + unknown).uid == "u"


def test_what_is_no_record_is_an_error() -> None:
    message = RECORDS[True]()
    message.features["values"].float32_tensor.values.extend([1, 2, 3])
    message.features["values"].float32_tensor.keys.extend([1000, 2, 3])
    whole = message.SerializeToString()
    for cut in range(1, len(whole)):
        with pytest.raises(CorruptRecord, match="not a protobuf record"):
            decode(whole[:cut])
    for broken in (b"\x0b", b"\xff" * 11, whole.replace(b"\x0c\x00\x00\x80\x3f", b"\x0b\x00\x00\x80\x3f")):
        with pytest.raises(CorruptRecord):
            decode(broken)
    message.features["values"].float32_tensor.shape.extend([3, 3])
    message.features["values"].float32_tensor.ClearField("keys")
    with pytest.raises(CorruptRecord, match="cannot reshape"):
        decode(message.SerializeToString())


@given(st.binary(max_size=60))
def test_any_bytes_are_a_record_or_an_error(data: bytes) -> None:
    with contextlib.suppress(CorruptRecord):
        decode(data)
