"""The record formats against the contract's vectors, against arbitrary block borders, and cut everywhere."""

from __future__ import annotations

import io
import logging
import struct
import subprocess
import sys
from abc import ABCMeta
from typing import Any, NoReturn

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from streamer.errors import CorruptRecord, TruncatedStream
from streamer.formats import crc, recordio, tfrecord
from streamer.formats.fixed import FixedReader
from streamer.formats.lines import LineReader
from streamer.formats.recordio import RecordIOReader
from streamer.formats.signatures import LOOKED_AT, foreign
from streamer.formats.tfrecord import TFRecordReader
from tests.kit.pieces import Pieces

HELLO = bytes.fromhex("0500000000000000eab2043e68656c6c6fbb1f1c19")
EMPTY = bytes.fromhex("000000000000000029039807d8ea82a2")
MAGIC = bytes.fromhex("0a23d7ce")
WITH_MAGIC = b"ABCD" + MAGIC + b"EF"
WHOLE = bytes.fromhex("0a23d7ce0a000000414243440a23d7ce45460000")
ESCAPED = bytes.fromhex("0a23d7ce04000020414243440a23d7ce0200006045460000")


sizes = st.lists(st.integers(0, 40), max_size=60)
payloads = st.lists(st.binary(max_size=200), max_size=20)
blocks = st.sampled_from([1, 7, 16, 64, 1 << 20])


Kind = type[TFRecordReader | RecordIOReader | LineReader]


def read(
    kind: Kind,
    data: bytes,
    **options: Any,
) -> list[bytes]:
    return list(kind(io.BytesIO(data), **options))


# CRC


def test_crc_check_value() -> None:
    assert crc.crc32c()(b"123456789") == 0xE3069283
    assert crc.crc32c_in_python(b"123456789") == 0xE3069283


@given(st.binary(max_size=300), st.integers(0, 300))
def test_crc_in_python_is_the_compiled_one(data: bytes, cut: int) -> None:
    due = crc.crc32c()(data)
    assert crc.crc32c_in_python(data) == due == crc.crc32c_in_python(memoryview(data))
    for kind in (crc.crc32c(), crc.crc32c_in_python):
        assert kind(data[cut:], kind(data[:cut])) == due


def test_crc_without_awscrt_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "awscrt.checksums", None)
    crc.crc32c.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="penstock"):
            assert read(TFRecordReader, HELLO + HELLO) == [b"hello"] * 2
            assert tfrecord.encode(b"hello") == HELLO
        stated = [line for line in caplog.messages if "awscrt" in line]
        assert len(stated) == 1
        assert stated[0].endswith("TFRecord channels will be slow. To mend it: pip install awscrt")
    finally:
        crc.crc32c.cache_clear()


# TFRecord


def test_tfrecord_vectors() -> None:
    assert tfrecord.encode(b"hello") == HELLO
    assert tfrecord.encode(b"") == EMPTY
    assert read(TFRecordReader, HELLO + EMPTY + HELLO) == [b"hello", b"", b"hello"]
    assert read(TFRecordReader, b"") == []


@given(payloads, sizes, blocks)
def test_tfrecord_round_trip(records: list[bytes], pieces: list[int], block: int) -> None:
    stream = Pieces(b"".join(map(tfrecord.encode, records)), pieces)
    assert list(TFRecordReader(stream, block_bytes=block)) == records


def test_tfrecord_cut_anywhere_is_an_error() -> None:
    data = HELLO + EMPTY + HELLO
    borders = {0: 0, len(HELLO): 1, len(HELLO + EMPTY): 2, len(data): 3}
    for cut in range(len(data) + 1):
        reader = TFRecordReader(io.BytesIO(data[:cut]))
        got: list[bytes] = []
        if cut in borders:
            assert len(list(reader)) == borders[cut]
            continue
        with pytest.raises(TruncatedStream, match="wanted"):
            got.extend(reader)
        assert got == [b"hello", b"", b"hello"][: len(got)]


def test_tfrecord_cut_names_offset_wanted_and_got() -> None:
    with pytest.raises(TruncatedStream, match="a TFRecord at offset 21: 21 bytes wanted, 20 arrived"):
        read(TFRecordReader, HELLO + HELLO[:-1])
    with pytest.raises(TruncatedStream, match="at offset 21: 12 bytes wanted, 3 arrived"):
        read(TFRecordReader, HELLO + HELLO[:3])


