"""Scanners of record borders against naive ones: any blocks, damaged and truncated objects."""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from streamer.errors import StreamError
from streamer.formats import recordio, tfrecord
from streamer.formats.borders import BadRecord, BorderScanner
from streamer.formats.crc import masked_crc32c
from streamer.formats.lines import LineReader
from streamer.formats.record_format import WHOLE, RecordFormat
from streamer.formats.recordio import RecordIOReader
from streamer.formats.signatures import foreign
from streamer.formats.tar import TarReader
from streamer.formats.tar import sample as sample_of
from streamer.formats.tfrecord import TFRecordReader
from streamer.formats.window import RecordReader
from tests.unit.test_tar import archive

FORMATS = ["TFRecord", "RecordIO", "lines", "tar"]
payloads = st.lists(st.binary(max_size=300), max_size=30)
cuts = st.lists(st.one_of(st.integers(1, 20), st.integers(1, 2000)), min_size=1, max_size=20)


def parts_of(payload: bytes) -> bytes:
    """A RecordIO record of up to three parts."""
    if len(payload) < 3:
        return recordio.encode(payload)
    pieces = [payload[:2], payload[2:3], payload[3:]]
    return b"".join(
        struct.pack("<II", recordio.MAGIC, flag << 29 | len(piece)) + piece + bytes(-len(piece) % 4)
        for flag, piece in zip((1, 2, 3), pieces, strict=True)
    )


def tar_of(payloads: list[bytes]) -> bytes:
    """A sample of one or two members for each payload, of long and short names, and a folder among them."""
    members = []
    for number, payload in enumerate(payloads):
        stem = f"d/{number:04}" + "x" * (len(payload) % 3 * 60)
        members.append((f"{stem}.jpg", payload))
        if len(payload) % 2:
            members.append((f"{stem}.cls", b"7"))
        if len(payload) % 5 == 1:
            members.append(("d/readme", b"no sample"))
    return archive(members, kind=(tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)[len(payloads) % 2])


def made(kind: str, payloads: list[bytes]) -> bytes:
    """An object of this format."""
    match kind:
        case "TFRecord":
            return b"".join(map(tfrecord.encode, payloads))
        case "RecordIO":
            return b"".join(parts_of(each) if len(each) % 2 else recordio.encode(each) for each in payloads)
        case "lines":
            return b"\n".join(payloads)
        case "tar":
            return tar_of(payloads)
    return b"".join(each[:7].ljust(7) for each in payloads)


