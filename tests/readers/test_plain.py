"""`open_channel` and `PipeReader`: epochs, the state file, the config file, records on real FIFOs."""

from __future__ import annotations

import io
import itertools
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from streamer.errors import ChannelError, CorruptRecord, TruncatedStream
from streamer.formats import recordio, tfrecord
from streamer.readers import PipeModeDatasetException, PipeReader, SkipPolicy, endless, open_channel
from streamer.readers.core.position import ReaderPosition
from streamer.readers.core.state import EpochState
from streamer.trailer import SIDECAR_LOCK
from tests.readers.feeder import Feeder

RECORDS = [b"record %d " % number * (number % 50) for number in range(2000)]
ENCODE = {"TFRecord": tfrecord.encode, "RecordIO": recordio.encode, "TextLine": lambda line: line + b"\n"}


def encoded(record_format: str, records: list[bytes] = RECORDS) -> bytes:
    return b"".join(map(ENCODE[record_format], records))


@pytest.mark.parametrize("record_format", list(ENCODE))
def test_each_iteration_is_the_next_epoch(feeder: Feeder, record_format: str) -> None:
    reader = PipeReader("train", record_format)
    for epoch in range(3):
        feeder.feed(epoch, encoded(record_format, RECORDS[epoch:]))
        assert list(reader) == RECORDS[epoch:]
    assert feeder.next_epoch() == 3


def test_batches(feeder: Feeder) -> None:
    feeder.feed(0, encoded("TFRecord"))
    batches = list(PipeReader("train", "TFRecord").batches())
    assert [record for batch in batches for record in batch] == RECORDS
    assert all(batches)


def test_an_iterator_that_is_never_asked_takes_no_epoch(feeder: Feeder) -> None:
    reader = PipeReader("train", "TFRecord")
    iter(reader)
    iter(reader.batches())
    feeder.feed(0, encoded("TFRecord"))
    assert len(list(reader)) == len(RECORDS)
    assert feeder.next_epoch() == 1


def test_leaving_a_loop_ends_the_epoch(feeder: Feeder) -> None:
    feed = feeder.feed(0, encoded("TFRecord") * 20)
    reader = PipeReader("train", "TFRecord")
    for _ in reader:
        break
    feed.join()
    assert feed.reader_gone
    feeder.feed(1, encoded("TFRecord"))
    assert list(reader) == RECORDS


def test_two_channels_side_by_side(feeder: Feeder) -> None:
    feeder.feed(0, encoded("TFRecord"))
    feeder.feed(0, encoded("TextLine"), channel="validation")
    both = zip(PipeReader("train", "TFRecord"), PipeReader("validation", "TextLine"), strict=True)
    assert list(both) == list(zip(RECORDS, RECORDS, strict=True))


def test_a_given_epoch_leaves_the_state_file_alone(feeder: Feeder) -> None:
    feeder.feed(4, b"four\n")
    feeder.feed(5, b"five\n")
    feeder.feed(6, b"six\n")
    reader = PipeReader("train", "TextLine", epoch=4)
    assert [list(reader), list(reader)] == [[b"four"], [b"five"]]
    with open_channel("train", epoch=6) as stream:
        assert stream.read() == b"six\n"
    assert not os.path.exists(feeder.state_dir)


def test_a_reader_is_true_before_its_channel_is_offered(feeder: Feeder) -> None:
    del feeder
    assert bool(PipeReader("train", "RecordIO", timeout=0)) is True


@pytest.mark.parametrize("first", [None, 3])
def test_the_length_in_mid_epoch_does_not_wait_for_the_next_epoch(feeder: Feeder, first: int | None) -> None:
    """This job's last epoch may be under way. Another object of the state file gives the same length."""
    feed = feeder.feed(first or 0, encoded("TFRecord"), records=len(RECORDS), steps=7)
    reader = PipeReader("train", "TFRecord", epoch=first)
    records = iter(reader)
    assert next(records) == RECORDS[0]
    other = reader if first else PipeReader("train", "TFRecord", timeout=0)
    assert (len(other), other.steps_per_epoch) == (len(RECORDS), 7)
    assert list(records) == RECORDS[1:]
    assert feed.written.is_set()
    assert len(reader) == len(RECORDS)
    feeder.withdraw(first or 0)  # the sidecar ended
    assert len(reader) == len(RECORDS)


def test_the_length_in_mid_epoch_of_another_writer_is_unknown_at_once(feeder: Feeder) -> None:
    feeder.feed(0, encoded("TFRecord"), proof=False)
    records = iter(PipeReader("train", "TFRecord"))
    assert next(records) == RECORDS[0]
    with pytest.raises(TypeError, match="the number of records of channel train is unknown"):
        len(PipeReader("train", "TFRecord", timeout=0))
    assert list(records) == RECORDS[1:]