@given(st.integers(0, len(HELLO) - 1), st.integers(1, 255))
def test_tfrecord_any_wrong_byte_is_an_error(place: int, change: int) -> None:
    bad = bytearray(HELLO)
    bad[place] ^= change
    reader = TFRecordReader(io.BytesIO(HELLO + bad + HELLO))
    got: list[bytes] = []
    with pytest.raises(CorruptRecord, match="at offset 21"):
        got.extend(reader)
    assert got == [b"hello"]


def spoilt(payload: bytes) -> bytes:
    frame = bytearray(tfrecord.encode(payload))
    frame[12] ^= 1
    return bytes(frame)


def test_tfrecord_skips_a_run_of_bad_data_up_to_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    data = spoilt(b"a") + spoilt(b"b") + HELLO + spoilt(b"c") + spoilt(b"d") + HELLO + spoilt(b"e")
    with pytest.raises(CorruptRecord, match="CRC check on data failed"):
        read(TFRecordReader, data)
    with pytest.raises(CorruptRecord, match="at offset 17 "):
        read(TFRecordReader, data, max_corrupted_records_to_skip=1)
    with caplog.at_level(logging.WARNING, logger="penstock"):
        reader = TFRecordReader(io.BytesIO(data), max_corrupted_records_to_skip=2)
        assert list(reader) == [b"hello", b"hello"]
    assert reader.skipped.records == 5
    assert [offset for _, offset in reader.skipped.positions] == [0, 17, 55, 72, 110]
    stated = [line for line in caplog.messages if "in all" in line]
    assert stated[-2].endswith(
        "at offset 72 of the stream: CRC check on data failed; 1 byte (2 in a row, 4 in all)"
    )


def test_tfrecord_a_run_of_bad_data_counts_across_blocks() -> None:
    data = spoilt(b"a") + spoilt(b"b") + HELLO
    with pytest.raises(CorruptRecord, match="at offset 17 "):
        read(TFRecordReader, data, max_corrupted_records_to_skip=1, block_bytes=4)


def test_tfrecord_never_skips_a_bad_length() -> None:
    bad = bytearray(HELLO)
    bad[0] ^= 1
    with pytest.raises(CorruptRecord, match="CRC check on header failed"):
        read(TFRecordReader, bytes(bad) + HELLO, max_corrupted_records_to_skip=9)


def test_tfrecord_never_skips_a_cut() -> None:
    with pytest.raises(TruncatedStream):
        read(TFRecordReader, HELLO + spoilt(b"abc")[:-1], max_corrupted_records_to_skip=9)


def test_tfrecord_reads_what_tfrecord_writers_of_others_write() -> None:
    # One frame per size around the borders of the head, checked byte by byte against the definition.
    for size in (0, 1, 7, 8, 11, 12, 13, 300):
        payload = bytes(range(256))[:size] + bytes(max(0, size - 256))
        length = struct.pack("<Q", size)
        frame = b"".join(
            (
                length,
                struct.pack("<I", crc.masked_crc32c(length)),
                payload,
                struct.pack("<I", crc.masked_crc32c(payload)),
            )
        )
        assert tfrecord.encode(payload) == frame
        assert read(TFRecordReader, frame, block_bytes=5) == [payload]


# RecordIO


def test_recordio_vectors() -> None:
    assert recordio.encode(b"1") == bytes.fromhex("0a23d7ce0100000031000000")
    assert recordio.encode(b"") == bytes.fromhex("0a23d7ce00000000")
    assert recordio.encode(WITH_MAGIC) == WHOLE
    assert read(RecordIOReader, recordio.encode(b"1") + recordio.encode(b"") + WHOLE) == [
        b"1",
        b"",
        WITH_MAGIC,
    ]


def test_recordio_parts_are_joined_as_aws_readers_do_or_as_dmlc_does() -> None:
    assert read(RecordIOReader, ESCAPED) == [b"ABCDEF"]
    assert read(RecordIOReader, ESCAPED, rejoin_magic=True) == [WITH_MAGIC]
    assert read(RecordIOReader, WHOLE + ESCAPED + WHOLE, rejoin_magic=True) == [WITH_MAGIC] * 3


def part(flag: int, payload: bytes) -> bytes:
    return MAGIC + struct.pack("<I", flag << 29 | len(payload)) + payload + bytes(-len(payload) % 4)


