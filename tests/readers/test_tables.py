"""Readers of tables and arrays, as docs/how-to/arrays-and-tables.md shows them: pandas, pyarrow, JAX."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pytest

from streamer.errors import TruncatedStream
from streamer.formats import tfrecord
from streamer.readers import open_channel
from tests.readers.feeder import Feeder

PAGE = Path(__file__).parent.parent.parent / "docs" / "how-to" / "arrays-and-tables.md"
ROWS = [(number, number / 2, f"text {number}") for number in range(30_000)]
CSV = b"".join(b"%d,%.1f,%s\n" % (number, half, text.encode()) for number, half, text in ROWS)


def chunks_of_pandas() -> Any:
    return pd.read_csv(open_channel("train"), header=None, chunksize=7_000)


def batches_of_pyarrow() -> Any:
    options = pyarrow.csv.ReadOptions(autogenerate_column_names=True, block_size=1 << 16)
    return pyarrow.csv.open_csv(open_channel("train"), read_options=options)


def test_pandas_reads_in_chunks(feeder: Feeder) -> None:
    feeder.feed(0, CSV)
    frames = list(chunks_of_pandas())
    assert [len(frame) for frame in frames] == [7_000] * 4 + [2_000]
    assert [tuple(row) for row in pd.concat(frames).itertuples(index=False)] == ROWS


def test_pyarrow_streams(feeder: Feeder) -> None:
    feeder.feed(0, CSV)
    batches = list(batches_of_pyarrow())
    assert len(batches) > 5
    columns = pa.Table.from_batches(batches).to_pydict()
    assert list(zip(*columns.values(), strict=True)) == ROWS


@pytest.mark.parametrize("read", [chunks_of_pandas, batches_of_pyarrow])
def test_a_table_that_was_cut_is_an_error(feeder: Feeder, read: Callable[[], Any]) -> None:
    """Cut at the end of a line, where a table cannot know it."""
    half = CSV.index(b"\n", len(CSV) // 2) + 1
    feeder.feed(0, CSV[:half], state="open", total=len(CSV))
    got = 0
    with pytest.raises(TruncatedStream, match=f"received {half} of {len(CSV)} bytes"):
        for part in read():
            got += len(part)
    assert got < len(ROWS)


def test_the_jax_example_of_the_page(feeder: Feeder) -> None:
    """Run as it stands, in a process of its own: JAX minds forks of processes that have loaded it."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (shown,) = (body for body in blocks if "import jax" in body)
    kept = shown.replace("    ...\n", "    seen.append(vectors)\n")
    assert kept != shown
    code = f"seen = []\n{kept}\nprint([each.shape for each in seen], float(sum(each.sum() for each in seen)))"
    feeder.feed(0, b"".join(tfrecord.encode(struct.pack("<3f", number, 1, 2)) for number in range(150)))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "SAGEMAKER_BASE_DIR": feeder.base}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[(64, 3), (64, 3), (22, 3)] {float(sum(range(150)) + 3 * 150)}\n"
