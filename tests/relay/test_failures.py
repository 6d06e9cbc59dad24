"""What readers see of an epoch that fails for good: held, closed, or poisoned behind its last record."""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import os
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from streamer.errors import CorruptRecord, TruncatedStream
from streamer.formats import recordio, tfrecord
from streamer.plan import Arrangement, Position
from streamer.readers import PipeStream
from streamer.readers.core.plain import record_reader
from streamer.relay.deliver.frame_aligner import POISON, Framing
from streamer.relay.transport import Wish
from tests.kit.harness import RunChannel, Running, fill, running_channel
from tests.kit.pipes import eventually, off_loop, read_all
from tests.kit.stub import Answer, S3Stub, fails
from tests.kit.trailers import published_trailer
from tests.sidecar import foreign

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")

ENCODE = {"RecordIO": recordio.encode, "TFRecord": tfrecord.encode}
FAULTS = {
    "denied": fails(403, "AccessDenied"),
    "gone": fails(404, "NoSuchKey"),
    "replaced": fails(412, "PreconditionFailed"),
}
PART = 50_000


@pytest.fixture(params=["aiobotocore", "buffered"])
def run(request: pytest.FixtureRequest) -> RunChannel:
    """A channel of one connection over the transports that bring bytes into memory."""
    return functools.partial(running_channel, transport=request.param, requests_in_flight=1, part_size=PART)


def store(
    stub: S3Stub, framing: Framing, *, objects: int = 3, pack: Callable[..., bytes] = bytes
) -> list[list[bytes]]:
    """Objects of some 120 kB of whole records; the records of each."""
    dice = random.Random(framing)
    found = [[dice.randbytes(dice.randrange(3000)) for _ in range(80)] for _ in range(objects)]
    for number, records in enumerate(found):
        stub.objects[f"b/data/{number}"] = pack(b"".join(map(ENCODE[framing], records)))
    return found


def fail_at(
    stub: S3Stub, key: str, start: int, fault: Callable[[Answer], Awaitable[web.StreamResponse]]
) -> None:
    """Have every GET of the object from byte `start` on fail."""
    stub.weather = lambda name, first, _size: fault if name == key and first >= start else None


def records_of(stream: bytes, framing: Framing) -> Any:
    """Whole records at the beginning of a stream, and what is left."""
    records, at = [], 0
    with contextlib.suppress(CorruptRecord):
        for payload in record_reader(io.BytesIO(stream), framing):
            records.append(payload)
            at += len(ENCODE[framing](payload))
    return records, stream[at:]


def each_into(found: Any, items: Any) -> None:
    """One by one, so that those before an error are there."""
    for item in items:
        found.append(item)


async def end(running: Running) -> None:
    running.channel.drain()
    await running.task


@pytest.mark.parametrize(("fault", "start"), [("denied", 0), ("gone", PART), ("replaced", 2 * PART)])
@pytest.mark.parametrize("framing", ["RecordIO", "TFRecord"])
async def test_poison_comes_behind_the_last_whole_record(
    run: RunChannel, stub: S3Stub, tmp_path: Path, *, framing: Framing, start: int, fault: str
) -> None:
    """Wherever S3 stops: whole records, the head that all refuse, the end; and the trailer knows it first."""
    first, second, _ = store(stub, framing)
    fail_at(stub, "b/data/1", start, FAULTS[fault])
    async with run(stub, tmp_path, when_failed="poison", framing=framing) as running:
        assert published_trailer(tmp_path, "train", 0).poison == len(POISON[framing])
        got = await off_loop(read_all, running.fifo(0))
        await eventually(lambda: running.fifo(1).exists() and not running.withdrawn(0).exists())
        trailer, after = (published_trailer(tmp_path, "train", epoch) for epoch in (0, 1))
        assert running.channel.failure is not None
        assert running.channel.failure.fifo == "poisoned"
        assert running.channel.statistics().state == "failed"
        await end(running)
    assert got.endswith(POISON[framing])
    assert (trailer.state, trailer.bytes_delivered) == ("failed", len(got) - len(POISON[framing]))
    assert (after.state, after.error) == ("failed", trailer.error)
    records, rest = records_of(got, framing)
    assert rest == POISON[framing]
    assert records == (first + second)[: len(records)]
    # No more is kept back than the record that is not whole.
    missing = len(stub.objects["b/data/0"]) + start - trailer.bytes_delivered
    assert 0 <= missing < len(ENCODE[framing]((first + second)[len(records)]))
    assert start or missing == 0


