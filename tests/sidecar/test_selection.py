"""What is streamed of what is listed, as a user says it: in the job file, of `cat`, of `plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sidecar.config.job import Job
from sidecar.process.exits import Exit
from streamer.plan import S3Uri
from tests.kit.processes import findings, job, penstock, sidecar, write_job
from tests.kit.stub import S3Stub


def fill_folders(stub: S3Stub) -> None:
    stub.objects |= {
        "b/train/a/1.txt": b"a1\n",
        "b/train/a/2.txt": b"a2\n",
        "b/train/a/2.txt.crc": b"crc",
        "b/train/b/1.txt": b"b1\n",
        "b/more/1.txt": b"m1\n",
    }


def selecting(stub: S3Stub, tmp_path: Path, *, mode: str = "Pipe", **extras: Any) -> str:
    document = job(stub.url, tmp_path / "ml", "b/train/")
    document["InputDataConfig"][0] |= {"Penstock": extras, "InputMode": mode}
    return write_job(tmp_path / "job.yaml", document)


def planned_keys(path: str, *options: str) -> list[str]:
    done = penstock("plan", "--json", "-c", path, *options)
    assert done.returncode == 0, done.stderr
    return [key for _, key, _, _ in json.loads(done.stdout)["channels"]["train"]["keys"]]


def test_a_run_streams_what_the_channel_selects(stub: S3Stub, tmp_path: Path) -> None:
    fill_folders(stub)
    path = selecting(
        stub, tmp_path, Include=["*.txt"], Exclude=["b/"], AlsoFrom=["s3://b/more/"], Limit={"Objects": 3}
    )
    with sidecar(path) as running:
        planned = running.wait_for("planned", channel="train", objects=3)
        assert planned["source"] == "s3://b/train/, s3://b/more/"
        running.wait_for("ready")
        assert (tmp_path / "ml/input/data/train_0").read_bytes() == b"a1\na2\nm1\n"
        assert running.end() == 0


def test_objects_that_may_not_be_data_are_named_with_what_leaves_them_out(
    stub: S3Stub, tmp_path: Path
) -> None:
    fill_folders(stub)
    path = selecting(stub, tmp_path)
    with sidecar(path) as running:
        reported = running.wait_for("objects that may not be data", channel="train")
        assert reported["keys"] == ["train/a/2.txt.crc"]
        assert reported["do"].startswith('add Penstock: {Exclude: ["*.crc"]} to the channel')
        assert running.end() == 0
    found = findings(path)
    assert found["strays train"]["state"] == "warning"
    assert "train/a/2.txt.crc" in found["strays train"]["text"]
    assert '{Exclude: ["*.crc"]}' in found["strays train"]["fix"]
    assert "objects that may not be data" in penstock("plan", "-c", path).stderr

    path = selecting(stub, tmp_path, Exclude=["*.crc"])
    assert "may not be data" not in penstock("plan", "-c", path).stderr
    assert "strays train" not in penstock("doctor", "--json", "-c", path).stdout


def test_doctor_looks_at_every_prefix_and_only_at_what_is_selected(stub: S3Stub, tmp_path: Path) -> None:
    fill_folders(stub)
    path = selecting(stub, tmp_path, Exclude=["*.crc"], AlsoFrom=["s3://b/more/"])
    assert findings(path)["list train"]["text"] == "objects: 4"
    path = selecting(stub, tmp_path, AlsoFrom=["s3://b/gone/"])
    found = findings(path)
    assert found["list train"]["state"] == "failure"
    assert "s3://b/gone/" in found["list train"]["text"]


def test_plan_tries_a_selection_before_it_is_in_the_job_file(stub: S3Stub, tmp_path: Path) -> None:
    fill_folders(stub)
    path = selecting(stub, tmp_path, Include=["b/*"])
    assert planned_keys(path) == ["train/b/1.txt"]
    tried = planned_keys(path, "--include", "a/*", "--exclude", "*.crc", "--limit", "1")
    assert tried == ["train/a/1.txt"]
    sample = planned_keys(path, "--include", "*", "--limit", "2", "--sample", "4")
    assert sample == planned_keys(selecting(stub, tmp_path, Include=["*"], Limit={"Objects": 2, "Seed": 4}))
    assert len(sample) == 2


def test_cat_streams_what_its_options_select(stub: S3Stub) -> None:
    fill_folders(stub)
    endpoint = ("--endpoint-url", stub.url, "--path-style")

    def cat(*options: str) -> str:
        done = penstock("cat", "s3://b/train/", "s3://b/more/", *endpoint, *options)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    assert cat("--include", "*.txt", "--exclude", "/b/") == "a1\na2\nm1\n"
    assert cat("--exclude", "*.crc", "--limit", "2") == "a1\na2\n"
    assert cat("--exclude", "*.crc", "--limit", "8B") == "a1\na2\n"
    assert len(cat("--limit", "2", "--sample", "1")) == 6
    refused = penstock("cat", "s3://b/train/", *endpoint, "--limit", "1B")
    assert refused.returncode == Exit.CONFIG
    assert refused.stderr.startswith("penstock: the limit of 1 B selects nothing")
    assert "is no limit; write" in penstock("cat", "s3://b/train/", *endpoint, "--limit", "many").stderr
    done = penstock("cat", "s3://b/train/", *endpoint)
    assert "add --exclude '*.crc' to leave them out" in done.stderr


def test_two_channels_divide_a_prefix_by_key(stub: S3Stub, tmp_path: Path) -> None:
    """Pipe and File mode, several prefixes, a manifest, `plan` and `cat` agree on the folds."""
    stub.objects |= {f"b/train/{number:03}": b"%03d\n" % number for number in range(40)}
    stub.objects |= {f"b/more/{number:03}": b"m%02d\n" % number for number in range(40)}
    every = sorted(stub.objects.values())

    def split(take: str, mode: str = "Pipe") -> str:
        return selecting(
            stub, tmp_path, mode=mode, AlsoFrom=["s3://b/more/"], Split={"Of": 4, "Take": take, "Seed": 0}
        )

    with sidecar(split("0-2")) as running:
        running.wait_for("ready")
        train = (tmp_path / "ml/input/data/train_0").read_bytes().splitlines(keepends=True)
        assert running.end() == 0
    rest = planned_keys(split("3"))
    assert 0 < len(rest) < 40
    assert sorted(train + [stub.objects["b/" + key] for key in rest]) == every

    endpoint = ("--endpoint-url", stub.url, "--path-style")
    done = penstock("cat", "s3://b/train/", "s3://b/more/", *endpoint, "--split", "0-2/4")
    assert done.stdout.encode() == b"".join(train)
    assert planned_keys(selecting(stub, tmp_path, AlsoFrom=["s3://b/more/"]), "--split", "3/4") == rest

    document = job(stub.url, tmp_path / "ml", "b/train/")
    document["InputDataConfig"][0] |= {"Penstock": {"Split": {"Of": 4, "Take": 3}}, "InputMode": "File"}
    with sidecar(write_job(tmp_path / "job.yaml", document)) as running:
        running.wait_for("ready")
        files = sorted(file.name for file in (tmp_path / "ml/input/data/train").iterdir())
        assert files == [key.removeprefix("train/") for key in rest if key.startswith("train/")]
        assert running.end() == 0

    names = [f"{number:03}" for number in reversed(range(40))]
    stub.objects["b/manifest"] = json.dumps([{"prefix": "s3://b/train/"}, *names]).encode()
    document["InputDataConfig"][0]["DataSource"]["S3DataSource"] |= {
        "S3DataType": "ManifestFile", "S3Uri": "s3://b/manifest"
    }  # fmt: skip
    by_manifest = planned_keys(write_job(tmp_path / "job.yaml", document))
    assert sorted(by_manifest) == [key for key in rest if key.startswith("train/")]


def test_a_split_that_leaves_nothing_is_an_error_that_says_so(stub: S3Stub, tmp_path: Path) -> None:
    stub.objects["b/train/a"] = b"a"
    path = selecting(stub, tmp_path, Split={"Of": 1000, "Take": "0-1"})
    done = penstock("plan", "-c", path)
    assert "Split leaves out every object: 1 key is in other folds of the 1000" in done.stderr
    assert done.returncode == 4


def test_files_of_a_channel_are_selected_too(stub: S3Stub, tmp_path: Path) -> None:
    fill_folders(stub)
    with sidecar(selecting(stub, tmp_path, mode="File", Include=["*.txt"], Exclude=["/b/"])) as running:
        running.wait_for("ready")
        directory = tmp_path / "ml/input/data/train"
        files = [str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()]
        assert sorted(files) == ["a/1.txt", "a/2.txt"]
        assert running.end() == 0
    done = penstock("check", "-c", selecting(stub, tmp_path, mode="File", AlsoFrom=["s3://b/more/"]))
    assert done.returncode == 2
    assert "AlsoFrom, for Pipe mode only" in done.stderr


@pytest.mark.parametrize(
    ("also", "twice"),
    [
        (["s3://b/p/"], True),
        (["s3://b/p/x/"], True),
        (["s3://b/"], True),
        (["s3://b/q/", "s3://b/q/r"], True),
        (["https://b.s3.eu-central-1.amazonaws.com/p/"], True),
        (["s3://b/p2", "s3://c/p/", "s3://b/q/"], False),
    ],
)
def test_no_object_can_come_from_two_prefixes(also: list[str], twice: bool) -> None:
    channel: dict[str, Any] = {
        "ChannelName": "train",
        "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://b/p/"}},
        "Penstock": {"AlsoFrom": also},
    }
    if twice:
        with pytest.raises(ValueError, match="would be streamed twice"):
            Job.model_validate({"InputDataConfig": [channel]})
    else:
        made = Job.model_validate({"InputDataConfig": [channel]}).input_data_config[0]
        assert made.sources[:2] == (S3Uri("b", "p/"), S3Uri("b", "p2"))


def test_entries_of_a_manifest_are_selected_too(stub: S3Stub, tmp_path: Path) -> None:
    fill_folders(stub)
    names = ["b/1.txt", "a/2.txt.crc", "a/2.txt", "a/1.txt"]
    stub.objects["b/manifest"] = json.dumps([{"prefix": "s3://b/train/"}, *names]).encode()
    document = job(stub.url, tmp_path / "ml", "b/train/")
    document["InputDataConfig"][0] |= {
        "DataSource": {"S3DataSource": {"S3DataType": "ManifestFile", "S3Uri": "s3://b/manifest"}},
        "Penstock": {"Exclude": ["*.crc"], "Limit": {"Objects": 2}},
    }
    with sidecar(write_job(tmp_path / "job.yaml", document)) as running:
        running.wait_for("planned", objects=2)
        running.wait_for("ready")
        assert (tmp_path / "ml/input/data/train_0").read_bytes() == b"b1\na2\n"
        assert running.end() == 0