def naive(kind: str, data: bytes) -> list[int]:
    """Offsets of all records, by the plainest means."""
    match kind:
        case "TFRecord":
            found, at = [], 0
            while at < len(data):
                found.append(at)
                at += int.from_bytes(data[at : at + 8], "little") + 16
            return found
        case "RecordIO":
            found, at = [], 0
            while at < len(data):
                word = int.from_bytes(data[at + 4 : at + 8], "little")
                if word >> 29 in (0, 1):
                    found.append(at)
                at += 8 + -(-(word & (1 << 29) - 1) // 4) * 4
            return found
        case "lines":
            return [0, *(at + 1 for at, byte in enumerate(data[:-1]) if byte == 10)] if data else []
        case "tar":
            found, key = [], None
            if not data:
                return found
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                for member in tar:
                    folder, _, name = member.name.rpartition("/")
                    stem, dot, _ = name.partition(".")
                    if dot and f"{folder}/{stem}" != key:
                        key = f"{folder}/{stem}"
                        found.append(member.offset)
            return found
    return list(range(0, len(data), int(kind.partition(":")[2])))


def blocks(data: bytes, sizes: list[int]) -> Iterator[memoryview]:
    """The data in blocks of these sizes, again and again."""
    at, number = 0, 0
    while at < len(data):
        yield memoryview(bytearray(data[at : at + sizes[number % len(sizes)]]))
        at += sizes[number % len(sizes)]
        number += 1


def scan(kind: str, data: bytes, sizes: list[int]) -> tuple[BorderScanner, int]:
    scanner = RecordFormat.parse(kind).scanner()
    for block in blocks(data, sizes):
        scanner.feed(block)
    return scanner, scanner.finish()


@pytest.mark.parametrize("kind", FORMATS)
def test_borders_are_those_of_a_naive_scan(kind: str) -> None:
    @given(payloads, cuts)
    def check(payloads: list[bytes], sizes: list[int]) -> None:
        data = made(kind, payloads)
        assume(kind != "lines" or foreign(data, "lines") is None)
        scanner, end = scan(kind, data, sizes)
        offsets = naive(kind, data)
        assert list(scanner.offsets) == offsets
        assert end <= len(data) == scanner.fed
        if kind != "tar":
            assert end == len(data)
        elif offsets:
            assert data[end : end + 512] == bytes(512), "the end mark follows"

    check()


def look(kind: str, data: bytes, offsets: list[int], place: int) -> str:
    """The fault of the spot check at a record of an index with these offsets."""
    record_format, end = RecordFormat.parse(kind), scan(kind, data, [1 << 20])[1]
    stop = offsets[place + 1] if place + 1 < len(offsets) else end
    first, last = record_format.evidence(offsets[place], stop)
    assert 0 <= first <= last <= len(data)
    return record_format.fault(data[first:last], offsets[place], stop)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_border_passes_the_spot_check(kind: str) -> None:
    @given(payloads)
    def check(payloads: list[bytes]) -> None:
        data = made(kind, payloads)
        assume(kind != "lines" or foreign(data, "lines") is None)
        offsets = naive(kind, data)
        for place in range(len(offsets)):
            assert look(kind, data, offsets, place) == ""

    check()


@pytest.mark.parametrize("kind", ["TFRecord", "RecordIO", "tar", "lines"])
def test_the_spot_check_refuses_other_offsets(kind: str) -> None:
    data = made(kind, [bytes([number + 32]) * 50 for number in range(20)])
    offsets = [offset + 2 for offset in naive(kind, data)]
    for place in range(len(offsets)):
        assert look(kind, data, offsets, place)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("size", [50, 3000])
def test_the_spot_check_finds_two_records_as_one_and_a_last_one_that_lacks(kind: str, size: int) -> None:
    """By the header of the first, or by all bytes; a header states the length of records of any size."""
    data = made(kind, [bytes([number + 32]) * size for number in range(20)])
    offsets = naive(kind, data)
    for lost in range(1, 20):
        assert look(kind, data, [*offsets[:lost], *offsets[lost + 1 :]], lost - 1)
    if kind in ("TFRecord", "RecordIO"):
        assert look(kind, made(kind, [bytes(100_000)] * 2), [0], 0)


def test_a_line_may_begin_as_another_format_does() -> None:
    data = made("lines", [b"a", b"PK\x03\x04", b"\x1f\x8b\x08"])
    assert [look("lines", data, naive("lines", data), place) for place in range(3)] == ["", "", ""]


@pytest.mark.parametrize("kind", ["lines", "tar"])
def test_of_long_records_the_begin_alone_is_looked_at(kind: str) -> None:
    data = made(kind, [b"x" * WHOLE] * 2)
    offsets = naive(kind, data)
    assert look(kind, data, offsets, 0) == look(kind, data, offsets[:1], 0) == ""
    assert look(kind, data, [offsets[1] + 1], 0)


READERS: dict[str, Any] = {
    "TFRecord": TFRecordReader, "RecordIO": RecordIOReader, "lines": LineReader, "tar": TarReader,
}  # fmt: skip


def summary(scanner: BorderScanner, end: int) -> tuple[int, list[int], int]:
    return len(scanner.offsets), list(scanner.offsets), end


def outcome(call: Callable[[], Any], *errors: type[Exception]) -> Any:
    try:
        return call()
    except errors as error:
        return type(error), str(error), getattr(error, "offset", None)


@pytest.mark.parametrize("kind", ["TFRecord", "RecordIO", "lines", "tar"])
def test_damaged_objects_end_as_in_the_reader_however_they_are_cut(kind: str) -> None:
    """The scanner refuses what the reader of the format refuses, but for the CRCs of data."""

    @given(payloads, st.integers(0), st.binary(max_size=3), st.integers(0), cuts)
    @example([b"a" * 40] * 3, 1, b"\xff", 0, [5])
    def check(payloads: list[bytes], at: int, put: bytes, cut: int, sizes: list[int]) -> None:
        whole = made(kind, payloads)
        at %= len(whole) + 1
        data = (whole[:at] + put + whole[at + len(put) :])[: len(whole) - cut % (len(whole) + 1)]
        found = outcome(lambda: summary(*scan(kind, data, sizes)), BadRecord)
        assert found == outcome(lambda: summary(*scan(kind, data, [1 << 20])), BadRecord)
        options = {"max_corrupted_records_to_skip": 1000} if kind == "TFRecord" else {}
        reader: RecordReader = READERS[kind](io.BytesIO(data), **options)
        read = outcome(lambda: len(list(reader)), StreamError)
        refused = found[0] is BadRecord
        assert refused == isinstance(read, tuple), (found, read)
        if refused:
            assert 0 <= found[2] <= len(data)
        else:
            skipped = reader.skipped.records if isinstance(reader, TFRecordReader) else 0
            assert found[0] == read + skipped

    check()


@pytest.mark.parametrize("mean", [1, 3, 20, 100, 600, 9000])
def test_lines_of_any_length_are_found(mean: int) -> None:
    """A change of the length in the middle, too."""
    lines = [b"x" * (number * 7919 % (2 * mean)) for number in range(max(300, 20_000 // mean))]
    for data in (b"\n".join(lines), b"\n".join([*lines, *([b""] * 3000), *lines, b"y" * 5000, *lines])):
        expected = naive("lines", data)
        for size in (131_072, 1000, len(data)):
            assert list(scan("lines", data, [size])[0].offsets) == expected


def test_several_archives_in_one_object() -> None:
    one = tar_of([b"a" * 10, b"b" * 700])
    scanner, end = scan("tar", one + one, [512])
    borders = naive("tar", one)
    assert list(scanner.offsets) == borders + [len(one) + each for each in borders]
    assert end > len(one)
    keys = [sample_of(each)["__key__"] for each in TarReader(io.BytesIO(one + one))]
    assert keys == ["d/0000" + "x" * 60, "d/0001" + "x" * 60] * 2


def test_a_member_before_the_first_sample_belongs_to_it() -> None:
    data = archive([("readme", b"x"), ("a.txt", b"1"), ("b.txt", b"2")], kind=tarfile.USTAR_FORMAT)
    assert list(scan("tar", data, [100])[0].offsets) == [0, 2048]


def test_a_header_that_promises_too_much_is_refused_at_once() -> None:
    huge = tarfile.TarInfo("x")
    huge.type = b"x"
    huge.size = 1 << 40
    header = huge.tobuf(tarfile.GNU_FORMAT)
    with pytest.raises(BadRecord, match="an extension header of 1099511627776 bytes"):
        scan("tar", header + bytes(512), [512])
    with pytest.raises(BadRecord, match="ends inside a TFRecord"):
        scan("TFRecord", tfrecord.encode(b"")[:8] + b"", [3])
    length = struct.pack("<Q", 1 << 63)
    crc = struct.pack("<I", masked_crc32c(length))
    with pytest.raises(BadRecord, match="ends inside a TFRecord, at byte 22") as caught:
        scan("TFRecord", length + crc + b"0123456789", [4])
    assert caught.value.offset == 0


def test_a_pax_header_of_two_million_records_is_read_in_linear_time() -> None:
    """A quadratic reader takes five minutes, so the test's time limit ends it."""
    pax = tarfile.TarInfo("x")
    pax.type, pax.size = tarfile.XHDTYPE, 8 << 20
    data = pax.tobuf(tarfile.USTAR_FORMAT) + b"4 =\n" * (2 << 20) + archive([("a.txt", b"1")])
    assert list(scan("tar", data, [1 << 20])[0].offsets) == [0]


def test_formats_have_names() -> None:
    for kind in (*FORMATS, "fixed:7"):
        assert str(RecordFormat.parse(kind)) == kind
    assert RecordFormat.parse("tfrecord").kind == "TFRecord"
    for wrong in ("", "fixed", "fixed:0", "fixed:-1", "fixed:9999999999", "csv"):
        with pytest.raises(ValueError, match="no record format"):
            RecordFormat.parse(wrong)
