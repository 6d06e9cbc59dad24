"""The job file: SageMaker's own request shape, and one `Penstock` section for what it has no word for.

Models are frozen and refuse unknown keys; a value that SageMaker knows and this version does not yet
carry out is an error that says so, never ignored. All errors are reported at once, each with its place
and what to write instead. Field names and limits are those of the CreateTrainingJob API (contract §3).
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    StrictStr,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_pascal

from streamer.errors import ConfigError
from streamer.plan import S3Uri, parse_s3_uri
from streamer.units import KIB, MIB, human_bytes

LARGEST_DEFAULT_PART = 8 * MIB


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_pascal)


def _not_yet(wanted: str, value: object) -> NoReturn:
    raise ValueError(f"{value!r} is not supported by this version of Penstock; use {wanted!r}")


def _only(wanted: str, *others: str) -> Any:
    """A string that SageMaker lets be `wanted` or one of `others`, of which we carry out `wanted`."""

    def check(value: object) -> object:
        if value == wanted:
            return value
        if value in others:
            _not_yet(wanted, value)
        raise ValueError(f"{value!r} is not one of {', '.join((wanted, *others))}")

    return BeforeValidator(check)


def _absent(what: str) -> Any:
    """A field of SageMaker's that we do not carry out yet: only its empty value is accepted."""

    def check(value: object) -> object:
        if value in (None, [], {}):
            return None
        raise ValueError(f"{what} is not supported by this version of Penstock; remove it")

    return BeforeValidator(check)


