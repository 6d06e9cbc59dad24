"""`PipeIterableDataset` in one process and in DataLoader workers, on real FIFOs."""

from __future__ import annotations

import glob
import os
import random
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from streamer.errors import ChannelError, CorruptRecord, TruncatedStream
from streamer.formats import recordio, tfrecord
from streamer.readers.token_blocks import join_blocks
from streamer.readers.tokens import TokenReader
from tests.kit.late import LATE
from tests.readers.feeder import Feeder
from tests.readers.marks import WITH_WORKERS
from tests.readers.test_table_reader import as_stream, table, wrapped
from tests.unit.test_tar import archive

if LATE:
    import torch
    from torch.utils.data import DataLoader

    from streamer.readers.table_dataset import TableIterableDataset
    from streamer.readers.torch import PipeIterableDataset, PipeModeDatasetException
    from tests.readers import decoders

RECORDS = [b"record %d " % number * (number % 50 * 4) for number in range(2000)]
"""Two megabytes: several blocks, so that every worker gets some. Each record is a message of its own."""
ENCODE = {"TFRecord": tfrecord.encode, "RecordIO": recordio.encode, "TextLine": lambda line: line + b"\n"}

pytestmark = WITH_WORKERS


def encoded(record_format: str, records: list[bytes] = RECORDS) -> bytes:
    return b"".join(map(ENCODE[record_format], records))


def load(dataset: PipeIterableDataset, workers: int, **options: Any) -> Any:
    """A loader of whole elements."""
    if workers:
        options |= {"multiprocessing_context": "forkserver"}
    return DataLoader(dataset, batch_size=None, num_workers=workers, **options)


def test_every_pass_is_the_next_epoch(feeder: Feeder) -> None:
    dataset = PipeIterableDataset("train", "TFRecord")
    assert isinstance(dataset, torch.utils.data.IterableDataset)
    for epoch in range(2):
        feeder.feed(epoch, encoded("TFRecord", RECORDS[epoch:]))
        assert list(dataset) == RECORDS[epoch:]
    assert feeder.next_epoch() == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_the_length_is_known_if_ranks_share_records(feeder: Feeder, workers: int) -> None:
    """It is that of the loader, too: no worker may end early, nor return more."""
    count = len(RECORDS)
    for epoch, (batch_size, drop) in enumerate(((None, False), (4, False), (4, True))):
        dataset = PipeIterableDataset("train", "TFRecord", batch_size=batch_size, drop_remainder=drop)
        feeder.feed(epoch, encoded("TFRecord"), records=count, steps=1)
        loader = load(dataset, workers)
        due = len(loader)
        assert len(list(loader)) == due == len(dataset)


@pytest.mark.parametrize(
    ("workers", "channels", "batch_size"),
    [*product((0,), (2,), (None, 4, 3)), (2, 2, None), (2, 2, 4), *product((2,), (1,), (None, 4, 3))],
)
def test_each_element_has_the_number_of_its_records_that_are_padding(
    feeder: Feeder, workers: int, channels: int, batch_size: int | None
) -> None:
    """The last 6 of 20 records, which may be those of several elements, in every order of the FIFOs.

    Two workers of two FIFOs take turns, each with a step of the rank.
    """
    names = ["train-0", "train-1"][:channels]
    feeder.configure(dict.fromkeys(names, "Pipe"))
    due, found = list[bytes](), list[bytes]()
    turns = min(workers, channels)
    for worker, name in enumerate(names):
        records = [f"{name} {number}".encode() for number in range(14)]
        due += records
        stream = encoded("TFRecord", records + [b"padding"] * 6)
        turn: dict[str, Any] = {"workers": turns, "worker": worker} if turns > 1 else {}
        feeder.feed(
            0,
            stream,
            channel=name,
            order={"digest": "d"},
            records=20,
            steps=5 * max(1, turns),
            padding=6,
            **turn,
        )
    dataset = PipeIterableDataset(names, "TFRecord", batch_size=batch_size, padding=True)
    for element, padding in load(dataset, workers):
        batch = [element] if batch_size is None else element
        found += batch[: len(batch) - padding]
    assert sorted(found) == sorted(due)


