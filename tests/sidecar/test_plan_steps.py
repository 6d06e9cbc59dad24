"""What `plan` and `doctor` say of the steps of ranks: equal by record, unequal by object, and what helps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sidecar.config.job import load_job
from sidecar.records.rank_advice import small_requests
from tests.kit.processes import findings, job, penstock, write_job
from tests.kit.stub import S3Stub

RECORDS = {"Format": "fixed:100"}


def job_file(stub: S3Stub, tmp_path: Path, *, hosts: int = 1, **channel: Any) -> str:
    """A channel of three objects of 100, 300 and 1,100 bytes."""
    stub.objects |= {f"b/train/{number}": bytes(size) for number, size in enumerate((100, 300, 1100))}
    document = job(stub.url, None, "b/train/")
    if hosts > 1:
        document["ResourceConfig"] = {"InstanceCount": hosts}
        source = document["InputDataConfig"][0]["DataSource"]["S3DataSource"]
        source["S3DataDistributionType"] = "ShardedByS3Key"
    document["InputDataConfig"][0] |= channel
    return write_job(tmp_path / "job.yaml", document)


def plan(path: str, *options: str) -> list[str]:
    """The lines of the channel."""
    done = penstock("plan", "-c", path, *options)
    assert done.returncode == 0, done.stderr
    lines: list[str] = done.stdout.splitlines()
    assert "" not in lines
    return lines[lines.index("train") + 1 :]


def test_the_table_has_a_row_for_each_rank(stub: S3Stub, tmp_path: Path) -> None:
    ranks = {"Count": 2, "GlobalBatch": 6, "Fetch": "separately"}
    path = job_file(stub, tmp_path, Penstock={"Ranks": ranks, "Records": RECORDS})
    assert plan(path, "--steps")[-4:] == [
        "  records  12, in 2 steps of 2 ranks",
        "           records  steps  bytes  requests  bytes a request",
        "  train-0        6      2    600         3              200",
        "  train-1        6      2    600         3              200",
    ]
    found = json.loads(penstock("plan", "-c", path, "--json").stdout)["channels"]["train"]
    assert "unequal_steps" not in found
    assert [(each["steps"], each["parts"]) for each in found["ranks"].values()] == [(2, 3), (2, 3)]


def test_the_table_has_the_padding_of_each_rank(stub: S3Stub, tmp_path: Path) -> None:
    """With 15 records in global batches of 9 the last three are padding, all of them of the last rank."""
    ranks = {"Count": 3, "GlobalBatch": 9, "Remainder": "pad", "Fetch": "separately"}
    assert plan(job_file(stub, tmp_path, Penstock={"Ranks": ranks, "Records": RECORDS}), "--steps")[-4:] == [
        "           records  padding  steps  bytes  requests  bytes a request",
        "  train-0        6        0      2    600         3              200",
        "  train-1        6        0      2    600         3              200",
        "  train-2        6        3      2    600         3              200",
    ]


def test_a_channel_without_ranks_is_a_row(stub: S3Stub, tmp_path: Path) -> None:
    path = job_file(stub, tmp_path)
    assert plan(path, "--steps")[-2:] == [
        "         records  steps  bytes  requests  bytes a request",
        "  train        -      -   1500         3              500",
    ]
    assert plan(path)[-1].startswith("  digest ")


@pytest.mark.parametrize(
    ("ranks", "extras", "do"),
    [
        ({"Fetch": "separately"}, {}, "for 3 remove Fetch: separately from Ranks"),
        ({}, {}, ""),
        ({"Fetch": "together"}, {}, ""),
        ({"Fetch": "separately", "GlobalBatch": 15}, {}, ""),
    ],
    ids=str,
)
def test_small_requests_are_named_with_what_sends_fewer(
    stub: S3Stub, tmp_path: Path, ranks: dict[str, Any], extras: dict[str, Any], do: str
) -> None:
    """A plan of 15 records in three objects, each with a request of its own."""
    ranks = {"Count": 3, "GlobalBatch": 3} | ranks
    path = job_file(stub, tmp_path, Penstock={"Ranks": ranks, "Records": RECORDS, **extras})
    last = plan(path)[-1]
    assert last.startswith("  requests small: ") == bool(do)
    assert do in last
    if do:
        assert "by 15 requests of 100 B on average" in last
    found = [each for check, each in findings(path).items() if check == "requests train"]
    assert len(found) == (ranks.get("Fetch") == "separately" or "WhenFailed" in extras)
    for each in found:
        assert f"by requests of about {100 * ranks['GlobalBatch'] // 3} B" in each["text"]
        assert do.removeprefix("for 3 ") in each["fix"]


def test_doctor_names_a_batch_that_has_no_equal_slices(stub: S3Stub, tmp_path: Path) -> None:
    ranks = {"Count": 2, "GlobalBatch": 6}
    path = job_file(stub, tmp_path, hosts=2, Penstock={"Ranks": ranks, "Records": RECORDS})
    finding = findings(path, "--host-index", "0")["ranks train"]
    assert finding["state"] == "failure"
    assert "cannot be divided over 4 ranks" in finding["text"]


@pytest.mark.parametrize(
    ("hosts", "channel", "words"),
    [
        (1, {"Penstock": {"Ranks": 2}}, [
            "each rank has whole objects, so their numbers of steps differ",
            "Ranks: {Count: 2, GlobalBatch: RECORDS} and Records: {Format: FORMAT, Index: index}",
        ]),
        (2, {}, ["each host has whole objects", "Ranks: {Count: 1, GlobalBatch: RECORDS} and Records: {"]),
        (1, {"Penstock": {"Ranks": 2}, "RecordWrapperType": "RecordIO"}, [
            "for equal steps set Ranks: {Count: 2, GlobalBatch: RECORDS}",
        ]),
        (1, {"Penstock": {"Ranks": 2}, "CompressionType": "Gzip"}, [
            "Ranks can have no GlobalBatch, which would make them equal: CompressionType: Gzip",
        ]),
    ],
)  # fmt: skip
def test_unequal_steps_are_named_with_what_helps(
    stub: S3Stub, tmp_path: Path, hosts: int, channel: dict[str, Any], words: list[str]
) -> None:
    path = job_file(stub, tmp_path, hosts=hosts, **channel)
    host = ["--host-index", "0"] if hosts > 1 else []
    planned = plan(path, *host)[-1]
    assert planned.startswith("  steps    unequal: ")
    finding = findings(path, *host)["steps train"]
    assert finding["state"] == "ok"
    for each in words:
        assert each in planned
        assert each in finding["text"] + finding["fix"]


def test_equal_steps_and_single_streams_are_not_mentioned(stub: S3Stub, tmp_path: Path) -> None:
    for ranks in ({}, {"Ranks": {"Count": 2, "GlobalBatch": 6}, "Records": RECORDS}):
        path = job_file(stub, tmp_path, Penstock=ranks)
        assert "unequal" not in "".join(plan(path))
        assert "steps train" not in penstock("doctor", "-c", path, "--json").stdout


def test_joined_samples_need_a_larger_batch(stub: S3Stub, tmp_path: Path) -> None:
    """Their ranks cannot be fetched together."""
    records = {"Format": "tar", "Index": "index"}
    extras = {"Ranks": {"Count": 3, "GlobalBatch": 3}, "Records": records, "Join": "tar"}
    path = job_file(stub, tmp_path, Penstock=extras)
    (channel,) = load_job(Path(path)).channels("Pipe")
    advice = small_requests(channel, bytes_total=1500, separately=15, together=3)
    assert advice is not None
    assert advice.do == "raise GlobalBatch"