def test_the_length_before_a_resumed_sidecar_offers_its_epoch_waits_for_it(feeder: Feeder) -> None:
    """The state file names epoch 3. No trailer is there yet, and the directory is a sidecar's."""
    Path(feeder.pipe_dir, SIDECAR_LOCK).touch()
    EpochState(feeder.state_dir, "train").put(3)
    with pytest.raises(ChannelError, match="train_3 did not appear in .* in 0 s"):
        len(PipeReader("train", "TFRecord", timeout=0))
    feeder.feed(3, encoded("TFRecord"), records=len(RECORDS), steps=7)
    reader = PipeReader("train", "TFRecord")
    assert (len(reader), reader.steps_per_epoch) == (len(RECORDS), 7)
    assert list(reader) == RECORDS


def test_the_length_is_not_kept_from_the_trailer_of_an_earlier_run(feeder: Feeder) -> None:
    """The FIFO and the trailer of the earlier run exist until the sidecar of this run starts."""
    os.mkfifo(feeder.path("train", 0))
    feeder.publish(0, "open", records=10, steps=1)
    reader = PipeReader("train", "TFRecord")
    assert len(reader) == 10
    feeder.feed(0, encoded("TFRecord", RECORDS[:20]), records=20, steps=2)
    assert list(reader) == RECORDS[:20]
    assert (len(reader), reader.steps_per_epoch, reader.padding) == (20, 2, 0)


def test_the_length_of_an_epoch_that_another_reader_took_meanwhile_is_in_its_trailer(feeder: Feeder) -> None:
    """Its FIFO came and went between two looks of the waiting reader, as beside another DataLoader worker."""

    class Taken(logging.Handler):
        """Takes the epoch when the reader says that it waits for it."""

        def emit(self, record: logging.LogRecord) -> None:
            assert "train_0 has not appeared" in record.getMessage()
            EpochState(feeder.state_dir, "train").put(1)
            feeder.publish(0, "complete", records=20, steps=2)

    logger, handler = logging.getLogger("penstock"), Taken()
    logger.addHandler(handler)
    try:
        assert len(PipeReader("train", "RecordIO", timeout=2)) == 20
    finally:
        logger.removeHandler(handler)


def test_an_evaluation_leaves_out_the_padding(feeder: Feeder) -> None:
    feeder.feed(0, encoded("TFRecord", RECORDS[:20]), records=20, steps=2, padding=3)
    reader = PipeReader("train", "TFRecord")
    left = len(reader) - reader.padding
    assert [record for number, record in enumerate(reader) if number < left] == RECORDS[:17]


def test_the_length_after_a_state_was_loaded_is_that_of_the_epoch_to_come(feeder: Feeder) -> None:
    feeder.feed(0, encoded("TFRecord"), records=len(RECORDS), steps=7)
    reader = PipeReader("train", "TFRecord")
    assert len(list(reader)) == len(reader)
    feeder.publish(1, "complete", records=10, steps=1)
    reader.load_state_dict(ReaderPosition("train", 2).state())
    feeder.feed(2, encoded("TFRecord", RECORDS[:20]), records=20, steps=2)
    assert len(reader) == 20


def test_open_channel_takes_the_next_epoch(feeder: Feeder) -> None:
    feeder.feed(0, b"a,b\n")
    feeder.feed(1, b"c,d\n")
    with open_channel("train") as stream:
        assert stream.read() == b"a,b\n"
    with io.BufferedReader(open_channel("train")) as stream:
        assert list(stream) == [b"c,d\n"]
    assert feeder.next_epoch() == 2


def test_directories_as_arguments(feeder: Feeder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", "/nowhere")
    feeder.feed(0, encoded("TFRecord"))
    assert list(PipeReader("train", "TFRecord", **feeder.directories)) == RECORDS
    assert feeder.next_epoch() == 1


def test_an_epoch_that_never_appeared_is_given_back(feeder: Feeder) -> None:
    os.makedirs(feeder.state_dir)
    with open(os.path.join(feeder.state_dir, ".train-pipe_mode-state"), "w") as file:
        file.write("7")
    feeder.feed(0, b"")
    message = (
        "train_7 did not appear in .* the directory has train_0: the state file .*-state says 7; .* delete"
    )
    with pytest.raises(ChannelError, match=message):
        open_channel("train", timeout=0)
    with pytest.raises(ChannelError, match=message):
        list(PipeReader("train", "RecordIO", timeout=0))
    assert feeder.next_epoch() == 7


def test_config_errors_in_the_incumbents_words(feeder: Feeder) -> None:
    for make in (PipeReader, open_channel):
        with pytest.raises(
            PipeModeDatasetException,
            match=r"^Channel eval not found in Training Job InputDataConfig; the Pipe chan.* train.*$",
        ):
            make("eval")
        with pytest.raises(
            PipeModeDatasetException, match=r"^Channel plain is not a PipeMode channel; the P"
        ):
            make("plain")
    feeder.configure({"train": "pIPE"})
    PipeReader("train", "RecordIO")
    feeder.configure({"eval": "Pipe", "train-0": "Pipe", "train-1": "Pipe"})
    with pytest.raises(
        PipeModeDatasetException, match=r"; its rank FIFOs are the channels train-0 to train-1$"
    ):
        PipeReader("train", "RecordIO")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"train": 1}', "\udcff"])
