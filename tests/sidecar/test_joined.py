"""Programs that believe end marks, as processes, on the FIFOs of a real sidecar: with `Join` and without."""

from __future__ import annotations

import io
import json
import random
import subprocess
import tarfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamer.formats.transform import JoinTar
from tests.kit.pipes import read_all
from tests.kit.processes import Sidecar, findings, job, penstock, sidecar, write_job
from tests.kit.stub import S3Stub
from tests.kit.trailers import published_trailer
from tests.kit.warm_python import warm_python
from tests.sidecar.test_keeper import killed, place, sha
from tests.sidecar.test_record_ranks import divided, index
from tests.unit.test_joiners import joined
from tests.unit.test_tar import archive

__all__ = ["place"]

SAMPLES = 250
"""Samples of each of four archives, and rows in each of four Arrow streams."""

WEBDATASET = """
import sys, webdataset
found = webdataset.WebDataset(sys.argv[1], shardshuffle=False)
print(sum(1 for sample in found if {"jpg", "cls"} <= sample.keys()))
"""
KEYS = """
import sys, webdataset
print(*(sample["__key__"] for sample in webdataset.WebDataset(sys.argv[1], shardshuffle=False)))
"""
TARFILE = """
import sys, tarfile
with tarfile.open(sys.argv[1], "r|") as tar:
    print(sum(1 for member in tar) // 2)
"""
ARROW = """
import sys, pyarrow
with open(sys.argv[1], "rb") as fifo:
    print(pyarrow.ipc.open_stream(fifo).read_all().num_rows)
"""
TABLES = """
import os, sys, pathlib
from streamer.readers.tables import TableReader
fifo = pathlib.Path(sys.argv[1])
os.environ["SAGEMAKER_BASE_DIR"] = str(fifo.parents[2])
print(sum(batch.num_rows for batch in TableReader(fifo.name.removesuffix("_0"))))
"""
DO = {
    "tar": "Penstock: {Join: tar}",
    "arrow": "set RecordWrapperType: RecordIO, and read the channel with TableReader",
}
"""By format with an end mark, what the warning advises."""


