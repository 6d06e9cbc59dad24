"""The job file: a CreateTrainingJob request of SageMaker, with a `Penstock` section for further settings.

A complete CreateTrainingJob request is a valid job file, and so is the output of describe-training-job. Keys
that do not concern data are ignored by name (`Model.ignored`); unknown keys are errors. All mistakes are
reported at once, each with its path in the file and what to write instead. The fields of a channel are in
`sidecar.config.request`, the `Penstock` section is in `sidecar.config.settings`; this module has the whole
job, the rules between channels, and the reading of the file.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field, PrivateAttr, StrictStr, ValidationError, model_validator

from sidecar.config.document import FileMistakes, read_document
from sidecar.config.index_place import index_uri
from sidecar.config.mistakes import RuleError, explain, kind_of, mistakes
from sidecar.config.model import Model
from sidecar.config.outputs import DEFAULT_BASE, CheckpointConfig, OutputDataConfig
from sidecar.config.request import (
    LONGEST_NAME,
    AlgorithmSpecification,
    ChannelConfig,
    InputMode,
    ResourceConfig,
)
from sidecar.config.settings import PenstockConfig
from sidecar.process.logs import log
from sidecar.process.resources import Footprint, default_budget, memory_limit
from streamer.errors import ConfigError
from streamer.plan import S3Uri
from streamer.plan.selection import Selection
from streamer.relay.staging.buffers import BUFFER_SIZE
from streamer.schedule.concurrency import MOST_REQUESTS, SMALLEST_PART
from streamer.trailer import rank_channel_name
from streamer.units import counted, human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SAGEMAKER_CHANNELS = 20

IGNORED = frozenset({
    # of the request
    "RoleArn", "VpcConfig", "StoppingCondition", "Tags", "EnableNetworkIsolation",
    "EnableInterContainerTrafficEncryption", "EnableManagedSpotTraining", "DebugHookConfig",
    "DebugRuleConfigurations", "TensorBoardOutputConfig", "ExperimentConfig",
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

    _further_indexes: frozenset[S3Uri] = PrivateAttr(default=frozenset())
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
    output_data_config: OutputDataConfig | None = None
    checkpoint_config: CheckpointConfig | None = None
    penstock: PenstockConfig = PenstockConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [channel.channel_name for channel in self.input_data_config]
        for name in sorted(name for name, count in Counter(names).items() if count > 1):
            second = len(names) - 1 - names[::-1].index(name)
            raise RuleError(
                f"two channels are called {name!r}; names must differ",
                at=("InputDataConfig", second, "ChannelName"),
            )
        self._check_ranks(set(names))
        piped = {name for channel in self.channels("Pipe") for name in self.fifos(channel)}
        for channel in self.channels("File"):
            name = channel.channel_name
            at = ("InputDataConfig", names.index(name), "ChannelName")
            if refusal := channel.refusal_as_file():
                raise RuleError(f"channel {name!r} in File mode: {refusal}", at=at[:2])
            stem, _, number = name.rpartition("_")
            if stem in piped and number.isdecimal():
                raise RuleError(
                    f"the directory of File channel {name!r} is also the FIFO of epoch {number} of Pipe "
                    f"channel {stem!r}; rename one",
                    at=at,
                )
        for index, channel in enumerate(self.input_data_config):
            changes, epochs = channel.penstock.mix and channel.penstock.mix.then, self.penstock.epochs
            if changes and epochs is not None and (last := changes[-1].epoch) >= epochs:
                raise RuleError(
                    f"epoch {last} is after the last one, {epochs - 1}; raise Penstock.Epochs, or remove it",
                    at=("InputDataConfig", index, "Penstock", "Mix", "Then", len(changes) - 1, "Epoch"),
                )
        sharded = any(
            (channel.source.sharded or channel.penstock.ranks is not None)
            and channel.penstock.by_record is None
            for channel in self.input_data_config
        )
        if self.penstock.shard_by == "bytes" and not sharded:
            raise RuleError(
                "ShardBy has no meaning without a ShardedByS3Key channel or Rank FIFOs that share objects; "
                "remove it",
                at=("Penstock", "ShardBy"),
            )
        learns = [channel.learnt is not None for channel in self.input_data_config]
        if self.penstock.transport == "splice" and any(learns):
            raise RuleError(
                "Records without GlobalBatch learn their index, for which bytes must be in memory, and "
                "Transport: splice keeps them out of it; use auto, which splices the objects that are in the "
                "index, or remove Records",
                at=("InputDataConfig", learns.index(True), "Penstock", "Records"),
            )
        budget, least = self.penstock.memory_budget, self.least_budget
        if budget is not None and budget < least:
            part = human_bytes(self.penstock.part_size or SMALLEST_PART)
            raise RuleError(
                f"MemoryBudget {human_bytes(budget)} is less than two parts of {part} for each of "
                f"{counted(max(len(piped), 1), 'channel or rank FIFO', 'channels or rank FIFOs')}; "
                f"raise it to {human_bytes(least)} or lower PartSize",
                at=("Penstock", "MemoryBudget"),
            )
        return self

    @model_validator(mode="after")
    def _writable(self) -> Self:
        penstock, checkpoints = self.penstock, self.checkpoint_config
        for section, name, config in (
            ("Output", "OutputDataConfig", self.output_data_config),
            ("Checkpoints", "CheckpointConfig", checkpoints),
        ):
            if section.lower() in penstock.model_fields_set and config is None:
                raise RuleError(f"has no meaning without {name}; add it", at=("Penstock", section))
        writes = self.output or self.checkpoints
        if penstock.upload.bandwidth is not None and writes is None:
            raise RuleError("has no meaning without OutputDataConfig; add it", at=("Penstock", "Upload"))
        if writes is not None and not re.fullmatch(r"(?!\.\.?\Z)[A-Za-z0-9._-]+", self.training_job_name):
            raise RuleError(
                f"{self.training_job_name!r} is part of keys; use letters of ASCII, digits, '.', '-' and '_'",
                at=("TrainingJobName",),
            )
        base = penstock.base_directory or DEFAULT_BASE
        if checkpoints is not None and (other := checkpoints.overlaps(base)) is not None:
            raise RuleError(
                f"{checkpoints.directory(base)} overlaps {other}, which has other files; leave LocalPath "
                "out, or name a directory of its own",
                at=("CheckpointConfig", "LocalPath"),
            )
        return self

    @property
    def output(self) -> OutputDataConfig | None:
        """Where the model goes; None if it is not uploaded."""
        return None if self.penstock.output.is_ignored else self.output_data_config

    @property
    def checkpoints(self) -> CheckpointConfig | None:
        """Where checkpoints are restored from and uploaded to; None if neither is done."""
        return None if self.penstock.checkpoints.is_ignored else self.checkpoint_config

    @property
    def budget(self) -> int:
        """Memory budget in bytes: that of the job file, or the default of this machine."""
        if (budget := self.penstock.memory_budget) is not None:
            return int(budget)
        limit = memory_limit()
        fitting = self.footprint(keeper=True).largest_budget(limit)
        return max(self.least_budget, min(default_budget(limit), fitting))

    @property
    def least_budget(self) -> int:
        """Bytes of two parts for each FIFO."""
        part = -(-(self.penstock.part_size or SMALLEST_PART) // BUFFER_SIZE) * BUFFER_SIZE
        return 2 * part * self._streams

    @property
    def _streams(self) -> int:
        """Number of FIFOs; 1 if there is none, because downloads take memory as a FIFO does."""
        return max(1, sum(len(self.fifos(channel)) for channel in self.channels("Pipe")))

    def footprint(self, transport: str | None = None, *, keeper: bool = False) -> Footprint:
        """Return what the memory of this job depends on.

        `transport`: its name, once it is chosen. Before that, the one that the job file and the address of
        the endpoint make probable, `buffered` over TLS.
        """
        penstock = self.penstock
        if transport is None:
            transport = "buffered" if penstock.endpoint.probably_tls else "splice"
            transport = transport if penstock.transport == "auto" else penstock.transport
        return Footprint(
            transport=transport,
            fifos=self._streams,
            requests=penstock.requests_in_flight or MOST_REQUESTS,
            keeper=keeper,
            uploads=self.output is not None or self.checkpoints is not None,
        )

    @property
    def ranks(self) -> dict[str, int]:
        """Number of rank FIFOs, by channel that has them."""
        return {
            channel.channel_name: channel.penstock.ranks.fifos
            for channel in self.channels("Pipe")
            if channel.penstock.ranks is not None
        }

    @property
    def index_objects(self) -> frozenset[S3Uri]:
        """Record indexes in S3. They are no data, so no channel streams them."""
        return self._further_indexes.union(
            uri
            for channel in self.input_data_config
            if channel.penstock.index is not None
            and (uri := index_uri(channel.penstock.index, channel.channel_name)) is not None
        )

    def with_index_objects(self, uris: Iterable[S3Uri]) -> Self:
        """Return the job with further record indexes in S3 that no channel streams."""
        job = self.model_copy()
        job._further_indexes = self._further_indexes.union(uris)  # noqa: SLF001 - of this class
        return job

    def selection(self, channel: ChannelConfig) -> Selection:
        """Return what a channel streams of the objects that its source names."""
        return replace(channel.penstock.selection, apart=self.index_objects)

    def _check_ranks(self, names: set[str]) -> None:
        """Raises ValueError if the name of a rank FIFO is too long or may be that of a channel, too."""
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
        """Return the names of the channel for the trainer: those of its rank FIFOs, or its own.

        The path of a FIFO is such a name and `_<epoch>`.
        """
        name = channel.channel_name
        ranks = channel.penstock.ranks
        if ranks is None:
            return (name,)
        return tuple(rank_channel_name(name, index) for index in range(ranks.fifos))

    def mode(self, channel: ChannelConfig) -> InputMode:
        """Return the channel's own InputMode, or that of the algorithm (contract §2.1)."""
        return channel.input_mode or self.algorithm_specification.training_input_mode

    def channels(self, mode: InputMode) -> tuple[ChannelConfig, ...]:
        """Return the channels of this mode, in the order of the job file."""
        return tuple(channel for channel in self.input_data_config if self.mode(channel) == mode)

    @property
    def checks(self) -> bool:
        """Whether any channel's objects are compared with their checksums."""
        return any(channel.penstock.integrity == "checksum" for channel in self.channels("Pipe"))


