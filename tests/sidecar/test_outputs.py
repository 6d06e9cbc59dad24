"""What a job writes to S3, as the job file says it: URIs, directories, contradictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sidecar.config.hosts import Hosts
from sidecar.config.job import Job, load_job, warnings
from sidecar.job.environment import write_config_files
from sidecar.job.layout import Layout
from streamer.errors import ConfigError
from streamer.plan import S3Uri
from tests.kit.processes import write_job

CHANNEL = {
    "ChannelName": "train",
    "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://b/train/"}},
}
OUTPUT = {"OutputDataConfig": {"S3OutputPath": "s3://b/models"}}
CHECKPOINTS = {"CheckpointConfig": {"S3Uri": "s3://b/run/checkpoints"}}


def job(**keys: Any) -> Job:
    return Job.model_validate({"TrainingJobName": "digits", "InputDataConfig": [CHANNEL]} | keys)


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("s3://b", "s3://b/digits/output/"),
        ("s3://b/", "s3://b/digits/output/"),
        ("s3://b/a/models", "s3://b/a/models/digits/output/"),
        ("s3://b/a/models/", "s3://b/a/models/digits/output/"),
        ("https://s3.amazonaws.com/b/models", "s3://b/models/digits/output/"),
        ("https://s3.eu-west-1.amazonaws.com/b/models/", "s3://b/models/digits/output/"),
        ("https://s3-eu-west-1.amazonaws.com/b", "s3://b/digits/output/"),
        ("https://s3.dualstack.eu-west-1.amazonaws.com/b/a%20b", "s3://b/a b/digits/output/"),
        ("https://my.b.s3.amazonaws.com/models", "s3://my.b/models/digits/output/"),
        ("https://b.s3.eu-west-1.amazonaws.com/models", "s3://b/models/digits/output/"),
        ("https://b.s3.dualstack.eu-west-1.amazonaws.com/models", "s3://b/models/digits/output/"),
        ("https://b.s3-eu-west-1.amazonaws.com/", "s3://b/digits/output/"),
        ("https://b.s3.cn-north-1.amazonaws.com.cn/models", "s3://b/models/digits/output/"),
    ],
)
def test_the_folder_of_the_output(path: str, folder: str) -> None:
    config = job(OutputDataConfig={"S3OutputPath": path}).output
    assert config is not None
    assert str(config.folder("digits")) == folder


def test_each_host_has_archives_of_its_own_and_all_have_one_folder_of_files() -> None:
    packed, plain = (
        job(OutputDataConfig={"S3OutputPath": "s3://b/m", "CompressionType": each}).output
        for each in ("GZIP", "NONE")
    )
    assert packed is not None
    assert plain is not None
    assert packed.target("model", "j", None) == S3Uri("b", "m/j/output/model.tar.gz")
    assert packed.target("output", "j", None) == S3Uri("b", "m/j/output/output.tar.gz")
    assert packed.target("model", "j", "algo-2") == S3Uri("b", "m/j/output/algo-2/model.tar.gz")
    assert packed.target("output", "j", "algo-2") == S3Uri("b", "m/j/output/algo-2/output.tar.gz")
    assert {plain.target("model", "j", host) for host in (None, "algo-2")} == {
        S3Uri("b", "m/j/output/model/")
    }
    assert plain.target("output", "j", "algo-2") == S3Uri("b", "m/j/output/algo-2/output.tar.gz")


@pytest.mark.parametrize(
    "key",
    [
        "1234abcd-12ab-34cd-56ef-1234567890ab",
        "arn:aws:kms:us-west-2:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab",
        "alias/ExampleAlias",
        "arn:aws:kms:us-west-2:111122223333:alias/ExampleAlias",
    ],
)
def test_a_kms_key_in_every_form(key: str) -> None:
    config = job(OutputDataConfig={"S3OutputPath": "s3://b", "KmsKeyId": key}).output
    assert config is not None
    assert config.encryption == {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": key}


@pytest.mark.parametrize("keys", [{}, {"KmsKeyId": ""}, {"KmsKeyId": None}])
def test_no_kms_key(keys: dict[str, Any]) -> None:
    config = job(OutputDataConfig={"S3OutputPath": "s3://b"} | keys).output
    assert config is not None
    assert config.encryption == {}


@pytest.mark.parametrize(
    ("local", "base", "directory"),
    [
        (None, "/opt/ml", "/opt/ml/checkpoints"),
        (None, "/data/ml/", "/data/ml/checkpoints"),
        ("/opt/ml/checkpoints/", "/data", "/data/checkpoints"),
        ("//opt/ml//state/./a", "/data", "/data/state/a"),
        ("/opt/mlflow", "/data", "/opt/mlflow"),
        ("/checkpoints", "/data", "/checkpoints"),
        ("/data/checkpoints", "/data", "/data/checkpoints"),
        ("/opt/ml/job/state", "/opt/ml/job", "/opt/ml/job/state"),
        ("/opt/ml/state", "/opt/ml/job", "/opt/ml/job/state"),
    ],
)
def test_the_directory_of_the_checkpoints(local: str | None, base: str, directory: str) -> None:
    config = job(
        CheckpointConfig={"S3Uri": "s3://b/c"} | ({"LocalPath": local} if local else {}),
        Penstock={"BaseDirectory": base},
    ).checkpoints
    assert config is not None
    assert config.uri == S3Uri("b", "c/")
    assert config.directory(base) == directory


def test_the_trainer_finds_the_directory_of_the_checkpoints(tmp_path: Path) -> None:
    """Under a base directory of another name, too; without a CheckpointConfig there is no such file."""
    layout = Layout.of(with_checkpoints := job(**CHECKPOINTS), str(tmp_path))
    layout.create()
    assert (tmp_path / "checkpoints").is_dir()
    assert layout.checkpoints == str(tmp_path.resolve() / "checkpoints")
    file = tmp_path / "input/config/checkpointconfig.json"
    hosts = Hosts(0, ("algo-1",))
    write_config_files(layout, with_checkpoints, hosts)
    local = str(tmp_path / "checkpoints")
    assert json.loads(file.read_text()) == {"S3Uri": "s3://b/run/checkpoints", "LocalPath": local}
    write_config_files(layout, job(), hosts)
    assert not file.exists()


@pytest.mark.parametrize(
    ("keys", "mistake"),
    [
        ({"Penstock": {"Output": "ignore"}}, "Penstock.Output: has no meaning without OutputDataConfig"),
        ({"Penstock": {"Output": {}}}, "Penstock.Output: has no meaning without OutputDataConfig"),
        (
            {"Penstock": {"Checkpoints": {"Restore": "newest"}}},
            "Penstock.Checkpoints: has no meaning without CheckpointConfig",
        ),
        (
            {"Penstock": {"Upload": {"Bandwidth": "1MB"}}},
            "Penstock.Upload: has no meaning without OutputDataConfig; add it",
        ),
        (
            OUTPUT | {"Penstock": {"Output": "ignore", "Upload": {"Bandwidth": "1MB"}}},
            "Penstock.Upload: has no meaning without OutputDataConfig; add it",
        ),
        (
            OUTPUT | {"Penstock": {"Output": "keep"}},
            r"Penstock.Output: must be a mapping .* is a text; write ignore, or \{Replace: true\}",
        ),
        (
            OUTPUT | {"Penstock": {"Output": {"Replaces": True}}},
            "Penstock.Output.Replaces: .* did you mean Replace",
        ),
        (CHECKPOINTS | {"Penstock": {"Checkpoints": {"Restore": "none"}}}, "is not one of 'all' or 'newest'"),
        ({"OutputDataConfig": {}}, "OutputDataConfig.S3OutputPath: is required"),
        ({"OutputDataConfig": {"S3OutputPath": "/models"}}, "is not an S3 URI: write s3://BUCKET/PREFIX"),
        (
            {"OutputDataConfig": {"S3OutputPath": "https://host/b"}},
            "is not an S3 URI: write s3://b/",
        ),
        (
            {"OutputDataConfig": {"S3OutputPath": "s3://b", "CompressionType": "Gzip"}},
            "did you mean 'GZIP'",
        ),
        ({"OutputDataConfig": {"S3OutputPath": "s3://b", "KmsKeyId": "a key"}}, "KmsKeyId.* alias/NAME"),
        (OUTPUT | {"TrainingJobName": "a/b"}, "TrainingJobName: 'a/b' is part of keys"),
        (CHECKPOINTS | {"TrainingJobName": ".."}, "TrainingJobName: '..' is part of keys"),
        (
            {"CheckpointConfig": {"S3Uri": "s3://b/c", "LocalPath": "checkpoints"}},
            "'checkpoints' is no absolute path, or has '..' in it; write one such as",
        ),
        (
            {"CheckpointConfig": {"S3Uri": "s3://b/c", "LocalPath": "/opt/ml/c/../input"}},
            "is no absolute path",
        ),
        *(
            (
                {"CheckpointConfig": {"S3Uri": "s3://b/c", "LocalPath": path}},
                "CheckpointConfig.LocalPath: .* overlaps /opt/ml/(input|model|output)",
            )
            for path in ("/opt/ml", "/", "/opt/ml/input/data", "/opt/ml/model/", "/opt/ml/output/data/x")
        ),
        (
            {
                "CheckpointConfig": {"S3Uri": "s3://b/c", "LocalPath": "/data/model"},
                "Penstock": {"BaseDirectory": "/data"},
            },
            "overlaps /data/model",
        ),
    ],
)
def test_mistakes_say_the_fix(tmp_path: Path, keys: dict[str, Any], mistake: str) -> None:
    document = {"TrainingJobName": "digits", "InputDataConfig": [CHANNEL]} | keys
    with pytest.raises(ConfigError, match=mistake):
        load_job(write_job(tmp_path / "job.yaml", document))


def test_what_is_ignored_is_not_written() -> None:
    found = job(**OUTPUT, **CHECKPOINTS, Penstock={"Output": "ignore", "Checkpoints": "ignore"})
    assert (found.output, found.checkpoints) == (None, None)
    assert found.output_data_config is not None
    some = job(
        **OUTPUT, **CHECKPOINTS, Penstock={"Output": {"Replace": True}, "Upload": {"Bandwidth": "5MB"}}
    )
    assert some.output is some.output_data_config
    assert some.checkpoints is some.checkpoint_config
    assert some.penstock.output.replace
    assert some.penstock.upload.bandwidth == 5_000_000


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"HyperParameters": {"model_dir": '"s3://b/model"'}}, "HyperParameters.model_dir"),
        ({"HyperParameters": {"model_dir": "s3://b/model"}}, "HyperParameters.model_dir"),
        ({"HyperParameters": {"model_dir": "/opt/ml/model"}} | OUTPUT | CHECKPOINTS, ""),
        ({"CheckpointConfig": {"S3Uri": "s3://b/train/checkpoints"}}, "CheckpointConfig has its objects in"),
        ({"CheckpointConfig": {"S3Uri": "s3://b/training"}}, ""),
        ({"CheckpointConfig": {"S3Uri": "s3://another/train"}}, ""),
        ({"CheckpointConfig": {"S3Uri": "s3://b/models"}} | OUTPUT, "OutputDataConfig has its objects in"),
        ({"CheckpointConfig": {"S3Uri": "s3://b/models/digits/checkpoints"}} | OUTPUT, ""),
        ({"CheckpointConfig": {"S3Uri": "s3://b"}}, "channel 'train' has its objects in s3://b/train/"),
        ({"OutputDataConfig": {"S3OutputPath": "s3://b/train"}}, "OutputDataConfig has its objects in"),
    ],
)
def test_warnings(keys: dict[str, Any], word: str) -> None:
    found = warnings(job(**keys))
    assert len(found) == bool(word)
    assert all(word in each for each in found)


def test_a_model_of_no_name_is_warned_of() -> None:
    assert "no TrainingJobName" in warnings(Job.model_validate({"InputDataConfig": [CHANNEL]} | OUTPUT))[0]