def arrow(table: Any) -> bytes:
    """An Arrow stream of the table."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def shards(stub: S3Stub) -> list[bytes]:
    """Put four of either kind; return the archives."""
    tars, streams = [], []
    for shard in range(4):
        names = [f"{shard}{i:03d}" for i in range(SAMPLES)]
        members = [(f"{n}.{x}", bytes(c)) for n in names for x, c in (("jpg", 3000), ("cls", 1))]
        tars.append(archive(members, kind=tarfile.USTAR_FORMAT))
        streams.append(arrow(pa.table({"n": [bytes(3000)] * SAMPLES})))
    stub.objects |= {f"b/tars/{i}.tar": data for i, data in enumerate(tars)}
    stub.objects |= {f"b/rows/{i}.arrows": data for i, data in enumerate(streams)}
    return tars


def serving(stub: S3Stub, tmp_path: Path, *, join: bool) -> AbstractContextManager[Sidecar]:
    # Pages that the kernel splices are large, and a FIFO would hold all that is left of an epoch.
    document = job(stub.url, tmp_path / "ml", "b/tars/", "b/rows/", Transport="buffered")
    if join:
        tars, rows = document["InputDataConfig"]
        tars["Penstock"], rows["RecordWrapperType"] = {"Join": "tar"}, "RecordIO"
    return sidecar(write_job(tmp_path / "job.yaml", document))


def read(code: str | list[str], fifo: Path) -> str:
    """What a program prints that reads the FIFO, and ends well."""
    command = code if isinstance(code, list) else [warm_python("torch"), "-c", code, str(fifo)]
    with open(fifo) if isinstance(code, list) else open("/dev/null") as stdin:
        done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.timeout(200)
def test_every_program_reads_all_of_it(stub: S3Stub, tmp_path: Path) -> None:
    shards(stub)
    data = tmp_path / "ml" / "input" / "data"
    with serving(stub, tmp_path, join=True) as running:
        running.wait_for("ready")
        assert int(read(WEBDATASET, data / "tars_0")) == 4 * SAMPLES
        assert int(read(TARFILE, data / "tars_1")) == 4 * SAMPLES
        names = read(["tar", "tf", "-"], data / "tars_2").split()
        assert len(names) == len(set(names)) == 8 * SAMPLES
        assert int(read(TABLES, data / "rows_0")) == 4 * SAMPLES
        for epoch in range(3):
            running.wait_for("epoch complete", channel="tars", epoch=epoch)
        running.wait_for("epoch complete", channel="rows", epoch=0)
        metrics = running.get("/metrics")[1]
        assert 'penstock_channel_unjoined{channel="tars"} 0.0' in metrics
        assert not [event for event in running.events if event["event"] == "objects carry end marks"]
        assert running.end() == 0


@pytest.mark.timeout(200)
def test_without_it_a_part_is_read_and_the_loss_is_told(stub: S3Stub, tmp_path: Path) -> None:
    """These programs all report success; the log and the metrics say what they do."""
    shards(stub)
    data = tmp_path / "ml" / "input" / "data"
    left = "the reader left at the end of an object, before the end of the epoch"
    with serving(stub, tmp_path, join=False) as running:
        for channel, format_ in (("tars", "tar"), ("rows", "arrow")):
            reported = running.wait_for("objects carry end marks", channel=channel, format=format_)
            assert DO[format_] in reported["do"]
        running.wait_for("ready")
        assert int(read(WEBDATASET, data / "tars_0")) == SAMPLES
        assert int(read(ARROW, data / "rows_0")) == SAMPLES
        assert len(read(["tar", "tf", "-"], data / "tars_1").split()) == 2 * SAMPLES
        assert DO["tar"] in running.wait_for(left, channel="tars", epoch=0)["do"]
        assert running.wait_for(left, channel="tars", epoch=0)["offset"] >= len(stub.objects["b/tars/0.tar"])
        running.wait_for(left, channel="rows", epoch=0)
        running.wait_for(left, channel="tars", epoch=1)
        metrics = running.get("/metrics")[1]
        for channel, count in (("tars", 2), ("rows", 1)):
            assert f'penstock_channel_unjoined{{channel="{channel}"}} 1.0' in metrics
            assert f'penstock_reader_end_disconnects_total{{channel="{channel}"}} {count}.0' in metrics
        assert running.end() == 0
    found = findings(str(tmp_path / "job.yaml"))
    assert found["end marks tars"]["state"] == found["end marks rows"]["state"] == "warning"
    assert DO["arrow"] in found["end marks rows"]["fix"]


def test_a_reader_of_json_that_leaves_is_told_of_no_archive(stub: S3Stub, tmp_path: Path) -> None:
    """A trainer that is killed may have taken whole objects alone."""
    stub.objects |= {f"b/train/{number}.jsonl": b'{"a": 1}\n' * 200_000 for number in range(8)}
    with sidecar(write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))) as running:
        running.wait_for("ready")
        with open(tmp_path / "ml/input/data/train_0", "rb", buffering=0) as reader:
            left = 1_800_000
            while left:
                left -= len(reader.read(left))
        event = running.wait_for("the reader left at the end of an object, before the end of the epoch")
        assert event["do"] == "read the trainer's log: it may have crashed"
        running.end()


@pytest.mark.timeout(200)
def test_a_killed_sidecar_goes_on_at_the_exact_byte(stub: S3Stub, place: Any) -> None:
    """SIGKILL within objects and epochs, with a keeper."""
    dice = random.Random("tar")
    objects = [archive([(f"{i}-{k}", dice.randbytes(1_500_000)) for k in range(3)]) for i in range(6)]
    stub.objects |= {f"b/train/{i}": data for i, data in enumerate(objects)}
    whole = joined(JoinTar(), objects, [])
    path, data = place(Penstock={"Join": "tar"})
    kills = [dice.randrange(10_000_000, len(whole)), len(whole) + dice.randrange(len(whole))]
    killed(path, data, [sha(whole)] * 2, kills)


@pytest.mark.timeout(200)
def test_programs_read_all_samples_of_a_rank(stub: S3Stub, tmp_path: Path) -> None:
    """Each rank is one archive per epoch, also from a step on: its samples, padding included, and one end."""
    found = []
    for shard, count in enumerate((7, 3, 12)):
        members = [[(f"{shard}{i:03d}.{x}", bytes(600)) for x in ("jpg", "cls")] for i in range(count)]
        found += members
        stub.objects[f"b/train/{shard}.tar"] = archive(each for pair in members for each in pair)
    document = divided(stub, tmp_path, records="tar", Count=2, GlobalBatch=6, Remainder="pad")
    document["InputDataConfig"][0]["Penstock"]["Join"] = "tar"
    path = write_job(tmp_path / "job.yaml", document)
    index(path)
    data = tmp_path / "ml" / "input" / "data"
    due = [[found[n % 22] for n in range(24) if n // 3 % 2 == rank] for rank in range(2)]
    streams = [[archive(pair, end=False) for pair in each] for each in due]
    fifos = [[data / f"train-{rank}_{epoch}" for rank in range(2)] for epoch in range(2)]
    with ThreadPoolExecutor(2) as pool:
        with sidecar(path) as running:
            running.wait_for("ready")
            theirs = pool.submit(read, KEYS, fifos[0][0])
            with tarfile.open(fifos[0][1], "r|") as tar:
                assert tar.getnames() == [name for pair in due[1] for name, _ in pair]
            assert theirs.result().split() == [pair[0][0].partition(".")[0] for pair in due[0]]
            assert list(pool.map(read_all, fifos[1])) == [b"".join(each) + bytes(1024) for each in streams]
            for rank in range(2):
                running.wait_for("epoch complete", channel=f"train-{rank}", epoch=1)
            trailers = [published_trailer(data, f"train-{rank}", 1) for rank in range(2)]
            assert not [event for event in running.events if event["event"] == "objects carry end marks"]
            assert running.end() == 0
        assert [(each.steps, each.records, each.padding) for each in trailers] == [(4, 12, 0), (4, 12, 2)]
        assert [each.bytes_delivered for each in trailers] == [len(b"".join(each)) + 1024 for each in streams]
        state = {"format": 1, "channel": "train", "epoch": 0, "step": 2, "order": trailers[0].order}
        with sidecar(path, "--resume", json.dumps(state)) as running:
            running.wait_for("ready")
            rest = list(pool.map(read_all, fifos[0]))
            assert running.end() == 0
    assert rest == [b"".join(each[6:]) + bytes(1024) for each in streams]


def test_cat_joins(stub: S3Stub) -> None:
    tars = shards(stub)
    endpoint = ["--endpoint-url", stub.url, "--path-style"]
    done = penstock("cat", "s3://b/tars/", *endpoint, "--join", "tar", text=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == joined(JoinTar(), tars, [])
    done = penstock("cat", "s3://b/rows/", *endpoint, "--join", "tar")
    assert done.returncode == 8
    assert "no tar header" in done.stderr
    assert "s3://b/rows/0.arrows (offset 0" in done.stderr