def test_a_config_file_that_is_not_one(feeder: Feeder, text: str) -> None:
    with open(os.path.join(feeder.config_dir, "inputdataconfig.json"), "w", errors="surrogateescape") as file:
        file.write(text)
    with pytest.raises(PipeModeDatasetException):
        PipeReader("train", "RecordIO")


def test_bare_fifos_need_no_config_file(feeder: Feeder) -> None:
    os.unlink(os.path.join(feeder.config_dir, "inputdataconfig.json"))
    feeder.feed(0, encoded("TFRecord"), proof=False)
    assert list(PipeReader("train", "TFRecord")) == RECORDS


def test_argument_errors(feeder: Feeder) -> None:
    message = (
        "^Invalid record format: CSV; the formats are RecordIO, .*fixed:BYTES, and WebDataset in PyTorch$"
    )
    with pytest.raises(ValueError, match=message):
        PipeReader("train", "CSV")
    assert issubclass(PipeModeDatasetException, ChannelError)


@pytest.mark.parametrize("record_format", ["TFRecord", "RecordIO"])
def test_a_cut_record_is_an_error_even_in_a_complete_epoch(feeder: Feeder, record_format: str) -> None:
    feeder.feed(0, encoded(record_format)[:-1])
    got: list[bytes] = []
    with pytest.raises(TruncatedStream, match=r"the stream ends inside a .* wanted"):
        got.extend(PipeReader("train", record_format))
    assert got == RECORDS[:-1]


@pytest.mark.parametrize("record_format", list(ENCODE))
def test_no_record_of_a_broken_epoch_is_made_up(feeder: Feeder, record_format: str) -> None:
    data = encoded(record_format)
    feeder.feed(0, data[: len(data) // 2], state="open", total=len(data))
    got: list[bytes] = []
    with pytest.raises(TruncatedStream, match="the sidecar died"):
        got.extend(PipeReader("train", record_format))
    assert got == RECORDS[: len(got)]
    assert 0 < len(got) < len(RECORDS)


def test_corrupt_records(feeder: Feeder) -> None:
    bad = bytearray(tfrecord.encode(b"bad"))
    bad[-1] ^= 1
    data = tfrecord.encode(b"good") + bytes(bad) + tfrecord.encode(b"good")
    feeder.feed(0, data)
    with pytest.raises(CorruptRecord, match="at offset 20 of the stream: CRC check on data failed"):
        list(PipeReader("train", "TFRecord"))
    feeder.feed(1, data)
    assert list(PipeReader("train", "TFRecord", skip=SkipPolicy(records=1))) == [b"good", b"good"]


def test_a_reader_goes_to_a_worker_process(feeder: Feeder) -> None:
    feeder.feed(0, encoded("TFRecord"))
    reader = pickle.loads(pickle.dumps(PipeReader("train", "TFRecord")))
    assert list(reader) == RECORDS


def test_readers_pull_in_nothing_foreign() -> None:
    script = (
        "import sys\n"
        "from streamer.readers import PipeReader, PipeStream, open_channel, PipeModeDatasetException\n"
        "foreign = 'tensorflow numpy aiobotocore botocore asyncio uvloop pydantic awscrt'.split()\n"
        "print([name for name in foreign if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_unknown_names_of_the_package() -> None:
    import streamer.readers

    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        streamer.readers.nothing  # noqa: B018


def test_endless_goes_on_into_the_next_epoch(feeder: Feeder) -> None:
    """From the middle of an epoch; the length stays that of one epoch."""
    for epoch, records in enumerate((RECORDS, [], RECORDS, [], [])):
        feeder.feed(epoch, encoded("TFRecord", records), records=len(records), steps=7)
    reader = PipeReader("train", "TFRecord")
    stream = endless(reader)
    assert list(itertools.islice(stream, 3000)) == [*RECORDS, *RECORDS[:1000]]
    assert len(reader) == len(RECORDS)
    assert list(itertools.islice(stream, 1000)) == RECORDS[1000:]
    with pytest.raises(ChannelError, match="two successive epochs have no record"):
        next(stream)