def warnings(job: Job) -> list[str]:
    """Return warnings about a valid job."""
    texts = []
    channels = job.input_data_config
    if len(channels) > SAGEMAKER_CHANNELS:
        texts.append(f"{len(channels)} channels; SageMaker itself takes at most {SAGEMAKER_CHANNELS}")
    upper = [name.upper() for each in channels for name in {each.channel_name, *job.fifos(each)}]
    texts += [
        f"channels whose names differ only in case share the variable SM_CHANNEL_{name}"
        for name, count in sorted(Counter(upper).items())
        if count > 1
    ]
    if job.output is not None and "training_job_name" not in job.model_fields_set:
        texts.append("no TrainingJobName: all jobs without one replace each other's model; add a name")
    if "s3://" in (model_dir := job.hyper_parameters.get("model_dir", "")):
        texts.append(
            f"HyperParameters.model_dir is {model_dir}, and the trainer has no credentials there; let it "
            "write to SM_MODEL_DIR, which OutputDataConfig uploads, or to LocalPath of CheckpointConfig"
        )
    return texts + _mixed_prefixes(job)


def _mixed_prefixes(job: Job) -> list[str]:
    """Return warnings about objects that the next start reads as those of another key of the job file."""
    sources = [
        (f"channel {each.channel_name!r}", each.data_source.s3_data_source) for each in job.input_data_config
    ]
    channels = [(name, source.uri) for name, source in sources if source.s3_data_type == "S3Prefix"]
    checkpoints = [("CheckpointConfig", job.checkpoints.uri)] if job.checkpoints else []
    output = [("OutputDataConfig", job.output.folder(job.training_job_name))] if job.output else []
    return [
        f"{what} has its objects in {uri}, which is part of {prefix} of {reader}; the next start reads them "
        "there, too: give each a prefix of its own"
        for (what, uri), (reader, prefix) in (
            *product(checkpoints + output, channels),
            *product(channels + output, checkpoints),
        )
        if uri.bucket == prefix.bucket and uri.key.startswith(prefix.key)
    ]


