"""Ranks that share wrapped objects, or lines of an augmented manifest, with equal steps and no index."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from streamer.readers import KeyedRecord, PipeReader
from tests.kit.processes import findings, job, penstock, sidecar, write_job
from tests.kit.stub import S3Stub
from tests.kit.trailers import published_trailer
from tests.sidecar.test_record_keys import directories
from tests.unit import reference

SEED, GLOBAL, OBJECTS = 3, 4, 11
KINDS = pytest.mark.parametrize("kind", ["S3Prefix", "AugmentedManifestFile"])


def content(number: int) -> bytes:
    """The bytes of an object, which name it; one object is empty, one has more than a FIFO."""
    return (b"%d." % number) * (number * 7919 % 400 if number < OBJECTS - 1 else 1 << 20)


def divided(stub: S3Stub, base: Path | None, kind: str, **ranks: Any) -> dict[str, Any]:
    stub.objects |= {f"b/train/{number:02}": content(number) for number in range(OBJECTS)}
    lines = [{"image-ref": f"s3://b/train/{number:02}", "label": number} for number in range(OBJECTS)]
    stub.objects["b/lists/train"] = "\n".join(map(json.dumps, lines)).encode()
    document = job(stub.url, base, "b/train/", MemoryBudget="32MiB")
    channel = document["InputDataConfig"][0]
    if kind != "S3Prefix":
        source = {"S3DataType": kind, "S3Uri": "s3://b/lists/train", "AttributeNames": ["image-ref", "label"]}
        channel["DataSource"] = {"S3DataSource": source}
    channel |= {"RecordWrapperType": "RecordIO", "ShuffleConfig": {"Seed": SEED}}
    channel["Penstock"] = {"RecordKeys": True, "Ranks": {"GlobalBatch": GLOBAL} | ranks}
    return document


def due(kind: str, epoch: int, remainder: str) -> list[list[list[bytes]]]:
    """The RecordIO records of every sample of every global batch."""
    order = reference.record_order([1] * OBJECTS, [100] * OBJECTS, seed=SEED, epoch=epoch, block=1 << 20)
    label = kind != "S3Prefix"
    return [
        [[content(entry), b"%d" % entry] if label else [content(entry)] for entry, _ in batch]
        for batch in reference.global_batches(order, GLOBAL, remainder)
    ]


@KINDS
@pytest.mark.parametrize(("count", "fetch"), [(1, "auto"), (2, "together"), (4, "separately")])
def test_any_number_of_ranks_reads_the_same_global_batches(
    stub: S3Stub, tmp_path: Path, kind: str, count: int, fetch: str
) -> None:
    """Two epochs of each FIFO, and then the second one from its step 1 on, by the state of a rank."""
    base, each = tmp_path / "ml", 1 if kind == "S3Prefix" else 2
    path = write_job(
        tmp_path / "job.yaml", divided(stub, base, kind, Count=count, Fetch=fetch, Remainder="pad")
    )
    steps, size = 3, GLOBAL // count * each
    names = [f"train-{rank}" for rank in range(count)]
    state: dict[str, Any] = {}
    for first in (0, 1):
        options = ["--resume", json.dumps(state)] if first else []
        with sidecar(path, *options) as running:
            planned = running.wait_for("planned")
            assert (planned["steps"], planned["records"]) == (steps, steps * GLOBAL * each)
            assert planned["padding"] == each
            running.wait_for("ready")
            readers = [PipeReader(name, "RecordIO", key=True, **directories(base)) for name in names]
            if first:
                for reader in readers:
                    reader.load_state_dict(state)
            with ThreadPoolExecutor(count) as threads:
                for epoch in range(first, 2):
                    if epoch:
                        state = readers[0].state_dict() | {"epoch": 1, "step": 1}
                    ranks: list[list[KeyedRecord]] = list(threads.map(list, readers))
                    batches = due(kind, epoch, "pad")[first:]
                    found = [
                        [record for rank in ranks for record in rank[step * size : (step + 1) * size]]
                        for step in range(steps - first)
                    ]
                    flat = [[record for sample in batch for record in sample] for batch in batches]
                    assert [[record.record for record in batch] for batch in found] == flat
                    for record in (record for batch in found for record in batch if record.key):
                        assert record.record == content(int(record.key[-2:]))
            trailers = [published_trailer(base / "input/data", name, 1) for name in names]
            assert running.end() == 0
        assert [trailer.records_skipped for trailer in trailers] == [first * size] * count
        assert sum(trailer.padding for trailer in trailers) == each


def test_two_hosts_share_every_global_batch_of_lines(stub: S3Stub, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    document = divided(stub, None, "AugmentedManifestFile", Count=1, Remainder="repeat")
    source = document["InputDataConfig"][0]["DataSource"]["S3DataSource"]
    source["S3DataDistributionType"] = "ShardedByS3Key"
    path = write_job(tmp_path / "job.yaml", document)
    program = """
from streamer.readers.torch import PipeIterableDataset
data = PipeIterableDataset("train-0", "RecordIO", attributes=2, batch_size=2)
print(len(data), [[int(label) for _, label in batch] for batch in data])
"""
    shares = []
    for host in range(2):
        flags = ["--host-count", "2", "--host-index", str(host)]
        done = penstock("exec", "-c", path, *flags, "--", sys.executable, "-c", program)
        assert done.returncode == 0, done.stderr
        shares.append(done.stdout.strip())
    order = [[int(label) for _, label in batch] for batch in due("AugmentedManifestFile", 0, "repeat")]
    assert shares == [f"3 {[batch[first : first + 2] for batch in order]}" for first in (0, 2)]


@KINDS
def test_doctor_needs_no_index_and_plan_counts_the_parts(stub: S3Stub, tmp_path: Path, kind: str) -> None:
    path = write_job(tmp_path / "job.yaml", divided(stub, tmp_path / "ml", kind, Count=2))
    assert not [check for check in findings(path) if check.startswith(("index", "equal"))]
    planned = json.loads(penstock("plan", "-c", path, "--json").stdout)["channels"]["train"]
    assert (planned["steps"], len(planned["ranks"])) == (2, 2)
    assert planned["parts"] >= 8