def test_recordio_long_part_chains() -> None:
    chain = part(1, b"ab") + part(2, b"") + part(2, b"cde") + part(3, b"")
    assert read(RecordIOReader, chain + part(0, b"x"), block_bytes=3) == [b"abcde", b"x"]
    assert read(RecordIOReader, chain, rejoin_magic=True) == [b"ab" + MAGIC + MAGIC + b"cde" + MAGIC]


@pytest.mark.parametrize(
    ("flags", "offset"),
    [
        ((2,), 0),
        ((3,), 0),
        ((1, 0), 12),
        ((1, 1), 12),
        ((1, 2, 0), 24),
        ((0, 3), 12),
        ((5,), 0),
        ((1, 7), 12),
    ],
)
def test_recordio_parts_out_of_order_are_corrupt(flags: tuple[int, ...], offset: int) -> None:
    with pytest.raises(CorruptRecord, match=f"at offset {offset} .*part flag {flags[-1]}"):
        read(RecordIOReader, b"".join(part(flag, b"data") for flag in flags) + part(0, b"more"))


def test_recordio_wrong_magic_is_corrupt() -> None:
    data = recordio.encode(b"good") + b"\x0a\x0a\x0a\x0a" + bytes(4)
    reader = RecordIOReader(io.BytesIO(data))
    got: list[bytes] = []
    with pytest.raises(CorruptRecord, match=r"at offset 12 .*invalid magic number 0x0a0a0a0a"):
        got.extend(reader)
    assert got == [b"good"]


@given(payloads, sizes, blocks)
def test_recordio_round_trip(records: list[bytes], pieces: list[int], block: int) -> None:
    stream = Pieces(b"".join(map(recordio.encode, records)), pieces)
    assert list(RecordIOReader(stream, block_bytes=block)) == records


def test_recordio_cut_anywhere_is_an_error() -> None:
    data = recordio.encode(b"hello") + ESCAPED + recordio.encode(b"x")
    clean = {0: 0, 16: 1, 40: 2, 52: 3}
    assert len(data) == 52
    for cut in range(len(data) + 1):
        if cut in clean:
            assert len(read(RecordIOReader, data[:cut])) == clean[cut]
        else:
            with pytest.raises(TruncatedStream):
                read(RecordIOReader, data[:cut])


def test_recordio_cut_between_parts_says_so() -> None:
    with pytest.raises(
        TruncatedStream, match="at offset 12 between the parts of a RecordIO record: 1 part arrived"
    ):
        read(RecordIOReader, part(1, b"data"))


def test_recordio_refuses_what_no_frame_can_hold() -> None:
    assert recordio.header(recordio.MAX_PAYLOAD)[4:] == b"\xff\xff\xff\x1f"
    for length in (recordio.MAX_PAYLOAD + 1, -1):
        with pytest.raises(ValueError, match="at most 536870911 bytes"):
            recordio.header(length)


def test_memory_follows_what_arrived_and_not_what_a_header_declares() -> None:
    script = (
        "import io, resource, struct\n"
        "from streamer.errors import TruncatedStream\n"
        "from streamer.formats.recordio import RecordIOReader\n"
        "resource.setrlimit(resource.RLIMIT_AS, (256 << 20,) * 2)\n"
        "head = struct.pack('<II', 0xced7230a, (1 << 29) - 1)\n"
        "try:\n"
        "    list(RecordIOReader(io.BytesIO(head + b'few')))\n"
        "except TruncatedStream as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "536870920 bytes wanted, 11 arrived" in done.stdout


# Text lines


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"\n", [b""]),
        (b"a\nb\n", [b"a", b"b"]),
        (b"a\nb", [b"a", b"b"]),
        (b"a\r\n\r\n\n b \n", [b"a\r", b"\r", b"", b" b "]),
        (b"\n\n\nx", [b"", b"", b"", b"x"]),
        (b"\0\xff\n", [b"\0\xff"]),
    ],
)
@pytest.mark.parametrize("block", [1, 3, 1 << 20])
def test_lines(data: bytes, lines: list[bytes], block: int) -> None:
    assert read(LineReader, data, block_bytes=block) == lines


