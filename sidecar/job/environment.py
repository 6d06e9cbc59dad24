"""What a trainer finds: config files (contract §2.1, §2.2), and the variables of its environment (§2.4).

The sidecar writes files atomically and before readiness, because some trainers read them once at start.

The toolkit only upper-cases names: `train-a` becomes `SM_CHANNEL_TRAIN-A`. Text values are unchanged, null is
the empty text, and any other value is compact JSON with sorted keys. `penstock exec` passes the variables to
the trainer. `penstock.env` has them for a shell in another container, without those that depend on that
container (CPUs and GPUs) and without names that are not valid in a shell.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import re
import shlex
from typing import TYPE_CHECKING, Any

from sidecar.config.hosts import HOMOGENEOUS
from sidecar.job.layout import COPY, RESOURCES, Layout
from streamer.directory import Directory
from streamer.errors import ConfigError, SinkError
from streamer.trailer import replace_file

if TYPE_CHECKING:
    from sidecar.config.hosts import Hosts
    from sidecar.config.job import Job

_TOOLKIT_OWN = frozenset({
    "sagemaker_program", "sagemaker_submit_directory", "sagemaker_enable_cloudwatch_metrics",
    "sagemaker_region", "sagemaker_container_log_level", "sagemaker_job_name",
    "default_user_module_name", "_tuning_objective_metric", "sagemaker_s3_output",
})  # fmt: skip
"""Hyperparameters of the toolkit itself. Others that begin with `sagemaker_` are for the framework, and the
rest are for the script."""
_DISTRIBUTED = (
    "sagemaker_mpi_enabled", "sagemaker_parameter_server_enabled",
    "sagemaker_distributed_dataparallel_enabled", "sagemaker_pytorch_ddp_enabled",
    "sagemaker_pytorch_xla_multi_worker_enabled", "sagemaker_multi_worker_mirrored_strategy_enabled",
)  # fmt: skip
"""If one of these is set and no group is named, this host's group is one of the distribution."""
CHECKPOINTS = "checkpointconfig.json"
_MACHINE = ("SM_NUM_CPUS", "SM_NUM_GPUS", "SM_TRAINING_ENV")
"""Variables that depend on the trainer's container; SM_TRAINING_ENV contains the other two."""


def trainer_environment(layout: Layout, job: Job, hosts: Hosts) -> dict[str, str]:
    """Return every variable. The `Environment` of the job file overrides the others."""
    channels = {
        name: os.path.join(layout.data, name)
        for channel in job.input_data_config
        for name in job.fifos(channel)
    }
    everything = {name: _decoded(value) for name, value in job.hyper_parameters.items()}
    parameters = {
        name: value
        for name, value in everything.items()
        if not name.startswith("sagemaker_") and name not in _TOOLKIT_OWN
    }
    program = everything.get("sagemaker_program")
    module = program.removesuffix(".py") if isinstance(program, str) else None
    framework = {
        name: value
        for name, value in everything.items()
        if name not in parameters and name not in _TOOLKIT_OWN
    }
    resources = resource_config(hosts)
    groups = {group["instance_group_name"]: group for group in resources.get("instance_groups", ())}
    group = resources.get("current_group_name", HOMOGENEOUS)
    distribution = framework.get(
        "sagemaker_distribution_instance_groups",
        [group] if any(framework.get(name) for name in _DISTRIBUTED) else [],
    )
    common: dict[str, Any] = {
        "current_host": hosts.current,
        "current_instance_group": group,
        "current_instance_group_hosts": groups.get(group, {}).get("hosts", []),
        "current_instance_type": resources.get("current_instance_type", "local"),
        "distribution_instance_groups": distribution,
        "framework_module": None,
        "hosts": resources["hosts"],
        "input_config_dir": layout.config,
        "input_data_config": input_data_config(job),
        "input_dir": os.path.join(layout.base, "input"),
        "instance_groups": list(groups),
        "instance_groups_dict": groups,
        "is_hetero": len(groups) > 1,
        "log_level": everything.get("sagemaker_container_log_level", logging.INFO),
        "model_dir": os.path.join(layout.base, "model"),
        "module_dir": str(everything.get("sagemaker_submit_directory", os.path.join(layout.base, "code"))),
        "module_name": module,
        "network_interface_name": resources.get("network_interface_name", "eth0"),
        "num_cpus": len(os.sched_getaffinity(0)),
        "num_gpus": len(glob.glob("/dev/nvidia[0-9]*")),
        "output_data_dir": os.path.join(layout.output, "data"),
        "output_dir": layout.output,
        "output_intermediate_dir": os.path.join(layout.output, "intermediate"),
        "resource_config": resources,
        "user_entry_point": program,
    }
    training = common | {
        "additional_framework_parameters": framework,
        "channel_input_dirs": channels,
        "distribution_hosts": _distribution_hosts(groups, distribution, resources["hosts"]),
        "hyperparameters": parameters,
        "job_name": job.training_job_name,
    }
    master = (training["distribution_hosts"] or resources["hosts"])[0]
    training |= {"is_master": hosts.current == master, "master_hostname": master}
    values = common | {
        "channels": sorted(channels),
        "framework_params": framework,
        "hps": parameters,
        "training_env": training,
        "user_args": _arguments(parameters),
    }
    values |= {f"channel_{name}": path for name, path in channels.items()}
    # A shell has no variable SM_CHANNEL_TRAIN-0, but a script can write "${SM_CHANNEL_TRAIN}-0".
    values |= {
        f"channel_{channel.channel_name}": os.path.join(layout.data, channel.channel_name)
        for channel in job.input_data_config
    }
    values |= {f"hp_{name}": value for name, value in parameters.items()}
    platform = {"TRAINING_JOB_NAME": job.training_job_name, "SAGEMAKER_BASE_DIR": layout.base}
    if job.training_job_arn:
        platform["TRAINING_JOB_ARN"] = job.training_job_arn
    toolkit = {f"SM_{name.upper()}": _encoded(value) for name, value in values.items()}
    return platform | toolkit | job.environment


