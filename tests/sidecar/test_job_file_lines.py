"""Mistakes in a job file: the line of each, in YAML and JSON, and what to write instead."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidecar.config.document import FileMistakes, read_document
from sidecar.config.job import load_job
from sidecar.config.retired import RETIRED
from tests.sidecar.test_config import document

YAML = """\
# A comment, so that line 1 has no key.
InputDataConfig:
- ChannelName: train
  DataSource:
    S3DataSource: {S3DataType: S3Prefix,
                   S3Uri: "s3://b/train/"}
- ChannelName: eval
  DataSource: {S3DataSource: {S3DataType: S3Prefix, S3Uri: "s3://b/eval/"}}
Penstock:
  Endpoint:
    PathStyle: true
"""
JSON = """\
{ "InputDataConfig": [
    {"ChannelName": "train", "DataSource":
      {"S3DataSource": {"S3DataType": "S3Prefix",
                        "S3Uri": "s3://b/[{\\"train:"}}},
    {"ChannelName":
       "eval",
     "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://b/eval/"}}}],
  "Penstock": {
    "Ranks": [], "Endpoint": {
      "PathStyle": true}}}
"""
PENSTOCK = YAML.replace("Endpoint:", "!\n  Endpoint:")
S3URI = ("InputDataConfig", 0, "DataSource", "S3DataSource", "S3Uri")


@pytest.mark.parametrize(
    ("path", "in_yaml", "in_json"),
    [
        ((), None, None),
        (("InputDataConfig",), 2, 1),
        (("InputDataConfig", 0), 3, 2),
        (("InputDataConfig", 0, "ChannelName"), 3, 2),
        (S3URI, 6, 4),
        (("InputDataConfig", 1), 7, 5),
        (("InputDataConfig", 1, "DataSource", "S3DataSource", "S3Uri"), 8, 7),
        (("InputDataConfig", 1, "InputMode"), 7, 5),  # absent: the channel that lacks it
        (("Penstock", "Endpoint", "PathStyle"), 11, 10),
        (("Penstock", "Admin", "Port"), 9, 8),
    ],
)
def test_every_value_has_the_line_of_its_key(
    tmp_path: Path, path: Sequence[str | int], in_yaml: int | None, in_json: int | None
) -> None:
    for text, line in ((YAML, in_yaml), (JSON, in_json)):
        (tmp_path / "job").write_text(text)
        assert read_document(str(tmp_path / "job")).line(path) == line


def reported(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(FileMistakes) as caught:
        load_job(tmp_path / "job.yaml")
    return [line.replace(str(tmp_path) + "/", "") for line in str(caught.value).splitlines()]


def test_each_mistake_has_a_line_of_its_own_that_names_file_line_and_key(tmp_path: Path) -> None:
    text = YAML.replace("PathStyle", "pathStyle").replace("ChannelName: eval", "ChannelName: e val")
    assert reported(tmp_path, text) == [
        "job.yaml has 2 mistakes",
        "job.yaml:7: InputDataConfig[1].ChannelName: 'e val' is not allowed; use letters, digits, '.', '-' "
        "and '_'",
        "job.yaml:11: Penstock.Endpoint.pathStyle: is not a key that Penstock supports here; did you mean "
        "PathStyle?",
    ]


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        (YAML.replace("eval", "train"), "job.yaml:7: InputDataConfig[1].ChannelName: two channels"),
        (PENSTOCK.replace("!", "MemoryBudget: 1MiB"), "job.yaml:10: Penstock.MemoryBudget: "),
        (PENSTOCK.replace("!", "ShardBy: bytes"), "job.yaml:10: Penstock.ShardBy: ShardBy"),
        (
            YAML.replace("eval\n", "eval\n  InputMode: File\n  CompressionType: Gzip\n"),
            "job.yaml:7: InputDataConfig[1]: channel 'eval' in File mode",
        ),
        (
            PENSTOCK.replace("  !", "\tAdmin: {}"),
            "job.yaml:10: cannot understand this YAML: a tab stands where only spaces may; indent with space",
        ),
        (YAML + "InputDataConfig: []\n", "job.yaml:12: cannot understand this YAML: key 'InputDataConfig'"),
        (YAML + "Environment: a: b\n", "job.yaml:12: cannot understand this YAML: a ':' is not"),
        (
            YAML.replace("Penstock:", "Penstock"),
            "job.yaml:9: cannot understand this YAML: could not find expected ':'; correct the indentation, "
            "or add the ':' after the key",
        ),
        (JSON.replace('"Ranks": []', '"Ranks": 4'), "job.yaml:9: Penstock.Ranks: "),
    ],
    ids=["same name", "budget", "ShardBy", "File mode", "tab", "twice", "colon", "no colon", "JSON"],
)  # fmt: skip
def test_rules_between_keys_and_syntax_errors_have_a_line(tmp_path: Path, text: str, begin: str) -> None:
    header, line = reported(tmp_path, text)
    assert header == "job.yaml has 1 mistake"
    assert line.startswith(begin)


def test_a_comma_too_many_has_its_line_and_remedy(tmp_path: Path) -> None:
    """Python 3.13 has words of its own for it."""
    _, line = reported(tmp_path, JSON.replace("true}}}", "true,}}}"))
    assert line.startswith("job.yaml:10: cannot understand this JSON: ")
    assert "); remove a comma that is too many, or add the quotes" in line


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("Penstock__Memory", "1GiB", "did you mean MemoryBudget?"),
        ("Penstock__requests-in-flight", 3, "did you mean RequestsInFlight?"),
        ("input_data_config", [], "did you mean InputDataConfig?"),
        ("Penstock__S3Uri", "s3://b", "it belongs in InputDataConfig[].DataSource.S3DataSource"),
        ("Penstock__path_style", True, "PathStyle belongs in Penstock.Endpoint"),
        ("Url", "http://h", "it belongs in Penstock.Endpoint"),
        ("Penstock__Zebra", 1, "remove it"),
        (
            "Penstock__Hosts",
            {"Index": 0, "Count": 2},
            "Penstock.Hosts: is retired: give each host --host-index",
        ),
        ("Penstock__RequestPrices", {"Get": 0.1}, "Penstock.RequestPrices: is retired: remove it"),
        ("Penstock__Endpoint__Profile", "me", "Penstock.Endpoint.Profile: is retired: set AWS_PROFILE"),
        *(
            ("Penstock__Processes", each, "Penstock.Processes: is retired: one process")
            for each in (0, "auto")
        ),
        *(
            (
                "InputDataConfig__0__Penstock",
                {"WhenChanged": each},
                "InputDataConfig[0].Penstock.WhenChanged: is retired: remove it; an object that changes",
            )
            for each in ("fail", "refetch", "skip")
        ),
        (
            "InputDataConfig__0__Penstock",
            {"WhenFailed": "poison"},
            "InputDataConfig[0].Penstock.WhenFailed: 'poison' is retired: use close, or hold",
        ),
        (
            "InputDataConfig__0__Penstock",
            {"Framing": "TFRecord"},
            "InputDataConfig[0].Penstock.Framing: is retired: remove it",
        ),
        ("InputDataConfig__0__Penstock", {"Join": "arrow"}, "'arrow' is retired: set RecordWrapperType"),
        *(
            ("InputDataConfig__0__Penstock", {"Ranks": {"Count": 2, "GlobalBatch": 2, key: value}}, words)
            for key, value, words in (
                (
                    "Batch",
                    8,
                    "Ranks.Batch: is retired: set GlobalBatch to Batch times Count, times the hosts",
                ),
                (
                    "Index",
                    "i",
                    "Ranks.Index: is retired: write Records: {Format: TFRecord, Index: DIRECTORY}",
                ),
                ("RecordSize", 8, "Ranks.RecordSize: is retired: write Records: {Format: fixed:BYTES}"),
            )
        ),
        (
            "InputDataConfig__0__Penstock",
            {"LearnIndex": {"To": "i", "Format": "lines"}},
            "LearnIndex: is retired: write Records: {Format: TFRecord, Index: DIRECTORY}, with the format",
        ),
        ("Penstock__Transport", "Splice", "did you mean 'splice'?"),
        ("InputDataConfig__0__CompressionType", "gzip", "did you mean 'Gzip'?"),
        ("Penstock__MemoryBudget", "1,5 GB", "'1,5 GB' is not a size; write 512MiB or a number of bytes"),
        ("Penstock__Bandwidth", "100MB/s", "'100MB/s' is not a size; leave out '/s'"),
        ("Penstock__MemoryBudget", "512MB,", "'512MB,' is not a size"),
        ("Penstock__MemoryBudget", "\u0663GB", "is not a size"),
        ("Penstock__Bandwidth", 2**60 + 1, "must be less than or equal to 1152921504606846976"),
        ("Penstock__Bandwidth", "9" * 40, "must be less than or equal to 1152921504606846976"),
        ("Penstock__GiveUpAfter", 0, "must be greater than 0; write seconds, such as 300"),
        ("Penstock__Endpoint__PathStyle", "maybe", "'maybe' is neither true nor false"),
        ("Penstock__Endpoint", "http://h", "must be a mapping of keys to values, and is a text"),
        ("InputDataConfig", {"train": {}}, "must be a list, and is a mapping; put '- ' before each item"),
    ],
)
def test_the_message_says_what_to_write(tmp_path: Path, path: str, value: Any, words: str) -> None:
    for dump in (yaml.safe_dump, json.dumps):
        assert words in " ".join(reported(tmp_path, dump(document(**{path: value}))))


def test_a_retired_key_or_value_of_a_channel_is_refused_with_what_to_use_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("Zebra", "Fetch: striped"):
        monkeypatch.setitem(RETIRED, f"InputDataConfig[].Penstock.Ranks.{each}", "write a lion")
    ranks = "InputDataConfig__0__Penstock", {"Ranks": {"Count": 2, "Zebra": 1, "Fetch": "striped"}}
    header, fetch, zebra = reported(tmp_path, yaml.safe_dump(document(**dict([ranks]))))
    assert header == "job.yaml has 2 mistakes"
    assert fetch.endswith("Fetch: 'striped' is retired: write a lion")
    assert zebra.endswith("Zebra: is retired: write a lion")


@pytest.mark.parametrize(
    ("text", "words"), [("", "is empty"), ("- 1\n", "is a list"), ("job\n", "is a text")]
)
def test_a_file_without_a_mapping(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(Exception, match=f"must hold one mapping with InputDataConfig, and {words}"):
        load_job(tmp_path / "job.yaml")