@given(
    st.lists(st.binary(max_size=60).map(lambda line: line.replace(b"\n", b" ")), max_size=20), sizes, blocks
)
def test_lines_round_trip(lines: list[bytes], pieces: list[int], block: int) -> None:
    data = b"".join(line + b"\n" for line in lines)
    assume(foreign(data[:LOOKED_AT], "lines") is None)  # refused: tests/readers/test_foreign_formats.py
    assert list(LineReader(Pieces(data, pieces), block_bytes=block)) == lines


def test_long_and_short_lines_alternate() -> None:
    """Lists of long lines are cut in another way, and both kinds follow each other."""
    lines = [b"x" * size for size in (3000, 2000, 5000, 0, 1, 2, 0, 9000, 9000, 9000, 0, 4)] * 30
    assert read(LineReader, b"".join(line + b"\n" for line in lines), block_bytes=6000) == lines


# What all readers share


@pytest.mark.parametrize("kind", [TFRecordReader, RecordIOReader, LineReader])
def test_a_record_much_larger_than_the_buffer(
    kind: Kind,
) -> None:
    payload = b"0123456789abcdef" * 5000
    encode = {TFRecordReader: tfrecord.encode, RecordIOReader: recordio.encode}.get(
        kind, lambda line: line + b"\n"
    )
    data = encode(b"small") + encode(payload) + encode(b"small")
    assert read(kind, data, block_bytes=32) == [b"small", payload, b"small"]


def test_batches_hold_every_whole_record_of_a_block() -> None:
    reader = TFRecordReader(Pieces(HELLO * 5, [len(HELLO) * 3 + 4, 0]))
    assert list(reader.batches()) == [[b"hello"] * 3, [], [b"hello"] * 2]
    assert reader.offset == len(HELLO) * 5


def test_a_source_that_fails_fails_the_reader_after_the_whole_records() -> None:
    class Failing(io.BytesIO):
        def readinto(self, buffer: Any) -> int:
            return super().readinto(buffer) or self.fail()

        def fail(self) -> NoReturn:
            raise TruncatedStream("the sidecar died")

    for kind in (TFRecordReader, LineReader):
        data = HELLO + HELLO[:9] if kind is TFRecordReader else b"hello\nhal"
        reader = kind(Failing(data))
        got: list[bytes] = []
        with pytest.raises(TruncatedStream, match="the sidecar died"):
            got.extend(reader)
        assert got == [b"hello"]


def test_block_bytes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        TFRecordReader(io.BytesIO(), block_bytes=0)


# Data that is read into memory of its own

runs = st.lists(st.tuples(st.sampled_from([0, 3, 20, 21, 90, 200]), st.integers(1, 9)), max_size=8).map(
    lambda found: [size for size, count in found for _ in range(count)]
)
"""Lengths of records, many of which have that of the one before."""


@pytest.mark.parametrize("kind", [TFRecordReader, RecordIOReader])
@given(lengths=runs, pieces=sizes, block=st.sampled_from([1, 64, 300]), back=st.sets(st.integers(0, 60)))
def test_any_lengths_in_any_pieces(
    kind: type[TFRecordReader | RecordIOReader],
    lengths: list[int],
    pieces: list[int],
    block: int,
    back: set[int],
) -> None:
    """At some lists the bytes that have arrived are put back into the buffer, as at a border of an object."""
    encode = tfrecord.encode if kind is TFRecordReader else recordio.encode
    expected = [bytes([number % 251]) * size for number, size in enumerate(lengths)]
    frames = list(map(encode, expected))
    source = Pieces(b"".join(frames), pieces)
    size, got, starts = len(source.left), [], []
    reader = kind(source, block_bytes=block)
    reader.keeps_places, reader.starts = True, []
    for number, batch in enumerate(reader.batches()):
        got += batch
        starts += reader.starts if batch else []
        assert reader.arrived == size - len(source.left)
        assert reader.offset == sum(map(len, frames[: len(got)]))
        if number in back:
            rest = reader.hand_over()
            reader.move_to(reader.offset)
            assert reader.hand_over() == rest
    assert got == expected
    assert starts == [sum(map(len, frames[:number])) for number in range(len(frames))]


@given(count=st.integers(0, 20), pieces=sizes, block=st.sampled_from([1, 64, 300]))
def test_records_of_a_fixed_size_in_any_pieces(count: int, pieces: list[int], block: int) -> None:
    expected = [bytes([number]) * 50 for number in range(count)]
    reader = FixedReader(Pieces(b"".join(expected), pieces), 50, block_bytes=block)
    reader.starts, got, starts = [], [], []
    for batch in reader.batches():
        got += batch
        starts += reader.starts if batch else []
    assert (got, starts) == (expected, list(range(0, 50 * count, 50)))


