"""What the training container finds: directories, config files, environment variables (contract §2).

Files are written atomically and before readiness, since some trainers read them once at start. One
sidecar owns a base directory at a time, by a lock that ends with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamer.errors import SinkError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sidecar.config import Job

DEFAULT_BASE = "/opt/ml"
HOST = "algo-1"
"""SageMaker's name for the first host; one host is all that this version serves."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The directory tree of contract §2.3 under one base."""

    base: str

    @property
    def data(self) -> str:
        return os.path.join(self.base, "input", "data")

    @property
    def config(self) -> str:
        return os.path.join(self.base, "input", "config")

    def create(self) -> None:
        """Make every directory. Raises SinkError."""
        try:
            for path in (
                self.data,
                self.config,
                *(os.path.join(self.base, name) for name in ("model", "output/data")),
            ):
                os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise SinkError(
                f"cannot make {error.filename}: {error.strerror}; set Penstock.BaseDirectory to a directory "
                "that this user may write"
            ) from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Own the tree until the end. Raises SinkError if another sidecar does."""
        path = os.path.join(self.data, ".penstock.lock")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise SinkError(f"{path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise SinkError(
                f"another penstock serves {self.data}; stop it or set Penstock.BaseDirectory"
            ) from None
        try:
            yield
        finally:
            os.close(fd)


def input_data_config(job: Job) -> dict[str, Any]:
    """inputdataconfig.json, with the keys that every known consumer asks for (contract §2.1)."""
    return {
        channel.channel_name: ({"ContentType": channel.content_type} if channel.content_type else {})
        | {
            "TrainingInputMode": "Pipe",
            "S3DistributionType": channel.data_source.s3_data_source.s3_data_distribution_type,
            "RecordWrapperType": channel.record_wrapper_type,
        }
        for channel in job.input_data_config
    }


def resource_config() -> dict[str, Any]:
    """resourceconfig.json of a job with one host (contract §2.2)."""
    return {"current_host": HOST, "hosts": [HOST], "network_interface_name": "eth0"}


def write_config_files(layout: Layout, job: Job) -> None:
    """Write the three files a training container may read. Raises SinkError."""
    for name, document in (
        ("inputdataconfig.json", input_data_config(job)),
        ("resourceconfig.json", resource_config()),
        ("hyperparameters.json", dict(job.hyper_parameters)),
    ):
        path = os.path.join(layout.config, name)
        temporary = f"{path}.{os.getpid()}.tmp"
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(document, file)
            os.rename(temporary, path)
        except OSError as error:
            raise SinkError(f"cannot write {path}: {error.strerror}") from error


def reset_reader_state(layout: Layout, job: Job) -> None:
    """Forget which FIFO the readers of an earlier run would open next (contract §6.2).

    A sidecar always starts at epoch 0, so a counter from before can only make readers wait for a FIFO
    that will never come. Raises SinkError.
    """
    for channel in job.input_data_config:
        path = os.path.join(layout.base, "pipe_state", f".{channel.channel_name}-pipe_mode-state")
        try:
            os.unlink(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise SinkError(f"cannot reset {path}: {error.strerror}") from error


def trainer_environment(layout: Layout, job: Job) -> dict[str, str]:
    """What SageMaker and its training toolkit set for the trainer (contract §2.4).

    A channel variable holds the path without epoch suffix, in Pipe mode too, and its name is only
    upper-cased: `SM_CHANNEL_TRAIN-A` is what the toolkit makes of `train-a`.
    """
    channels = sorted(channel.channel_name for channel in job.input_data_config)
    parameters = {name: _decoded(value) for name, value in job.hyper_parameters.items()}
    resources = resource_config()
    output = os.path.join(layout.base, "output")
    values: dict[str, Any] = {
        "CHANNELS": channels,
        "HPS": parameters,
        "INPUT_DATA_CONFIG": input_data_config(job),
        "RESOURCE_CONFIG": resources,
        "HOSTS": resources["hosts"],
        "CURRENT_HOST": resources["current_host"],
        "NETWORK_INTERFACE_NAME": resources["network_interface_name"],
        "INPUT_DIR": os.path.join(layout.base, "input"),
        "INPUT_CONFIG_DIR": layout.config,
        "OUTPUT_DIR": output,
        "OUTPUT_DATA_DIR": os.path.join(output, "data"),
        "MODEL_DIR": os.path.join(layout.base, "model"),
        "NUM_CPUS": len(os.sched_getaffinity(0)),
    }
    values |= {f"CHANNEL_{name.upper()}": os.path.join(layout.data, name) for name in channels}
    values |= {f"HP_{name.upper()}": value for name, value in parameters.items()}
    return {
        "TRAINING_JOB_NAME": job.training_job_name,
        "SAGEMAKER_BASE_DIR": layout.base,
        **{f"SM_{name}": _encoded(value) for name, value in values.items()},
        **job.environment,
    }


def _decoded(value: str) -> Any:
    """A hyperparameter's value as the toolkit reads it: JSON if it is, else the text."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def _encoded(value: Any) -> str:
    """The toolkit's text of a value (contract §2.4)."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))
