"""Mistakes of the command line and the job file: each message names what to write instead."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from sidecar.config.job import load_job
from streamer.errors import ConfigError
from tests.kit.harness import fill
from tests.kit.processes import penstock
from tests.kit.stub import S3Stub

JOB = """\
InputDataConfig:
- ChannelName: train
  DataSource:
    S3DataSource:
      S3DataType: S3Prefix
      S3Uri: s3://b/train/
Penstock:
  BaseDirectory: @BASE@
  MemoryBudget: 16MiB
  Admin: {Port: 0}
  Endpoint: {Url: @URL@, PathStyle: true}
"""
CHECK = "check -c job.yaml"
TABLE = os.environ.get("PENSTOCK_MISTAKES")
"""File that gets a line for each mistake: its name, the last line of the message, seconds, exit code."""


@dataclass(frozen=True)
class Mistake:
    """A command, after `old` was replaced by `new` in the job file, and words that its message has."""

    name: str
    words: str
    old: str = ""
    new: str = ""
    command: str = CHECK
    code: int = 2
    drop: str = ""
    """A variable of the environment that is unset."""


def extras(section: str) -> tuple[str, str]:
    """What to replace in the job file so that its channel has this `Penstock` section."""
    return "Penstock:\n", f"  Penstock: {{{section}}}\nPenstock:\n"


def then(changes: str, weights: str = "1, 2") -> tuple[str, str]:
    """A job with these changes of the weights of a mix."""
    others = ", ".join(f"s3://b/{name}/" for name in "xyz"[: weights.count(",")])
    return extras(f"AlsoFrom: [{others}], Mix: {{Weights: [{weights}], Then: [{changes}]}}")


MISTAKES = [
    # Keys
    Mistake("a key in capitals", "did you mean Url?", "{Url:", "{URL:"),
    Mistake("a required key left out", "S3DataSource.S3Uri: is required", "      S3Uri: s3://b/train/\n", ""),
    # Values
    Mistake("a duration with a unit", "write seconds, such as 300", "MemoryBudget: 16MiB", "GiveUpAfter: 5m"),
    Mistake("a number in words", "is not a whole number", "MemoryBudget: 16MiB", "RequestsInFlight: many"),
    Mistake("a port that is none", "less than or equal to 65535", "{Port: 0}", "{Port: 97810}"),
    Mistake("yes for a name", "for text, put it in quotes", "ChannelName: train", "ChannelName: yes"),
    Mistake("an endpoint without http://", "must be http:// or https://", "Url: @URL@", "Url: minio:9000"),
    Mistake("a bucket in the endpoint", "Endpoint.Url must not have the bucket in it",
            "Url: @URL@", "Url: @URL@/b", command="plan -c job.yaml", code=4),
    Mistake("a region with underscores", "such as eu-central-1",
            "{Url: @URL@", "{Region: eu_central_1, Url: @URL@"),
    Mistake("a relative directory", "such as /opt/ml", "@BASE@", "ml"),
    Mistake("a number for a hyperparameter", "put it in quotes",
            "Penstock:", "HyperParameters: {lr: 0.1}\nPenstock:"),
    Mistake("a glob without quotes", 'in quotes, such as "*.tar"', *extras("Include: [*.tar]")),
    Mistake("a glob that is no list", 'such as ["*.tar"]', *extras('Include: "*.tar"')),
    Mistake("an empty Include", "must have at least 1 item", *extras("Include: []")),
    Mistake("a glob with braces", "one glob for each alternative", *extras("Exclude: ['*.{a,b}']")),
    Mistake("a glob with the bucket", "write it without bucket and prefix", *extras("Include: [s3://b/x]")),
    Mistake("a limit without its unit", "write {Objects: 1000} or {Bytes: 10GB}", *extras("Limit: 1000")),
    Mistake("a limit of two kinds", "one of Objects, Bytes and", *extras("Limit: {Objects: 1, Bytes: 1}")),
    Mistake("a seed alone", "one of Objects, Bytes and Records", *extras("Limit: {Seed: 1}")),
    Mistake("a limit of nothing", "greater than or equal to 1", *extras("Limit: {Objects: 0}")),
    Mistake("a split that is no mapping", 'write {Of: 100, Take: "0-98"}', *extras("Split: 0-98/100")),
    Mistake("a fold too many", "of 100 the last one is 99", *extras("Split: {Of: 100, Take: 0-100}")),
    Mistake("folds that fall", "write 3-9", *extras("Split: {Of: 100, Take: 9-3}")),
    Mistake("a fold twice", "names the fold 5 twice", *extras("Split: {Of: 100, Take: '0-9, 5'}")),
    Mistake("folds in words", "write a range such as 0-98", *extras("Split: {Of: 100, Take: most}")),
    Mistake("a fold below 0", "1 mistake\njob.yaml:7: InputDataConfig[0].Penstock.Split: Take: '-1' names",
            *extras("Split: {Of: 100, Take: -1}")),
    Mistake("one fold of all", "greater than or equal to 2", *extras("Split: {Of: 1, Take: 0}")),
    Mistake("a limit of records without their places", "add Ranks: {Count: 1, GlobalBatch: 1} and Records",
            *extras("Limit: {Records: 10}")),
    Mistake("a split by block without the records' places",
            "add Ranks: {Count: 1, GlobalBatch: 1} and Records: {Format: TFRecord, Index: DIRECTORY}",
            *extras("Split: {Of: 2, Take: 0, By: block}")),
    Mistake("a block beside a split by block", "have 1 MiB on all hosts",
            "ChannelName: train", "ChannelName: train\n  ShuffleConfig: {Seed: 1}\n  Penstock: {"
            "Split: {Of: 2, Take: 0, By: block}, Ranks: {Count: 1, GlobalBatch: 1, Block: 2MiB}, "
            "Records: {Format: fixed:8}}"),
    Mistake("a mix of one prefix", "add AlsoFrom, or remove Mix", *extras("Mix: {Weights: [1, 2]}")),
    Mistake("a weight too few", "has 2 Weights, and the channel 3 prefixes",
            *extras("AlsoFrom: [s3://b/x/, s3://b/y/], Mix: {Weights: [1, 2]}")),
    Mistake("a mix without the records' places", "add Ranks: {Count: 1, GlobalBatch: 1} and Records",
            *extras("AlsoFrom: [s3://b/x/], Mix: {Weights: [1, 2]}")),
    Mistake("a weight in quotes", "Weights[1]: '2' is not a number",
            *extras("AlsoFrom: [s3://b/x/], Mix: {Weights: [1, '2']}")),
    Mistake("a mix with one weight", "must have at least 2 items",
            *extras("AlsoFrom: [s3://b/x/], Mix: {Weights: [1]}")),
    Mistake("a mix that is no mapping", "write {Weights: [7, 2, 1]}", *extras("Mix: [1, 2]")),
    Mistake("a weight of nothing", "greater than 0",
            *extras("AlsoFrom: [s3://b/x/], Mix: {Weights: [1, 0]}")),
    Mistake("a weight without an end", "finite number",
            *extras("AlsoFrom: [s3://b/x/], Mix: {Weights: [1, .inf]}")),
    Mistake("a change with a weight too few", "has 2 Weights, and Mix 3; write one weight for each",
            *then("{Epoch: 1, Weights: [1, 2]}", weights="1, 2, 3")),
    Mistake("changes out of order", "Then[1]: the change is not after step 4 of epoch 1; write the changes",
            *then("{Epoch: 1, Step: 4, Weights: [1, 1]}, {Epoch: 1, Weights: [2, 1]}")),
    Mistake("a change at the first step", "without the weights of the first step, which Mix.Weights has",
            *then("{Epoch: 0, Weights: [1, 1]}")),
    Mistake("a change after the last epoch", "Then[0].Epoch: epoch 3 is after the last one, 2; raise",
            "Penstock:\n", "  Penstock: {Records: {Format: fixed:8}, Ranks: {Count: 1, GlobalBatch: 1}, "
            "AlsoFrom: [s3://b/x/], Mix: {Weights: [1, 2], Then: [{Epoch: 3, Weights: [2, 1]}]}}\n"
            "Penstock:\n  Epochs: 3\n"),
    Mistake("a change without an epoch", "Epoch: is required", *then("{Step: 4, Weights: [1, 1]}")),
    Mistake("weights of a change too fine", "round them, as to three digits",
            *then("{Epoch: 1, Weights: [1, 0.333333]}")),
    Mistake("weights too fine", "round them, as to three digits",
            *extras("AlsoFrom: [s3://b/x/], Mix: {Weights: [1, 0.333333]}")),
    Mistake("a limit of mixed records", "remove one of the two",
            *extras("AlsoFrom: [s3://b/x/], Mix: {Weights: [1, 2]}, Limit: {Records: 5}, Ranks: {Count: 1, "
                    "GlobalBatch: 1}, Records: {Format: fixed:8}")),
    Mistake("a prefix within the other", "would be streamed twice", *extras("AlsoFrom: [s3://b/train/x/]")),
    Mistake("the same prefix again", "would be streamed twice", *extras("AlsoFrom: [s3://b/train/]")),
    Mistake("globs with an augmented manifest", "Include: has no meaning with AugmentedManifestFile",
            "S3Prefix\n      S3Uri: s3://b/train/\n",
            "AugmentedManifestFile\n      AttributeNames: [a]\n      S3Uri: s3://b/m\n"
            "  Penstock: {Include: [x]}\n"),
    Mistake("a split of an augmented manifest", "Split: has no meaning with AugmentedManifestFile",
            "S3Prefix\n      S3Uri: s3://b/train/\n",
            "AugmentedManifestFile\n      AttributeNames: [a]\n      S3Uri: s3://b/m\n"
            "  Penstock: {Split: {Of: 2, Take: 0}}\n"),
    Mistake("a prefix beside a manifest", "name all objects in one manifest",
            "S3Prefix\n      S3Uri: s3://b/train/\n",
            "ManifestFile\n      S3Uri: s3://b/m\n  Penstock: {AlsoFrom: [s3://b/x/]}\n"),
    Mistake("a channel's limit in the job's section", "`Penstock: {Limit: {Objects: 1000}}`",
            "MemoryBudget: 16MiB", "Limit: 5"),
    Mistake("cat: a sample without a limit", "--sample needs --limit",
            command="cat s3://b/train/ --sample 1 --endpoint-url @URL@"),
    Mistake("cat: a seed of 65 bits", "is no 64-bit integer",
            command="cat s3://b/train/ --limit 1 --sample 18446744073709551616 --endpoint-url @URL@"),
    Mistake("cat: a limit of nothing", "a limit of 0 selects nothing",
            command="cat s3://b/train/ --limit 0 --endpoint-url @URL@"),
    Mistake("plan: a split without a number", "write folds and their number, as in 0-98/100",
            command="plan -c job.yaml --split 0-98"),
    Mistake("cat: a fold that is not there", "of 10 the last one is 9",
            command="cat s3://b/train/ --split 10/10 --endpoint-url @URL@"),
    Mistake("plan: a glob that cannot be", "a [ has no ]", command="plan -c job.yaml --include a[b"),
    Mistake("Protect without a token", "needs a TokenFile", "{Port: 0}", "{Protect: all}"),
    # The file
    Mistake("a file that is not there", "did you mean job.yaml?", command="check -c jobs.yaml"),
    Mistake("a directory as the file", "cannot read ml: Is a directory", command="check -c ml"),
    Mistake("an index that a transport keeps out", "Transport: splice keeps them out",
            "Penstock:\n",
            "  Penstock: {Records: {Format: TFRecord, Index: i}}\nPenstock:\n  Transport: splice\n"),
    # The command line
    Mistake("a command misspelt", "Did you mean 'doctor'?", command="docter -c job.yaml"),
    Mistake("an option misspelt", "--json", command="plan -c job.yaml --jsn"),
    Mistake("a host index that is none", "is not below the number of hosts, 2",
            command="plan -c job.yaml --host-index 2 --host-count 2"),
    Mistake("an index without a count", "set --host-index and --host-count",
            command="plan -c job.yaml --host-index 2"),
    Mistake("set with a limit misspelt", "did you mean bandwidth?",
            command="set --token-file token bandwith=1MB"),
    Mistake("set with a unit that is none", "is no size, such as 200MB",
            command="set --token-file token bandwidth=fast"),
    Mistake("set with no token in the file", "`openssl rand -hex 16`",
            command="set --token-file job.yaml bandwidth=1MB"),
    Mistake("probe with https", "is not an http:// URL", command="probe --url https://127.0.0.1:9781"),
    Mistake("exec without a trainer", "Missing argument 'COMMAND...'", command="exec -c job.yaml"),
    Mistake("exec of a file that cannot run", "make it executable (chmod +x), or write its interpreter",
            command="exec -c job.yaml ./job.yaml", code=7),
    Mistake("no job file", "write -c FILE, set PENSTOCK_CONFIG", command="run"),
    Mistake("plan: -c misspelt", "Did you mean one of: '--config'", command="plan --confg job.yaml"),
    Mistake("a host index in words", "'one' is not a valid integer range", command="run --host-index one"),
    Mistake("cat without a URI", "Missing argument 'S3URI...'", command="cat"),
    Mistake("cat of a path", "write s3://BUCKET/PREFIX", command="cat train/x --endpoint-url @URL@"),
    Mistake("manifest without a URI", "write an S3URI, or --keys FILE", command="manifest"),
    Mistake("a state that is none", "must be what a reader's state_dict() returns",
            command="run -c job.yaml --resume {}"),
    Mistake("a state in another store", "is not an S3 URI: write s3://b/x",
            command="run -c job.yaml --resume gs://b/x"),
    # What is written by guess
    Mistake("a tab", "indent with spaces", "- ChannelName", "\t- ChannelName"),
    Mistake("a colon left out", "correct the indentation", "InputDataConfig:", "InputDataConfig"),
    Mistake("channels under another name", "InputDataConfig: is required", "InputDataConfig:", "Channels:"),
    Mistake("a type in small letters", "did you mean 'S3Prefix'?", "S3Prefix", "S3prefix"),
    Mistake("a mode that is none", "is not one of 'Pipe' or 'File'",
            "ChannelName: train", "ChannelName: train\n  InputMode: Fifo"),
    Mistake("a bucket that cannot be", "does not name a bucket: a name has letters", "s3://b/", "s3://My_B!/"),
    Mistake("a URI without s3://", "write s3://BUCKET/PREFIX", "s3://b/train/", "b/train/"),
    Mistake("a size in words", "write 512MiB or a number of bytes", "16MiB", "16 gigs"),
    Mistake("a part larger than the budget", "raise it to 128 MiB or lower PartSize",
            "MemoryBudget: 16MiB", "MemoryBudget: 16MiB\n  PartSize: 64MiB"),
    Mistake("a transport that is none", "is not one of 'auto', 'aiobotocore', 'buffered' or 'splice'",
            "MemoryBudget: 16MiB", "Transport: fast"),
    Mistake("a wrapper that is none", "is not one of 'None' or 'RecordIO'",
            "ChannelName: train", "ChannelName: train\n  RecordWrapperType: TFRecord"),
    Mistake("a compression in small letters", "did you mean 'Gzip'?",
            "ChannelName: train", "ChannelName: train\n  CompressionType: gzip"),
    Mistake("a record format that is none", "write TFRecord, RecordIO, lines, tar, or fixed:BYTES",
            *extras("Records: {Format: tfrecords}")),
    Mistake("a channel's name with a space", "use letters, digits",
            "ChannelName: train", "ChannelName: my data"),
    # What is not there
    Mistake("a server without TLS", "write http:// in Penstock.Endpoint.Url", "Url: @URL@", "Url: @TLS@",
            command="plan -c job.yaml", code=5),
    Mistake("cat of an object that is not there", "check S3URI (a prefix is case-sensitive)",
            command="cat s3://b/absent --endpoint-url @URL@ --path-style", code=4),
    Mistake("cat from a server that is down", "and --endpoint-url or AWS_DEFAULT_REGION right",
            command="cat s3://b/k --endpoint-url http://127.0.0.1:1 --give-up-after 0.1", code=5),
    Mistake("no keeper", "start `penstock keeper none` first",
            command="run -c job.yaml --keeper none", code=7),
    Mistake("no sidecar to probe", "is it running, and --url right?",
            command="probe --url http://127.0.0.1:1", code=1),
    Mistake("a trainer that is not there", "correct the command, install it",
            command="exec -c job.yaml trian", code=127),
    Mistake("a bundle that is not there", "Endpoint.CaBundle must name a PEM file", "{Url: @URL@,",
            "{CaBundle: none.pem, Url: https://x,", command="plan -c job.yaml"),
    Mistake("no such bucket", "S3-compatible server try Endpoint.PathStyle: true",
            "s3://b/", "s3://none/", command="plan -c job.yaml", code=4),
    Mistake("no such prefix", "no object matches this prefix; check S3Uri", "train/", "trian/",
            command="plan -c job.yaml", code=4),
    Mistake("no credentials", "no usable credentials",
            command="run -c job.yaml", code=3, drop="AWS_ACCESS_KEY_ID"),
    Mistake("no token file", "make the file with `openssl rand -hex 16`",
            "{Port: 0}", "{Port: 0, TokenFile: none}", command="run -c job.yaml", code=2),
    Mistake("a directory that cannot be made", "set Penstock.BaseDirectory", "@BASE@", "/proc/ml",
            command="run -c job.yaml", code=7),
    Mistake("no sidecar to restart", "give the sidecar's base directory",
            command="restart --base-directory ml", code=7),
]  # fmt: skip


@pytest.fixture
def written(stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Puts the values of this test into a text. The working directory has a token and a base directory."""
    fill(stub, [10], prefix="b/train/")
    (tmp_path / "ml/input/data").mkdir(parents=True)
    (tmp_path / "token").write_text("0123456789abcdef\n")
    monkeypatch.chdir(tmp_path)
    tls = stub.url.replace("http:", "https:")
    return lambda text: (
        text.replace("@BASE@", str(tmp_path / "ml")).replace("@URL@", stub.url).replace("@TLS@", tls)
    )


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_the_message_names_the_remedy(
    written: Callable[[str], str], mistake: Mistake, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mistake.drop:
        monkeypatch.delenv(mistake.drop)
    text = JOB.replace(mistake.old, mistake.new) if mistake.old else JOB
    assert (text != JOB) == bool(mistake.old)
    Path("job.yaml").write_text(written(text))
    began = time.monotonic()
    if mistake.command == CHECK:  # whose own output `test_commands` has
        with pytest.raises(ConfigError) as caught:
            load_job(Path("job.yaml"))
        message, code = str(caught.value), 2
    else:
        done = penstock(*written(mistake.command).split(), env=dict(os.environ))
        message, code = done.stderr.replace('\\"', '"') + done.stdout, done.returncode
    if TABLE:
        *_, last = message.strip().splitlines()
        with open(TABLE, "a", encoding="utf-8") as file:
            file.write(f"| {mistake.name} | {last} | {time.monotonic() - began:.1f} | {code} |\n")
    assert mistake.words in message, message
    assert code == mistake.code, message
    assert "Traceback" not in message