def test_a_record_is_read_into_memory_that_becomes_it() -> None:
    """The peak of a process that reads 100 MiB is one record, not that and a buffer."""
    code = (
        "import resource, struct\n"
        "from streamer.formats import recordio\n"
        "size = 100 << 20\n"
        "class Source:\n"
        "    left = [recordio.header(size), *[bytes(1 << 20)] * 100]\n"
        "    def readinto(self, view):\n"
        "        if not self.left:\n"
        "            return 0\n"
        "        piece = self.left.pop(0)\n"
        "        if len(piece) > len(view):\n"
        "            self.left.insert(0, piece[len(view):])\n"
        "            piece = piece[:len(view)]\n"
        "        view[:len(piece)] = piece\n"
        "        return len(piece)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "(record,) = recordio.RecordIOReader(Source())\n"
        "print(len(record) >> 20, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    size, grown = map(int, done.stdout.split())
    assert size == 100
    assert grown < 120 << 10


# Handing over


def cut_recordio(record: Any) -> bytes:
    """The record in parts of at most 50 bytes."""
    if len(record) <= 50:
        return recordio.encode(record)
    parts = [record[at : at + 50] for at in range(0, len(record), 50)]
    flags = [1, *[2] * (len(parts) - 2), 3]
    return b"".join(
        struct.pack("<II", recordio.MAGIC, flag << 29 | len(part)) + part + recordio.padding(len(part))
        for flag, part in zip(flags, parts, strict=True)
    )


HANDED = {
    TFRecordReader: tfrecord.encode,
    RecordIOReader: cut_recordio,
    LineReader: lambda line: b"." + line.replace(b"\n", b"-") + b"\n",  # begins as no other format
}


@pytest.mark.parametrize("kind", list(HANDED))
@given(records=payloads, pieces=sizes, block=blocks)
def test_readers_that_take_turns_read_what_one_reads(
    kind: ABCMeta, records: list[bytes], pieces: list[int], block: int
) -> None:
    data = b"".join(map(HANDED[kind], records))
    expected = list(kind(io.BytesIO(data)))
    source = Pieces(data, pieces)
    readers = [kind(source, block_bytes=block) for _ in range(2)]
    turns = [reader.batches() for reader in readers]
    got, state, turn = [], (b"", 0), 0
    while True:
        readers[turn % 2].go_on(*state)
        batch = next(turns[turn % 2], None)
        if batch is None:
            break
        got += batch
        state = readers[turn % 2].hand_over()
        assert state[1] <= len(data)
        turn += 1
    assert got == expected


def test_a_reader_that_went_on_tells_offsets_and_needs_of_the_whole_stream() -> None:
    first = TFRecordReader(io.BytesIO(HELLO + HELLO[:15]))
    assert next(first.batches()) == [b"hello"]
    rest, offset = first.hand_over()
    assert (rest, offset) == (HELLO[:15], len(HELLO))
    second = TFRecordReader(io.BytesIO())
    second.go_on(rest, offset)
    with pytest.raises(TruncatedStream, match="at offset 21: 21 bytes wanted, 15 arrived"):
        list(second)


def test_a_large_record_takes_memory_once_beside_its_copy() -> None:
    """In a process of its own, whose peak is known: the buffer grows without a copy, by the pages in use."""
    code = (
        "import io, resource\n"
        "from streamer.formats import recordio\n"
        "data = recordio.encode(bytes(48 << 20))\n"
        "source = io.BytesIO(data)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "(record,) = recordio.RecordIOReader(source)\n"
        "print(len(record), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / (48 << 10))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    size, times = done.stdout.split()
    assert int(size) == 48 << 20
    assert float(times) < 2.5


def test_a_record_for_which_there_is_no_memory_leaves_the_reader_whole() -> None:
    """The buffer grows twice, as a mapping, before the address space ends."""
    code = (
        "import resource\n"
        "from streamer.formats.lines import LineReader\n"
        "class Endless:\n"
        "    def readinto(self, view):\n"
        "        return len(view)\n"
        "reader = LineReader(Endless())\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        list(reader)\n"
        "    except MemoryError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    first, again = done.stdout.splitlines()
    assert first == again
    assert first.startswith("no memory for a line of more than")
