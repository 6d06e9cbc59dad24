"""TFRecords cut in bulk: the records, skips and errors of the plain reader."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors import CorruptRecord, StreamError
from streamer.formats import tfrecord
from streamer.formats.crc import crc32c
from streamer.formats.window import FailedRecord
from tests.kit.frames import spoilt
from tests.kit.late import LATE
from tests.kit.pieces import Pieces

if LATE:
    import numpy as np

    from streamer.readers.tensorflow.bulk import BulkTFRecordReader
    from streamer.readers.tensorflow.checksums import frames_crc


def going_on(reader: tfrecord.TFRecordReader) -> Iterator[list[bytes]]:
    """The plain reader's lists, and a `FailedRecord` for each corrupt record whose end is known."""
    while True:
        try:
            yield from reader.batches()
        except CorruptRecord as error:
            offset = reader.offset
            if not reader.pass_over_fault():
                raise
            reader.skipped.records += 1
            reader.skipped.positions.append(("", offset))
            yield FailedRecord(error)
        else:
            return


def read_in_bulk(
    data: bytes, *, pieces: Sequence[int] = (), **options: Any
) -> tuple[list[bytes | str], list[tuple[str, int]], tuple[type[StreamError], str] | None]:
    """What the bulk reader gives, what it skipped, and its last error; the plain reader must agree.

    The text of an error is in the place of a corrupt record.
    """
    outcomes = []
    for kind in (BulkTFRecordReader, tfrecord.TFRecordReader):
        reader, got, error = kind(Pieces(data, pieces), **options), list[bytes | str](), None
        try:
            for batch in reader.batches() if kind is BulkTFRecordReader else going_on(reader):
                got += [str(batch.error)] if isinstance(batch, FailedRecord) else batch
        except StreamError as caught:
            error = (type(caught), str(caught))
        outcomes.append((got, list(reader.skipped.positions), error, reader.offset))
    assert outcomes[0] == outcomes[1]
    return outcomes[0][:3]


@pytest.mark.parametrize("sizes", [[200], [0], [1, 2, 3], [200] * 40 + [7], [100, 3000], [0, 500, 0]])
@pytest.mark.parametrize("block", [64, 1000, 1 << 20])
def test_bulk_reading_gives_the_records(sizes: list[int], block: int) -> None:
    records = [os.urandom(size) for size in sizes * 100]
    got, skipped, error = read_in_bulk(b"".join(map(tfrecord.encode, records)), block_bytes=block)
    assert got == records
    assert not skipped
    assert error is None


frames = st.lists(st.tuples(st.sampled_from([0, 5, 5, 5, 200]), st.booleans() | st.just(True)), max_size=80)


@given(frames, st.integers(0, 3), st.lists(st.integers(0, 300), max_size=30), st.integers(0, 40))
def test_bulk_reading_is_plain_reading(
    chosen: list[tuple[int, bool]], skip: int, pieces: list[int], cut: int
) -> None:
    """Whatever is spoilt, skipped or cut off, and wherever blocks end."""
    data = b"".join((tfrecord.encode if good else spoilt)(b"x" * size) for size, good in chosen)
    read_in_bulk(data[: len(data) - cut], pieces=pieces, max_corrupted_records_to_skip=skip)


@given(st.integers(0, 215), st.integers(1, 255), st.sampled_from([0, 20, 39]))
def test_bulk_reading_lets_no_wrong_byte_pass(place: int, change: int, number: int) -> None:
    data = bytearray(tfrecord.encode(b"y" * 200) * 40)
    data[number * 216 + place] ^= change
    got, skipped, error = read_in_bulk(bytes(data))
    text = f"TFRecord at offset {number * 216} of the stream: CRC check on "
    if place < 12:  # of the header: no later record can be found
        assert got == [b"y" * 200] * number
        assert error == (CorruptRecord, f"{text}header failed")
        assert skipped == []
    else:
        assert got == [b"y" * 200] * number + [f"{text}data failed"] + [b"y" * 200] * (39 - number)
        assert error is None
        assert skipped == [("", number * 216)]


# Many of one length: their checksums together

TOGETHER = 256
"""Copy of `bulk.TOGETHER`."""
LONG = [100] * 6 * TOGETHER
BLOCK = 2 * TOGETHER * 116
"""Six times as many frames of 116 bytes as are taken together, two times as many in a block."""


@pytest.mark.parametrize("length", [0, 1, 200])
@pytest.mark.parametrize("count", [1, 2, 3, 77, 1000])
def test_the_crc_of_frames_follows_from_those_of_their_data(length: int, count: int) -> None:
    frames = [tfrecord.encode(os.urandom(length)) for _ in range(count)]
    stored = np.array([struct.unpack("<I", frame[-4:])[0] for frame in frames], np.uint32)
    found = frames_crc(stored, length, crc32c()(frames[0][:12]))
    assert found == crc32c()(b"".join(frames))


def test_records_of_one_length_are_verified_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first block each by itself, in the next ones all at once."""
    calls: list[int] = []
    crc = crc32c()

    def counted(data: bytes | bytearray | memoryview) -> int:
        calls.append(len(data))
        return crc(data)

    monkeypatch.setattr(tfrecord, "crc32c", lambda: counted)
    reader = BulkTFRecordReader(
        Pieces(b"".join(tfrecord.encode(os.urandom(100)) for _ in LONG), ()), block_bytes=BLOCK
    )
    assert [len(record) for batch in reader.batches() for record in batch] == LONG
    assert calls.count(100) == 2 * TOGETHER


@given(
    st.lists(st.tuples(st.integers(0, len(LONG) - 1), st.integers(0, 115), st.integers(1, 255)), max_size=5),
    st.integers(0, 3),
    st.lists(st.integers(1, 40_000), max_size=20),
)
def test_together_no_wrong_byte_passes_either(
    changes: list[tuple[int, int, int]], skip: int, pieces: list[int]
) -> None:
    written = [struct.pack("<I", number) * 25 for number in range(len(LONG))]
    data = bytearray(b"".join(map(tfrecord.encode, written)))
    for number, place, change in changes:
        data[116 * number + place] ^= change
    got, _, _ = read_in_bulk(
        bytes(data), pieces=pieces, block_bytes=BLOCK, max_corrupted_records_to_skip=skip
    )
    assert {each for each in got if isinstance(each, bytes)} <= {*written}
