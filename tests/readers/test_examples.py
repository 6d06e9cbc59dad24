"""tf.train.Example without TensorFlow. Against TensorFlow's own parser: test_samples.py."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from streamer.errors import CorruptRecord
from streamer.formats import tfrecord
from streamer.readers.examples import ExampleDecoder, Fixed, Var
from tests.readers.example_bytes import entry, example, feature, numbers, tagged, varint
from tests.readers.feeder import Feeder

PAGE = Path(__file__).parent.parent.parent / "docs" / "how-to" / "arrays-and-tables.md"


@pytest.mark.parametrize("packed", [True, False])
def test_values_of_every_type(packed: bool) -> None:
    floats, integers = [0.5, -1.25, float("inf")], [0, 1, -1, 300, 2**63 - 1, -(2**63)]
    payload = example(
        entry(b"f", feature("float32", floats, packed=packed)),
        entry(b"i", feature("int64", integers, packed=packed)),
        entry(b"b", feature("bytes", [b"a\0", b""])),
        entry(b"unused", feature("bytes", [b"x"])),
    )
    decoder = ExampleDecoder(
        {"f": Fixed("float32", (3, 1)), "i": Var("int64"), "b": Var("bytes"), "n": Var("float32")}
    )
    values = decoder.decode(payload)
    assert values.keys() == {"f", "i", "b", "n"}
    assert (values["f"].dtype, values["f"].tolist()) == (np.float32, [[each] for each in floats])
    assert (values["i"].dtype, values["i"].tolist()) == (np.int64, integers)
    assert values["b"].tolist() == [b"a\0", b""]
    assert (values["n"].dtype, values["n"].shape) == (np.float32, (0,))
    # Workers get it by pickle.
    assert pickle.loads(pickle.dumps(decoder)).decode(payload)["i"].tolist() == integers


def test_batches_are_stacked() -> None:
    payloads = [
        example(
            entry(b"label", feature("int64", [number])),
            entry(b"image", feature("bytes", [b"x" * number])),
            entry(b"boxes", feature("float32", [1.0] * number)),
        )
        for number in range(3)
    ]
    decoder = ExampleDecoder({"label": Fixed("int64"), "image": Fixed("bytes"), "boxes": Var("float32")})
    batch = decoder.decode_batch(payloads)
    assert batch["label"].tolist() == [0, 1, 2]
    assert batch["image"].tolist() == [b"", b"x", b"xx"]
    assert [boxes.tolist() for boxes in batch["boxes"]] == [[], [1.0], [1.0, 1.0]]
    with pytest.raises(CorruptRecord, match=r"^record 1 of the batch is no tf.train.Example") as caught:
        decoder.decode_batch([payloads[0], b"\xff"])
    assert isinstance(caught.value.__cause__, DecodeError)


X = {"x": Fixed("float32", (2,))}


@pytest.mark.parametrize(
    ("payload", "features", "error"),
    [
        (b"\xff\xff", X, "the record is no tf.train.Example: Error parsing message"),
        (example(entry(b"x", feature("float32", [1, 2])))[:-1], X, "the record is no tf.train.Example"),
        (b"no example", X, "the record is no tf.train.Example"),
        (tagged(7, b"other message"), X, "the record is no tf.train.Example: it has no features"),
        (b"", X, "feature 'x' of the record: the record lacks it, and it has no default"),
        (example(entry(b"x", b"")), X, "the record lacks it"),
        (example(entry(b"x", feature("int64", [1, 2]))), X, "it is a int64_list, and float_list is due"),
        (example(entry(b"x", feature("float32", [1]))), X, r"1 values, and its shape is \(2,\)"),
        (example(entry(b"x", feature("float32", []))), X, r"0 values, and its shape is \(2,\)"),
        # Wrong wire types: a varint, and 8 bytes, where floats are due; a varint instead of a list.
        (
            example(entry(b"x", tagged(2, varint(1 << 3) + b"\5"))),
            {"x": Var("float32")},
            "values of another type",
        ),
        (
            example(entry(b"x", tagged(2, varint(1 << 3 | 1) + bytes(8)))),
            {"x": Var("float32")},
            "its float_list has values of another type",
        ),
        (
            example(entry(b"x", varint(2 << 3) + b"\1")),
            {"x": Fixed("float32", default=1.0)},
            "it has values of an unknown type",
        ),
        # Packed floats of 3 bytes, an integer of 11 bytes, a name that is no UTF-8.
        (example(entry(b"x", tagged(2, tagged(1, b"abc")))), {"x": Var("float32")}, "no tf.train.Example"),
        (
            example(entry(b"x", tagged(3, tagged(1, b"\xff" * 10 + b"\1")))),
            {"x": Var("int64")},
            "no tf.train",
        ),
        (example(entry(b"\xff", feature("int64", [1]))), {"x": Var("int64")}, "no tf.train.Example"),
    ],
)
def test_what_is_not_as_wanted_is_an_error(payload: bytes, features: Any, error: str) -> None:
    with pytest.raises(CorruptRecord, match=error):
        ExampleDecoder(features).decode(payload)


def test_unknown_fields_are_skipped() -> None:
    value = feature("float32", [1, 2])
    payload = (
        tagged(9, b"?") + example(entry(b"x", value + tagged(9, b"?")), tagged(5, b"?")) + tagged(8, b"")
    )
    assert ExampleDecoder(X).decode(payload)["x"].tolist() == [1, 2]


def test_defaults() -> None:
    decoder = ExampleDecoder(
        {
            "a": Fixed("float32", (2, 1), [[1.0], [2.0]]),
            "b": Fixed("bytes", default=b"none\0"),
            "c": Fixed("bytes", (2,), [b"x\0", b"y"]),
            "d": Fixed("int64", default=7),
            "e": Var("int64"),
        }
    )
    values = decoder.decode(b"")
    assert (values["a"].tolist(), values["b"], values["c"].tolist()) == (
        [[1], [2]],
        b"none\0",
        [b"x\0", b"y"],
    )
    assert (values["d"], values["d"].dtype, values["e"].shape) == (7, np.int64, (0,))
    values["a"][:] = 0
    assert decoder.decode(b"")["a"].tolist() == [[1], [2]]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (
            lambda: Var(cast("Any", "float64")),
            "the type of a feature is 'float64': write bytes, float32, int64",
        ),
        (lambda: Fixed("int64", cast("Any", (None, 2))), "sizes are 1 or more; or use Var"),
        (lambda: Fixed("int64", (0,)), "sizes are 1 or more"),
        (lambda: Fixed("int64", (2,), 1), r"1 values, and its shape is \(2,\)"),
        (lambda: ExampleDecoder({}), "no feature to decode"),
    ],
)
def test_wrong_features_are_refused(make: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        make()


def test_without_protobuf_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['google.protobuf'] = None\n"
        "from streamer.readers.examples import ExampleDecoder, Var\n"
        "ExampleDecoder({'x': Var('int64')})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "install penstock-readers[examples]" in done.stderr


def test_the_example_of_the_page(feeder: Feeder) -> None:
    (shown,) = (
        body
        for body in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        if "import ExampleDecoder" in body and "PipeReader" in body
    )
    payload = example(
        entry(b"image/encoded", feature("bytes", [b"jpeg"])),
        entry(b"image/class/label", feature("int64", [5])),
        entry(b"image/object/bbox", feature("float32", numbers("float32", 8))),
    )
    feeder.feed(0, tfrecord.encode(payload) * 3)
    seen: dict[str, Any] = {}
    exec(shown, seen)
    assert (seen["image"], seen["label"], seen["boxes"].shape) == (b"jpeg", 5, (2, 4))