def _s3_uri(value: str) -> str:
    try:
        parse_s3_uri(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return value


class S3DataSource(_Model):
    s3_data_type: Annotated[str, _only("S3Prefix", "ManifestFile", "AugmentedManifestFile", "Converse")] = (
        Field(alias="S3DataType")
    )
    s3_uri: Annotated[StrictStr, Field(max_length=1024), AfterValidator(_s3_uri)] = Field(alias="S3Uri")
    s3_data_distribution_type: Annotated[str, _only("FullyReplicated", "ShardedByS3Key")] = Field(
        "FullyReplicated", alias="S3DataDistributionType"
    )
    attribute_names: Annotated[None, _absent("AttributeNames")] = None
    instance_group_names: Annotated[None, _absent("InstanceGroupNames")] = None

    @property
    def uri(self) -> S3Uri:
        return parse_s3_uri(self.s3_uri)


class DataSource(_Model):
    s3_data_source: S3DataSource = Field(alias="S3DataSource")
    file_system_data_source: Annotated[None, _absent("FileSystemDataSource (Pipe mode reads S3 only)")] = None


class ChannelConfig(_Model):
    channel_name: Annotated[StrictStr, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9.\-_]+$")]
    data_source: DataSource
    content_type: Annotated[StrictStr, Field(max_length=256)] | None = None
    compression_type: Annotated[str, _only("None", "Gzip")] = "None"
    record_wrapper_type: Annotated[str, _only("None", "RecordIO")] = "None"
    input_mode: Annotated[str, _only("Pipe", "File", "FastFile")] | None = None
    shuffle_config: Annotated[None, _absent("ShuffleConfig")] = None


class AlgorithmSpecification(_Model):
    training_input_mode: Annotated[str, _only("Pipe", "File", "FastFile")] = "Pipe"


def _octal(value: object) -> object:
    if isinstance(value, str) and re.fullmatch(r"0?[0-7]{3}", value):
        return int(value, 8)
    raise ValueError('write the mode as a quoted octal number, such as "0640"')


class EndpointConfig(_Model):
    """Where S3 is; what is left out comes from the environment, as with every AWS client."""

    url: Annotated[StrictStr, Field(pattern=r"^https?://[^/\s]+/?$")] | None = None
    region: StrictStr | None = None
    profile: StrictStr | None = None
    path_style: bool = False
    """Put the bucket into the path, not into the host name; most S3-compatible servers want it."""
    anonymous: bool = False
    ca_bundle: StrictStr | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.anonymous and self.profile:
            raise ValueError("Anonymous and Profile contradict each other; remove one")
        if self.ca_bundle and self.url and self.url.startswith("http://"):
            raise ValueError("CaBundle has no meaning for an http:// Url; remove it or use https://")
        return self


class AdminConfig(_Model):
    """The HTTP server for metrics, probes and status. Loopback only, unless told."""

    host: StrictStr = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Unset: 9781, or under `penstock exec` any free port. 0 takes any free one, which the log names."""


class PenstockConfig(_Model):
    """What SageMaker has no word for."""

    base_directory: Annotated[StrictStr, Field(pattern=r"^/")] | None = None
    """FIFOs go to `<it>/input/data`. Unset: `/opt/ml`, or under `penstock exec` a temporary directory."""
    memory_budget: ByteSize = ByteSize(256 * MIB)
    """Bytes requested and not yet delivered, over all channels, which share it equally."""
    transport: Literal["auto", "portable", "copying", "kernel"] = "auto"
    """How bodies are fetched. `auto`: by splice in the kernel wherever that applies (plain HTTP)."""
    part_size: ByteSize | None = None
    """Bytes of one request. Unset: 4 MiB for the kernel transport, 8 MiB for the portable one."""
    connections: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Requests in flight per channel. Unset: 32 for the kernel transport, 16 for the portable one."""
    give_up_after: Annotated[float, Field(gt=0)] = 300.0
    """Seconds without a byte of progress before a channel fails."""
    drain_for: Annotated[float, Field(ge=0)] = 20.0
    """Seconds that SIGTERM lets running epochs finish; Kubernetes kills after 30 by default."""
    fifo_mode: Annotated[int, BeforeValidator(_octal)] = 0o640
    endpoint: EndpointConfig = EndpointConfig()
    admin: AdminConfig = AdminConfig()

    @model_validator(mode="after")
    def _sane_part(self) -> Self:
        if self.part_size is not None and not 64 * KIB <= self.part_size <= 512 * MIB:
            raise ValueError("PartSize must be between 64KiB and 512MiB")
        return self


class Job(_Model):
    """A whole job file."""

    training_job_name: Annotated[StrictStr, Field(min_length=1, max_length=63)] = "penstock"
    algorithm_specification: AlgorithmSpecification = AlgorithmSpecification()
    hyper_parameters: Annotated[dict[str, StrictStr], Field(max_length=100)] = {}
    environment: dict[str, StrictStr] = {}
    input_data_config: Annotated[tuple[ChannelConfig, ...], Field(min_length=1)]
    penstock: PenstockConfig = PenstockConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [channel.channel_name for channel in self.input_data_config]
        for name in sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two channels are called {name!r}; names must differ")
        part_size = self.penstock.part_size or LARGEST_DEFAULT_PART
        needed = len(names) * 2 * part_size
        if self.penstock.memory_budget < needed:
            raise ValueError(
                f"MemoryBudget {human_bytes(self.penstock.memory_budget)} is less than two parts of "
                f"{human_bytes(part_size)} for each of {len(names)} channels; "
                f"raise it to {human_bytes(needed)} or lower PartSize"
            )
        return self

    @property
    def channel_budget(self) -> int:
        """Bytes that each channel may hold."""
        return int(self.penstock.memory_budget) // len(self.input_data_config)


def load_job(path: str | Path) -> Job:
    """Read and validate a job file, YAML or JSON. Raises ConfigError naming every mistake."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from error
    try:
        document = _parse(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"cannot understand {path}: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold one mapping with InputDataConfig; see the README")
    try:
        return Job.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"{path}:\n  {explain(error, separator=chr(10) + '  ')}") from None


def explain(error: ValidationError, *, separator: str = "; ") -> str:
    """Every mistake that pydantic found, in the words of the file."""
    details = error.errors(include_url=False)
    # A list whose items are all wrong is also called too short; the items' own errors say more.
    told = [detail for detail in details if detail["type"] != "too_short" or detail["input"] in ([], ())]
    return separator.join(_describe(detail) for detail in told or details)


def _parse(text: str) -> Any:
    """JSON if it is; else YAML. Either way a key written twice is an error, not a silent choice."""
    if text.lstrip().startswith(("{", "[")):
        return json.loads(text, object_pairs_hook=_no_duplicates)
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader


class _Loader(yaml.SafeLoader):
    pass


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    return _no_duplicates(loader.construct_pairs(node, deep=True))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _no_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} is written twice")
        found[key] = value
    return found


_PLACES: dict[str, type[_Model]] = {
    "the top level": Job,
    "AlgorithmSpecification": AlgorithmSpecification,
    "a channel of InputDataConfig": ChannelConfig,
    "DataSource": DataSource,
    "DataSource.S3DataSource": S3DataSource,
    "Penstock": PenstockConfig,
    "Penstock.Endpoint": EndpointConfig,
    "Penstock.Admin": AdminConfig,
}
_KEYS = {
    field.alias or name: place
    for place, model in _PLACES.items()
    for name, field in model.model_fields.items()
}
_SAGEMAKER = {
    "AlgorithmName", "CheckpointConfig", "DebugHookConfig", "EnableInterContainerTrafficEncryption",
    "EnableManagedSpotTraining", "EnableNetworkIsolation", "ExperimentConfig", "MetricDefinitions",
    "OutputDataConfig", "ProfilerConfig", "ResourceConfig", "RetryStrategy", "RoleArn", "StoppingCondition",
    "Tags", "TensorBoardOutputConfig", "TrainingImage", "VpcConfig",
}  # fmt: skip
"""Keys of a CreateTrainingJob request that have no bearing on data."""


def _describe(detail: Any) -> str:
    """One mistake: `InputDataConfig[0].ChannelName: ...`."""
    place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in detail["loc"]).lstrip(
        "."
    )
    message = _WORDS.get(detail["type"], detail["msg"].removeprefix("Value error, "))
    if detail["type"] == "extra_forbidden":
        message = f"is not a key that Penstock supports here; {_advice(str(detail['loc'][-1]))}"
    elif detail["type"] == "string_pattern_mismatch":
        message = f"{detail['input']!r} does not match {detail['ctx']['pattern']}"
    return f"{place}: {message}" if place else message


_WORDS = {
    "missing": "is required",
    "string_type": "must be text; put it in quotes",
    "too_short": "must have at least 1 item",
}


def _advice(key: str) -> str:
    """What to do about an unknown key."""
    if key in _KEYS:
        return f"it belongs in {_KEYS[key]}"
    if key in _SAGEMAKER:
        return "this version takes only the parts of a training job that concern data: remove it"
    close = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.8)
    return f"did you mean {close[0]}?" if close else "remove it"
