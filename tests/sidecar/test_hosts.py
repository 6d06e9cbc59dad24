"""Which host of how many: every source, their contradictions, and the shards that follow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.config.hosts import Hosts, identify, local_job
from sidecar.config.job import Job
from streamer.errors import ConfigError
from streamer.plan import Shard
from tests.kit.harness import fill
from tests.kit.processes import job as process_job
from tests.kit.processes import penstock, write_job
from tests.kit.stub import S3Stub


def job(
    *,
    resources: dict[str, list[dict[str, object]]] | None = None,
    shard: bool = False,
    groups: Any = (),
) -> Job:
    source = {"S3DataType": "S3Prefix", "S3Uri": "s3://b/", "InstanceGroupNames": list(groups)}
    if shard:
        source["S3DataDistributionType"] = "ShardedByS3Key"
    channel = {"ChannelName": "train", "DataSource": {"S3DataSource": source}}
    document = {"InputDataConfig": [channel]}
    return Job.model_validate(document | ({"ResourceConfig": resources} if resources else {}))


def found(
    environment: dict[str, str] | None = None,
    *,
    flags: tuple[int | None, int | None] = (None, None),
    document: dict[str, Sequence[str]] | None = None,
    **changes: Any,
) -> tuple[int, int]:
    hosts = identify(job(**changes), flags=flags, environment=environment or {}, document=document)
    return hosts.index, len(hosts.names)


def tf_config(kind: str, index: int, **cluster: Any) -> dict[Any, Any]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4)),
        ({"RANK": "", "WORLD_SIZE": ""}, (0, 1)),
        ({"RANK": "11", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, (1, 2)),
        ({"RANK": "11", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1"}, (1, 2)),
        ({"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_SIZE": "8"}, (1, 2)),
        ({"NODE_RANK": "1", "NNODES": "2"}, (1, 2)),
        ({"JOB_COMPLETION_INDEX": "1", "NNODES": "2"}, (1, 2)),
        (tf_config("worker", 1, worker=["a:1", "b:1"]), (1, 2)),
        (tf_config("worker", 0, chief=["c:1"], worker=["a:1", "b:1"], ps=["p:1"]), (1, 3)),
        (tf_config("chief", 0, chief=["c:1"], worker=["a:1"]), (0, 2)),
        ({"TF_CONFIG": "{}"}, (0, 1)),
    ],
)
def test_every_launcher_s_variables(environment: dict[str, str], expected: tuple[int, int]) -> None:
    assert found(environment) == expected


def test_files_flags_and_job_file() -> None:
    document = {"current_host": "algo-2", "hosts": ["algo-2", "algo-10", "algo-1"]}
    assert found(document=document) == (2, 3)  # sorted lexicographically: algo-1, algo-10, algo-2
    assert found(flags=(1, 2)) == (1, 2)
    assert found({"JOB_COMPLETION_INDEX": "1"}, flags=(None, 2)) == (1, 2)
    assert found({"JOB_COMPLETION_INDEX": "3"}, resources={"InstanceCount": 4}) == (3, 4)
    assert found({"RANK": "1", "WORLD_SIZE": "2"}, flags=(1, 2)) == (1, 2)


def test_a_request_for_many_hosts_runs_on_one_if_told_so() -> None:
    assert found(resources={"InstanceCount": 8}, flags=(None, 1)) == (0, 1)


@pytest.mark.parametrize(
    ("environment", "changes", "words"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, {"flags": (0, 2)}, "host index 0, but RANK/WORLD_SIZE gives 1"),
        ({"NODE_RANK": "0", "NNODES": "3"}, {"flags": (0, 2)}, "gives number of hosts 2, but NODE_RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {"resources": {"InstanceCount": 4}}, "ResourceConfig of the job"),
        ({"RANK": "8", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "0"}, {}, "GROUP_RANK"),
        ({"JOB_COMPLETION_INDEX": "0"}, {}, "nothing says of how many; set --host-index"),
        ({}, {"resources": {"InstanceCount": 4}}, "--host-count 1 runs it on one host"),
        ({}, {"flags": (2, 2)}, "host index 2 is not below"),
        ({"NNODES": "1:4"}, {}, "NNODES='1:4' is not a number"),
        ({"RANK": "-1"}, {}, "RANK='-1'"),
        ({"WORLD_SIZE": "0"}, {}, "1 or more"),
        ({"RANK": "0", "WORLD_SIZE": "9", "LOCAL_WORLD_SIZE": "8"}, {}, "not a multiple"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, {}, "and LOCAL_WORLD_SIZE, the number of"),
        ({"TF_CONFIG": "["}, {}, "cannot be understood"),
        ({"TF_CONFIG": "[]"}, {}, "cannot be understood"),
        (tf_config("ps", 0, worker=["a:1"], ps=["p:1"]), {}, "ps 0, which is none of the 1 tasks"),
        ({}, {"document": {"current_host": "x", "hosts": ["a"]}}, "current_host 'x' is not in hosts"),
        (
            {},
            {"document": {"current_host": "a", "hosts": ["a"], "instance_groups": [{}]}},
            "instance_groups cannot be understood",
        ),
    ],
)
def test_contradictions_and_gaps_are_errors(environment: dict[str, str], changes: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        found(environment, **changes)
    assert words in str(caught.value)


counts = st.integers(1, 40)


@given(count=counts, data=st.data(), local=st.integers(1, 8))
def test_all_sources_agree_with_one_another(count: int, data: st.DataObject, local: int) -> None:
    """However a cluster is described, and in whatever mix, a host gets the same place."""
    index = data.draw(st.integers(0, count - 1))
    rank = index * local + data.draw(st.integers(0, local - 1))
    sources = [
        {"RANK": str(rank), "WORLD_SIZE": str(count * local), "LOCAL_WORLD_SIZE": str(local)},
        {"NODE_RANK": str(index), "NNODES": str(count)},
        {"JOB_COMPLETION_INDEX": str(index), "NNODES": str(count)},
        tf_config("worker", index, worker=[f"h{n}:1" for n in range(count)]),
    ]
    chosen = data.draw(st.lists(st.sampled_from(sources), min_size=1))
    environment = {name: value for source in chosen for name, value in source.items()}
    assert found(environment) == (index, count)


@given(count=counts, data=st.data())
def test_what_we_write_is_read_back_as_the_same_place(count: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, count - 1))
    hosts = identify(job(), flags=(index, count), environment={})
    assert list(hosts.names) == sorted(hosts.names)
    document = {"current_host": hosts.current, "hosts": list(hosts.names)}
    again = identify(job(), environment={}, document=document)
    assert (again.index, again.names) == (index, hosts.names)


@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any), data=st.data())
def test_shards_cover_the_listed_groups_once(sizes: list[int], data: st.DataObject) -> None:
    """Over all hosts: each shard of the group's hosts exactly once, and nothing for the others."""
    names = [f"g{n}" for n in range(len(sizes))]
    wanted = data.draw(st.lists(st.sampled_from(names), unique=True))
    resources = {
        "InstanceGroups": [
            {"InstanceGroupName": name, "InstanceCount": size, "InstanceType": "t"}
            for name, size in zip(names, sizes, strict=True)
        ]
    }
    asked = job(resources=resources, shard=True, groups=wanted)
    everyone = [identify(asked, flags=(n, None), environment={}) for n in range(sum(sizes))]
    shards = [hosts.shard(asked.input_data_config[0].source) for hosts in everyone]
    due = sum(size for name, size in zip(names, sizes, strict=True) if name in wanted or not wanted)
    assert [shard for shard in shards if shard] == [Shard(n, due) for n in range(due)]
    for hosts, shard in zip(everyone, shards, strict=True):
        assert hosts.group is not None
        assert (shard is not None) == (not wanted or hosts.group.name in wanted)
        assert len(local_job(asked, hosts).input_data_config) == (shard is not None)


