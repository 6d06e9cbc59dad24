"""The job file: SageMaker's own request shape, and one `Penstock` section for what it has no word for.

A whole CreateTrainingJob request is taken as it is, and so is what describe-training-job answers: keys
without bearing on data are ignored by name, from lists (`Model.ignored`); unknown ones are errors. All
mistakes are reported at once, each with its place and what to write instead. The channel's fields are in
`sidecar.config.request`, the `Penstock` section in `sidecar.config.settings`; here are the whole job, the
rules between channels, and reading the file.
"""

from __future__ import annotations

import difflib
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, StrictStr, ValidationError, model_validator

from sidecar.config.document import read_document, shortened
from sidecar.config.model import Model
from sidecar.config.request import (
    LONGEST_NAME,
    AlgorithmSpecification,
    ChannelConfig,
    ChannelExtras,
    DataSource,
    InputMode,
    InstanceGroup,
    ResourceConfig,
    S3DataSource,
    ShuffleConfig,
)
from sidecar.config.settings import (
    AdminConfig,
    EndpointConfig,
    HostsConfig,
    PenstockConfig,
)
from sidecar.process.logs import log
from sidecar.process.memory import default_budget, memory_limit
from streamer.errors import ConfigError
from streamer.relay.staging.buffers import BUFFER_SIZE
from streamer.schedule.concurrency import SMALLEST_PART
from streamer.trailer import rank_channel_name
from streamer.units import human_bytes

SAGEMAKER_CHANNELS = 20
MOST_MISTAKES = 50
"""Mistakes in a job file that are told at once."""

IGNORED = frozenset({
    # of the request
    "RoleArn", "OutputDataConfig", "VpcConfig", "StoppingCondition", "Tags", "EnableNetworkIsolation",
    "EnableInterContainerTrafficEncryption", "EnableManagedSpotTraining", "CheckpointConfig",
    "DebugHookConfig", "DebugRuleConfigurations", "TensorBoardOutputConfig", "ExperimentConfig",
    "ProfilerConfig", "ProfilerRuleConfigurations", "RetryStrategy", "RemoteDebugConfig",
    "InfraCheckConfig", "SessionChainingConfig", "ServerlessJobConfig", "MlflowConfig",
    "ModelPackageConfig",
    # of the answer of describe-training-job
    "TuningJobArn", "LabelingJobArn", "AutoMLJobArn", "ModelArtifacts", "TrainingJobStatus",
    "SecondaryStatus", "FailureReason", "WarmPoolStatus", "CreationTime", "TrainingStartTime",
    "TrainingEndTime", "LastModifiedTime", "SecondaryStatusTransitions", "FinalMetricDataList",
    "TrainingTimeInSeconds", "BillableTimeInSeconds", "BillableTokenCount",
    "DebugRuleEvaluationStatuses", "ProfilerRuleEvaluationStatuses", "ProfilingStatus", "MlflowDetails",
    "ProgressInfo", "OutputModelPackageArn",
    # what boto3 adds to every answer
    "ResponseMetadata",
})  # fmt: skip
"""Keys of a training job, as requested and as described, that have no bearing on data."""