def input_data_config(job: Job) -> dict[str, Any]:
    """Return inputdataconfig.json, with the keys that every known consumer needs (contract §2.1).

    A channel with `Records` has their format too, for Penstock's readers. The file lists every rank FIFO as a
    channel, so that any reader of a channel can read a rank FIFO. It does not list the channel of the rank
    FIFOs, which has no FIFO itself.
    """
    return {
        name: ({"ContentType": channel.content_type} if channel.content_type else {})
        | {
            "TrainingInputMode": job.mode(channel),
            "S3DistributionType": channel.source.s3_data_distribution_type,
            "RecordWrapperType": channel.record_wrapper_type,
        }
        | ({"RecordFormat": channel.records.format} if channel.penstock.records else {})
        for channel in job.input_data_config
        for name in job.fifos(channel)
    }


def resource_config(hosts: Hosts) -> dict[str, Any]:
    """Return resourceconfig.json (contract §2.2): the platform's own if there is one.

    A sidecar's own has instance types and groups if the job file has them, in SageMaker's order.
    """
    if hosts.document is not None:
        return dict(hosts.document)
    groups = [(group.name, group.instance_type, group.hosts) for group in hosts.groups]
    if not groups and hosts.instance_type:
        groups = [(HOMOGENEOUS, hosts.instance_type, hosts.names)]
    own = next(((name, kind) for name, kind, members in groups if hosts.current in members), None)
    document: dict[str, Any] = {"current_host": hosts.current}
    if own:
        document |= {"current_instance_type": own[1], "current_group_name": own[0]}
    document["hosts"] = list(hosts.names)
    if groups:
        document["instance_groups"] = [
            {"instance_group_name": name, "instance_type": kind, "hosts": list(members)}
            for name, kind, members in groups
        ]
    return document | {"network_interface_name": "eth0"}


def write_config_files(layout: Layout, job: Job, hosts: Hosts) -> None:
    """Write the config files of the training container. Raises SinkError.

    A platform's own resourceconfig.json stays as it is. `penstock.env`, for `. penstock.env` in the trainer's
    container, lacks the job file's `Environment`, which may contain secrets, because all users may read it.
    """
    documents = {
        "inputdataconfig.json": input_data_config(job),
        "hyperparameters.json": dict(job.hyper_parameters),
    }
    if (checkpoints := job.checkpoint_config) is not None:
        local = checkpoints.directory(layout.base)
        documents[CHECKPOINTS] = {"S3Uri": checkpoints.s3_uri, "LocalPath": local}
    if hosts.document is None:
        documents |= dict.fromkeys((COPY, RESOURCES), resource_config(hosts))
    files = {name: json.dumps(each, separators=(",", ":")) for name, each in documents.items()}
    without = job.model_copy(update={"environment": {}})
    files["penstock.env"] = "".join(
        f"export {name}={shlex.quote(value)}\n"
        for name, value in trainer_environment(layout, without, hosts).items()
        if name not in _MACHINE and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
    )
    for name in (*files, *({CHECKPOINTS} - files.keys())):
        try:
            with Directory.at(os.path.join(layout.root, "input", "config")) as config:
                if name in files:
                    replace_file(name, files[name].encode(), dir_fd=config.fd)
                else:
                    config.remove(name)  # of an earlier job
        except OSError as error:
            raise SinkError(f"cannot write {os.path.join(layout.config, name)}: {error.strerror}") from error


def _distribution_hosts(groups: dict[str, dict[str, Any]], chosen: Any, everyone: list[str]) -> list[str]:
    if not isinstance(chosen, list):
        raise ConfigError(
            "HyperParameters.sagemaker_distribution_instance_groups must be a JSON list of group names"
        )
    if not groups:
        return list(everyone)
    return [host for name, group in groups.items() if name in chosen for host in group["hosts"]]


def _arguments(parameters: dict[str, Any]) -> list[str]:
    """Return the hyperparameters as the toolkit's command-line arguments: `--name value`, sorted."""
    arguments = []
    for name, value in sorted(parameters.items()):
        arguments.append(f"--{name}" if len(name) > 1 else f"-{name}")
        if isinstance(value, dict):
            arguments.append(",".join(f"{key}={inner}" for key, inner in sorted(value.items())))
        else:
            arguments.append("" if value is None else str(value))
    return arguments


def _decoded(value: str) -> Any:
    """Return a hyperparameter's value as the toolkit reads it: parsed if it is JSON, else the text."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _encoded(value: Any) -> str:
    """Return the toolkit's text for a value (contract §2.4)."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))
