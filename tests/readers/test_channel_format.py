"""The format that a reader reads by: its own argument, or the channel's, which are never two."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from streamer.formats import recordio, tfrecord
from streamer.readers import PipeModeDatasetException, PipeReader
from streamer.readers.tables import TableReader
from streamer.readers.tokens import TokenReader
from tests.kit.late import LATE
from tests.readers.feeder import Feeder
from tests.unit.test_tar import archive

if LATE:
    from streamer.readers.table_dataset import TableIterableDataset
    from streamer.readers.tensorflow import PipeModeDataset
    from streamer.readers.torch import PipeIterableDataset

TRAIN = {"train": "Pipe"}
BYTES = {
    "TFRecord": tfrecord.encode(b"ab") + tfrecord.encode(b"cd"),
    "RecordIO": recordio.encode(b"ab") + recordio.encode(b"cd"),
    "lines": b"ab\ncd\n",
    "fixed:2": b"abcd",
}
Make = Callable[..., Any]
PYTHON: list[Make] = [PipeReader, lambda *given: PipeIterableDataset("train", *given[1:])]
ALL: list[Make] = [*PYTHON, lambda *given: PipeModeDataset("train", given[1] if given[1:] else None)]


def contents(made: Any) -> list[bytes]:
    return list(made.as_numpy_iterator() if hasattr(made, "as_numpy_iterator") else made)


@pytest.mark.parametrize("own", BYTES)
def test_a_reader_without_a_format_has_the_channel_s(feeder: Feeder, own: str) -> None:
    feeder.configure(TRAIN, RecordFormat=own)
    for epoch, make in enumerate(ALL):
        feeder.feed(epoch, BYTES[own])
        reader = make("train")
        assert contents(reader) == [b"ab", b"cd"]
        assert reader.record_format == {"lines": "TextLine"}.get(own, own)


def test_samples_of_tar_are_pytorch_s(feeder: Feeder) -> None:
    feeder.configure(TRAIN, RecordFormat="tar")
    feeder.feed(0, archive([("a.txt", b"text")]))
    assert list(PipeIterableDataset("train")) == [{"__key__": "a", "txt": b"text"}]
    with pytest.raises(ValueError, match=r"Invalid record format: WebDataset; .*, and WebDataset in PyTorch"):
        PipeReader("train")


def test_wrapped_objects_are_recordio(feeder: Feeder) -> None:
    """SageMaker's own key says it; `Records` is refused beside it."""
    feeder.configure(TRAIN, RecordWrapperType="RecordIO")
    for epoch, make in enumerate(ALL):
        feeder.feed(epoch, BYTES["RecordIO"])
        assert contents(make("train")) == [b"ab", b"cd"]
    for make in ALL:
        with pytest.raises(
            PipeModeDatasetException, match=r"^channel train has RecordWrapperType: RecordIO, .* reads TFRec"
        ):
            make("train", "TFRecord")


@pytest.mark.parametrize("make", ALL)
def test_no_format_anywhere(feeder: Feeder, make: Make) -> None:
    with pytest.raises(
        PipeModeDatasetException,
        match=r"^the record format of channel train is unknown: say record_format='TFRecord', .*"
        r"or add Records: \{Format: TFRecord\} to the Penstock section of the channel$",
    ):
        make("train")


@pytest.mark.parametrize("make", PYTHON)
def test_no_format_and_no_list_of_channels(feeder: Feeder, make: Make) -> None:
    os.unlink(os.path.join(feeder.config_dir, "inputdataconfig.json"))
    with pytest.raises(PipeModeDatasetException, match=r"; .*config has no inputdataconfig\.json, "):
        make("train")
    feeder.feed(0, BYTES["TFRecord"])
    assert contents(make("train", "TFRecord")) == [b"ab", b"cd"]


def test_another_format_is_an_error_by_name(feeder: Feeder) -> None:
    feeder.configure(TRAIN, RecordFormat="lines")
    message = (
        "^channel train has Records.Format: lines, which record_format='TextLine' reads, and this reader "
        "reads {}: correct the one that is wrong$"
    )
    others: list[tuple[Callable[[], Any], str]] = [
        (lambda: PipeReader("train", "TFRecord"), "TFRecord"),
        (lambda: PipeIterableDataset("train", "RecordIO"), "RecordIO"),
        (lambda: PipeIterableDataset("train", "WebDataset"), "WebDataset"),
        (lambda: PipeModeDataset("train", "TFRecord"), "TFRecord"),
        (lambda: PipeModeDataset("train"), "RecordIO"),
        (lambda: TableReader("train"), "RecordIO"),
        (lambda: TableIterableDataset("train"), "RecordIO"),
        (lambda: TokenReader("train", "uint16", length=4), "fixed:8"),
    ]
    for make, reads in others:
        with pytest.raises(PipeModeDatasetException, match=message.format(reads)):
            make()


def test_what_agrees(feeder: Feeder) -> None:
    feeder.configure(TRAIN, RecordFormat="fixed:8")
    assert TokenReader("train", "uint16", length=4).record_format == "fixed:8"
    with pytest.raises(PipeModeDatasetException, match=r"Records\.Format: fixed:8, .* reads fixed:16"):
        PipeReader("train", "fixed:16")
    assert PipeReader("train", "TFRecord").record_format == "TFRecord"  # records of one size
    feeder.configure(TRAIN, RecordFormat="RecordIO")
    for make in ALL:
        assert make("train", "MXRecordIO").record_format == "MXRecordIO"


def test_channels_of_several_formats(feeder: Feeder) -> None:
    document = {
        name: {"TrainingInputMode": "Pipe", "RecordFormat": own}
        for name, own in {"a": "RecordIO", "b": "TFRecord"}.items()
    }
    with open(os.path.join(feeder.config_dir, "inputdataconfig.json"), "w", encoding="utf-8") as file:
        json.dump(document, file)
    with pytest.raises(PipeModeDatasetException, match=r"^channel b has .*, and this reader reads RecordIO"):
        PipeIterableDataset(["a", "b"])