def with_extras(job: Job, extras: Mapping[str, Any]) -> Job:
    """Return the job with these keys in the `Penstock` section of every channel. Raises ConfigError.

    The keys must be those that File channels have too (`SELECTING_FILES`), as no rule of the job is checked.
    """
    if not extras:
        return job
    channels = []
    for channel in job.input_data_config:
        fields = type(channel).model_fields
        document = {str(fields[name].alias): getattr(channel, name) for name in channel.model_fields_set}
        document["Penstock"] = {**channel.penstock.model_dump(by_alias=True, exclude_unset=True), **extras}
        try:
            channels.append(ChannelConfig.model_validate(document))
        except ValidationError as error:
            raise ConfigError(f"channel {channel.channel_name!r}: {explain(error, ChannelConfig)}") from None
    return job.model_copy(update={"input_data_config": tuple(channels)})


def load_job(path: str | Path) -> Job:
    """Read and validate a job file, YAML or JSON. Raises ConfigError naming every mistake."""
    document = read_document(str(path))
    if not isinstance(document.value, dict):
        kind = "is empty" if document.value is None else f"is {kind_of(document.value)}"
        raise ConfigError(f"{path} must hold one mapping with InputDataConfig, and {kind}; see the README")
    try:
        job = Job.model_validate(document.value)
    except ValidationError as error:
        found, more = mistakes(error, Job, line=document.line)
        raise FileMistakes(str(path), found, more=more) from None
    for warning in warnings(job):
        log.warning(warning)
    return job
