"""Channels dealt over several FIFOs, by real processes: bytes, config files, readers of unequal speed."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamer.units import counted
from tests.kit.harness import MORE_THAN_A_FIFO, fill
from tests.kit.pipes import read_all
from tests.kit.processes import job, leftovers, penstock, sidecar, write_job
from tests.kit.stub import S3Stub
from tests.kit.trailers import published_trailer
from tests.sidecar.test_channels import EVERY_KIND, job_of, store_of
from tests.unit import reference

TRAINER = """
import hashlib, os, sys
from streamer.readers import PipeReader, rank_channels

channels = rank_channels("train")
reader = PipeReader(channels[int(os.environ["LOCAL_RANK"])], "RecordIO")
for epoch in range(2):
    for record in reader:
        print(epoch, hashlib.sha256(record).hexdigest())
"""


def ranked(stub: S3Stub, base: Path | None, count: int, *prefixes: str, **penstock: Any) -> dict[str, Any]:
    """A job whose channel `train`, the first, has `count` rank FIFOs."""
    prefixes = prefixes or ("b/train/",)
    document = job(stub.url, base, *prefixes, **{"MemoryBudget": "32MiB"} | penstock)
    document["InputDataConfig"][0]["Penstock"] = {"Ranks": count}
    return document


def test_two_trainers_read_their_rank_fifos_at_once(stub: S3Stub, tmp_path: Path) -> None:
    """Two epochs: each record once in each, in another order, from one listing."""
    fill(stub, [10_000 * number for number in range(40)], prefix="b/train/")
    due = sorted(hashlib.sha256(data).hexdigest() for data in stub.objects.values())
    document = ranked(stub, tmp_path / "ml", 2)
    document["InputDataConfig"][0] |= {"RecordWrapperType": "RecordIO", "ShuffleConfig": {"Seed": 3}}
    with sidecar(write_job(tmp_path / "job.yaml", document)) as running:
        assert running.wait_for("planned")["ranks"] == 2
        running.wait_for("ready")
        trainers = [
            subprocess.Popen(
                [sys.executable, "-c", TRAINER],
                env=os.environ | {"SAGEMAKER_BASE_DIR": str(tmp_path / "ml"), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        read = [trainer.communicate()[0].splitlines() for trainer in trainers]
        assert [trainer.returncode for trainer in trainers] == [0, 0]
        for rank in ("train-0", "train-1"):
            running.wait_for("epoch complete", channel=rank, epoch=1)
        status = running.status()["channels"]
        assert {name: found["epochs"] for name, found in status.items()} == {
            "train-0": {"complete": 2},
            "train-1": {"complete": 2},
        }
        assert (
            'penstock_epochs_total{channel="train-1",trailer_state="complete"} 2.0'
            in running.get("/metrics")[1]
        )
        assert running.end() == 0
    orders = []
    for epoch in "01":
        found = [[line.split()[1] for line in lines if line.startswith(epoch)] for lines in read]
        assert [len(rank) for rank in found] == [20, 20]
        assert sorted(itertools.chain(*found)) == due
        orders.append(found)
    assert orders[0] != orders[1]
    assert leftovers(tmp_path / "ml") == [
        f".train-{rank}_{epoch}.penstock.json" for rank in range(2) for epoch in range(2)
    ]
    assert stub.listings == ["train/"] * 2  # one page, and the proof of its end
    assert stub.split_listings == 1


@EVERY_KIND
@pytest.mark.parametrize("arranged", [False, True], ids=["plain", "arranged"])
def test_every_kind_of_channel_on_two_hosts(
    stub: S3Stub, tmp_path: Path, kind: str, uri: str, arranged: bool
) -> None:
    """Arranged: shuffled, wrapped in records, balanced by bytes."""
    store = store_of(stub)
    channel = {"RecordWrapperType": "RecordIO", "ShuffleConfig": {"Seed": 7}} if arranged else {}
    document = job_of(stub, kind, uri, **channel)
    document["Penstock"]["ShardBy"] = "bytes" if arranged else "objects"
    document["InputDataConfig"][0]["Penstock"] = {"Ranks": 3}
    path = write_job(tmp_path / "job.yaml", document)
    rows = reference.rows(kind, store, uri, ["image-ref", "label", "note"])
    script = 'for rank in 0 1 2; do cat "${SM_CHANNEL_C}-${rank}_0" "${SM_CHANNEL_C}-${rank}_1"; done'
    for host in range(2):
        flags = ["--host-count", "2", "--host-index", str(host)]
        done = penstock("exec", "-c", path, *flags, "--", "sh", "-c", script, text=False)
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout == b"".join(
            reference.stream(
                rows,
                epoch=epoch,
                wrap=arranged,
                seed=7 if arranged else None,
                host=host,
                hosts=2,
                by="bytes" if arranged else "count",
                rank=rank,
                ranks=3,
            )
            for rank in range(3)
            for epoch in range(2)
        )


def test_compressed_objects(stub: S3Stub, tmp_path: Path) -> None:
    contents = [bytes([number]) * 1000 * number for number in range(5)]
    stub.objects |= {f"b/train/{n}.gz": gzip.compress(content) for n, content in enumerate(contents)}
    document = ranked(stub, None, 2)
    document["InputDataConfig"][0]["CompressionType"] = "Gzip"
    script = "cat ${SM_CHANNEL_TRAIN}-0_0 ${SM_CHANNEL_TRAIN}-1_0"
    done = penstock("exec", "-c", write_job(tmp_path / "job.yaml", document), "sh", "-c", script, text=False)
    assert done.stdout == b"".join(contents[0::2] + contents[1::2])


def test_rank_fifos_wait_for_nobody_and_drain(stub: S3Stub, tmp_path: Path) -> None:
    """One is read for two epochs while the reader of the second sleeps and the third has none."""
    fill(stub, [3_000_000, MORE_THAN_A_FIFO, 10], prefix="b/train/")
    contents = [stub.objects[f"b/train/000{number}"] for number in range(3)]
    with sidecar(write_job(tmp_path / "job.yaml", ranked(stub, tmp_path / "ml", 3))) as running:
        running.wait_for("ready")
        data = tmp_path / "ml" / "input" / "data"
        with open(data / "train-1_0", "rb", buffering=0) as sleeper:
            first = sleeper.read(1000)
            for epoch in range(2):
                assert read_all(data / f"train-0_{epoch}") == contents[0]
            running.wait_for("epoch complete", channel="train-0", epoch=1)
            states = {name: found["state"] for name, found in running.status()["channels"].items()}
            assert states == {"train-0": "waiting", "train-1": "streaming", "train-2": "waiting"}
            running.process.send_signal(signal.SIGTERM)
            running.wait_for("signal, draining")
            assert first + sleeper.readall() == contents[1]
        assert running.wait() == 0
    assert published_trailer(data, "train-1", 0).state == "complete"
    assert leftovers(tmp_path / "ml") == [
        ".train-0_0.penstock.json",
        ".train-0_1.penstock.json",
        ".train-1_0.penstock.json",
    ]


def test_the_trainer_finds_rank_fifos_as_channels(stub: S3Stub, tmp_path: Path) -> None:
    """In inputdataconfig.json and the variables; the variable of the channel itself stays, for shells."""
    fill(stub, [10, 20], prefix="b/train/")
    fill(stub, [5], prefix="b/eval/")
    document = ranked(stub, None, 2, "b/train/", "b/eval/")
    document["InputDataConfig"][0]["ContentType"] = "text/csv"
    script = (
        "import json, os\n"
        "names = ['S', '_EVAL', '_TRAIN', '_TRAIN-0', '_TRAIN-1']\n"
        "with open(os.environ['SM_INPUT_CONFIG_DIR'] + '/inputdataconfig.json') as file:\n"
        "    config = json.load(file)\n"
        "assert json.loads(os.environ['SM_INPUT_DATA_CONFIG']) == config\n"
        "print(json.dumps([config] + [os.environ['SM_CHANNEL' + name] for name in names]))\n"
    )
    done = penstock("exec", "-c", write_job(tmp_path / "job.yaml", document), sys.executable, "-c", script)
    config, names, *paths = json.loads(done.stdout)
    entry = {
        "TrainingInputMode": "Pipe", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None",
    }  # fmt: skip
    assert config == {
        "train-0": {"ContentType": "text/csv"} | entry,
        "train-1": {"ContentType": "text/csv"} | entry,
        "eval": entry,
    }
    assert json.loads(names) == ["eval", "train-0", "train-1"]
    assert [os.path.basename(path) for path in paths] == ["eval", "train", "train-0", "train-1"]


def test_plan_shows_rank_fifos(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [100, 30, 7], prefix="b/train/")
    path = write_job(tmp_path / "job.yaml", ranked(stub, None, 2))
    document = json.loads(penstock("plan", "-c", path, "--json").stdout)["channels"]["train"]
    assert (document["objects"], document["bytes"], len(document["keys"])) == (3, 137, 3)
    ranks = document["ranks"]
    assert {name: (rank["objects"], rank["bytes"]) for name, rank in ranks.items()} == {
        "train-0": (2, 107),
        "train-1": (1, 30),
    }
    shown = penstock("plan", "-c", path).stdout
    for name, rank in ranks.items():
        objects, digest = counted(rank["objects"], "object"), rank["digest"][:16]
        line = f"  {name}  {objects}, {rank['bytes']} bytes, digest {digest}\n"
        assert line in shown
    assert document["digest"] in shown
    alone = ranked(stub, None, 1)
    del alone["InputDataConfig"][0]["Penstock"]
    (found,) = json.loads(penstock("plan", "-c", write_job(tmp_path / "alone.yaml", alone), "--json").stdout)[
        "channels"
    ].values()
    assert found == {key: value for key, value in document.items() if key not in {"ranks", "unequal_steps"}}
    assert "Ranks: {Count: 2, GlobalBatch: " in document["unequal_steps"]["do"]
