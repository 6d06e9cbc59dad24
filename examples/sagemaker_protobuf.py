"""SageMaker's protobuf records (`application/x-recordio-protobuf`) as NumPy arrays, in plain Python.

Every RecordIO record is one `aialgs.data.Record`: two maps from names to tensors, features and labels. The
protobuf package decodes it. The model is the mean vector of each label.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from streamer.readers import PipeReader

TENSORS = {
    "float32_tensor": ("TYPE_FLOAT", np.float32),
    "float64_tensor": ("TYPE_DOUBLE", np.float64),
    "int32_tensor": ("TYPE_INT32", np.int32),
}
"""By field of `Value`: protobuf's type and NumPy's type of a number."""
TENSOR = """
message_type { name: "%s"
  field { name: "values" number: 1 label: LABEL_REPEATED type: %s }
  field { name: "keys" number: 2 label: LABEL_REPEATED type: TYPE_UINT64 }
  field { name: "shape" number: 3 label: LABEL_REPEATED type: TYPE_UINT64 } }
"""
RECORD = """
name: "record.proto" package: "aialgs.data" syntax: "proto3"
message_type { name: "Bytes"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES }
  field { name: "content_type" number: 2 type: TYPE_STRING } }
message_type { name: "Value" oneof_decl { name: "value" }
  field { name: "float32_tensor" number: 2 type: TYPE_MESSAGE type_name: "float32_tensor" oneof_index: 0 }
  field { name: "float64_tensor" number: 3 type: TYPE_MESSAGE type_name: "float64_tensor" oneof_index: 0 }
  field { name: "int32_tensor" number: 7 type: TYPE_MESSAGE type_name: "int32_tensor" oneof_index: 0 }
  field { name: "bytes" number: 9 type: TYPE_MESSAGE type_name: "Bytes" oneof_index: 0 } }
message_type { name: "Record"
  nested_type { name: "FeaturesEntry" options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: "Value" } }
  nested_type { name: "LabelEntry" options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: "Value" } }
  field { name: "features" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "FeaturesEntry" }
  field { name: "label" number: 2 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "LabelEntry" }
  field { name: "uid" number: 3 type: TYPE_STRING }
  field { name: "metadata" number: 4 type: TYPE_STRING }
  field { name: "configuration" number: 5 type: TYPE_STRING } }
"""
"""The messages that SageMaker publishes as `record.proto`."""


@cache
def record_class() -> Any:
    """Return the class of a record."""
    text = RECORD + "".join(TENSOR % (name, kind) for name, (kind, _) in TENSORS.items())
    pool, file = descriptor_pool.DescriptorPool(), descriptor_pb2.FileDescriptorProto()
    pool.AddSerializedFile(text_format.Parse(text, file).SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("aialgs.data.Record"))


def array(value: Any) -> Any:
    """Return a tensor of numbers; a sparse one is 0 where the record has no value."""
    name = value.WhichOneof("value")
    tensor, (_, dtype) = getattr(value, name), TENSORS[name]
    values: Any = np.array(tensor.values, dtype)
    if tensor.keys:
        values, given = np.zeros(np.prod(tensor.shape), dtype), values
        values[list(tensor.keys)] = given
    return values.reshape(tensor.shape) if tensor.shape else values


def labelled(channel: str) -> Any:
    """Yield the vector and the label of each record."""
    for payload in PipeReader(channel, "RecordIO"):
        record = record_class().FromString(payload)
        yield array(record.features["values"]), int(array(record.label["values"])[0])


def main() -> None:
    sums: dict[int, Any] = {}
    counts: dict[int, int] = {}
    for vector, label in labelled("train"):
        sums[label] = sums.get(label, 0) + vector
        counts[label] = counts.get(label, 0) + 1
    print(f"read {sum(counts.values())} records with {len(counts)} labels")
    labels = sorted(sums)
    means = np.array([sums[label] / counts[label] for label in labels])
    right = total = 0
    for vector, label in labelled("eval"):
        right += labels[int(((means - vector) ** 2).sum(axis=1).argmin())] == label
        total += 1
    print(f"accuracy {right / total:.4f}")


if __name__ == "__main__":
    main()