@pytest.mark.parametrize(
    ("framing", "reader"),
    [
        ("RecordIO", foreign.dmlc),
        ("RecordIO", foreign.incumbent_recordio),
        ("RecordIO", foreign.mlio_recordio),
        ("RecordIO", foreign.sdk_recordio),
        ("TFRecord", foreign.skipping_tfrecord),
        ("TFRecord", foreign.unchecked_tfrecord),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
async def test_every_foreign_reader_of_records_refuses_a_poisoned_epoch(
    stub: S3Stub, tmp_path: Path, framing: Framing, reader: Callable[[str, int, str], list[list[str]]]
) -> None:
    """Those too that would not notice a record cut short."""
    run = functools.partial(running_channel, transport="buffered", requests_in_flight=1, part_size=PART)
    store(stub, framing, objects=2)
    fail_at(stub, "b/data/1", PART, FAULTS["denied"])
    async with run(stub, tmp_path, when_failed="poison", framing=framing) as running:
        with pytest.raises(foreign.REFUSALS):
            await off_loop(reader, str(tmp_path), 1, "train")
        await end(running)


@pytest.mark.parametrize("framing", ["RecordIO", "TFRecord"])
async def test_our_readers_tell_why_and_give_out_no_poison(
    run: RunChannel, stub: S3Stub, tmp_path: Path, framing: Framing
) -> None:
    first, second, _ = store(stub, framing)
    fail_at(stub, "b/data/1", PART, FAULTS["denied"])
    got: list[bytes] = []

    def records(path: Path) -> Iterator[Any]:
        with PipeStream(path) as stream:
            yield from record_reader(stream, framing)

    async with run(stub, tmp_path, when_failed="poison", framing=framing) as running:
        with pytest.raises(TruncatedStream, match="the source failed: access denied.*s3://b/data/1"):
            await off_loop(each_into, got, records(running.fifo(0)))
        await end(running)
    assert got == (first + second)[: len(got)]
    assert len(got) >= len(first)


async def test_raw_bytes_end_before_the_poison(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    store(stub, "TFRecord")
    fail_at(stub, "b/data/1", PART, FAULTS["denied"])
    got: list[bytes] = []

    def blocks(path: Path) -> Iterator[Any]:
        with PipeStream(path) as stream:
            yield from iter(functools.partial(stream.read, 7777), b"")

    async with run(stub, tmp_path, when_failed="poison", framing="TFRecord") as running:
        with pytest.raises(TruncatedStream, match="the source failed"):
            await off_loop(each_into, got, blocks(running.fifo(0)))
        delivered = running.states[0].bytes_delivered
        await end(running)
    assert b"".join(got) == (stub.objects["b/data/0"] + stub.objects["b/data/1"])[:delivered]


@pytest.mark.parametrize("start", [0, PART], ids=["border", "record"])
async def test_a_wrapped_object_that_is_not_whole_is_not_begun(
    run: RunChannel, stub: S3Stub, tmp_path: Path, start: int
) -> None:
    """Its header, which the plan brings, would promise bytes that never come."""
    truth = fill(stub, [70_001, 120_003, 10])
    fail_at(stub, "b/data/0001", start, FAULTS["gone"])

    wrapped = Arrangement(wrap=True)
    async with run(stub, tmp_path, arrangement=wrapped, when_failed="poison", framing="RecordIO") as running:
        got = await off_loop(read_all, running.fifo(0))
        await end(running)
    assert got == recordio.encode(truth[:70_001]) + POISON["RecordIO"]


@pytest.mark.parametrize("framing", ["RecordIO", "TFRecord"])
async def test_a_damaged_object_poisons_behind_its_last_whole_record(
    run: RunChannel, stub: S3Stub, tmp_path: Path, framing: Framing
) -> None:
    records = store(stub, framing, objects=2, pack=gzip.compress)
    stub.objects["b/data/1"] = stub.objects["b/data/1"][:-100]

    inflated = Arrangement(inflate=True)
    async with run(
        stub, tmp_path, arrangement=inflated, inflate=True, when_failed="poison", framing=framing
    ) as running:
        got = await off_loop(read_all, running.fifo(0))
        assert "it was cut off" in (running.states[0].error or "")
        await end(running)
    found, rest = records_of(got, framing)
    assert rest == POISON[framing]
    assert records[0] == found[: len(records[0])]
    assert found == (records[0] + records[1])[: len(found)]


async def test_inside_a_record_that_cannot_be_kept_back_the_fifo_is_held(
    run: RunChannel, stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No bytes there are refused by all, and a cut record is none that all refuse either."""
    monkeypatch.setattr("streamer.relay.deliver.frame_aligner.MOST_HELD", 10_000)
    stub.objects["b/data/0"] = tfrecord.encode(b"short") + tfrecord.encode(bytes(2 * PART))
    fail_at(stub, "b/data/0", PART, FAULTS["denied"])
    async with run(stub, tmp_path, when_failed="poison", framing="TFRecord") as running:
        with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb", buffering=0) as reader:
            got = b""
            while len(got) < PART:
                got += await off_loop(reader.read, PART)
            await eventually(lambda: running.channel.error)
            os.set_blocking(reader.fileno(), False)
            assert reader.read(1) is None
            assert running.channel.failure is not None
            assert running.channel.failure.fifo == "held"
            assert published_trailer(tmp_path, "train", 0).poison == 0
        await end(running)


@pytest.mark.parametrize(
    ("skipped", "failing", "poisoned"), [(True, 0, True), (False, 0, False), (False, 1, True)]
)
async def test_an_epoch_that_is_gone_on_with(
    run: RunChannel, stub: S3Stub, tmp_path: Path, *, skipped: bool, failing: int, poisoned: bool
) -> None:
    """A FIFO begins with a record; where another sidecar ended is no border, until an object begins."""
    stub.objects |= {f"b/data/{number}": tfrecord.encode(bytes(999)) * 100 for number in range(2)}
    fail_at(stub, f"b/data/{failing}", PART, FAULTS["denied"])
    offset = len(tfrecord.encode(bytes(999))) * 3
    start = Position(0, offset, skipped=offset) if skipped else Position(0, offset + 1)
    async with run(stub, tmp_path, when_failed="poison", framing="TFRecord", start=start) as running:
        with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb", buffering=0) as reader:
            await eventually(lambda: running.channel.error)
            assert running.channel.failure is not None
            assert running.channel.failure.fifo == ("poisoned" if poisoned else "held")
            assert running.channel.mendable == (not poisoned)
            os.set_blocking(reader.fileno(), False)
            got = reader.read(1 << 20)
            assert got.endswith(POISON["TFRecord"]) == poisoned
        await end(running)


async def test_whole_epochs_are_as_ever(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    """A last record that is cut in the object itself comes as it is, and so do bytes of another format."""
    store(stub, "TFRecord")
    stub.objects["b/data/3"] = tfrecord.encode(b"cut in the object")[:-3]
    truth = b"".join(stub.objects[f"b/data/{number}"] for number in range(4))
    async with run(stub, tmp_path, when_failed="poison", framing="TFRecord") as running:
        for epoch in range(2):
            assert await off_loop(read_all, running.fifo(epoch)) == truth
        await eventually(lambda: len(running.states) == 2)
        trailer = published_trailer(tmp_path, "train", 1)
        assert (trailer.state, trailer.bytes_delivered, trailer.poison) == ("complete", len(truth), 0)
    os.mkdir(tmp_path / "other")
    async with run(stub, tmp_path / "other", when_failed="poison", framing="RecordIO") as running:
        assert await off_loop(read_all, running.fifo(0)) == truth


@pytest.mark.parametrize("transport", ["aiobotocore", "buffered", "splice"])
async def test_close_is_an_end_that_only_the_trailer_denies(
    stub: S3Stub, tmp_path: Path, transport: Wish
) -> None:
    fill(stub, [70_000, 20_000])
    fail_at(stub, "b/data/0001", 0, FAULTS["denied"])
    async with running_channel(
        stub, tmp_path, transport=transport, part_size=PART, when_failed="close"
    ) as running:
        assert await off_loop(read_all, running.fifo(0)) == stub.objects["b/data/0000"]
        await eventually(lambda: running.fifo(1).exists() and not running.withdrawn(0).exists())
        assert published_trailer(tmp_path, "train", 0).state == "failed"
        with pytest.raises(TruncatedStream, match="received 0 of 90000 bytes of train_1: the source failed"):
            await off_loop(lambda: PipeStream(running.fifo(1)).read(1))
        await end(running)
    assert not running.fifo(1).exists()


async def test_close_while_our_reader_reads(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [70_000, 20_000])
    fail_at(stub, "b/data/0001", 0, FAULTS["gone"])
    async with running_channel(stub, tmp_path, when_failed="close") as running:
        with pytest.raises(
            TruncatedStream, match="received 70000 of 90000 bytes of train_0: the source failed"
        ):
            await off_loop(lambda: PipeStream(running.fifo(0)).readall())
        await end(running)


@pytest.mark.parametrize("transport", ["aiobotocore", "buffered", "splice"])
async def test_who_leaves_a_failed_epoch_is_told_in_the_next(
    stub: S3Stub, tmp_path: Path, transport: Wish
) -> None:
    """The failure came while the reader left early, as steps_per_epoch has it: nobody will write there."""
    fill(stub, [70_000, 20_000])
    fail_at(stub, "b/data/0001", 0, FAULTS["gone"])
    async with running_channel(stub, tmp_path, transport=transport, part_size=PART) as running:
        with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb", buffering=0) as reader:
            assert await off_loop(reader.read, 1000)
            await eventually(lambda: published_trailer(tmp_path, "train", 0).state == "failed")
        with pytest.raises(
            TruncatedStream,
            match=r"received 0 of 90000 bytes of train_1: the source failed: .* s3://b/data/0001 ",
        ):
            await off_loop(lambda: PipeStream(running.fifo(1), timeout=300).read(1))
        assert running.withdrawn(0).exists()  # held: a restart may go on with it
        await end(running)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_full_fifo_is_poisoned_when_there_is_room(
    run: RunChannel, stub: S3Stub, tmp_path: Path, leaves: bool
) -> None:
    """Until then it stays open; a reader that leaves meanwhile needs no poison."""
    truth = tfrecord.encode(bytes((1 << 20) - 16))
    stub.objects |= {"b/data/0": truth, "b/data/1": tfrecord.encode(b"x")}
    fail_at(stub, "b/data/1", 0, FAULTS["denied"])
    async with run(stub, tmp_path, when_failed="poison", framing="TFRecord", parts=30) as running:
        with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb", buffering=0) as reader:
            await eventually(lambda: running.channel.error)
            assert running.channel.statistics().fifo_bytes == len(truth)
            assert published_trailer(tmp_path, "train", 0).state == "failed"
            assert running.withdrawn(0).exists()
            if not leaves:
                assert await off_loop(reader.readall) == truth + POISON["TFRecord"]
        await eventually(lambda: not running.withdrawn(0).exists())
        await end(running)