def cluster_job(stub: S3Stub, tmp_path: Path) -> dict[str, Any]:
    document = process_job(stub.url, tmp_path / "ml", "b/train/", "b/eval/")
    document["ResourceConfig"] = {
        "InstanceGroups": [
            {"InstanceGroupName": "gpu", "InstanceType": "t", "InstanceCount": 2},
            {"InstanceGroupName": "cpu", "InstanceType": "t", "InstanceCount": 1},
        ]
    }
    document["InputDataConfig"][0]["DataSource"]["S3DataSource"]["InstanceGroupNames"] = ["gpu"]
    return document


@pytest.mark.parametrize(("index", "channels"), [(1, ["train", "eval"]), (2, ["eval"])])
def test_a_host_has_only_its_groups_channels(
    stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int, channels: list[str]
) -> None:
    """A process that a Kubernetes Job has started: the environment says which host it is."""
    fill(stub, [10], prefix="b/train/")
    fill(stub, [10], prefix="b/eval/")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
    path = write_job(tmp_path / "job.yaml", cluster_job(stub, tmp_path))
    planned = penstock("plan", "--json", "-c", path)
    assert planned.returncode == 0, planned.stderr
    found = json.loads(planned.stdout)
    assert found["host"] == {"index": index, "hosts": ["algo-1", "algo-2", "algo-3"]}
    assert list(found["channels"]) == channels
    done = penstock("exec", "-c", path, "sh", "-c", 'echo "$SM_CURRENT_HOST" "$SM_CHANNELS"')
    assert done.stdout.split() == [f"algo-{index + 1}", json.dumps(sorted(channels), separators=(",", ":"))]


def test_a_host_without_channels_serves_none(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [10], prefix="b/train/")
    document = cluster_job(stub, tmp_path)
    del document["InputDataConfig"][1]
    path = write_job(tmp_path / "job.yaml", document)
    done = penstock("exec", "-c", path, "--host-index", "2", "sh", "-c", 'echo "$SM_CHANNELS"')
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_a_host_without_an_index_ends_the_process(stub: S3Stub, tmp_path: Path) -> None:
    done = penstock("plan", "-c", write_job(tmp_path / "job.yaml", cluster_job(stub, tmp_path)))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_replicated_data_is_whole_everywhere() -> None:
    hosts = Hosts(1, ("a", "b"))
    assert hosts.shard(job().input_data_config[0].source) == Shard(0, 1)


def test_an_unknown_group_is_an_error() -> None:
    hosts = identify(job(), environment={})
    with pytest.raises(ConfigError, match="no instance group is called 'x'; this cluster has none"):
        local_job(job(groups=["x"]), hosts)
