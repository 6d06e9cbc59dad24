"""Identity of this host (its index and the number of hosts), from flags, environment, files and the job.

Every source makes a claim (an index, a count, or both) and all claims must agree: if two hosts read the same
shard, or no host reads a shard, the only symptom is a worse model. The results are

    both known and agreed      the answer
    nothing claimed at all     one host
    a contradiction            an error that names both values and their sources
    an index without a count,  an error that says what to set
    or several hosts without an index

The job's own ResourceConfig says how many hosts SageMaker would start; explicit flags override it (and
nothing else), so that a request for eight hosts can run on one.

Hosts are counted, not GPU processes: under torchrun RANK and WORLD_SIZE are divided by LOCAL_WORLD_SIZE.
The host of index i is the i-th of the lexicographically sorted names (contract §2.2), so that a trainer
that takes `hosts.index(current_host)` for its rank gets the same i.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from streamer.errors import ConfigError
from streamer.launchers import LAUNCHERS
from streamer.plan import Shard

if TYPE_CHECKING:
    from sidecar.config.job import Job
    from sidecar.config.sources import S3DataSource

HOMOGENEOUS = "homogeneousCluster"
"""SageMaker's name for the only group of a job without instance groups."""
MOST_HOSTS = 100_000
"""Most hosts of a job. A higher number is a mistake, and the names of the hosts would fill memory."""
_FIX = "set --host-index and --host-count"


@dataclass(frozen=True, slots=True)
class Claim:
    """Index and count by one source; None for a number that the source does not give."""

    source: str
    index: int | None = None
    count: int | None = None


@dataclass(frozen=True, slots=True)
class HostGroup:
    """An instance group and its hosts."""

    name: str
    instance_type: str
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Hosts:
    """The hosts of the cluster, and which of them this one is."""

    index: int
    """Index of this host in `names`."""
    names: tuple[str, ...]
    """Names of all hosts, sorted lexicographically."""
    groups: tuple[HostGroup, ...] = ()
    instance_type: str | None = None
    document: Mapping[str, Any] | None = None
    """The platform's own resourceconfig.json, which the sidecar does not replace; None if there is none."""

    @property
    def current(self) -> str:
        return self.names[self.index]

    @property
    def group(self) -> HostGroup | None:
        """Instance group of this host."""
        return next((group for group in self.groups if self.current in group.hosts), None)

    def shard(self, source: S3DataSource) -> Shard | None:
        """Return the shard of a channel for this host; None if the channel is for other instance groups.

        Raises ConfigError for a group that the cluster does not have.
        """
        chosen: tuple[str, ...] = self.names
        if wanted := source.instance_group_names:
            hosts_of = {group.name: group.hosts for group in self.groups}
            if unknown := [name for name in wanted if name not in hosts_of]:
                raise ConfigError(
                    f"InstanceGroupNames: no instance group is called {unknown[0]!r}; "
                    f"this cluster has {', '.join(map(repr, hosts_of)) or 'none'}: "
                    "add it to ResourceConfig.InstanceGroups or remove InstanceGroupNames"
                )
            members = {host for name in wanted for host in hosts_of[name]}
            chosen = tuple(host for host in self.names if host in members)
        if self.current not in chosen:
            return None
        return Shard(chosen.index(self.current), len(chosen)) if source.sharded else Shard(0, 1)


def identify(
    job: Job,
    *,
    flags: tuple[int | None, int | None] = (None, None),
    environment: Mapping[str, str],
    document: Mapping[str, Any] | None = None,
) -> Hosts:
    """Return the cluster and the index of this host. Raises ConfigError.

    `flags`: `--host-index`, `--host-count`. `document`: the platform's resourceconfig.json.
    """
    claims = [Claim("--host-index/--host-count", *flags), *_from_environment(environment)]
    if document is not None:
        claims.append(_from_document(document))
    resources = job.resource_config
    instances = resources.instance_count or sum(group.instance_count for group in resources.instance_groups)
    if instances and flags[1] is None:
        claims.append(Claim("ResourceConfig of the job", None, instances))
    index = _agreed("host index", [(claim.source, claim.index) for claim in claims])
    count = _agreed("number of hosts", [(claim.source, claim.count) for claim in claims])
    if count is None and index is not None:
        raise ConfigError(f"this is host {index}, but nothing says of how many; {_FIX}")
    count = 1 if count is None else count
    if index is None and count > 1:
        raise ConfigError(
            f"the job has {count} hosts, but nothing says which of them this is; {_FIX} "
            "(--host-count 1 runs it on one host)"
        )
    if count > MOST_HOSTS:
        raise ConfigError(f"{count} hosts are more than {MOST_HOSTS}; correct the number, or {_FIX}")
    index = index or 0
    if index >= count:
        raise ConfigError(f"host index {index} is not below the number of hosts, {count}; {_FIX}")
    if document is not None:
        return _documented(index, document)
    names = tuple(sorted(f"algo-{number + 1}" for number in range(count)))
    return Hosts(index, names, _groups(job, names), resources.instance_type)


