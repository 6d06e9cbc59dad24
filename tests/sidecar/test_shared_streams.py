"""Ranks that are fetched together, and copies: bytes, requests, resume, errors, by real processes."""

from __future__ import annotations

import contextlib
import io
import json
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest

from streamer.formats.tar import TarReader
from tests.kit.pipes import probe, read_all, read_some
from tests.kit.processes import Sidecar, job, penstock, sidecar, write_job
from tests.kit.stub import S3Stub
from tests.kit.trailers import published_trailer
from tests.sidecar.test_keeper import keeper_of
from tests.sidecar.test_record_ranks import (
    GLOBAL,
    all_epochs,
    batches,
    divided,
    due,
    index,
    shuffled,
    uneven,
)
from tests.unit.test_borders import made

TOGETHER = {"Fetch": "together"}
RECORD = 4096
"""Bytes of a record. A FIFO may hold 16 MiB of large network fragments."""


@pytest.mark.parametrize(
    ("count", "copies", "transport"),
    [
        (3, 1, "splice"),
        (1, 3, "splice"),
        (2, 2, "splice"),
        (3, 1, "buffered"),
        (1, 3, "buffered"),
        (2, 2, "aiobotocore"),
    ],
)
def test_a_shared_stream_has_the_bytes_of_every_fifo(
    stub: S3Stub, tmp_path: Path, count: int, copies: int, transport: str
) -> None:
    """Its global batches are those of ranks that are fetched separately; each FIFO has its own trailer."""
    records = uneven(stub)
    document = shuffled(divided(stub, tmp_path, Count=count, Copies=copies, GlobalBatch=GLOBAL, **TOGETHER))
    document["Penstock"]["Transport"] = transport
    path = write_job(tmp_path / "job.yaml", document)
    index(path)
    with sidecar(path) as running:
        running.wait_for("ready")
        read = all_epochs(tmp_path / "ml", count * copies)
        trailers = [
            published_trailer(tmp_path / "ml/input/data", f"train-{number}", 1)
            for number in range(count * copies)
        ]
        assert running.status()["transport"] == transport
        assert running.end() == 0
    for epoch in range(2):
        for copy in range(copies):
            ranks = [read[f"train-{rank * copies + copy}"][0][epoch] for rank in range(count)]
            assert batches(ranks) == due(records, epoch)
    assert {(each.state, each.steps, each.records) for each in trailers} == {("complete", 6, 72 // count)}
    assert len({each.digest for each in trailers}) == count


def filled(
    stub: S3Stub, tmp_path: Path, *, count: int = 2, batch: int = 16, megabytes: int = 8, **ranks: Any
) -> tuple[str, list[bytes]]:
    """A job of records of one size, fetched together, and the stream of each rank."""
    data = random.Random(3).randbytes(megabytes << 20)
    half = len(data) // 2
    stub.objects |= {"b/train/0": data[:half], "b/train/1": data[half:]}
    extras = TOGETHER | {"Count": count, "GlobalBatch": count * batch} | ranks
    document = job(stub.url, tmp_path / "ml", "b/train/", MemoryBudget="32MiB", PartSize="1MiB")
    document["InputDataConfig"][0]["Penstock"] = {
        "Ranks": extras,
        "Records": {"Format": f"fixed:{RECORD}"},
        "WhenFailed": "close",
    }
    slice_bytes = batch * RECORD
    pieces = [data[start : start + slice_bytes] for start in range(0, len(data), slice_bytes)]
    return write_job(tmp_path / "job.yaml", document), [
        b"".join(pieces[rank::count]) for rank in range(count)
    ]


def fifo(tmp_path: Path, number: int, epoch: int = 0) -> Path:
    return tmp_path / "ml" / "input" / "data" / f"train-{number}_{epoch}"


class Pull:
    """A reader in a thread of its own."""

    def __init__(self, read: Callable[..., bytes], *arguments: object) -> None:
        self._read: Callable[[], bytes] = partial(read, *arguments)
        self._data: bytes | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._data = self._read()

    def join(self) -> bytes:
        self._thread.join()
        assert self._data is not None
        return self._data


def opened(stack: contextlib.ExitStack, paths: list[Path]) -> list[IO[bytes]]:
    """Open FIFOs at the same time, for the life of `stack`."""
    with ThreadPoolExecutor(len(paths)) as pool:
        return [stack.enter_context(file) for file in pool.map(lambda path: open(path, "rb", 0), paths)]


def both(tmp_path: Path, epoch: int, count: int = 2) -> list[bytes]:
    readers = [Pull(read_all, fifo(tmp_path, each, epoch)) for each in range(count)]
    return [reader.join() for reader in readers]


def status_with(running: Sidecar, name: str, held: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The first status in which `held` is true of this channel."""
    while True:
        channels: dict[str, Any] = running.status()["channels"]
        if held(channels[name]):
            return channels


def test_requests_are_large_whatever_the_number_of_ranks(stub: S3Stub, tmp_path: Path) -> None:
    """Slices of 64 KiB, and parts of 1 MiB: each byte is fetched once."""
    path, due = filled(stub, tmp_path, count=4)
    with sidecar(path) as running:
        running.wait_for("ready")
        assert both(tmp_path, 0, 4) == due
        channels = running.status()["channels"]
        assert running.end() == 0
    ranges = [each.range for each in stub.seen]
    assert set(ranges) == {f"bytes={start << 20}-{(start + 1 << 20) - 1}" for start in range(4)}
    assert len({(each.key, each.range) for each in stub.seen}) == 8
    assert channels["train-0"]["received_bytes"] >= 8 << 20
    assert [channels[f"train-{each}"]["received_bytes"] for each in (1, 2, 3)] == [0, 0, 0]
    assert {each["written_bytes"] for each in channels.values()} == {2 << 20}


def test_plan_counts_the_requests_of_a_stream_once(stub: S3Stub, tmp_path: Path) -> None:
    path, _ = filled(stub, tmp_path, Copies=2)
    found = json.loads(penstock("plan", "-c", path, "--json").stdout)["channels"]["train"]["ranks"]
    assert [(each["parts"], each["requested"]) for each in found.values()] == [(8, 8 << 20)] + [(0, 0)] * 3
    assert {each["bytes"] for each in found.values()} == {4 << 20}


def test_a_rank_that_leaves_early_does_not_end_the_epoch_of_others(stub: S3Stub, tmp_path: Path) -> None:
    path, due = filled(stub, tmp_path, megabytes=48)
    with sidecar(path) as running:
        running.wait_for("ready")
        other = Pull(read_all, fifo(tmp_path, 0))
        assert read_some(fifo(tmp_path, 1), 5000) == due[1][:5000]
        running.wait_for("epoch abandoned", channel="train-1", epoch=0)
        assert other.join() == due[0]
        assert both(tmp_path, 1) == due
        channels = running.status()["channels"]
        assert running.end() == 0
    assert [channels[f"train-{rank}"]["epochs"] for rank in range(2)] == [
        {"complete": 2},
        {"abandoned": 1, "complete": 1},
    ]
    assert channels["train-0"]["wasted_bytes"] > 0


def test_readers_that_open_and_close_pass_the_epoch(stub: S3Stub, tmp_path: Path) -> None:
    """TensorFlow's `repeat` does so, with all ranks or with one."""
    path, due = filled(stub, tmp_path)
    with sidecar(path) as running:
        running.wait_for("ready")
        for rank in range(2):
            probe(fifo(tmp_path, rank))
        for rank in range(2):
            running.wait_for("epoch abandoned", channel=f"train-{rank}", epoch=0)
        probe(fifo(tmp_path, 1, 1))
        running.wait_for("epoch abandoned", channel="train-1", epoch=1)
        assert read_all(fifo(tmp_path, 0, 1)) == due[0]
        assert both(tmp_path, 2) == due
        assert running.end() == 0


def test_status_names_the_fifo_that_holds_back_the_others(stub: S3Stub, tmp_path: Path) -> None:
    """First it has no reader, then its reader is slow."""
    path, due = filled(stub, tmp_path, megabytes=48)
    with sidecar(path) as running:
        running.wait_for("ready")
        first = Pull(read_all, fifo(tmp_path, 0))
        channels = status_with(running, "train-0", lambda each: each["held_back_by"])
        assert channels["train-0"]["held_back_by"] == ["train-1"]
        assert channels["train-1"]["state"] == "waiting"
        with open(fifo(tmp_path, 1), "rb") as slow:
            channels = status_with(
                running, "train-0", lambda each: each["written_bytes"] and each["held_back_by"]
            )
            assert channels["train-0"]["held_back_by"] == ["train-1"]
            assert channels["train-1"]["held_back_by"] == []
            assert channels["train-1"]["state"] == "streaming"
            assert channels["train-0"]["written_bytes"] < len(due[0])
            assert slow.read() == due[1]
        assert first.join() == due[0]
        metrics = running.get("/metrics")[1]
        assert running.end() == 0
    seconds = {
        (rank, state): float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        for rank in range(2)
        for state in ("blocked", "held_back")
        if line.startswith(f'penstock_channel_seconds_total{{channel="train-{rank}",state="{state}"}}')
    }
    assert seconds[0, "held_back"] > 0
    assert seconds[1, "blocked"] > 0


@pytest.mark.parametrize("copies", [1, 2])
def test_every_fifo_resumes_at_its_own_byte(stub: S3Stub, tmp_path: Path, copies: int) -> None:
    """From states of readers that were not at the same step, the second in the next epoch."""
    path, streams = filled(stub, tmp_path, Copies=copies)
    due = [stream for stream in streams for _ in range(copies)]
    ranks = json.loads(penstock("plan", "-c", path, "--json").stdout)["channels"]["train"]["ranks"]
    offsets = [3_000_000, 5, 2_000_001, 2_100_000][: 2 * copies]
    epochs = [3, 4, 3, 3][: 2 * copies]
    states = [
        {"format": 1, "channel": f"train-{number}", "epoch": epoch, "offset": offset, "skip": 0, "records": 0}
        | {"digest": ranks[f"train-{number}"]["digest"]}
        for number, (epoch, offset) in enumerate(zip(epochs, offsets, strict=True))
    ]
    with sidecar(path, "--resume", json.dumps(states)) as running:
        running.wait_for("ready")

        def read(number: int) -> bytes:
            found = b""
            for epoch in range(epochs[number], 6):
                found += read_all(fifo(tmp_path, number, epoch))
            return found

        readers = [Pull(read, number) for number in range(2 * copies)]
        for number, reader in enumerate(readers):
            assert reader.join() == due[number][offsets[number] :] + due[number] * (5 - epochs[number])
        assert running.end() == 0


@pytest.mark.parametrize(("count", "copies"), [(2, 1), (1, 2), (2, 2)])
def test_a_killed_sidecar_loses_no_byte_of_any_fifo(
    stub: S3Stub, tmp_path: Path, count: int, copies: int
) -> None:
    """A keeper holds the FIFOs, whose readers have reached different bytes."""
    path, streams = filled(stub, tmp_path, megabytes=48, count=count, Copies=copies)
    due = [stream for stream in streams for _ in range(copies)]
    with contextlib.ExitStack() as stack:
        with sidecar(path, "--keeper", "auto") as started:
            started.wait_for("ready")
            files = opened(stack, [fifo(tmp_path, number) for number in range(len(due))])
            begun = [file.read(1) + file.read(10_000 * number) for number, file in enumerate(files)]
        with sidecar(path, "--keeper", "auto") as again:
            again.wait_for("ready")
            readers = [Pull(file.read) for file in files]
            for number, reader in enumerate(readers):
                assert begun[number] + reader.join() == due[number]
            for number in range(len(due)):
                again.wait_for("epoch complete", channel=f"train-{number}", epoch=0)
            assert both(tmp_path, 1, len(due)) == due
            assert keeper_of(again)
            assert again.end() == 0


def test_a_failure_of_storage_fails_every_fifo_at_its_own_byte(stub: S3Stub, tmp_path: Path) -> None:
    path, due = filled(stub, tmp_path, count=3, batch=7, Remainder="repeat")
    with sidecar(path) as running:
        running.wait_for("ready")
        stub.objects["b/train/1"] = bytes(len(stub.objects["b/train/1"]))
        readers = both(tmp_path, 0, 3)
        for rank in range(3):
            running.wait_for("epoch failed", channel=f"train-{rank}")
        trailers = [published_trailer(tmp_path / "ml/input/data", f"train-{rank}", 0) for rank in range(3)]
        running.end()
    for rank, (trailer, data) in enumerate(zip(trailers, readers, strict=True)):
        assert trailer.state == "failed"
        assert trailer.bytes_delivered == len(data)
        assert due[rank].startswith(data)
        assert "s3://b/train/1" in (trailer.error or "")
    assert sum(map(len, readers)) == 4 << 20, "every byte before the missing one"


def test_the_drain_lets_a_running_epoch_end(stub: S3Stub, tmp_path: Path) -> None:
    """One rank has reached the end of its epoch, and another has not read yet: SIGTERM cuts off nothing."""
    path, due = filled(stub, tmp_path, megabytes=48)
    with sidecar(path) as running:
        running.wait_for("ready")
        with contextlib.ExitStack() as stack:
            files = opened(stack, [fifo(tmp_path, rank) for rank in range(2)])
            begun = [file.read(1) for file in files]
            running.process.send_signal(signal.SIGTERM)
            running.wait_for("signal, draining")
            readers = [Pull(file.read) for file in files]
            assert [first + reader.join() for first, reader in zip(begun, readers, strict=True)] == due
        assert running.wait() == 0


def tars(stub: S3Stub, tmp_path: Path, *, longest: int = 40_000, **ranks: Any) -> dict[str, Any]:
    """A shuffled job of 25 tar samples with long names, pax headers, and the same keys in every object."""
    payload = random.Random(2).randbytes
    for number, records in enumerate((7, 2, 12, 4)):
        samples = [payload(1 + (number + 3) * each * 997 % longest) for each in range(records)]
        stub.objects[f"b/train/{number}.tar"] = made("tar", samples)
    document = shuffled(divided(stub, tmp_path, records="tar", Remainder="repeat", **ranks))
    document["InputDataConfig"][0]["Penstock"]["Ranks"]["Block"] = longest
    return document


def tar_streams(path: str, tmp_path: Path, fifos: int, *options: str) -> list[bytes]:
    """The first epoch of every FIFO."""
    with sidecar(path, *options) as running:
        running.wait_for("ready")
        found = both(tmp_path, 0, fifos)
        assert running.end() == 0
    return found


@pytest.mark.parametrize(
    ("count", "copies", "transport"), [(3, 1, "splice"), (2, 2, "buffered"), (3, 1, "aiobotocore")]
)
def test_tar_samples_that_are_fetched_together(
    stub: S3Stub, tmp_path: Path, count: int, copies: int, transport: str
) -> None:
    """Each rank has the bytes, end marks included, that it has alone; also from a saved step on."""
    document = tars(stub, tmp_path, Count=count, GlobalBatch=2 * count, Copies=copies)
    document["Penstock"]["Transport"] = transport
    path = write_job(tmp_path / "job.yaml", document)
    index(path)
    fifos = count * copies
    due = tar_streams(path, tmp_path, fifos)
    document["InputDataConfig"][0]["Penstock"]["Ranks"] |= TOGETHER
    path = write_job(tmp_path / "job.yaml", document)
    assert tar_streams(path, tmp_path, fifos) == due
    data = tmp_path / "ml" / "input" / "data"
    trailers = [published_trailer(data, f"train-{each}", 0) for each in range(fifos)]
    assert [(each.state, each.bytes_delivered) for each in trailers] == [("complete", len(d)) for d in due]
    assert len({each.digest for each in trailers}) == count
    steps = trailers[0].steps
    assert steps == -(-25 // (2 * count))
    for step in (1, steps - 1):
        state = {"format": 1, "channel": "train", "epoch": 0, "step": step, "order": trailers[0].order}
        rest = tar_streams(path, tmp_path, fifos, "--resume", json.dumps(state))
        for whole, part in zip(due, rest, strict=True):
            assert whole.endswith(part)
            assert samples(part) == samples(whole)[2 * step :]


def samples(stream: bytes) -> list[bytes]:
    return [record for batch in TarReader(io.BytesIO(stream)).batches() for record in batch]


def test_a_killed_sidecar_loses_no_end_mark(stub: S3Stub, tmp_path: Path) -> None:
    """A keeper holds the FIFOs, whose readers have reached different bytes."""
    path = write_job(
        tmp_path / "job.yaml", tars(stub, tmp_path, longest=1 << 20, Count=2, GlobalBatch=4, Copies=2)
    )
    index(path)
    due = tar_streams(path, tmp_path, 4)
    document = tars(stub, tmp_path, longest=1 << 20, Count=2, GlobalBatch=4, Copies=2, **TOGETHER)
    path = write_job(tmp_path / "job.yaml", document)
    with contextlib.ExitStack() as stack:
        with sidecar(path, "--keeper", "auto") as started:
            started.wait_for("ready")
            files = opened(stack, [fifo(tmp_path, number) for number in range(4)])
            begun = [file.read(1) + file.read(100_000 * number) for number, file in enumerate(files)]
        with sidecar(path, "--keeper", "auto") as again:
            again.wait_for("ready")
            readers = [Pull(file.read) for file in files]
            for number, reader in enumerate(readers):
                assert begun[number] + reader.join() == due[number]
            assert keeper_of(again)
            assert again.end() == 0


def test_copies_of_tar_samples(stub: S3Stub, tmp_path: Path) -> None:
    """Each rank is a stream of its own, end marks included."""
    stub.objects |= {f"b/train/{number}.tar": made("tar", [b"a", b"b", b"c"]) for number in range(2)}
    found = []
    for copies in (1, 2):
        document = divided(stub, tmp_path, records="tar", Count=2, GlobalBatch=2, Copies=copies)
        path = write_job(tmp_path / "job.yaml", document)
        index(path)
        with sidecar(path) as running:
            running.wait_for("ready")
            found.append(both(tmp_path, 0, 2 * copies))
            assert running.end() == 0
    assert found[1] == [found[0][0], found[0][0], found[0][1], found[0][1]]