class Job(Model):
    """A whole job file."""

    ignored: ClassVar[frozenset[str]] = IGNORED

    training_job_name: Annotated[StrictStr, Field(min_length=1, max_length=63)] = "penstock"
    training_job_arn: Annotated[StrictStr, Field(max_length=256)] | None = None
    algorithm_specification: AlgorithmSpecification = AlgorithmSpecification()
    hyper_parameters: Annotated[
        dict[
            Annotated[str, Field(max_length=256, pattern=r"^[^=]+$")],
            Annotated[StrictStr, Field(max_length=2500)],
        ],
        Field(max_length=100),
    ] = {}  # noqa: RUF012 - pydantic copies defaults
    environment: Annotated[
        dict[Annotated[str, Field(max_length=512, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], StrictStr],
        Field(max_length=100),
    ] = {}  # noqa: RUF012 - likewise
    resource_config: ResourceConfig = ResourceConfig()
    input_data_config: Annotated[tuple[ChannelConfig, ...], Field(min_length=1)]
    penstock: PenstockConfig = PenstockConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [channel.channel_name for channel in self.input_data_config]
        for name in sorted(name for name, count in Counter(names).items() if count > 1):
            raise ValueError(f"two channels are called {name!r}; names must differ")
        self._check_ranks(set(names))
        piped = {name for channel in self.channels("Pipe") for name in self.fifos(channel)}
        for channel in self.channels("File"):
            name = channel.channel_name
            if refusal := channel.refusal_as_file():
                raise ValueError(f"channel {name!r} in File mode: {refusal}")
            stem, _, number = name.rpartition("_")
            if stem in piped and number.isdecimal():
                raise ValueError(
                    f"the directory of File channel {name!r} is also the FIFO of epoch {number} of Pipe "
                    f"channel {stem!r}; rename one"
                )
        sharded = any(channel.source.sharded for channel in self.input_data_config)
        if self.penstock.shard_by == "bytes" and not sharded and not self.ranks:
            raise ValueError(
                "ShardBy has no meaning without a ShardedByS3Key channel or Rank FIFOs; remove it"
            )
        budget, least = self.penstock.memory_budget, self._least_budget
        if budget is not None and budget < least:
            part = human_bytes(self.penstock.part_size or SMALLEST_PART)
            raise ValueError(
                f"MemoryBudget {human_bytes(budget)} is less than two parts of {part} for each of "
                f"{max(len(piped), 1)} channels or rank FIFOs; raise it to {human_bytes(least)} or lower "
                "PartSize"
            )
        return self

    @property
    def budget(self) -> int:
        """Bytes in flight: what is asked for, or what suits this machine."""
        asked = self.penstock.memory_budget
        return max(self._least_budget, default_budget(memory_limit())) if asked is None else int(asked)

    @property
    def _least_budget(self) -> int:
        """Bytes of two parts for each FIFO."""
        part = -(-(self.penstock.part_size or SMALLEST_PART) // BUFFER_SIZE) * BUFFER_SIZE
        fifos = sum(len(self.fifos(channel)) for channel in self.channels("Pipe"))
        return 2 * part * max(fifos, 1)

    @property
    def ranks(self) -> dict[str, int]:
        """By channel, the number of FIFOs that its objects are dealt over, of those that ask for it."""
        asked = {channel.channel_name: channel.penstock.ranks for channel in self.channels("Pipe")}
        return {name: count for name, count in asked.items() if count is not None}

    def _check_ranks(self, names: set[str]) -> None:
        """Raises ValueError for rank FIFOs without a name, and for channels that might be taken for rank
        FIFOs.
        """
        for name, count in self.ranks.items():
            if len(last := rank_channel_name(name, count - 1)) > LONGEST_NAME:
                raise ValueError(
                    f"the rank FIFO {last!r} has a name of more than {LONGEST_NAME} characters; "
                    f"shorten {name!r}"
                )
            for other in sorted(names):
                stem, _, number = other.rpartition("-")
                if stem == name and number.isdecimal():
                    raise ValueError(
                        f"channel {other!r} has the name of a rank FIFO of channel {name!r}; "
                        f"rename one, or remove the Ranks of {name!r}"
                    )

    def fifos(self, channel: ChannelConfig) -> tuple[str, ...]:
        """The channel under the names that the trainer knows: those of its rank FIFOs, if it has any.

        `_<epoch>` added gives the FIFOs of a Pipe channel.
        """
        name = channel.channel_name
        count = channel.penstock.ranks
        return (name,) if count is None else tuple(rank_channel_name(name, index) for index in range(count))

    def mode(self, channel: ChannelConfig) -> InputMode:
        """The channel's own InputMode, else the algorithm's (contract §2.1)."""
        return channel.input_mode or self.algorithm_specification.training_input_mode

    def channels(self, mode: InputMode) -> tuple[ChannelConfig, ...]:
        """The channels of this mode, in the order of the file."""
        return tuple(channel for channel in self.input_data_config if self.mode(channel) == mode)

    @property
    def checks(self) -> bool:
        """Whether any channel's objects are compared with their checksums."""
        return any(channel.penstock.integrity == "checksum" for channel in self.channels("Pipe"))

    @property
    def needs_records(self) -> bool:
        """Whether any channel's records must be separated."""
        return any(channel.failure_policy.needs_records for channel in self.channels("Pipe"))


def warnings(job: Job) -> list[str]:
    """What is odd about a job that can be carried out."""
    found = []
    names = [channel.channel_name for channel in job.input_data_config]
    if len(names) > SAGEMAKER_CHANNELS:
        found.append(f"{len(names)} channels; SageMaker itself takes at most {SAGEMAKER_CHANNELS}")
    upper = [name.upper() for one in job.input_data_config for name in {one.channel_name, *job.fifos(one)}]
    found += [
        f"channels whose names differ only in case share the variable SM_CHANNEL_{name}"
        for name, count in sorted(Counter(upper).items())
        if count > 1
    ]
    return found


def load_job(path: str | Path) -> Job:
    """Read and validate a job file, YAML or JSON. Raises ConfigError naming every mistake."""
    document = read_document(str(path))
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold one mapping with InputDataConfig; see the README")
    try:
        job = Job.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"{path}:\n  {explain(error, separator=chr(10) + '  ')}") from None
    for warning in warnings(job):
        log.warning(warning)
    return job


def explain(error: ValidationError, *, separator: str = "; ") -> str:
    """Every mistake that pydantic found, in the words of the file."""
    details = error.errors(include_url=False)
    # A list whose items are all wrong is also called too short; the items' own errors say more.
    told = [detail for detail in details if detail["type"] != "too_short" or detail["input"] in ([], ())]
    told = told or details
    more = [f"and {len(told) - MOST_MISTAKES} more mistakes"] if len(told) > MOST_MISTAKES else []
    return separator.join([*(_describe(detail) for detail in told[:MOST_MISTAKES]), *more])


_PLACES: dict[str, type[Model]] = {
    "the top level": Job,
    "AlgorithmSpecification": AlgorithmSpecification,
    "ResourceConfig": ResourceConfig,
    "an instance group": InstanceGroup,
    "a channel of InputDataConfig": ChannelConfig,
    "the Penstock section of a channel": ChannelExtras,
    "ShuffleConfig": ShuffleConfig,
    "DataSource": DataSource,
    "DataSource.S3DataSource": S3DataSource,
    "Penstock": PenstockConfig,
    "Penstock.Hosts": HostsConfig,
    "Penstock.Endpoint": EndpointConfig,
    "Penstock.Admin": AdminConfig,
}
_KEYS = {key: place for place, model in _PLACES.items() for key in model.ignored} | {
    field.alias or name: place
    for place, model in _PLACES.items()
    for name, field in model.model_fields.items()
}


def _describe(detail: Any) -> str:
    """One mistake: `InputDataConfig[0].ChannelName: ...`."""
    place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in detail["loc"]).lstrip(
        "."
    )
    message = _WORDS.get(detail["type"], detail["msg"].removeprefix("Value error, "))
    if detail["type"] == "extra_forbidden":
        message = f"is not a key that Penstock supports here; {_advice(str(detail['loc'][-1]))}"
    elif detail["type"] == "literal_error":
        message = f"{shortened(repr(detail['input']))} is not one of {detail['ctx']['expected']}"
    elif detail["type"] == "string_pattern_mismatch":
        message = f"{shortened(repr(detail['input']))} does not match {detail['ctx']['pattern']}"
    return shortened(f"{place}: {message}" if place else message, 1000)


_WORDS = {
    "missing": "is required",
    "string_type": "must be text; put it in quotes",
    "too_short": "must have at least 1 item",
}


_OF_A_CHANNEL = {"Ranks": "Ranks: 4", "ChannelBandwidth": "Bandwidth: 50MB"}
"""Keys that would be maps of channels in the `Penstock` section, and how each channel has them."""


def _advice(key: str) -> str:
    """What to do about an unknown key."""
    if key in _OF_A_CHANNEL:
        return f"each channel has it in a section of its own, `Penstock: {{{_OF_A_CHANNEL[key]}}}`"
    if key in _KEYS:
        return f"it belongs in {_KEYS[key]}"
    close = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.8)
    return f"did you mean {close[0]}?" if close else "remove it"
