"""Whatever a job file holds, it is carried out or refused by a ConfigError; nothing else leaves `load_job`.

Every key that the schema knows gets odd values, by itself and beside others. What is accepted goes on through
all that is computed from a job before storage is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sidecar.config.hosts import identify, local_job
from sidecar.config.job import Job, load_job
from sidecar.job.environment import input_data_config, resource_config, trainer_environment
from sidecar.job.layout import Layout, platform_resource_config
from streamer.errors import ConfigError
from streamer.s3.client.session import open_clients
from tests.kit.processes import penstock

WHOLE: dict[str, Any] = {
    "TrainingJobName": "job",
    "AlgorithmSpecification": {"TrainingInputMode": "Pipe"},
    "HyperParameters": {"epochs": "3", "sagemaker_program": "train.py"},
    "Environment": {"A": "b"},
    "ResourceConfig": {
        "InstanceGroups": [{"InstanceGroupName": "g", "InstanceCount": 1, "InstanceType": "ml.m5.large"}]
    },
    "InputDataConfig": [
        {
            "ChannelName": "train",
            "DataSource": {
                "S3DataSource": {
                    "S3DataType": "S3Prefix",
                    "S3Uri": "s3://b/p/",
                    "S3DataDistributionType": "FullyReplicated",
                    "InstanceGroupNames": ["g"],
                }
            },
            "ContentType": "text/csv",
            "CompressionType": "None",
            "RecordWrapperType": "None",
            "InputMode": "Pipe",
            "ShuffleConfig": {"Seed": 1},
            "Penstock": {"WhenFailed": "close", "Ranks": 2, "Bandwidth": "1MB"},
        },
        {
            "ChannelName": "labels",
            "DataSource": {
                "S3DataSource": {
                    "S3DataType": "AugmentedManifestFile",
                    "S3Uri": "s3://b/m",
                    "AttributeNames": ["a"],
                }
            },
        },
    ],
    "Penstock": {
        "BaseDirectory": "/tmp/ml",
        "MemoryBudget": "64MiB",
        "PartSize": "1MiB",
        "RequestsInFlight": 8,
        "GiveUpAfter": 10,
        "StallTimeout": 5,
        "HedgeBudget": 0.1,
        "DrainFor": 5,
        "FifoMode": "0640",
        "ShardBy": "objects",
        "Bandwidth": "1GB",
        "Endpoint": {"Url": "http://127.0.0.1:9000", "Region": "us-east-1", "PathStyle": True},
        "Admin": {"Host": "127.0.0.1", "Port": 0, "Protect": "limits"},
    },
}


RESOURCES = {
    "current_host": "algo-1",
    "hosts": ["algo-1"],
    "current_group_name": "g",
    "current_instance_type": "t",
    "network_interface_name": "eth0",
    "instance_groups": [{"instance_group_name": "g", "instance_type": "t", "hosts": ["algo-1"]}],
}
"""A platform's resourceconfig.json."""


def places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[Any]:
    """The path of every value of a document."""
    yield at
    inner = document.items() if isinstance(document, dict) else ()
    for step, value in enumerate(document) if isinstance(document, list) else inner:
        yield from places(value, (*at, step))


def known_keys() -> list[Any]:
    """Every key that the schema knows."""

    def of(part: dict[str, Any]) -> Iterator[Any]:
        if isinstance(part, dict):
            yield from part.get("properties", {})
            for inner in part.values():
                yield from of(inner)
        elif isinstance(part, list):
            for inner in part:
                yield from of(inner)

    return sorted(set(of(Job.model_json_schema(by_alias=True))))


texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["", " ", "\0", "a\0b", "\ud800", "\udcff", "/", "/a\0b", "..", "=", "\uff11\uff12", "\u0663MB",
         "1e400",
         "nan", "0x10", "-1MB", "9" * 5000, "x" * 5_000, "s3://", "s3://b", "https://[", "https://s3.amazonaws.com:x/b/k",
         "http://[::1", "http://h:99999999", "http://h:0", "http://a..b", "http://[zz]",
         "http://h:\uff11", "http://\xe9",
         "http://" + "a" * 300, "[" * 2500, "{}", "[]", "5", "NaN", "1" * 19, "yes", "=", "\u202e", "\x1b[2J"]
    ),
)  # fmt: skip
scalars = st.one_of(
    st.none(), st.booleans(), texts, texts,
    st.integers(), st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**40, 10**400, 65536, 100_001]),
    st.floats(), st.sampled_from([1e308, 5e-324, -0.0]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
PLACES = [place for place in places(WHOLE) if place]


@st.composite
def odd_files(draw: st.DrawFn) -> str:
    """The text of a job file with some values replaced, added or removed."""
    document = copy.deepcopy(WHOLE)
    for place in draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=2)):
        at: Any = document
        try:
            for step in place[:-1]:
                at = at[step]
            how = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
            if how == "replace":
                at[place[-1]] = draw(values)
            elif how == "remove":
                del at[place[-1]]
            elif isinstance(at, dict):
                at[draw(st.one_of(st.sampled_from(known_keys()), texts))] = draw(values)
        except (LookupError, TypeError):
            continue  # an earlier change has removed what is around it
    return json.dumps(document, ensure_ascii=draw(st.booleans()))


def carried_out(path: Path) -> Job:
    """All that is computed from a job file before storage is asked. Raises ConfigError."""
    job = load_job(path)
    layout = Layout("/tmp/none")
    hosts = identify(job, environment={}, document=platform_resource_config(layout))
    job = local_job(job, hosts)
    job.penstock.endpoint.resolved()
    job.penstock.admin.token()
    json.dumps([input_data_config(job), resource_config(hosts)])
    for name, value in trainer_environment(layout, job, hosts).items():
        assert b"\0" not in os.fsencode(name) + os.fsencode(value)  # as execve(2) takes them
        assert "=" not in name
    assert b"\0" not in os.fsencode(job.penstock.base_directory or "")
    return job


@contextlib.contextmanager
def perhaps_refused() -> Iterator[None]:
    """Nothing, or a ConfigError of a bounded length."""
    try:
        yield
    except ConfigError as error:
        reported = str(error)
        assert 0 < len(reported) < 60_000


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("odd") / "job.yaml"


def written(file: Path, text: str) -> Path:
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    return file


@settings(max_examples=150, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(odd_files())
def test_a_job_file_is_valid_or_refused(file: Path, text: str) -> None:
    with perhaps_refused():
        carried_out(written(file, text))


@pytest.mark.parametrize(
    "text",
    [
        "Penstock: {}", "x: &a [*a]", "? [a]\n: b", "!!python/object/apply:os.system [echo]: 1", "<<: {a: 1}",
        'x: !!int ""', "x: !!bool maybe", "x: !!timestamp x", "x: !!binary =", "x: !!set {a}",
        "x: !!omap [1]",
        "x: 1:99:99", "x: *none", "---\na: 1", "\t", "x: '", "%TAG", "x: !!float x", ".nan: 1\n.NaN: 2",
        "2001-01-01: 1", "null: 1", "x: 0b", "x: 0x_", "\0", "\x85", "\ufeff", "x: " + "[" * 600,
    ],
)  # fmt: skip
def test_odd_yaml_is_valid_or_refused(file: Path, text: str) -> None:
    with perhaps_refused():
        load_job(written(file, f"{yaml.safe_dump(WHOLE)}\n{text}"))


def with_endpoint(**endpoint: str) -> str:
    document = copy.deepcopy(WHOLE)
    document["Penstock"]["Endpoint"] = endpoint
    return json.dumps(document)


hosts_of_urls = st.one_of(
    texts, st.ip_addresses(v=6).map(lambda ip: f"[{ip}]"), st.ip_addresses(v=4).map(str),
    st.from_regex(r"[a-z0-9._-]{1,20}(:[0-9]{0,9})?", fullmatch=True),
)  # fmt: skip


@settings(max_examples=50, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(url=hosts_of_urls.map("http://{}".format), region=st.one_of(st.just("us-east-1"), texts))
@example("http://[::1", "us-east-1")
@example("http://h:99999999", "us-east-1")
@example("http://a..b", "us-east-1")
@example("http://ok", "")
@example("http://[::1]:9000", "eu-west-1")
def test_an_endpoint_is_valid_or_refused(file: Path, credentials: None, url: str, region: str) -> None:
    """Up to the clients, which botocore makes."""

    async def opened() -> None:
        job = carried_out(written(file, with_endpoint(Url=url, Region=region)))
        async with open_clients(job.penstock.endpoint.resolved(), connections=1) as clients:
            assert clients.endpoint_url == url

    with perhaps_refused():
        asyncio.run(opened())


@pytest.mark.parametrize("url", ["http://[::1", "http://h:99999999", "http://a..b", "http://h:0"])
def test_an_endpoint_of_the_environment_is_refused_alike(file: Path, url: str, tmp_path: Path) -> None:
    document = copy.deepcopy(WHOLE)
    document["Penstock"] = {"BaseDirectory": str(tmp_path / "ml"), "Admin": {"Port": 0}}
    path = written(file, json.dumps(document))
    done = penstock("run", "-c", str(path), env={**os.environ, "AWS_ENDPOINT_URL": url})
    assert done.returncode == 2, done.stderr
    assert "the endpoint is invalid" in done.stderr
    assert "AWS_ENDPOINT_URL" in done.stderr


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("BaseDirectory", "/tmp/a\0b", "holds a NUL"),
        ("GiveUpAfter", float("inf"), "finite"),
        ("DrainFor", 1e300, "less than or equal to 31536000"),
        ("StallTimeout", True, "must not be true"),
        ("Admin", {"Host": ""}, "is no address or host name"),
    ],
)
def test_values_that_no_call_takes(
    file: Path, key: str, value: str | float | dict[str, str], words: str
) -> None:
    document = copy.deepcopy(WHOLE)
    document["Penstock"][key] = value
    with pytest.raises(ConfigError, match=words):
        load_job(written(file, json.dumps(document)))


