"""Runs the Python examples of pages, each on channels that have what it reads.

The blocks of a page share their names, so an example may go on with what an earlier one imported. Each block
has a base directory of its own, with the first epochs of its channels. What a page calls `your function` is
in `YOURS`. An example without a loop ends with a reader, a dataset or a loader, which is then read.
"""

from __future__ import annotations

import functools
import io
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from streamer.formats import recordio, tfrecord
from tests.readers.example_bytes import entry, example, feature
from tests.readers.feeder import Feeder

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FRAMEWORKS = ("tensorflow", "jax")
"""Frameworks whose threads would be in the way of a DataLoader's fork, so that each has a process."""
NOT_FED = ('"/dev/stdin"', "cardinality=True")
"""Words of examples that are not run: they read a pipe, or ranks that share a channel by record."""
COUNT = 24
"""Records of an epoch."""
EPOCHS = 3
SHORTER = {"1_000_000": "20", '"/opt/ml/output/data/': f'"{tempfile.gettempdir()}/'}
"""What a test must not do as a page shows it."""


def parquet(number: int) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet as files

    out = io.BytesIO()
    table = pa.table({"text": [f"text {number}"] * 3, "label": [number, 1, 2]})
    files.write_table(table, out)
    return out.getvalue()


@functools.cache
def jpeg() -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "JPEG")
    return out.getvalue()


def annotated(number: int) -> bytes:
    image = entry(b"image/encoded", feature("bytes", [b"jpeg"]))
    label = entry(b"image/class/label", feature("int64", [number]))
    return example(image, label, entry(b"image/object/bbox", feature("float32", [0.0, 0.1, 0.5, 0.9])))


def stream(block: str) -> list[bytes]:
    """Return the bytes of each record of an epoch of the channel that a block reads."""
    numbers = range(COUNT)
    records: dict[str, Callable[[int], bytes]] = {
        "read_csv|open_csv|BufferedReader": lambda number: b"%d,%d\n" % (number, number),
        '"TextLine"': lambda number: json.dumps({"number": number}).encode() + b"\n",
        "TokenReader": lambda number: np.full(1024, number, "<u2").tobytes(),
        '"fixed:2050"': lambda number: np.full(1025, number, "<u2").tobytes(),
        "TableReader|TableIterableDataset": lambda number: recordio.encode(parquet(number)),
        "ExampleDecoder": lambda number: tfrecord.encode(annotated(number)),
        "parse_example": lambda number: tfrecord.encode(example(entry(b"label", feature("int64", [number])))),
        "grouped": lambda number: recordio.encode(jpeg() if number % 2 == 0 else b"label"),
        '"TFRecord"': lambda number: tfrecord.encode(np.full(4, number, "<f4").tobytes()),
    }
    return next(
        [make(number) for number in numbers] for words, make in records.items() if re.search(words, block)
    )


def decode(records: list[bytes]) -> Any:
    import torch

    return torch.tensor([len(record) for record in records])


YOURS: dict[str, Any] = {"decode": decode}


def run(block: str, names: dict[str, Any]) -> None:
    """Run a block on fed channels, with the names of the blocks before it."""
    for shown, shorter in SHORTER.items():
        block = block.replace(shown, shorter)
    with tempfile.TemporaryDirectory() as base:
        channels = [name for name in ("train", "web", "code") if f'"{name}"' in block] or ["train"]
        feeder = Feeder(Path(base, "ml"), channels)
        os.environ["SAGEMAKER_BASE_DIR"] = feeder.base
        records = stream(block)
        objects = [(len(record), f"data/{number}") for number, record in enumerate(records)]
        for channel in channels:
            for epoch in range(EPOCHS):
                feeder.list_keys(objects, epoch=epoch, channel=channel)
                feeder.feed(epoch, b"".join(records), channel=channel)
        try:
            exec(compile(block, "block", "exec"), names)
            if not re.search(r"^ *for ", block, re.MULTILINE):
                *_, last = re.findall(r"^(\w+) = ", block, re.MULTILINE)
                assert sum(1 for _ in names[last]) > 0
        finally:
            feeder.close()


def blocks(page: str, framework: str | None) -> list[str]:
    """Return the examples of a page with one of `FRAMEWORKS`, or those with none."""
    found = BLOCK.findall(Path(page).read_text())
    return [
        block
        for block in found
        if framework == next((name for name in FRAMEWORKS if name in block), None)
        and not any(words in block for words in NOT_FED)
    ]


def main(pages: list[str], framework: str | None) -> None:
    """Run the examples of pages; print a line before each."""
    for page in pages:
        names = {"__name__": "__main__"} | YOURS
        for number, block in enumerate(blocks(page, framework)):
            print(f"example {number} of {page}", flush=True)
            run(block, names)