def test_without_ranks_by_record_no_record_is_padding(feeder: Feeder) -> None:
    feeder.feed(0, encoded("TFRecord", [b"a", b"b", b"c"]))
    dataset = PipeIterableDataset("train", "TFRecord", batch_size=2, decode=len, padding=True)
    assert list(dataset) == [(2, 0), (1, 0)]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_length_is_unknown_if_ranks_do_not_share_records(feeder: Feeder, workers: int) -> None:
    """Before the epoch, in mid-epoch and after it. A worker takes the epoch in another process."""
    dataset = PipeIterableDataset("train", "TFRecord", timeout=300)
    assert bool(dataset) is True  # also before the sidecar offers an epoch
    loader = load(dataset, workers)
    feed = feeder.feed(0, encoded("TFRecord"), proof=False)
    with pytest.raises(TypeError, match="the number of records of channel train is unknown"):
        len(loader)
    received: list[bytes] = []
    for record in loader:
        if not received or feed.written.is_set():
            with pytest.raises(TypeError, match="the number of records of channel train is unknown"):
                len(loader)
        received.append(record)
    assert received == RECORDS


@pytest.mark.parametrize(("record_format", "epochs"), [("TFRecord", 2), ("RecordIO", 1), ("TextLine", 1)])
def test_workers_of_one_channel_divide_its_records(feeder: Feeder, record_format: str, epochs: int) -> None:
    """Whatever the workers' speed: every record once, and no worker sees a byte twice."""
    loader = load(PipeIterableDataset("train", record_format, decode=decoders.with_worker), epochs + 1)
    for epoch in range(epochs):
        feeder.feed(epoch, encoded(record_format))
        got = list(loader)
        assert sorted(record for _, record in got) == sorted(RECORDS)
        assert len({worker for worker, _ in got}) > 1
    assert feeder.next_epoch() == epochs
    assert glob.glob(os.path.join(feeder.state_dir, ".*-pass-*")) == []


def test_one_worker_keeps_the_order(feeder: Feeder) -> None:
    feeder.feed(0, encoded("TFRecord"))
    assert list(load(PipeIterableDataset("train", "TFRecord"), 1)) == RECORDS


def test_workers_that_stay_read_one_epoch_after_the_other(feeder: Feeder) -> None:
    dataset = PipeIterableDataset("train", "TextLine", batch_size=10)
    loader = load(dataset, 2, persistent_workers=True)
    for epoch in range(3):
        lines = [b"%d of %d" % (number, epoch) for number in range(501)]
        feeder.feed(epoch, encoded("TextLine", lines))
        assert sorted(line for batch in loader for line in batch) == sorted(lines)


