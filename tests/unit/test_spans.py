"""Records found as places in a window: records, skips and errors of the plain readers; and glibc's memory."""

from __future__ import annotations

import itertools
import os
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors import StreamError
from streamer.formats import lines, recordio, tfrecord
from tests.kit.pieces import Pieces

pytest.importorskip("numpy")

from streamer.readers.spans import LineSpans, RecordIOSpans, TFRecordSpans

READERS = {
    TFRecordSpans: tfrecord.TFRecordReader,
    RecordIOSpans: recordio.RecordIOReader,
    LineSpans: lines.LineReader,
}


def found_by_both(data, *, kind=TFRecordSpans, width=1, pieces=(), **options):
    """What a span reader gives, what it skipped, and its error; the plain reader must agree.

    Records are taken `width` at a time, so that some stay while the window moves.
    """
    outcomes = []
    reader, got, error = kind(Pieces(data, pieces), **options), [], None
    try:
        for sizes in reader.arrivals():
            assert len(sizes) <= reader.ready
            got += reader.take(reader.ready - reader.ready % width).records()
    except StreamError as caught:
        error = (type(caught), str(caught))
    got += reader.take(reader.ready).records()
    outcomes.append((got, error, skipped(reader)))
    reader, got, error = READERS[kind](Pieces(data, pieces), **options), [], None
    try:
        for batch in reader.batches():
            got += batch
    except StreamError as caught:
        error = (type(caught), str(caught))
    outcomes.append((got, error, skipped(reader)))
    assert outcomes[0] == outcomes[1]
    return outcomes[0]


def skipped(reader):
    return list(reader.skipped.places) if hasattr(reader, "skipped") else []


def spoilt(payload):
    frame = bytearray(tfrecord.encode(payload))
    frame[-1] ^= 1
    return bytes(frame)


@pytest.mark.parametrize("sizes", [[200], [0], [1, 2, 3], [200] * 40 + [7], [100, 3000], [0, 500, 0]])
@pytest.mark.parametrize("block", [64, 1000, 1 << 20])
def test_bulk_reading_gives_the_records(sizes, block):
    records = [os.urandom(size) for size in sizes * 100]
    got, error, left_out = found_by_both(b"".join(map(tfrecord.encode, records)), block_bytes=block, width=7)
    assert got == records
    assert not left_out
    assert error is None


frames = st.lists(st.tuples(st.sampled_from([0, 5, 5, 5, 200]), st.booleans() | st.just(True)), max_size=80)


arriving = st.lists(st.integers(0, 300), max_size=30)


@given(
    frames,
    st.integers(0, 3),
    arriving,
    st.integers(0, 40),
    st.integers(1, 50),
    st.sampled_from([64, 1 << 20]),
)
def test_bulk_reading_is_plain_reading(  # noqa: PLR0917
    chosen, skip, pieces, cut, width, block
):
    """Whatever is spoilt, skipped or cut off, and wherever blocks end."""
    data = b"".join((tfrecord.encode if good else spoilt)(b"x" * size) for size, good in chosen)
    found_by_both(
        data[: len(data) - cut],
        width=width,
        pieces=pieces,
        max_corrupted_records_to_skip=skip,
        block_bytes=block,
    )


parts = st.lists(st.tuples(st.sampled_from([0, 0, 0, 1, 2, 3]), st.integers(0, 90)), max_size=30)
whole_parts = st.lists(
    st.lists(st.integers(0, 90), min_size=1, max_size=4).map(
        lambda sizes: (
            [(0, sizes[0])]
            if len(sizes) == 1
            else [(1, sizes[0]), *((2, size) for size in sizes[1:-1]), (3, sizes[-1])]
        )
    ),
    max_size=12,
).map(lambda records: [part for record in records for part in record])


@given(parts | whole_parts, arriving, st.integers(0, 40), st.integers(1, 9), st.sampled_from([64, 1 << 20]))
def test_parts_are_joined_in_place_as_plain_reading_joins_them(chosen, pieces, cut, width, block):
    letters = itertools.cycle(b"abcdefgh")
    data = b"".join(
        struct.pack("<II", recordio.MAGIC, flag << 29 | size)
        + bytes([next(letters)]) * size
        + recordio.padding(size)
        for flag, size in chosen
    )
    found_by_both(data[: len(data) - cut], kind=RecordIOSpans, width=width, pieces=pieces, block_bytes=block)


@given(
    st.binary(max_size=400).map(lambda data: data.replace(b"a", b"\n")) | st.text("x\n").map(str.encode),
    arriving,
)
def test_lines_are_those_of_plain_reading(data, pieces):
    found_by_both(data, kind=LineSpans, width=3, pieces=pieces, block_bytes=64)


@given(st.integers(0, 215), st.integers(1, 255), st.sampled_from([0, 20, 39]))
def test_bulk_reading_lets_no_wrong_byte_pass(place, change, number):
    data = bytearray(tfrecord.encode(b"y" * 200) * 40)
    data[number * 216 + place] ^= change
    got, error, _ = found_by_both(bytes(data))
    assert got == [b"y" * 200] * number
    assert error is not None
    assert f"at offset {number * 216} " in error[1]


# Memory


@pytest.mark.parametrize(
    ("environment", "kept"),
    [({}, "True"), ({"PENSTOCK_MALLOPT": "0"}, "False"), ({"MALLOC_TRIM_THRESHOLD_": "1000"}, "False")],
)
def test_the_allocator_keeps_memory_unless_told_otherwise(environment, kept):
    """400 blocks of 1 MiB, made and dropped: faulted in anew each time, or reused."""
    script = (
        "import resource\n"
        "from streamer.readers.memory import keep_memory\n"
        "print(keep_memory())\n"
        "faults = resource.getrusage(0).ru_minflt\n"
        "for _ in range(100):\n"
        "    held = [bytearray(1 << 20) + b'x' for _ in range(4)]\n"
        "    del held\n"
        "print(resource.getrusage(0).ru_minflt - faults < 20_000)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [kept, kept]
