"""Job files: what is accepted, and that every mistake is told with its place and its fix."""

from __future__ import annotations

import json

import pytest
import yaml

from sidecar.config import load_job
from streamer.errors import ConfigError

S3 = "InputDataConfig__0__DataSource__S3DataSource"


def document(**changes):
    """A right job; `changes` replace values by dotted path, None removes."""
    job = {
        "AlgorithmSpecification": {"TrainingInputMode": "Pipe"},
        "InputDataConfig": [
            {
                "ChannelName": "train",
                "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://b/p/"}},
            }
        ],
        "Penstock": {},
    }
    for path, value in changes.items():
        *steps, last = [int(step) if step.isdigit() else step for step in path.split("__")]
        place = job
        for step in steps:
            place = place[step] if isinstance(step, int) else place.setdefault(step, {})
        place[last] = value
    return job


def load(tmp_path, job, *, kind="yaml"):
    path = tmp_path / f"job.{kind}"
    path.write_text(
        job if isinstance(job, str) else json.dumps(job) if kind == "json" else yaml.safe_dump(job)
    )
    return load_job(path)


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_a_right_job_in_both_formats(tmp_path, kind):
    job = load(tmp_path, document(Penstock__MemoryBudget="64MiB", Penstock__FifoMode="0644"), kind=kind)
    assert job.input_data_config[0].channel_name == "train"
    assert job.input_data_config[0].data_source.s3_data_source.uri == ("b", "p/")
    assert (job.channel_budget, job.penstock.fifo_mode) == (64 << 20, 0o644)


def test_what_sagemaker_prints_for_unset_fields_is_accepted(tmp_path):
    """describe-training-job prints empty lists and the defaults."""
    channel = "InputDataConfig__0"
    job = document(
        **{
            f"{channel}__CompressionType": "None",
            f"{channel}__RecordWrapperType": "None",
            f"{channel}__InputMode": "Pipe",
            f"{channel}__DataSource__S3DataSource__AttributeNames": [],
            f"{channel}__DataSource__S3DataSource__InstanceGroupNames": [],
            f"{channel}__DataSource__S3DataSource__S3DataDistributionType": "FullyReplicated",
        }
    )
    load(tmp_path, job)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("InputDataConfig__0__ChannelName", "a b", "InputDataConfig[0].ChannelName"),
        ("InputDataConfig__0__ChannelName", "x" * 65, "64 characters"),
        ("InputDataConfig__0__ChannelName", 7, "ChannelName"),
        ("InputDataConfig__0__CompresionType", "Gzip", "did you mean CompressionType?"),
        ("InputDataConfig__0__CompressionType", "Gzip", "'Gzip' is not supported by this version"),
        ("InputDataConfig__0__CompressionType", "Zip", "'Zip' is not one of None, Gzip"),
        ("InputDataConfig__0__RecordWrapperType", "RecordIO", "not supported by this version"),
        ("InputDataConfig__0__InputMode", "FastFile", "use 'Pipe'"),
        ("InputDataConfig__0__ShuffleConfig", {"Seed": 1}, "ShuffleConfig is not supported"),
        (f"{S3}__S3DataType", "ManifestFile", "use 'S3Prefix'"),
        (
            f"{S3}__S3DataDistributionType",
            "ShardedByS3Key",
            "not supported",
        ),
        (f"{S3}__S3Uri", "/b/p", "write s3://BUCKET/PREFIX"),
        (f"{S3}__S3Uri", "s3://b/" + "k" * 1100, "1024"),
        (
            f"{S3}__AttributeNames",
            ["a"],
            "AttributeNames is not supported",
        ),
        (
            "InputDataConfig__0__DataSource__FileSystemDataSource",
            {"FileSystemId": "fs"},
            "reads S3 only",
        ),
        ("AlgorithmSpecification__TrainingInputMode", "File", "use 'Pipe'"),
        ("AlgorithmSpecification__TrainingImage", "x", "the parts of a training job that concern data"),
        ("RoleArn", "arn", "RoleArn: is not a key that Penstock supports here; this version takes only"),
        ("TrainingInputMode", "Pipe", "it belongs in AlgorithmSpecification"),
        ("InputDataConfig", [], "must have at least 1 item"),
        ("Penstock__MemoryBudget", "15MiB", "raise it to 16 MiB or lower PartSize"),
        ("Penstock__MemoryBudget", "lots", "Penstock.MemoryBudget"),
        ("Penstock__PartSize", "1KiB", "between 64KiB and 512MiB"),
        ("Penstock__FifoMode", 640, "quoted octal"),
        ("Penstock__FifoMode", "0999", "quoted octal"),
        ("Penstock__Connections", 0, "greater than or equal to 1"),
        ("Penstock__BaseDirectory", "relative", "Penstock.BaseDirectory"),
        ("Penstock__Endpoint__Url", "127.0.0.1:9000", "Penstock.Endpoint.Url"),
        ("Penstock__Endpoint", {"Anonymous": True, "Profile": "me"}, "contradict each other"),
        ("Penstock__Endpoint", {"Url": "http://h", "CaBundle": "/x"}, "use https://"),
        ("Penstock__Admin__Port", 70000, "65535"),
        ("Penstok", {}, "did you mean Penstock?"),
        ("HyperParameters", {"lr": 0.1}, "HyperParameters.lr: must be text; put it in quotes"),
    ],
)
def test_mistakes_are_named(tmp_path, path, value, words):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, document(**{path: value}))
    assert words in str(caught.value)


def test_all_mistakes_at_once(tmp_path):
    job = document(InputDataConfig__0__ChannelName="a b", Penstock__Admin__Port=-1, Typo=1)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, job)
    assert len(str(caught.value).splitlines()) == 4  # the file's name, and one line each


def test_channel_names_must_differ(tmp_path):
    job = document()
    job["InputDataConfig"] *= 2
    with pytest.raises(ConfigError, match="two channels are called 'train'"):
        load(tmp_path, job)


@pytest.mark.parametrize("text", ["a: 1\na: 2\n", '{"a": 1, "a": 2}'])
def test_a_key_written_twice_is_no_silent_choice(tmp_path, text):
    with pytest.raises(ConfigError, match="'a' is written twice"):
        load(tmp_path, text)


@pytest.mark.parametrize("text", ["[1, 2", "{,}", "just words", "- a list\n"])
def test_not_a_job_at_all(tmp_path, text):
    with pytest.raises(ConfigError):
        load(tmp_path, text)


def test_absent_and_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_job(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_job(tmp_path / "latin.yaml")


def test_the_job_is_frozen(tmp_path):
    job = load(tmp_path, document())
    with pytest.raises(ValueError, match="frozen"):
        job.penstock.connections = 5