def local_job(job: Job, hosts: Hosts) -> Job:
    """Return the job with only the channels of this host's instance group.

    Raises ConfigError as `Hosts.shard` does.
    """
    local = tuple(channel for channel in job.input_data_config if hosts.shard(channel.source) is not None)
    return job.model_copy(update={"input_data_config": local})


def _agreed(what: str, claims: list[tuple[str, int | None]]) -> int | None:
    """Return the number that all claims agree on, None if there is no claim. Raises ConfigError."""
    first: tuple[str, int] | None = None
    for source, value in claims:
        if value is None:
            continue
        first = first or (source, value)
        if value != first[1]:
            raise ConfigError(
                f"{first[0]} gives {what} {first[1]}, but {source} gives {value}; make them agree"
            )
    return first[1] if first else None


def _from_environment(environment: Mapping[str, str]) -> Iterator[Claim]:
    """Yield the claims of launchers' environment variables."""

    def number(name: str, *, least: int = 0) -> int | None:
        if not (text := environment.get(name)):
            return None
        if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < least:
            raise ConfigError(f"{name}={text!r} is not a number of {least} or more; correct or unset it")
        return int(text)

    rank, world = number("RANK"), number("WORLD_SIZE", least=1)
    local_name = next((name for name in LAUNCHERS[0].sizes if environment.get(name)), "LOCAL_WORLD_SIZE")
    local = number(local_name, least=1) or 1
    if rank is not None and local == 1 and number("LOCAL_RANK"):
        raise ConfigError(
            f"LOCAL_RANK is {environment['LOCAL_RANK']}, and LOCAL_WORLD_SIZE, the number of processes on a "
            f"host, not set: hosts cannot be counted; set it, or {_FIX}"
        )
    if world is not None and world % local:
        raise ConfigError(
            f"WORLD_SIZE {world} is not a multiple of {local_name} {local}: hosts cannot be counted; {_FIX}"
        )
    yield Claim(
        "RANK/WORLD_SIZE" + (f" over {local_name} {local}" if local > 1 else ""),
        None if rank is None else rank // local,
        None if world is None else world // local,
    )
    yield Claim("GROUP_RANK/GROUP_WORLD_SIZE", number("GROUP_RANK"), number("GROUP_WORLD_SIZE", least=1))
    yield Claim("NODE_RANK/NNODES", number("NODE_RANK"), number("NNODES", least=1))
    yield Claim("JOB_COMPLETION_INDEX", number("JOB_COMPLETION_INDEX"))
    if text := environment.get("TF_CONFIG"):
        yield _from_tf_config(text)


def _from_tf_config(text: str) -> Claim:
    """Return the claim of TF_CONFIG: the chief is host 0, the workers follow; other tasks read no data."""
    try:
        document = json.loads(text)
        cluster, task = document.get("cluster", {}), document.get("task", {})
        chiefs = [(kind, n) for kind in ("chief", "master") for n in range(len(cluster.get(kind, ())))]
        readers = [*chiefs, *(("worker", n) for n in range(len(cluster.get("worker", ()))))]
        if not readers:
            return Claim("TF_CONFIG")  # a job of one process has an empty cluster
        me = (str(task["type"]), int(task["index"]))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"TF_CONFIG cannot be understood ({error!r}); correct or unset it") from error
    if me not in readers:
        raise ConfigError(
            f"TF_CONFIG says that this is {me[0]} {me[1]}, which is none of the {len(readers)} tasks that "
            f"read data (chief and workers); unset it here, and {_FIX}"
        )
    return Claim("TF_CONFIG", readers.index(me), len(readers))


def _from_document(document: Mapping[str, Any]) -> Claim:
    hosts, current = document.get("hosts"), document.get("current_host")
    if (
        not isinstance(hosts, list)
        or current not in hosts
        or not all(isinstance(host, str) for host in hosts)
    ):
        raise ConfigError(
            f"resourceconfig.json: current_host {current!r} is not in hosts {hosts!r}; correct or remove it"
        )
    return Claim("resourceconfig.json", sorted(hosts).index(current), len(hosts))


def _documented(index: int, document: Mapping[str, Any]) -> Hosts:
    try:
        groups = tuple(
            HostGroup(
                _text(group["instance_group_name"]),
                _text(group.get("instance_type", "")),
                tuple(map(_text, group["hosts"])),
            )
            for group in document.get("instance_groups", ())
        )
        _text(document.get("current_group_name", ""))
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"resourceconfig.json: instance_groups cannot be understood ({error!r}); correct or remove it"
        ) from error
    return Hosts(
        index,
        tuple(sorted(document["hosts"])),
        groups,
        document.get("current_instance_type"),
        document,
    )


def _text(value: Any) -> str:
    """Return `value` if it is text. Raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _groups(job: Job, names: tuple[str, ...]) -> tuple[HostGroup, ...]:
    """Assign these hosts to the job's instance groups, in order; return () if the numbers differ."""
    groups = job.resource_config.instance_groups
    if sum(group.instance_count for group in groups) != len(names):
        return ()  # only where explicit flags override ResourceConfig
    names_left = iter(names)
    return tuple(
        HostGroup(
            group.instance_group_name, group.instance_type, tuple(islice(names_left, group.instance_count))
        )
        for group in groups
    )
