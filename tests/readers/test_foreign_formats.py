"""Streams of another format than the reader's: refused by their first bytes, with what to do."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from backports import zstd

from streamer.errors import CorruptRecord
from streamer.formats import recordio, tfrecord
from streamer.formats.record_format import RecordFormat
from streamer.formats.signatures import LOOKED_AT, recognised
from streamer.formats.tar import TarReader
from streamer.readers import PipeReader, SkipPolicy
from streamer.readers.tokens import TokenReader
from tests.kit.frames import spoilt
from tests.kit.late import LATE
from tests.readers.feeder import Feeder
from tests.unit.test_tar import archive

if LATE:
    import tensorflow as tf
    from torch.utils.data import DataLoader

    from streamer.readers.tensorflow import PipeModeDataset
    from streamer.readers.torch import PipeIterableDataset

TEXT = b"".join(b"line %d\n" % number for number in range(5000))


def saved(save: Any, *arguments: Any) -> bytes:
    file = io.BytesIO()
    save(file, *arguments)
    return file.getvalue()


def tables() -> tuple[bytes, bytes]:
    table, parquet, arrow = pa.table({"n": list(range(1000))}), io.BytesIO(), io.BytesIO()
    pyarrow.parquet.write_table(table, parquet)
    with pa.ipc.new_file(arrow, table.schema) as writer:
        writer.write_table(table)
    return parquet.getvalue(), arrow.getvalue()


TOKENS = np.arange(5000, dtype="<u2") % 50257
SAFETENSORS = b'{"t":{"dtype":"U16","shape":[5000],"data_offsets":[0,10000]}}'
FOREIGN: dict[str, tuple[bytes, str]] = {
    "TFRecord": (b"".join(tfrecord.encode(b"x" * n) for n in range(200)), "record_format='TFRecord'"),
    "RecordIO": (b"".join(recordio.encode(b"x" * n) for n in range(200)), "record_format='RecordIO'"),
    "gzip": (gzip.compress(TEXT), "CompressionType: Gzip"),
    "zstd": (zstd.compress(TEXT), "CompressionType: Gzip"),
    "bzip2": (bz2.compress(TEXT), "gzip or Zstandard"),
    "xz": (lzma.compress(TEXT), "gzip or Zstandard"),
    "parquet": (tables()[0], "TableReader"),
    "arrow": (tables()[1], "TableReader"),
    "npy": (saved(np.save, TOKENS), "InputMode: File"),
    "npz": (saved(np.savez, TOKENS), "InputMode: File"),
    "safetensors": (struct.pack("<Q", len(SAFETENSORS)) + SAFETENSORS + TOKENS.tobytes(), "InputMode: File"),
    "megatron idx": (b"MMIDIDX\0\0" + struct.pack("<QB", 1, 8) + bytes(2000), "Exclude"),
    "llm.c": (struct.pack("<256i", 20240520, 1, 5000, *[0] * 253) + TOKENS.tobytes(), "SkipBytes: 1024"),
    "tar": (archive([("a.txt", b"text")]), "WebDataset"),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(100), "RecordWrapperType: RecordIO"),
    "jpeg": (b"\xff\xd8\xff\xe0" + bytes(100), "RecordWrapperType: RecordIO"),
}
TEXTS = {
    "text": (TEXT, "record_format='TextLine'"),
    "cut text": (b"x" + "é".encode() * 500, "Records.Format: lines"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_no_reader_takes_it_for_lines(feeder: Feeder, name: str) -> None:
    data, remedy = FOREIGN[name]
    feeder.feed(0, data)
    with pytest.raises(CorruptRecord, match="the stream does not begin with a line of text") as caught:
        list(PipeReader("train", "TextLine"))
    assert remedy in str(caught.value)


def test_nor_do_those_of_frameworks(feeder: Feeder) -> None:
    for epoch in range(2):
        feeder.feed(epoch, FOREIGN["TFRecord"][0])
    with pytest.raises(CorruptRecord, match="does not begin with a line"):
        list(DataLoader(PipeIterableDataset("train", "TextLine"), batch_size=None))
    with pytest.raises(tf.errors.InternalError, match="does not begin with a line"):
        list(PipeModeDataset("train", "TextLine"))


@pytest.mark.parametrize("name", [*FOREIGN])
def test_no_reader_takes_it_for_tokens(feeder: Feeder, name: str) -> None:
    data, remedy = FOREIGN[name]
    feeder.feed(0, data)
    with pytest.raises(CorruptRecord, match="the stream does not begin with tokens") as caught:
        list(TokenReader("train", "uint16", length=64, drop_remainder=True))
    assert remedy in str(caught.value)


@pytest.mark.parametrize("record_format", ["TFRecord", "RecordIO"])
@pytest.mark.parametrize("skip", [None, SkipPolicy(records=5)], ids=str)
def test_readers_of_records_name_it(feeder: Feeder, record_format: str, skip: SkipPolicy | None) -> None:
    for epoch, (name, (data, remedy)) in enumerate((FOREIGN | TEXTS).items()):
        if name != record_format:
            feeder.feed(epoch, data)
            with pytest.raises(CorruptRecord, match=rf": this is .*, not {record_format}: ") as caught:
                list(PipeReader("train", record_format, epoch=epoch, skip=skip))
            assert remedy in str(caught.value), name


@pytest.mark.parametrize("name", sorted({*FOREIGN, "text"} - {"tar"}))
def test_readers_of_samples_name_it(feeder: Feeder, name: str) -> None:
    data, remedy = (FOREIGN | TEXTS)[name]
    feeder.feed(0, data.ljust(1024, b" "))
    with pytest.raises(CorruptRecord, match=r"^tar member at offset 0 .*: this is .*, not tar: ") as caught:
        list(PipeIterableDataset("train", "WebDataset"))
    assert remedy in str(caught.value)


def test_a_dataset_of_tensorflow_names_it(feeder: Feeder) -> None:
    feeder.feed(0, TEXT)
    with pytest.raises(tf.errors.InternalError, match="this is text, not TFRecord: say record_format='Text"):
        list(PipeModeDataset("train", "TFRecord"))


def test_no_reader_names_its_own_format() -> None:
    """A corrupt first record is not the beginning of another format; nor is one of 559,903 bytes gzip."""
    tar = bytearray(archive([("a.txt", b"text")]))
    tar[0] ^= 1
    part = struct.pack("<II", recordio.MAGIC, 2 << 29)
    for reader in (
        tfrecord.TFRecordReader(io.BytesIO(spoilt(b"x" * 559_903))),
        recordio.RecordIOReader(io.BytesIO(part)),
        TarReader(io.BytesIO(tar)),
    ):
        with pytest.raises(CorruptRecord) as caught:
            list(reader)
        assert "this is a tar archive" not in str(caught.value)
        assert ", not " not in str(caught.value)
    found = recognised(tfrecord.encode(bytes(559_903)))
    assert found is not None
    assert found.kind == "TFRecord"


@pytest.mark.parametrize("data", [b"", b"\xe9t\xe9", b"a\0b", b"a\x7f", bytes(600)], ids=repr)
def test_what_is_nothing(data: bytes) -> None:
    assert recognised(data[:LOOKED_AT]) is None


@pytest.mark.parametrize("text", [b"", b"\n", b"a", b"PAR1,PAR2\n", b"BZh\n", "é\n".encode(), b"{}\n", TEXT])
def test_text_is_text(feeder: Feeder, text: bytes) -> None:
    feeder.feed(0, text)
    lines = text.removesuffix(b"\n").split(b"\n") if text else []
    assert list(PipeReader("train", "TextLine")) == lines


def test_a_scan_of_lines_refuses_it_too() -> None:
    for data, remedy in FOREIGN.values():
        with pytest.raises(ValueError, match="no line of text begins here") as caught:
            RecordFormat("lines").scanner().feed(data)
        assert remedy in str(caught.value)


# The width of tokens

WIDER = [("uint16", "<u4"), ("uint16", "<i4"), ("uint32", "<i8"), ("uint16", "<i8"), ("int32", "<u8")]


@pytest.mark.parametrize(("dtype", "stored"), WIDER)
def test_tokens_of_a_wider_type(feeder: Feeder, dtype: str, stored: str) -> None:
    feeder.feed(0, TOKENS.astype(stored).tobytes())
    with pytest.raises(CorruptRecord, match=f"tokens of a wider type than {dtype}"):
        list(TokenReader("train", dtype, length=50, vocabulary=50257))


def test_a_vocabulary_that_the_type_cannot_hold() -> None:
    with pytest.raises(ValueError, match="uint16 has no 128256 tokens"):
        TokenReader("train", "uint16", length=50, vocabulary=128_256)


@pytest.mark.parametrize("tokens", [np.zeros(5000, "<u2"), TOKENS, np.arange(5000, dtype="<u2") % 2], ids=str)
def test_tokens_of_the_right_type(feeder: Feeder, tokens: Any) -> None:
    feeder.feed(0, tokens.tobytes())
    found = np.concatenate(list(TokenReader("train", "uint16", length=50, vocabulary=50257)))
    assert (found == tokens).all()


# Records of several parts

MAGIC = struct.pack("<I", recordio.MAGIC)


def dmlc(payload: bytes) -> bytes:
    """A record as dmlc's writer writes it: cut at each magic at a border of four bytes, which it drops."""
    parts, first = [], 0
    for at in range(0, len(payload) - 3, 4):
        if payload[at : at + 4] == MAGIC:
            parts.append(payload[first:at])
            first = at + 4
    parts.append(payload[first:])
    flags = [0] if len(parts) == 1 else [1, *[2] * (len(parts) - 2), 3]
    return b"".join(
        MAGIC + struct.pack("<I", flag << 29 | len(part)) + part + bytes(-len(part) % 4)
        for flag, part in zip(flags, parts, strict=True)
    )


RECORDS = [b"plain", b"a" * 8 + MAGIC + b"bc", MAGIC * 3, b"12345" + MAGIC, b""]


def test_every_reader_puts_the_magic_back(feeder: Feeder) -> None:
    for epoch in range(3):
        feeder.feed(epoch, b"".join(map(dmlc, RECORDS)))
    assert list(PipeReader("train", "MXRecordIO")) == RECORDS
    assert list(DataLoader(PipeIterableDataset("train", "MXRecordIO"), batch_size=None)) == RECORDS
    assert list(PipeModeDataset("train", "MXRecordIO").as_numpy_iterator()) == RECORDS


def test_parts_that_are_concatenated_are_told_once(feeder: Feeder, caplog: pytest.LogCaptureFixture) -> None:
    feeder.feed(0, b"".join(map(dmlc, RECORDS)))
    assert list(PipeReader("train", "RecordIO")) == [
        record.replace(MAGIC, b"") if record != RECORDS[3] else record for record in RECORDS
    ]
    assert caplog.text.count("record_format='MXRecordIO'") == 1
