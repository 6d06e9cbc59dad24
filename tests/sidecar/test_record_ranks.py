"""Ranks that share a channel by record, by real processes: global batches, bytes, errors by name."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shlex
import signal
import struct
import subprocess
import sys
from array import array
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from streamer.errors import ConfigError, StreamError
from streamer.formats import tfrecord
from streamer.formats.record_format import WHOLE, RecordFormat
from streamer.formats.record_index import block, header
from streamer.readers import PipeReader
from streamer.s3.pages.validation import PlanMemory
from tests.kit.index import read_index, with_stride
from tests.kit.pipes import read_all
from tests.kit.processes import findings, job, penstock, sidecar, write_job
from tests.kit.raw import listing, raw_server
from tests.kit.stub import S3Stub
from tests.kit.trailers import published_trailer
from tests.kit.warm_python import warm_python
from tests.sidecar.test_index import lose
from tests.sidecar.test_record_keys import directories
from tests.unit import reference
from tests.unit.test_borders import made, naive

UNEVEN = [3, 0, 41, 1, 7, 18, 2]
"""Records of the objects."""
SEED, BLOCK, GLOBAL = 5, 600, 12


def epochs_of(base: Path, channel: str, epochs: int = 2) -> tuple[list[list[str]], int]:
    """Read epochs of a FIFO; return the hashes of their records, and how many of each are padding."""
    reader = PipeReader(channel, "TFRecord", **directories(base))
    length, steps = len(reader), reader.steps_per_epoch
    found = [[hashlib.sha256(record).hexdigest() for record in reader] for _ in range(epochs)]
    assert [(len(each), reader.steps_per_epoch) for each in found] == [(length, steps)] * epochs
    return found, reader.padding


def all_epochs(base: Path, fifos: int, epochs: int = 2) -> dict[str, tuple[list[list[str]], int]]:
    """Read epochs of every FIFO at the same time."""
    names = [f"train-{number}" for number in range(fifos)]
    with ThreadPoolExecutor(fifos) as threads:
        found = threads.map(lambda name: epochs_of(base, name, epochs), names)
        return dict(zip(names, found, strict=True))


def uneven(stub: S3Stub) -> list[list[bytes]]:
    """Put objects of TFRecord on the server; return the records of each."""
    records = [
        [
            tfrecord.encode(f"{number}/{each}/".encode() + bytes(each * 31 % 400))
            for each in range(UNEVEN[number])
        ]
        for number in range(len(UNEVEN))
    ]
    stub.objects |= {f"b/train/{number}": b"".join(each) for number, each in enumerate(records)}
    return records


def divided(stub: S3Stub, tmp_path: Path, /, *, records: str = "TFRecord", **ranks: Any) -> dict[str, Any]:
    """A job whose channel `train` is divided by record. Tests may read its ranks one after the other."""
    document = job(stub.url, tmp_path / "ml", "b/train/", MemoryBudget="32MiB")
    document["InputDataConfig"][0]["Penstock"] = {
        "Ranks": {"Fetch": "separately"} | ranks,
        "Records": records_of(records, tmp_path / "index"),
    }
    return document


def records_of(kind: str, index: Path) -> dict[str, str]:
    """The section of a channel's records, which have an index unless all have one size."""
    return {"Format": kind} | ({} if kind.startswith("fixed:") else {"Index": str(index)})


def shuffled(document: dict[str, Any]) -> dict[str, Any]:
    channel = document["InputDataConfig"][0]
    channel["ShuffleConfig"] = {"Seed": SEED}
    channel["Penstock"]["Ranks"]["Block"] = BLOCK
    return document


def index(path: str) -> None:
    """Build the index that the job file names."""
    done = penstock("index", "build", "-c", path)
    assert done.returncode == 0, done.stderr


def due(records: list[list[bytes]], epoch: int) -> list[list[str]]:
    """Hashes of the payloads of every global batch, by the reference."""
    counts, sizes = [len(each) for each in records], [sum(map(len, each)) for each in records]
    order = reference.record_order(counts, sizes, seed=SEED, epoch=epoch, block=BLOCK)
    return [
        [hashlib.sha256(records[entry][number][12:-4]).hexdigest() for entry, number in batch]
        for batch in reference.global_batches(order, GLOBAL, "drop")
    ]