def bomb(levels: int, width: int = 9) -> str:
    """YAML whose aliases expand to width ** levels values."""
    lines = [f"x0: &x0 [{','.join('x' * width)}]"]
    lines += [f"x{n}: &x{n} [{','.join([f'*x{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join([*lines, f"InputDataConfig: *x{levels - 1}"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (bomb(9), "expands to more than 100000 values; remove aliases"),
        ("a: &a [*a]", "expands to more than"),
        ("a: " + "x" * 300_000, "more than 256 KiB"),
        ('{"a": "' + "x" * 2_000_000 + '"}', "more than 1024 KiB"),
        (json.dumps({f"Key{n}": n for n in range(20_000)}), "and 19951 more mistakes"),
    ],
)
def test_a_large_file_is_refused_soon(file: Path, text: str, words: str) -> None:
    before = time.process_time()
    with pytest.raises(ConfigError, match=words):
        load_job(written(file, text))
    assert time.process_time() - before < 10


def test_an_endless_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than 256 KiB"):
        load_job("/dev/zero")


def test_aliases_may_be_used(file: Path) -> None:
    document = yaml.safe_dump(WHOLE).replace("ContentType: text/csv", "ContentType: &kind text/csv")
    document += "VpcConfig: [*kind, *kind]\n"
    assert load_job(written(file, document)).input_data_config[0].content_type == "text/csv"


@settings(max_examples=100, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(
    place=st.sampled_from([place for place in places(RESOURCES) if place]),
    value=values,
)
def test_a_platform_s_file_is_valid_or_refused(file: Path, place: Any, value: Any) -> None:
    layout = Layout(str(file.parent))
    os.makedirs(layout.config, exist_ok=True)
    document = copy.deepcopy(RESOURCES)
    at: Any = document
    for step in place[:-1]:
        at = at[step]
    at[place[-1]] = value
    with open(os.path.join(layout.config, "resourceconfig.json"), "w", encoding="ascii") as resources:
        json.dump(document, resources)
    plain = copy.deepcopy(WHOLE)
    del plain["ResourceConfig"]
    del plain["InputDataConfig"][0]["DataSource"]["S3DataSource"]["InstanceGroupNames"]
    job = load_job(written(file, json.dumps(plain)))
    with perhaps_refused():
        hosts = identify(job, environment={}, document=platform_resource_config(layout))
        for name, text in trainer_environment(layout, local_job(job, hosts), hosts).items():
            assert b"\0" not in os.fsencode(name) + os.fsencode(text)
