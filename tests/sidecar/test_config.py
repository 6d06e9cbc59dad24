"""Job files: what is accepted, and that every mistake is told with its place and its fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidecar.config.job import Job, load_job, warnings, with_extras
from streamer.errors import ConfigError
from streamer.plan.selection import Limit

S3 = "InputDataConfig__0__DataSource__S3DataSource"
AUGMENTED = {
    "S3DataSource": {"S3DataType": "AugmentedManifestFile", "S3Uri": "s3://b/m", "AttributeNames": ["a"]}
}


def document(**changes: Any) -> dict[str, Any]:
    """A right job; `changes` replace values by dotted path, None removes."""
    job: dict[str, Any] = {
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
        place: Any = job
        for step in steps:
            place = place[step] if isinstance(step, int) else place.setdefault(step, {})
        place[last] = value
    return job


def load(tmp_path: Path, job: str | dict[str, Any], *, kind: str = "yaml") -> Job:
    path = tmp_path / f"job.{kind}"
    path.write_text(
        job if isinstance(job, str) else json.dumps(job) if kind == "json" else yaml.safe_dump(job)
    )
    return load_job(path)


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_a_right_job_in_both_formats(tmp_path: Path, kind: str) -> None:
    job = load(tmp_path, document(Penstock__MemoryBudget="64MiB", Penstock__FifoMode="0644"), kind=kind)
    assert job.input_data_config[0].channel_name == "train"
    assert job.input_data_config[0].source.uri == ("b", "p/")
    assert (job.penstock.memory_budget, job.penstock.fifo_mode) == (64 << 20, 0o644)


def test_keys_that_plan_adds_leave_all_others_as_they_are(tmp_path: Path) -> None:
    job = load(
        tmp_path,
        document(
            Penstock__FifoMode="0644",
            Penstock__PartSize="1MiB",
            InputDataConfig__0__ShuffleConfig={"Seed": 3},
            InputDataConfig__0__Penstock={"Ranks": 2, "Exclude": ["x"], "Include": ["y"]},
        ),
    )
    changed = with_extras(job, {"Include": ["*.tar"], "Limit": {"Objects": 5, "Seed": 1}})
    assert changed.penstock == job.penstock
    before, after = job.input_data_config[0], changed.input_data_config[0]
    assert after.penstock.include == ("*.tar",)
    assert after.penstock.selection.limit == Limit(objects=5, seed=1)
    assert after.penstock.model_copy(update={"include": ("y",), "limit": None}) == before.penstock
    assert after.model_copy(update={"penstock": before.penstock}) == before
    augmented = load(tmp_path, document(InputDataConfig__0__DataSource=AUGMENTED))
    assert augmented.input_data_config[0].source.attribute_names == ("a",)
    with pytest.raises(ConfigError, match="channel 'train': .*Include: has no meaning with Augmented"):
        with_extras(augmented, {"Include": ["x"]})


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("InputDataConfig__0__ChannelName", "x" * 65, "64 characters"),
        ("InputDataConfig__0__ChannelName", 7, "ChannelName"),
        ("InputDataConfig__0__CompressionType", "Bzip2", "'Bzip2' is not one of 'None' or 'Gzip'"),
        ("InputDataConfig__0__RecordWrapperType", "TFRecord", "'None' or 'RecordIO'"),
        ("InputDataConfig__0__ShuffleConfig", {}, "ShuffleConfig.Seed: is required"),
        ("InputDataConfig__0__ShuffleConfig", {"Seed": 2**63}, "ShuffleConfig.Seed"),
        ("InputDataConfig__0__ShuffleConfig", {"Seed": "1"}, "ShuffleConfig.Seed"),
        ("InputDataConfig__0__ContentType", "x" * 257, "256 characters"),
        (f"{S3}__S3DataType", "Converse", "use 'S3Prefix'"),
        (f"{S3}__S3DataType", "AugmentedManifestFile", "list the attributes to stream, in order"),
        (f"{S3}__S3DataDistributionType", "Sharded", "'FullyReplicated' or 'ShardedByS3Key'"),
        (f"{S3}__AttributeNames", ["a" * 257], "256 characters"),
        (f"{S3}__AttributeNames", [f"a{n}" for n in range(17)], "at most 16 items"),
        (f"{S3}__InstanceGroupNames", ["a", "a"], "name each once"),
        (f"{S3}__InstanceGroupNames", list("abcdef"), "at most 5 items"),
        (f"{S3}__S3Uri", "https://elsewhere.example/b/p", "write s3://b/p, and https://elsewhere.example as"),
        (f"{S3}__S3Uri", "s3://b/" + "k" * 1100, "1024"),
        (
            f"{S3}__AttributeNames",
            ["a"],
            "AttributeNames has no meaning with S3Prefix",
        ),
        (
            "InputDataConfig__0__DataSource__FileSystemDataSource",
            {"FileSystemId": "fs"},
            "reads S3 only",
        ),
        ("AlgorithmSpecification__TrainingInputMode", "FastFile", "mounts nothing"),
        ("AlgorithmSpecification__TrainingImag", "x", "did you mean TrainingImage?"),
        ("TrainingImage", "x", "it belongs in AlgorithmSpecification"),
        ("Penstock__RoleArn", "arn", "it belongs in the top level"),
        ("ResourceConfig__InstanceCount", -1, "greater than or equal to 0"),
        ("Penstock__ShardBy", "bytes", "ShardBy has no meaning without a ShardedByS3Key channel"),
        (
            "Penstock__Ranks",
            {"train": 2},
            "each channel has it in a section of its own, `Penstock: {Ranks: 4}`",
        ),
        ("Penstock__ChannelBandwidth", {"train": "1MB"}, "section of its own, `Penstock: {Bandwidth: 50MB}`"),
        ("InputDataConfig__0__Penstock__Ranks", 0, "greater than or equal to 1"),
        ("InputDataConfig__0__Penstock__Ranks", 65, "less than or equal to 64"),
        (
            "InputDataConfig__0__Penstock__Ranks",
            "2",
            "Ranks: must be a number of rank FIFOs",
        ),
        *(
            ("InputDataConfig__0__Penstock__Ranks", {"Count": 2} | ranks, text)
            for ranks, text in (
                ({"Remainder": "drop"}, "Remainder has no meaning without GlobalBatch; add it"),
                ({"GlobalBatch": None, "Copies": 2}, "Copies has no meaning without GlobalBatch"),
                ({"Fetch": "together"}, "Fetch has no meaning without GlobalBatch"),
                ({"GlobalBatch": 2}, "needs to know where they are: add Records: {Format: TFRecord, Index"),
                ({"GlobalBatch": 2, "Block": "100000EiB"}, "write a size from 1 B to 1 TiB"),
                ({"GlobalBatch": 3}, "cannot be divided over 2 ranks in equal slices"),
                ({"GlobalBatch": 0}, "Ranks.GlobalBatch: must be greater than or equal to 1"),
                ({"GlobalBatch": (1 << 26) + 2}, "less than or equal to 67108864"),
                ({"GlobalBatch": 2, "Copies": 33}, "are more than 64 FIFOs; lower one"),
                ({"Count": "from launcher"}, "none of LOCAL_WORLD_SIZE"),
            )
        ),
        ("InputDataConfig__0__Penstock__Bandwidth", 0, "greater than 0"),
        ("InputDataConfig", [], "must have at least 1 item"),
        ("Penstock__PartSize", "1KiB", "between 64KiB and 512MiB"),
        ("Penstock__FifoMode", 640, "quoted octal"),
        ("Penstock__FifoMode", "0999", "quoted octal"),
        ("Penstock__RequestsInFlight", 0, "greater than or equal to 1"),
        ("Penstock__Endpoint", {"Anonymous": True, "RequesterPays": True}, "contradict each other"),
        ("Penstock__Endpoint", {"Url": "http://h", "CaBundle": "/x"}, "use https://"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, path: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, document(**{path: value}))
    assert words in str(caught.value)


LINES = {
    "S3DataSource": {
        "S3DataType": "AugmentedManifestFile",
        "S3Uri": "s3://b/lines.manifest",
        "AttributeNames": ["image-ref"],
    }
}


@pytest.mark.parametrize(
    ("channel", "extras", "text"),
    [
        ({"CompressionType": "Gzip"}, {}, "CompressionType: Gzip has no records at fixed offsets"),
        (
            {"RecordWrapperType": "RecordIO"},
            {},
            "RecordWrapperType: RecordIO makes every object one record, and a block; remove Records and",
        ),
        (
            {"RecordWrapperType": "RecordIO", "ShuffleConfig": {"Seed": 1}},
            {"Ranks": {"Count": 2, "GlobalBatch": 16, "Block": "1MiB"}, "Records": None},
            "RecordWrapperType: RecordIO makes every object one record, and a block; remove Records and",
        ),
        (
            {"DataSource": LINES},
            {},
            "AugmentedManifestFile has a sample on each line of its manifest, and no reader sees its end; "
            "add RecordWrapperType: RecordIO",
        ),
        ({}, {"Join": "lines"}, "Join: lines joins whole objects"),
        (
            {},
            {
                "Join": "tar",
                "Ranks": {"Count": 2, "GlobalBatch": 16, "Fetch": "together"},
                "Records": {"Format": "tar", "Index": "index"},
            },
            "Join: tar ends a sample where the rank's next one begins",
        ),
        ({}, {"Integrity": "checksum"}, "Integrity: checksum compares whole objects"),
        ({}, {"Records": {"Format": "lines"}}, "needs to know where they are: add Records"),
        (
            {},
            {"Ranks": {"Count": 2, "GlobalBatch": 16, "Block": "1MiB"}},
            "Block has no meaning without ShuffleConfig or Mix; remove it",
        ),
        (
            {"ShuffleConfig": {"Seed": 1}},
            {
                "Ranks": {"Count": 2, "GlobalBatch": 16, "Block": "1MiB"},
                "Split": {"Of": 2, "Take": 0, "By": "block"},
            },
            "Block contradicts Split",
        ),
    ],
)
def test_what_has_no_records_at_offsets_is_not_divided_by_record(
    tmp_path: Path, channel: dict[str, Any], extras: dict[str, Any], text: str
) -> None:
    job = document()
    job["InputDataConfig"][0] |= channel | {
        "Penstock": {
            "Ranks": {"Count": 2, "GlobalBatch": 16},
            "Records": {"Format": "TFRecord", "Index": "index"},
        }
        | extras
    }
    with pytest.raises(ConfigError, match="GlobalBatch divides a channel by record, and " + text):
        load(tmp_path, job)


@pytest.mark.parametrize(("ranks", "least"), [(None, "2 MiB"), (17, "34 MiB")])
def test_the_budget_holds_two_parts_for_every_fifo(tmp_path: Path, ranks: int | None, least: str) -> None:
    job = document() if ranks is None else document(InputDataConfig__0__Penstock={"Ranks": ranks})
    assert load(tmp_path, job).budget >= 64 << 20
    job["Penstock"] = {"MemoryBudget": "1MiB"}
    with pytest.raises(ConfigError, match=f"channels? or rank FIFOs?; raise it to {least} or lower PartSize"):
        load(tmp_path, job)


def named(**modes: str | None) -> dict[str, Any]:
    """A job whose channels have these names and modes."""
    job = document()
    (channel,) = job["InputDataConfig"]
    job["InputDataConfig"] = [channel | {"ChannelName": name, "InputMode": m} for name, m in modes.items()]
    return job


def ranked(count: int, **modes: Any) -> dict[str, Any]:
    """Likewise; the first of them has `count` rank FIFOs."""
    job = named(**modes)
    job["InputDataConfig"][0]["Penstock"] = {"Ranks": count}
    return job


@pytest.mark.parametrize(
    ("modes", "clash"),
    [
        ({"train": "Pipe", "train_0": "File"}, True),
        ({"train_12": "File", "train": "Pipe"}, True),
        ({"train": "Pipe", "train_0": "Pipe"}, False),
        ({"train": "File", "train_0": "File"}, False),
        ({"train": "Pipe", "train_x": "File"}, False),
        ({"train": "Pipe", "eval_0": "File"}, False),
    ],
)
def test_a_directory_must_not_be_where_a_fifo_comes(modes: dict[str, str], clash: bool) -> None:
    if clash:
        with pytest.raises(ValueError, match="is also the FIFO of epoch"):
            Job.model_validate(named(**modes))
    else:
        Job.model_validate(named(**modes))


@pytest.mark.parametrize(
    ("modes", "words"),
    [
        ({"train": "Pipe", "train-1": "Pipe"}, "'train-1' has the name of a rank FIFO of channel 'train'"),
        ({"train": "Pipe", "train-7": "File"}, "'train-7' has the name of a rank FIFO of channel 'train'"),
        ({"train": "Pipe", "train-1_0": "File"}, "is also the FIFO of epoch 0 of Pipe channel 'train-1'"),
        ({"train": "File", "eval": "Pipe"}, "'train' in File mode: its Penstock section has Ranks"),
        ({"train": "Pipe", "train-x": "Pipe", "train_0": "File", "eval-1": "Pipe"}, None),
    ],
)
def test_no_channel_may_be_taken_for_a_rank_fifo(modes: dict[str, str], words: str | None) -> None:
    """`train_0` may be a directory then: `train` has no FIFO of its own."""
    document = ranked(2, **modes)
    if words is None:
        job = Job.model_validate(document)
        assert [job.fifos(channel) for channel in job.input_data_config][:2] == [
            ("train-0", "train-1"),
            ("train-x",),
        ]
    else:
        with pytest.raises(ValueError, match=words):
            Job.model_validate(document)


def test_a_rank_fifo_has_a_name_that_a_channel_could_have() -> None:
    Job.model_validate(ranked(10, **{"x" * 62: "Pipe"}))
    with pytest.raises(ValueError, match="more than 64 characters; shorten"):
        Job.model_validate(ranked(11, **{"x" * 62: "Pipe"}))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("RecordWrapperType", "RecordIO", "for Pipe mode only"),
        ("CompressionType", "Gzip", "for Pipe mode only"),
        ("ShuffleConfig", {"Seed": 1}, "files have no order"),
        ("ChannelName", "..", "cannot be a directory"),
        ("DataSource", AUGMENTED, "for Pipe mode only"),
        (
            "Penstock",
            {"Bandwidth": "1MB", "Integrity": "checksum"},
            "has Integrity, Bandwidth, for Pipe mode",
        ),
    ],
)
def test_what_only_a_stream_can_have_is_refused_for_files(
    tmp_path: Path, key: str, value: Any, words: str
) -> None:
    job = document(**{"InputDataConfig__0__InputMode": "File", f"InputDataConfig__0__{key}": value})
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, job)


def test_the_channel_s_mode_overrides_the_algorithm_s(tmp_path: Path) -> None:
    job = named(a="Pipe", b="File", c=None)
    job["AlgorithmSpecification"]["TrainingInputMode"] = "File"
    found = load(tmp_path, job)
    assert [channel.channel_name for channel in found.channels("Pipe")] == ["a"]
    assert [channel.channel_name for channel in found.channels("File")] == ["b", "c"]


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("s3://b", ("b", "")),
        ("https://b.s3.amazonaws.com/p/x%20y", ("b", "p/x y")),
        ("https://my.b.s3.eu-west-1.amazonaws.com/p", ("my.b", "p")),
        ("https://s3.eu-west-1.amazonaws.com/b/p/", ("b", "p/")),
        ("https://s3-us-west-2.amazonaws.com/b", ("b", "")),
        ("https://b.s3.cn-north-1.amazonaws.com.cn/p", ("b", "p")),
    ],
)
def test_both_kinds_of_address(uri: str, expected: tuple[str, str]) -> None:
    assert Job.model_validate(document(**{f"{S3}__S3Uri": uri})).input_data_config[0].source.uri == expected


@pytest.mark.parametrize(
    "uri",
    [
        "s3://.", "s3://..", "s3://./k", "s3://../k", "https://s3.amazonaws.com/../k",
        "https://s3.amazonaws.com/%2e%2E/k", "https://..s3.amazonaws.com/k", "https://a%2Fb.s3.amazonaws.com/k",
    ],
)  # fmt: skip
def test_a_bucket_that_is_a_step_of_a_path_is_refused(uri: str) -> None:
    """A proxy or server would resolve `/../k` to the bucket `k`, or to the service itself."""
    with pytest.raises(ValueError, match="does not name a bucket|is not an S3 URI"):
        Job.model_validate(document(**{f"{S3}__S3Uri": uri}))


def test_many_channels_and_names_in_two_cases_are_warned_of() -> None:
    assert warnings(Job.model_validate(named(train="Pipe", eval="Pipe"))) == []
    many = document(Penstock__MemoryBudget="1GiB")
    many["InputDataConfig"] = named(**{f"c{n}": "Pipe" for n in range(21)})["InputDataConfig"]
    assert warnings(Job.model_validate(many)) == ["21 channels; SageMaker itself takes at most 20"]
    (reported,) = warnings(Job.model_validate(named(Train="Pipe", train="Pipe")))
    assert "SM_CHANNEL_TRAIN" in reported
    (reported,) = warnings(Job.model_validate(ranked(2, **{"train": "Pipe", "TRAIN-0": "Pipe"})))
    assert "SM_CHANNEL_TRAIN-0" in reported


def test_dates_are_text(tmp_path: Path) -> None:
    job = load(
        tmp_path,
        "CreationTime: 2024-05-01T10:00:00Z\nHyperParameters: {since: 2024-05-01}\n"
        + yaml.safe_dump({"InputDataConfig": document()["InputDataConfig"]}),
    )
    assert job.hyper_parameters == {"since": "2024-05-01"}


@pytest.mark.parametrize("text", ["a: 1\na: 2\n", '{"a": 1, "a": 2}'])
def test_a_key_written_twice_is_no_silent_choice(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="'a' is written twice"):
        load(tmp_path, text)


def test_absent_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_job(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_job(tmp_path / "latin.yaml")


def test_the_job_is_frozen(tmp_path: Path) -> None:
    job = load(tmp_path, document())
    with pytest.raises(ValueError, match="frozen"):
        job.penstock.requests_in_flight = 5


INDEXED = {"Format": "TFRecord", "Index": "index"}


@pytest.mark.parametrize(
    ("extras", "channel", "words"),
    [
        (
            {"Records": {"Format": "fixed:8", "Index": "i"}},
            {},
            "Index has no meaning with Format: fixed:8",
        ),
        ({"Records": {"Format": "tar"}}, {"RecordWrapperType": "RecordIO"}, "which readers know; remove Rec"),
        ({"Records": {"Format": "TFRecord"}, "Join": "lines"}, {}, "Join: lines contradicts Records.Format"),
        (
            {
                "Join": "tar",
                "Records": {"Format": "fixed:512"},
                "Ranks": {"Count": 2, "GlobalBatch": 16},
            },
            {},
            "Join: tar contradicts Records.Format: fixed:512; correct one of the two",
        ),
        ({"Records": INDEXED | {"Format": "Parquet"}}, {}, "is no record format"),
        ({"Records": INDEXED | {"Index": "gs://b/"}}, {}, "gs://"),
        ({"Records": INDEXED}, {"CompressionType": "Gzip"}, "store the objects inflated; remove Index"),
        ({"Records": INDEXED}, {"RecordWrapperType": "RecordIO"}, "every object one record"),
        ({"Records": INDEXED}, {"InputMode": "File"}, "has Records, for Pipe mode only"),
        ({"SkipBytes": 8, "Join": "lines"}, {}, "Join and SkipBytes exclude each other"),
        ({"SkipBytes": 8, "RecordKeys": True}, {}, "SkipBytes: 8 makes one file of all objects"),
        ({"SkipBytes": 8}, {"RecordWrapperType": "RecordIO"}, "SkipBytes: 8 contradicts"),
        ({"SkipBytes": 8, "Ranks": {"Count": 2, "GlobalBatch": 4}}, {}, "SkipBytes: 8 joins"),
        ({"SkipBytes": 0}, {}, "SkipBytes"),
        ({"Join": "tar"}, {"RecordWrapperType": "RecordIO"}, "contradicts RecordWrapperType: RecordIO"),
        ({"Join": "zip"}, {}, "is not one of 'tar' or 'lines'"),
        ({"WhenFailed": "stop"}, {}, "is not one of 'hold' or 'close'"),
        ({"Transport": "buffered"}, {}, "it belongs in Penstock"),
    ],
)
def test_what_a_channel_asks_for_must_be_possible(
    tmp_path: Path, extras: dict[str, Any], channel: dict[str, str], words: str
) -> None:
    job = document(InputDataConfig__0__Penstock=extras)
    job["InputDataConfig"][0] |= channel
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, job)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("form", "channel"), [("TFRecord", {"CompressionType": "Gzip"}), ("fixed:8", {}), ("tar", {})]
)
def test_a_format_alone_is_for_readers(tmp_path: Path, form: str, channel: dict[str, str]) -> None:
    job = document(InputDataConfig__0__Penstock={"Records": {"Format": form}})
    job["InputDataConfig"][0] |= channel
    (loaded, *_) = load(tmp_path, job).input_data_config
    assert loaded.records.format == form
    assert loaded.learnt is None


def test_texts_of_attributes_cannot_be_joined(tmp_path: Path) -> None:
    """Objects that a manifest names can."""
    for names, refused in ((["shard-ref"], False), (["shard-ref", "label"], True)):
        job = document(InputDataConfig__0__Penstock={"Join": "tar"})
        source = {"S3DataType": "AugmentedManifestFile", "S3Uri": "s3://b/m", "AttributeNames": names}
        job["InputDataConfig"][0]["DataSource"]["S3DataSource"] = source
        if not refused:
            assert load(tmp_path, job).input_data_config[0].penstock.join == "tar"
            continue
        with pytest.raises(ConfigError, match="the attribute 'label' is a text; list only attributes"):
            load(tmp_path, job)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, None),
        ({"PET_NPROC_PER_NODE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "04"}, None),
        ({"PET_NPROC_PER_NODE": "auto"}, "PET_NPROC_PER_NODE is 'auto', no number"),
        ({"LOCAL_WORLD_SIZE": "4", "PET_NPROC_PER_NODE": "2"}, "PET_NPROC_PER_NODE=2 differ"),
        ({"LOCAL_WORLD_SIZE": "65"}, "less than or equal to 64"),
        ({"LOCAL_WORLD_SIZE": "3"}, "cannot be divided over 3 ranks"),
    ],
)
def test_ranks_may_be_as_many_as_the_launchers_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], words: str | None
) -> None:
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    ranks = {"Count": "from launcher", "GlobalBatch": 8}
    job = document(InputDataConfig__0__Penstock={"Ranks": ranks, "Records": {"Format": "fixed:10"}})
    if words is None:
        assert load(tmp_path, job).ranks == {"train": 4}
        return
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, job)
    assert words in str(caught.value)