def test_batches_are_whole_across_workers(feeder: Feeder) -> None:
    """Only the last of the epoch is short, though the workers share the blocks."""
    feeder.feed(0, encoded("TFRecord"))
    feeder.feed(1, encoded("TFRecord"))
    batches = list(load(PipeIterableDataset("train", "TFRecord", batch_size=64 * 9), 3))
    assert sorted(record for batch in batches for record in batch) == sorted(RECORDS)
    assert sorted(map(len, batches)) == [len(RECORDS) % 576, *[576] * (len(RECORDS) // 576)]
    whole = PipeIterableDataset("train", "TFRecord", batch_size=576, drop_remainder=True)
    assert [len(batch) for batch in load(whole, 3)] == [576] * (len(RECORDS) // 576)


def test_samples_of_a_manifest_stay_together(feeder: Feeder) -> None:
    pairs = [(b"image %d" % number * (number % 90), b"%d" % number) for number in range(3000)]
    data = b"".join(recordio.encode(record) for pair in pairs for record in pair)
    feeder.feed(0, data)
    feeder.feed(1, data)
    # The loader's default conversion makes lists of tuples.
    assert sorted(map(tuple, load(PipeIterableDataset("train", "RecordIO", attributes=2), 3))) == sorted(
        pairs
    )
    batches = list(PipeIterableDataset("train", "RecordIO", attributes=2, batch_size=7))
    assert [sample for batch in batches for sample in batch] == pairs


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_ends_inside_a_sample_is_an_error(feeder: Feeder, workers: int) -> None:
    feeder.feed(0, b"".join(map(recordio.encode, [b"1", b"2", b"3"])))
    with pytest.raises(TruncatedStream, match="the epoch ends inside a sample, after 1 of 2 records"):
        list(load(PipeIterableDataset("train", "RecordIO", attributes=2, batch_size=4), workers))


@pytest.mark.parametrize("workers", [0, 3])
def test_webdataset(feeder: Feeder, workers: int) -> None:
    source = random.Random(1)
    samples: list[dict[str, Any]] = [
        {"__key__": f"{number:05}", "bin": source.randbytes(source.randrange(4000)), "cls": b"%d" % number}
        for number in range(1500)
    ]
    members = [[(f"{each['__key__']}.{field}", each[field]) for field in ("bin", "cls")] for each in samples]
    shards = [archive([pair for both in members[at::2] for pair in both]) for at in range(2)]
    feeder.feed(0, b"".join(shards))
    got = list(load(PipeIterableDataset("train", "WebDataset"), workers))
    assert sorted(got, key=lambda each: each["__key__"]) == samples
    if not workers:
        assert got == samples[::2] + samples[1::2]


def test_decode_makes_tensors_that_the_loader_collates(feeder: Feeder) -> None:
    feeder.feed(0, encoded("TFRecord", RECORDS[:100]))
    loader = DataLoader(PipeIterableDataset("train", "TFRecord", decode=decoders.length), batch_size=30)
    batches = list(loader)
    assert [batch.shape[0] for batch in batches] == [30, 30, 30, 10]
    assert torch.cat(batches).tolist() == [len(record) for record in RECORDS[:100]]


FOUR = ["train0", "train1", "train2", "train3"]


def feed_four(feeder: Feeder, epoch: int = 0) -> None:
    for channel in FOUR:
        feeder.feed(
            epoch, b"".join(b"%s %d\n" % (channel.encode(), line) for line in range(3)), channel=channel
        )


def test_channels_are_read_in_rotation(four: Feeder) -> None:
    feed_four(four)
    got = list(PipeIterableDataset(FOUR, "TextLine", batch_size=2))
    assert [batch[0].split()[0].decode() for batch in got[:4]] == FOUR
    assert sorted(line for batch in got for line in batch) == [
        b"%s %d" % (channel.encode(), line) for channel in FOUR for line in range(3)
    ]
    assert {len({line.split()[0] for line in batch}) for batch in got} == {1}


@pytest.mark.parametrize(("workers", "readers"), [(2, [{0}, {1}, {0}, {1}]), (4, [{0}, {1}, {2}, {3}])])
def test_workers_have_whole_channels_if_there_are_enough(
    four: Feeder, workers: int, readers: list[set[int]]
) -> None:
    feed_four(four)
    loader = load(PipeIterableDataset(FOUR, "TextLine", decode=decoders.with_worker), workers)
    found: list[set[int]] = [set() for _ in FOUR]
    for worker, line in loader:
        found[int(line.split()[0][-1:])].add(worker)
    assert found == readers


def test_more_workers_than_channels_share_them(four: Feeder) -> None:
    """Worker 0 and 2 have the first, worker 1 alone the second."""
    four.feed(0, encoded("TFRecord"), channel="train0")
    four.feed(0, encoded("TFRecord", RECORDS[:50]), channel="train1")
    loader = load(PipeIterableDataset(FOUR[:2], "TFRecord", decode=decoders.with_worker), 3)
    assert sorted(record for _, record in loader) == sorted(RECORDS + RECORDS[:50])


def test_ranks_have_channels_of_their_own(four: Feeder, monkeypatch: pytest.MonkeyPatch) -> None:
    feed_four(four)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert PipeIterableDataset(FOUR, "TextLine").channels == ["train1", "train3"]
    assert {line.split()[0] for line in PipeIterableDataset(FOUR, "TextLine")} == {b"train1", b"train3"}
    assert PipeIterableDataset(FOUR, "TextLine", share=(2, 4)).channels == ["train2"]
    assert PipeIterableDataset("train0", "TextLine", share=(0, 1)).channels == ["train0"]
    with pytest.raises(
        PipeModeDatasetException, match=r"2 processes of this host cannot divide 1 channel \(train0\)"
    ):
        PipeIterableDataset("train0", "RecordIO")


def test_a_launcher_that_starts_ranks_after_the_dataset_was_made(
    four: Feeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning's sets LOCAL_RANK in the first process when the training begins."""
    dataset = PipeIterableDataset(FOUR, "TextLine")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ChannelError, match=r"unknown, because LOCAL_RANK is 0 .* give share="):
        iter(dataset)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ChannelError, match="was made when its process was one of 1 rank, and the launcher"):
        iter(dataset)


def test_ranks_that_torchrun_did_not_start_must_say_where_they_are(four: Feeder) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(PipeModeDatasetException, match=r"start them with torchrun, or give share="):
            PipeIterableDataset(FOUR, "RecordIO")
        assert PipeIterableDataset(FOUR, "RecordIO", share=(1, 2)).channels == ["train1", "train3"]
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_cut_epoch_is_an_error_with_any_number_of_workers(feeder: Feeder, workers: int) -> None:
    data = encoded("TFRecord")
    feeder.feed(0, data[: len(data) // 2], state="open", total=len(data))
    with pytest.raises(
        TruncatedStream, match=f"received {len(data) // 2} of {len(data)} bytes.*the sidecar died"
    ):
        list(load(PipeIterableDataset("train", "TFRecord"), workers))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failed_epoch_whose_fifo_is_closed_is_told_by_its_cause(feeder: Feeder, workers: int) -> None:
    data = encoded("TFRecord")
    feed = feeder.feed(0, data, state="failed", total=2 * len(data), error="gone")
    with pytest.raises(TruncatedStream, match=f"received {len(data)} of .*the source failed: gone"):
        list(load(PipeIterableDataset("train", "TFRecord"), workers))
    feed.join()


def test_a_corrupt_record_is_an_error_by_name(feeder: Feeder) -> None:
    data = bytearray(encoded("TFRecord"))
    data[-1] ^= 1
    feeder.feed(0, bytes(data))
    with pytest.raises(CorruptRecord, match="CRC check on data failed"):
        list(load(PipeIterableDataset("train", "TFRecord"), 3))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fifo_that_does_not_appear(feeder: Feeder, workers: int) -> None:
    with pytest.raises(ChannelError, match=r"train_0 did not appear in .* in 0.2 s"):
        list(load(PipeIterableDataset("train", "RecordIO", timeout=0.2), workers))
    feeder.feed(0, b"late\n")
    assert list(PipeIterableDataset("train", "TextLine")) == [b"late"]


@pytest.mark.parametrize("workers", [0, 3])
def test_leaving_a_loop_ends_the_epoch_for_all(feeder: Feeder, workers: int) -> None:
    """The next pass is the next epoch, whole, though its loader draws the same seed as the last."""
    feed = feeder.feed(0, encoded("TFRecord") * 10)
    loader = load(PipeIterableDataset("train", "TFRecord"), workers)
    torch.manual_seed(1)
    for _ in loader:
        break
    feed.join()
    assert feed.reader_gone
    for epoch in (1, 2):
        torch.manual_seed(1)
        feeder.feed(epoch, encoded("TFRecord"))
        assert sorted(loader) == sorted(RECORDS)


def test_a_loader_that_was_left_leaves_no_file_for_long(feeder: Feeder) -> None:
    feeder.feed(0, encoded("TFRecord") * 10)
    loader = load(PipeIterableDataset("train", "TFRecord"), 2)
    for _ in loader:
        break
    assert len(glob.glob(os.path.join(feeder.state_dir, ".*-pass-*"))) == 1
    feeder.feed(1, encoded("TFRecord"))
    list(loader)
    assert glob.glob(os.path.join(feeder.state_dir, ".*-pass-*")) == []


def test_two_loops_at_once_read_an_epoch_each(feeder: Feeder) -> None:
    for epoch in range(2):
        feeder.feed(epoch, encoded("TextLine", [b"%d %d" % (epoch, line) for line in range(1000)]))
    loader = load(PipeIterableDataset("train", "TextLine"), 2)
    first, second = map(list, zip(*zip(loader, loader, strict=True), strict=True))
    assert {line.split()[0] for line in first} | {line.split()[0] for line in second} == {b"0", b"1"}
    assert len(set(first)) == len(set(second)) == 1000
    assert set(first).isdisjoint(second)


def test_a_worker_that_dies_ends_the_loop(feeder: Feeder) -> None:
    """PyTorch notices it; nothing hangs."""
    feeder.feed(0, encoded("TextLine", [b"%d" % number for number in range(1000)] + [b"die"] + RECORDS))
    with pytest.raises(RuntimeError, match="exited unexpectedly|killed by signal"):
        list(load(PipeIterableDataset("train", "TextLine", decode=decoders.die), 2))


def test_arguments(feeder: Feeder) -> None:
    with pytest.raises(ValueError, match="Invalid record format: CSV"):
        PipeIterableDataset("train", "CSV")
    with pytest.raises(ValueError, match="attributes is 0"):
        PipeIterableDataset("train", "RecordIO", attributes=0)
    with pytest.raises(ValueError, match="WebDataset, whose records are whole"):
        PipeIterableDataset("train", "WebDataset", attributes=2)
    with pytest.raises(ValueError, match="batch_size is 0"):
        PipeIterableDataset("train", "RecordIO", batch_size=0)
    with pytest.raises(ValueError, match="drop_remainder has no meaning without batch_size"):
        PipeIterableDataset("train", "RecordIO", drop_remainder=True)
    with pytest.raises(ValueError, match="give one or several, each once"):
        PipeIterableDataset(["train", "train"], "RecordIO")
    with pytest.raises(ValueError, match=r"share is \(2, 2\)"):
        PipeIterableDataset("train", "RecordIO", share=(2, 2))
    with pytest.raises(PipeModeDatasetException, match="Channel eval not found"):
        PipeIterableDataset(["train", "eval"], "RecordIO")
    with pytest.raises(PipeModeDatasetException, match="Channel plain is not a PipeMode channel"):
        PipeIterableDataset("plain", "RecordIO")


@pytest.mark.parametrize("workers", [0, 2])
def test_tables_are_divided_among_workers_by_object(feeder: Feeder, workers: int) -> None:
    feeder.feed(0, wrapped(*(as_stream(table(first, 50)) for first in range(0, 300, 50))))
    dataset = TableIterableDataset("train", columns=["number", "word"], batch_rows=20)
    batches = list(load(dataset, workers))
    assert sorted(batch.num_rows for batch in batches) == [10] * 6 + [20] * 12
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert sorted(row["number"] for row in rows) == list(range(300))
    assert all(row["word"] == f"w{row['number'] % 5}" for row in rows)
    # A slice that a worker sends has its own rows, not the buffers of the whole object.
    assert not workers or all(batch["number"].buffers()[1].size <= 192 for batch in batches)


def test_token_blocks_are_tensors(feeder: Feeder) -> None:
    data = np.arange(100 * 64, dtype=np.uint16).reshape(100, 64)
    for epoch in range(2):
        feeder.feed(epoch, data.tobytes())
    arrays = list(TokenReader("train", "uint16", length=64, batch_size=8))
    tensors = [torch.from_numpy(array) for array in arrays]
    assert [tensor.data_ptr() for tensor in tensors] == [array.ctypes.data for array in arrays]
    assert np.array_equal(torch.cat(tensors).numpy(), data)
    dataset = PipeIterableDataset(
        "train", "fixed:128", batch_size=8, decode=partial(join_blocks, dtype="uint16")
    )
    elements = list(load(dataset, 2))
    assert sorted(row[0] for element in elements for row in element.tolist()) == data[:, 0].tolist()