def batches(ranks: list[list[str]]) -> list[list[str]]:
    """The global batches that these ranks read together."""
    size = GLOBAL // len(ranks)
    steps = [[each[first : first + size] for each in ranks] for first in range(0, max(map(len, ranks)), size)]
    return [[record for share in step for record in share] for step in steps]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_any_number_of_ranks_reads_the_same_global_batches(stub: S3Stub, tmp_path: Path, count: int) -> None:
    """Over uneven objects: equal steps, every record once an epoch."""
    records = uneven(stub)
    path = write_job(
        tmp_path / "job.yaml", shuffled(divided(stub, tmp_path, Count=count, GlobalBatch=GLOBAL))
    )
    index(path)
    with sidecar(path) as running:
        planned = running.wait_for("planned")
        assert (planned["ranks"], planned["records"], planned["steps"]) == (count, 72, 6)
        running.wait_for("ready")
        read = all_epochs(tmp_path / "ml", count)
        trailers = [
            published_trailer(tmp_path / "ml/input/data", f"train-{rank}", 1) for rank in range(count)
        ]
        status = running.status()["channels"]
        assert running.end() == 0
    for epoch in range(2):
        found = batches([epochs[epoch] for epochs, _ in read.values()])
        assert found == due(records, epoch)
        assert max(Counter(record for batch in found for record in batch).values()) == 1
    assert {(each.steps, each.records) for each in trailers} == {(6, 72 // count)}
    assert {each["records"] for each in status.values()} == {2 * 72 // count}


def test_two_hosts_share_every_global_batch(stub: S3Stub, tmp_path: Path) -> None:
    records = uneven(stub)
    document = shuffled(divided(stub, tmp_path, Count=2, GlobalBatch=GLOBAL, Remainder="repeat"))
    source = document["InputDataConfig"][0]["DataSource"]["S3DataSource"]
    source["S3DataDistributionType"] = "ShardedByS3Key"
    del document["Penstock"]["BaseDirectory"]
    path = write_job(tmp_path / "job.yaml", document)
    index(path)
    shares: list[list[Any]] = []
    for host in range(2):
        flags = ["--host-count", "2", "--host-index", str(host)]
        training = json.dumps({"path": str(tmp_path / f"state-{host}"), "epochs": 2})
        trainer = [sys.executable, "-m", "tests.kit.stepping", training]
        done = penstock("exec", "-c", path, *flags, "--", *trainer)
        assert done.returncode == 0, done.stderr
        shares.append([json.loads(line) for line in done.stdout.splitlines()])
    counts, sizes = [len(each) for each in records], [sum(map(len, each)) for each in records]
    found = [(one[:2], [*itertools.chain(*one[2], *other[2])]) for one, other in zip(*shares, strict=True)]
    due = []
    for epoch in range(2):
        order = reference.record_order(counts, sizes, seed=SEED, epoch=epoch, block=BLOCK)
        for step, batch in enumerate(reference.global_batches(order, GLOBAL, "repeat")):
            due.append(([epoch, step], [f"{entry}/{number}/" for entry, number in batch]))
    assert found == due


def test_a_start_refuses_an_index_with_two_records_as_one(stub: S3Stub, tmp_path: Path) -> None:
    uneven(stub)
    path = write_job(tmp_path / "job.yaml", divided(stub, tmp_path, Count=2, GlobalBatch=8))
    index(path)
    lose(tmp_path / "index/train.index", "train/2", 20)
    refused(
        path, 8, "the index has 1 record from here to the next one, and the object has not: s3://b/train/2"
    )


@pytest.mark.parametrize("lost", [3, 19])
def test_a_reader_stops_before_the_record_that_the_index_lacks(
    stub: S3Stub, tmp_path: Path, lost: int
) -> None:
    """The start looks at the first bytes of long lines alone. Both records pass; the reader counts them."""
    lines = [b"%d" % number + b"x" * (WHOLE - 99) + b"\n" for number in range(20)]
    stub.objects |= {"b/train/0": b"".join(lines), "b/train/1": b"".join(lines)}
    document = divided(stub, tmp_path, records="lines", Count=1, GlobalBatch=3)
    path = write_job(tmp_path / "job.yaml", document)
    index(path)
    lose(tmp_path / "index/train.index", "train/1", lost)
    with sidecar(path) as running:
        assert running.wait_for("planned")["records"] == 39
        running.wait_for("ready")
        records = iter(PipeReader("train-0", "TextLine", **directories(tmp_path / "ml")))
        assert [*islice(records, 39)] == [line[:-1] for line in [*lines, *lines[:-1]]]
        with pytest.raises(StreamError, match="has more than 39 records that the sidecar promised"):
            next(records)


WORKERS = """
import json, sys
from torch.utils.data import DataLoader
from streamer.readers import rank_channels
from streamer.readers.torch import PipeIterableDataset

def numbers(records):
    return [int(record.split(b"/")[0]) for record in records]

workers, size = map(int, sys.argv[1:3])
dataset = PipeIterableDataset(rank_channels("train"), "TFRecord", batch_size=size, decode=numbers)
loader = DataLoader(dataset, batch_size=None, num_workers=workers)
with open(sys.argv[3], "w") as file:
    json.dump(list(loader), file)
"""
"""Writes the batches of a process to a file."""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("shape", [(1, 2, 0), (1, 2, 2), (2, 1, 2), (1, 1, 3)])
def test_a_step_has_the_same_records_at_any_number_of_hosts_processes_and_workers(
    stub: S3Stub, tmp_path: Path, shape: tuple[int, int, int]
) -> None:
    """Seven steps, and two to four FIFOs; the three are fetched separately."""
    pytest.importorskip("torch")
    hosts, processes, workers = shape
    stub.objects["b/train/0"] = b"".join(tfrecord.encode(b"%d/" % number) for number in range(7 * GLOBAL))
    fetch = "separately" if workers == 3 else "auto"
    document = divided(
        stub, tmp_path, Count=processes, Workers=max(1, workers), GlobalBatch=GLOBAL, Fetch=fetch
    )
    source = document["InputDataConfig"][0]["DataSource"]["S3DataSource"]
    source["S3DataDistributionType"] = "ShardedByS3Key"
    del document["Penstock"]["BaseDirectory"]
    path = write_job(tmp_path / "job.yaml", document)
    index(path)
    loaders = []
    for host in range(hosts):
        size = GLOBAL // hosts // processes
        program = [shlex.join([warm_python("torch"), "-c", WORKERS, str(workers), str(size)])]
        program += [f"{tmp_path}/{host}-$LOCAL_RANK"]
        start = f"export LOCAL_WORLD_SIZE={processes}; pids=; for LOCAL_RANK in {{0..{processes - 1}}}; do "
        start += f'export LOCAL_RANK; {" ".join(program)} & pids="$pids $!"; done; '
        start += "for pid in $pids; do wait $pid || exit 1; done"
        flags = ["--host-count", str(hosts), "--host-index", str(host)]
        done = penstock("exec", "-c", path, *flags, "--", "bash", "-c", start)
        assert done.returncode == 0, done.stderr
        loaders += [json.loads((tmp_path / f"{host}-{each}").read_text()) for each in range(processes)]
    steps = [[number for batch in step for number in batch] for step in zip(*loaders, strict=True)]
    assert steps == [[*range(at, at + GLOBAL)] for at in range(0, 7 * GLOBAL, GLOBAL)]


@pytest.mark.parametrize(("count", "copies", "together"), [(1, 1, False), (2, 2, True), (8, 1, False)])
def test_padding_gives_every_record_once_at_equal_steps(
    stub: S3Stub, tmp_path: Path, count: int, copies: int, together: bool
) -> None:
    """With 72 records in global batches of 40 the last 8 are padding; of 8 ranks one has 5 and one has 3."""
    records = uneven(stub)
    keys: dict[str, Any] = {"Copies": copies} | ({"Fetch": "together"} if together else {})
    document = shuffled(divided(stub, tmp_path, Count=count, GlobalBatch=40, Remainder="pad", **keys))
    path = write_job(tmp_path / "job.yaml", document)
    index(path)
    channels = [f"train-{number}" for number in range(count * copies)]
    with sidecar(path) as running:
        running.wait_for("ready")
        read = all_epochs(tmp_path / "ml", len(channels), epochs=1)
        trailer = published_trailer(tmp_path / "ml/input/data", channels[-1], 0)
        assert running.end() == 0
    assert len({len(records) for (records,), _ in read.values()}) == 1
    assert (trailer.steps, trailer.padding) == (2, read[channels[-1]][1])
    assert trailer.padding == min(8, 40 // count)
    plan = penstock("plan", "-c", path, "--json").stdout
    planned = json.loads(plan)["channels"]["train"]["ranks"]
    assert {name: each["padding"] for name, each in planned.items()} == {
        name: padding for name, (_, padding) in read.items()
    }
    due = sorted(hashlib.sha256(record[12:-4]).hexdigest() for each in records for record in each)
    for copy in range(copies):
        ranks = [read[name] for name in channels[copy::copies]]
        assert sorted(each for (found,), pad in ranks for each in found[: len(found) - pad]) == due


def requested(stub: S3Stub) -> set[tuple[str, int, int]]:
    """The ranges of objects that were requested, without those of record headers."""
    found = set()
    for seen in stub.seen:
        first, last = map(int, seen.range.removeprefix("bytes=").split("-"))
        if last - first + 1 != 12:
            found.add((seen.key, first, last + 1))
    return found


def test_all_ranks_together_fetch_each_byte_once(stub: S3Stub, tmp_path: Path) -> None:
    records = uneven(stub)
    # Without a seed, because parts of the second epoch may be fetched beforehand: they are the same then.
    document = divided(stub, tmp_path, Count=3, GlobalBatch=GLOBAL)
    del document["Penstock"]["BaseDirectory"]
    path = write_job(tmp_path / "job.yaml", document)
    index(path)
    stub.seen.clear()
    script = "cat ${SM_CHANNEL_TRAIN}-0_0 ${SM_CHANNEL_TRAIN}-1_0 ${SM_CHANNEL_TRAIN}-2_0 | wc -c"
    done = penstock("exec", "-c", path, "sh", "-c", script)
    total = sum(len(record) for each in records for record in each)
    assert int(done.stdout) == total
    ranges = sorted(requested(stub))
    assert sum(end - first for _, first, end in ranges) == total
    before = {("", 0)}
    for key, first, end in ranges:
        assert first == 0 or (key, first) in before, "ranges follow each other"
        before.add((key, end))


@pytest.mark.parametrize("kind", ["TFRecord", "RecordIO", "lines", "tar", "fixed:7"])
def test_ranks_of_every_record_format(stub: S3Stub, tmp_path: Path, kind: str) -> None:
    """Streams have the bytes of their records; of tar each run of adjacent samples is an archive."""
    payloads = [bytes([65 + number % 26]) * (number * 37 % 900) for number in range(130)]
    objects = [made(kind, payloads[:80]), made(kind, payloads[80:])]
    if kind == "lines":
        objects = [each + b"\n" for each in objects]
    stub.objects |= {f"b/train/{number}": each for number, each in enumerate(objects)}
    document = divided(stub, tmp_path, records=kind, Count=2, GlobalBatch=16, Remainder="repeat")
    del document["Penstock"]["BaseDirectory"]
    path = write_job(tmp_path / "job.yaml", document)
    if kind != "fixed:7":
        index(path)
    done = penstock("exec", "-c", path, "sh", "-c", 'cat "${SM_CHANNEL_TRAIN}-1_0"', text=False)
    assert done.returncode == 0, done.stderr.decode()
    records = []
    for data in objects:
        starts = naive(kind, data)
        end = len(data)
        if kind == "tar":
            end = len(data.rstrip(b"\0")) + 511 & ~511
        records += [data[start:stop] for start, stop in zip(starts, [*starts[1:], end], strict=True)]
    steps = -(-len(records) // 16)
    numbers = [
        number % len(records) for step in range(steps) for number in range(16 * step + 8, 16 * step + 16)
    ]
    border = len(naive(kind, objects[0]))
    due = b""
    for number, following in pairwise([*numbers, -1]):
        due += records[number]
        if kind == "tar" and (following != number + 1 or following == border):
            due += bytes(1024)
    assert done.stdout == due


def test_the_warning_of_end_marks_names_no_key_that_the_job_file_refuses(
    stub: S3Stub, tmp_path: Path
) -> None:
    """`Join: tar` is for ranks with records of tar, and not of one size."""
    stub.objects |= {f"b/train/{number}.tar": made("tar", [b"a", b"b"]) for number in range(2)}
    document = divided(stub, tmp_path, records="tar", Count=2, GlobalBatch=2)
    path = write_job(tmp_path / "job.yaml", document)
    index(path)
    extras = document["InputDataConfig"][0]["Penstock"]
    for records in (extras["Records"], {"Format": "fixed:512"}):
        extras["Records"] = records
        write_job(Path(path), document)
        with sidecar(path) as running:
            warning = running.wait_for("objects carry end marks", channel="train", format="tar")
            assert running.end() == 0
        fix = findings(path)["end marks train"]["fix"]
        for text in (warning["do"], fix):
            assert "with Penstock's own readers" in text
            assert ("Join: tar" in text) == ("Index" in records)
        extras["Join"] = "tar"
        write_job(Path(path), document)
        assert penstock("plan", "-c", path).returncode == (0 if "Index" in records else 2)
        del extras["Join"]


def test_plan_shows_what_each_rank_gets(stub: S3Stub, tmp_path: Path) -> None:
    uneven(stub)
    path = write_job(tmp_path / "job.yaml", shuffled(divided(stub, tmp_path, Count=4, GlobalBatch=GLOBAL)))
    index(path)
    document = json.loads(penstock("plan", "-c", path, "--json").stdout)["channels"]["train"]
    assert {each["order"] for each in document["ranks"].values()} == {document["order"]}
    assert (document["records"], document["steps"], len(document["keys"])) == (72, 6, 7)
    ranks = document["ranks"].values()
    assert [(each["records"], each["steps"]) for each in ranks] == [(18, 6)] * 4
    assert sum(each["bytes"] for each in ranks) == document["bytes"]
    assert len({each["digest"] for each in [document, *ranks]}) == 5
    assert "train-3  18 records, 6 steps, " in penstock("plan", "-c", path).stdout


def test_a_limit_of_records_is_exact(stub: S3Stub, tmp_path: Path) -> None:
    """It cuts an object, and the digest of the order differs."""
    records = uneven(stub)
    document = divided(stub, tmp_path, Count=1, GlobalBatch=1)
    orders = set()
    for most in (None, 13):
        if most is not None:
            document["InputDataConfig"][0]["Penstock"]["Limit"] = {"Records": most}
        path = write_job(tmp_path / "job.yaml", document)
        index(path)
        with sidecar(path) as running:
            planned = running.wait_for("planned")
            orders.add(planned["order"])
            assert planned["records"] == (most or 72)
            running.wait_for("ready")
            order = [record for each in records for record in each]
            assert read_all(tmp_path / "ml/input/data/train-0_0") == b"".join(order[:most])
            assert running.end() == 0
    assert len(orders) == 2


def test_two_channels_divide_an_object_by_block(stub: S3Stub, tmp_path: Path) -> None:
    """One large object, which a split by key would leave whole; shuffled over two ranks, and as it is."""
    stub.objects["b/train/0"] = b"".join(b"%08d" % number for number in range(1_000_000))
    found: list[set[bytes]] = []
    for take, count, seed in (("0-2", 2, 7), ("3", 1, None)):
        document = divided(
            stub, tmp_path, records="fixed:8", Count=count, GlobalBatch=count << 14, Remainder="repeat"
        )
        channel = document["InputDataConfig"][0]
        channel["Penstock"]["Split"] = {"Of": 4, "Take": take, "By": "block"}
        if seed is not None:
            channel["ShuffleConfig"] = {"Seed": seed}
        path = write_job(tmp_path / "job.yaml", document)
        planned = json.loads(penstock("plan", "-c", path, "--json").stdout)["channels"]["train"]
        with sidecar(path) as running, ThreadPoolExecutor() as threads:
            running.wait_for("ready")
            ranks = [tmp_path / f"ml/input/data/train-{rank}_0" for rank in range(count)]
            data = b"".join(threads.map(read_all, ranks))
            assert running.end() == 0
        assert len(data) == planned["bytes"] == 8 * planned["records"]
        found.append({data[first : first + 8] for first in range(0, len(data), 8)})
    assert min(map(len, found)) > 100_000
    assert found[0] & found[1] == set()
    assert found[0] | found[1] == {b"%08d" % number for number in range(1_000_000)}


@pytest.mark.parametrize("by", ["block", "record"])
def test_prefixes_are_mixed_by_their_weights(stub: S3Stub, tmp_path: Path, by: str) -> None:
    """One and two ranks have equal global batches, of exactly the shares, in each of two epochs."""
    for name, number in (("wide", 700), ("rare", 40)):
        for each in range(2):
            lines = [f"{name} {each} {record:04}\n".encode() for record in range(number)]
            stub.objects[f"b/{name}/{each}"] = b"".join(lines)
    document = divided(stub, tmp_path, records="lines", GlobalBatch=10, Block="60")
    channel = document["InputDataConfig"][0]
    channel["DataSource"]["S3DataSource"]["S3Uri"] = "s3://b/wide/"
    channel["ShuffleConfig"] = {"Seed": SEED}
    channel["Penstock"] |= {
        "AlsoFrom": ["s3://b/rare/"],
        "Mix": {"Weights": [0.8, 0.2], "Until": "all", "By": by},
    }
    read = []
    for count in (1, 2):
        channel["Penstock"]["Ranks"]["Count"] = count
        path = write_job(tmp_path / "job.yaml", document)
        index(path)
        with sidecar(path) as running, ThreadPoolExecutor() as threads:
            planned = running.wait_for("planned")
            assert (planned["records"], planned["steps"]) == (1750, 175)
            running.wait_for("ready")
            epochs = []
            for epoch in range(2):
                fifos = [tmp_path / f"ml/input/data/train-{rank}_{epoch}" for rank in range(count)]
                ranks = [data.splitlines() for data in threads.map(read_all, fifos)]
                size = 10 // count
                epochs.append(
                    [
                        [line for rank in ranks for line in rank[at : at + size]]
                        for at in range(0, len(ranks[0]), size)
                    ]
                )
            assert running.end() == 0
        read.append(epochs)
    assert read[0] == read[1]
    assert read[0][0] != read[0][1]
    most = 1 if by == "record" else 5
    for global_batches in read[0]:
        lines = [line for batch in global_batches for line in batch]
        wide = [line for line in lines if line.startswith(b"wide")]
        assert len(wide) == len({*wide}) == 1400
        assert {Counter(lines)[line] for line in lines if line.startswith(b"rare")} <= {4, 5}
        for end in range(len(lines)):
            taken = sum(line.startswith(b"wide") for line in lines[:end])
            assert abs(taken - 0.8 * end) <= most


def test_a_rank_resumes_at_its_byte(stub: S3Stub, tmp_path: Path) -> None:
    """In the second epoch of a shuffled channel, from the state of a reader."""
    uneven(stub)
    document = shuffled(divided(stub, tmp_path, Count=2, GlobalBatch=GLOBAL))
    path = write_job(tmp_path / "job.yaml", document)
    index(path)
    ranks = json.loads(penstock("plan", "-c", path, "--json").stdout)["channels"]["train"]["ranks"]
    state = {"format": 1, "channel": "train-1", "epoch": 0, "offset": 0, "skip": 0, "records": 0}
    state["digest"] = ranks["train-1"]["digest"]
    data = tmp_path / "ml" / "input" / "data"
    read = []
    for options in ([], ["--resume", json.dumps(state | {"epoch": 1, "offset": 1000})]):
        with sidecar(path, *options) as running:
            running.wait_for("ready")
            epochs = range(1 if options else 0, 2)
            read.append([read_all(data / f"train-1_{epoch}") for epoch in epochs][-1])
            assert running.end() == 0
    assert len(read[0]) > 1000
    assert read[1] == read[0][1000:]


def refused(path: str, code: int, text: str) -> None:
    done = penstock("plan", "-c", path)
    assert (done.returncode, text in done.stderr) == (code, True), done.stderr


def test_an_index_that_does_not_fit_is_an_error_by_name(stub: S3Stub, tmp_path: Path) -> None:
    uneven(stub)
    document = divided(stub, tmp_path, Count=2, GlobalBatch=4)
    path = write_job(tmp_path / "job.yaml", document)
    file = tmp_path / "index" / "train.index"
    build = "penstock index build -c JOB --channel train"
    assert (
        "index train        ok       there is none yet; run builds it"
        in penstock("doctor", "-c", path).stdout
    )
    stub.listings.clear()
    refused(path, 2, f"there is no record index {file}: make it by `{build}`, or correct Records.Index")
    assert stub.listings == [], "it is refused before the listing"
    done = penstock(*shlex.split(build.replace("JOB", path))[1:])
    assert done.returncode == 0, done.stderr
    assert penstock("plan", "-c", path).returncode == 0, "the command of the text makes the index"

    extras = document["InputDataConfig"][0]["Penstock"]
    extras["Records"]["Format"] = "tar"
    refused(write_job(Path(path), document), 2, f"{file} is of TFRecord, and not of tar; remove it")
    extras["Records"]["Format"] = "TFRecord"
    write_job(Path(path), document)
    whole = file.read_bytes()
    file.write_bytes(with_stride(whole, 256))
    refused(path, 7, f"{file} cannot be read as a record index: it has 1 record of 256, and this Penstock")
    file.write_bytes(header(RecordFormat.parse("fixed:8")))
    refused(path, 7, "it is of fixed:8, whose records need no index")
    file.write_bytes(whole)

    before = dict(stub.objects)
    stub.objects["b/train/4"] = b"".join(tfrecord.encode(b"new") for _ in range(7))
    refused(path, 6, "than when it was indexed; build the record index again: s3://b/train/4")
    stub.objects |= before
    stub.objects["b/train/9"] = stub.objects["b/train/4"]
    refused(path, 6, "the object is not in the record index; build the record index again: s3://b/train/9")
    del stub.objects["b/train/9"]
    assert penstock("plan", "-c", path).returncode == 0
    assert (
        "index train        ok       72 records of TFRecord in 7 objects"
        in penstock("doctor", "-c", path).stdout
    )

    good = read_index(str(file))
    for added, text in (
        (1, "no record is where the index has one"),
        (1 << 40, "no record is where the index has one: the object ends before it"),
    ):
        rows = [row._replace(offsets=array("Q", row.offsets)) for row in good]
        rows[2].offsets[-1] += added
        file.write_bytes(header(good.format) + block(rows))
        refused(path, 8, text)
        refused(path, 8, "s3://b/train/2")
    file.write_bytes(b"no index")
    refused(path, 7, "cannot be read as a record index")


def test_an_index_too_large_for_memory_is_named(stub: S3Stub, tmp_path: Path) -> None:
    """A block of very many objects; the file is sparse, and no row of these is read."""
    uneven(stub)
    path = write_job(tmp_path / "job.yaml", divided(stub, tmp_path, Count=2, GlobalBatch=4))
    index(path)
    file, objects = tmp_path / "index" / "train.index", 1 << 31
    with open(file, "ab") as end:
        end.write(struct.pack("<4sIQ", b"ROWS", objects, 40 * objects))
        end.truncate(end.tell() + 40 * objects + 4)
    refused(path, 2, f"the record index {file} takes 760 GiB of memory while it is read, and plans may use ")
    refused(path, 2, "run `penstock index build` again, which leaves the rows of other objects out")
    doctor = penstock("doctor", "-c", path).stdout
    assert f"index train        FAILURE  the record index {file} takes 760 GiB of memory" in doctor


@pytest.mark.usefixtures("credentials")
def test_blocks_of_a_split_too_many_for_memory_are_named(tmp_path: Path) -> None:
    """An object whose size only the listing states."""
    with raw_server(lambda _: listing(("train/0", 1 << 55, "e"))) as server:
        document = job(server.url, tmp_path / "ml", "b/train/")
        document["InputDataConfig"][0]["Penstock"] = {
            "Ranks": {"Count": 1, "GlobalBatch": 1},
            "Records": {"Format": "fixed:4096"},
            "Split": {"Of": 4, "Take": 0, "By": "block"},
        }
        path = write_job(tmp_path / "job.yaml", document)
        refused(path, 2, "takes of channel 'train' need 128 GiB of memory, and plans may use ")


def test_objects_and_an_index_that_fill_the_memory_are_both_named() -> None:
    memory = PlanMemory(4 << 20)
    memory.count_index("i/train.index", 3 << 20)
    with pytest.raises(ConfigError, match=r"i/b.index takes 2 MiB .* may use 1 MiB more, of 4 MiB, half"):
        memory.count_index("i/b.index", 2 << 20)
    memory.count(7, 1 << 20)
    with pytest.raises(ConfigError, match="8 objects so far, and their names and 3 MiB of record indexes"):
        memory.count(1, 1)


def test_a_last_line_without_an_end_is_refused(stub: S3Stub, tmp_path: Path) -> None:
    """A rank would read it and the next record as one line."""
    stub.objects |= {"b/train/0": b"a\nb\n", "b/train/1": b"c\nd"}
    document = divided(stub, tmp_path, records="lines", Count=1, GlobalBatch=1)
    path = write_job(tmp_path / "job.yaml", document)
    index(path)
    refused(path, 8, "the object's last line has no end")
    refused(path, 8, "s3://b/train/1")


def test_divisions_that_cannot_be_are_refused(stub: S3Stub, tmp_path: Path) -> None:
    stub.objects["b/train/0"] = bytes(70)
    document = divided(stub, tmp_path, records="fixed:7", Count=2, GlobalBatch=4)
    document["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3DataDistributionType"] = "ShardedByS3Key"
    path = write_job(tmp_path / "job.yaml", document)
    done = penstock("plan", "-c", path, "--host-count", "3", "--host-index", "0")
    assert done.returncode == 2
    assert "4 records cannot be divided over 6 ranks in equal slices" in done.stderr
    extras = document["InputDataConfig"][0]["Penstock"]
    ranks = extras["Ranks"]
    ranks["GlobalBatch"] = 20
    refused(write_job(Path(path), document), 2, "has 10 records, fewer than one global batch of 20")
    ranks["Remainder"] = "repeat"
    assert penstock("plan", "-c", write_job(Path(path), document)).returncode == 0
    extras["Records"]["Format"] = "fixed:8"
    refused(
        write_job(Path(path), document), 2, "s3://b/train/0 has 70 bytes, no multiple of the 8 of Records."
    )


def test_ranks_go_on_in_the_fifos_of_a_keeper(stub: S3Stub, tmp_path: Path) -> None:
    """The sidecar is killed inside the second epoch; the next one goes on at the byte."""
    uneven(stub)
    path = write_job(tmp_path / "job.yaml", shuffled(divided(stub, tmp_path, Count=2, GlobalBatch=GLOBAL)))
    index(path)
    due = streams(path, tmp_path / "ml")
    data = tmp_path / "ml" / "input" / "data"
    with sidecar(path, "--keeper", "auto") as running:
        running.wait_for("ready")
        assert read_all(data / "train-0_0") == due["train-0_0"]
        with open(data / "train-0_1", "rb", buffering=0) as reader:
            begun = reader.read(1000)
            running.process.send_signal(signal.SIGKILL)
            running.wait()
            with sidecar(path, "--keeper", "auto") as following:
                rest = reader.readall()  # the FIFO may have had it all, so the next sidecar begins epoch 2
                following.wait_for("ready")
                assert read_all(data / "train-1_0") == due["train-1_0"]
                assert following.end() == 0
    assert begun + rest == due["train-0_1"]


def streams(path: str, base: Path) -> dict[str, bytes]:
    """Two epochs of both ranks, by FIFO."""
    with sidecar(path) as running:
        running.wait_for("ready")
        names = [f"train-{rank}_{epoch}" for rank in range(2) for epoch in range(2)]
        found = {name: read_all(base / "input" / "data" / name) for name in names}
        assert running.end() == 0
    return found


def test_an_object_that_is_replaced_later_fails_the_epoch_by_name(stub: S3Stub, tmp_path: Path) -> None:
    """No byte of another version than the indexed one is streamed. Two epochs may be fetched beforehand."""
    records = uneven(stub)
    path = write_job(tmp_path / "job.yaml", divided(stub, tmp_path, Count=2, GlobalBatch=GLOBAL))
    index(path)
    with sidecar(path) as running:
        running.wait_for("ready")
        stub.objects["b/train/2"] = stub.objects["b/train/2"][::-1]
        data = tmp_path / "ml" / "input" / "data"
        command = " && ".join(f"cat {data}/train-0_{epoch} > {tmp_path}/{epoch}" for epoch in range(4))
        shell = ["sh", "-c", f"exec 2> /dev/null; {command}"]
        with subprocess.Popen(shell, start_new_session=True) as trainer:
            failed = running.wait_for("epoch failed", channel="train-0")
            assert (failed["bucket"], failed["key"]) == ("b", "train/2")
            running.end()
            os.killpg(trainer.pid, signal.SIGKILL)  # it may wait in the next FIFO, whose name is gone
    order = [record for each in records for record in each]
    due = b"".join(b"".join(order[first : first + GLOBAL // 2]) for first in range(0, len(order), GLOBAL))
    read = (tmp_path / str(failed["epoch"])).read_bytes()
    assert due.startswith(read)
    assert len(read) < len(due)


@pytest.mark.parametrize(
    ("ranks", "seeded"),
    [
        ({"Count": 1}, True),  # without a seed one rank has the whole object, and needs no offset
        ({"Count": 2, "Fetch": "together"}, True),
        ({"Count": 2, "Fetch": "together"}, False),
    ],
    ids=["1", "together, seeded", "together"],
)
def test_an_index_that_is_overwritten_later_fails_by_name(
    stub: S3Stub, tmp_path: Path, ranks: dict[str, Any], seeded: bool
) -> None:
    """Offsets are read from its file; a wrong one never decides what is streamed. The FIFOs are held."""
    # 293 pages of 512 offsets, of which 256 are kept: every epoch reads some of them again.
    stub.objects["b/train/0"] = b"x\n" * 150_000
    document = divided(stub, tmp_path, records="lines", GlobalBatch=600, **ranks)
    path = write_job(tmp_path / "job.yaml", shuffled(document) if seeded else document)
    index(path)
    file = tmp_path / "index" / "train.index"
    with sidecar(path) as running:
        running.wait_for("ready")
        with open(file, "r+b") as there:
            there.seek(1000)
            there.write(bytes(file.stat().st_size - 1000))
        data = tmp_path / "ml" / "input" / "data"
        trainers = [
            " && ".join(f"cat {data}/train-{rank}_{epoch} > {tmp_path}/{rank}-{epoch}" for epoch in range(9))
            for rank in range(ranks["Count"])
        ]
        shell = ["sh", "-c", f"exec 2> /dev/null; ({') & ('.join(trainers)})"]
        trainer = subprocess.Popen(shell, start_new_session=True)
        try:
            for rank in range(ranks["Count"]):
                failed = running.wait_for("epoch failed", channel=f"train-{rank}")
                assert f"the record index {file} was overwritten while it was in use" in failed["error"]
                assert failed["fifo"] == "held open"
            assert running.end() == 7
        finally:
            os.killpg(trainer.pid, signal.SIGKILL)
            trainer.wait()
