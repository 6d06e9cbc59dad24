"""The parts of a CreateTrainingJob request that concern data, with the API's own limits (contract §3).

A value that the API allows and Penstock does not support is an error that says what to write instead. This
module has the rules of one channel, `sidecar.config.sources` those of its source, and `sidecar.config.job`
those between channels.
"""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, StrictInt, StrictStr, model_validator

from sidecar.config.extras import SELECTING, SELECTING_FILES, ChannelExtras
from sidecar.config.model import Model
from sidecar.config.sources import DataSource, S3DataSource
from streamer.plan import S3Uri, parse_address

if TYPE_CHECKING:
    from sidecar.config.records import RecordsConfig
    from streamer.formats.record_format import RecordFormat

InputMode = Literal["Pipe", "File"]

BY_RECORD = "Ranks: {Count: 1, GlobalBatch: 1} and Records: {Format: TFRecord, Index: DIRECTORY}"
"""Keys by which a channel knows its records."""
LONGEST_NAME = 64
"""Characters of a ChannelName."""
NO_FASTFILE = (
    "'FastFile' is refused: it mounts the bucket as a file system, and Penstock mounts nothing; "
    "use 'Pipe' to stream the objects or 'File' to download them first"
)


def _no_fastfile(value: object) -> object:
    if value == "FastFile":
        raise ValueError(NO_FASTFILE)
    return value


class ShuffleConfig(Model):
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
    """A 64-bit signed integer, as the API's `long`."""


class ChannelConfig(Model):
    channel_name: Annotated[
        StrictStr, Field(min_length=1, max_length=LONGEST_NAME, pattern=r"^[A-Za-z0-9.\-_]+$")
    ]
    data_source: DataSource
    content_type: Annotated[StrictStr, Field(max_length=256)] | None = None
    compression_type: Literal["None", "Gzip"] = "None"
    record_wrapper_type: Literal["None", "RecordIO"] = "None"
    input_mode: Annotated[InputMode, BeforeValidator(_no_fastfile)] | None = None
    shuffle_config: ShuffleConfig | None = None
    penstock: ChannelExtras = ChannelExtras()

    @model_validator(mode="after")
    def _joinable(self) -> Self:
        joining = self.penstock.joining
        if joining is None:
            return self
        if self.penstock.join is not None and self.penstock.skip_bytes is not None:
            raise ValueError("Join and SkipBytes exclude each other; remove one of the two")
        if self.penstock.record_keys:
            raise ValueError(
                f"{joining} makes one file of all objects, whose records have no keys; remove RecordKeys"
            )
        if self.record_wrapper_type != "None":
            raise ValueError(
                f"{joining} contradicts RecordWrapperType: {self.record_wrapper_type}, which keeps every "
                "object apart; remove one of the two"
            )
        if texts := [name for name in self.source.attribute_names if not name.endswith("-ref")]:
            raise ValueError(
                f"{joining} joins whole objects, and the attribute {texts[0]!r} is a text; list only "
                "attributes whose names end in -ref, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _selectable(self) -> Self:
        kind = self.source.s3_data_type
        allowed = {
            "S3Prefix": SELECTING,
            "ManifestFile": SELECTING_FILES,
            "AugmentedManifestFile": ("Limit",),
        }
        if given := " and ".join(key for key in self.penstock.selecting if key not in allowed[kind]):
            raise ValueError(
                f"{given}: has no meaning with {kind}; remove {given}, and "
                + (
                    "name all objects in one manifest, or use S3Prefix"
                    if kind == "ManifestFile"
                    else "leave lines out of the manifest, or use Limit"
                )
            )
        for inner, outer in permutations(self.sources, 2):
            if inner.bucket == outer.bucket and inner.key.startswith(outer.key):
                raise ValueError(
                    f"AlsoFrom: every object below {inner} is also below {outer} and would be streamed "
                    "twice; remove one of the two, or end both in / if they are folders"
                )
        return self

    @model_validator(mode="after")
    def _addressable(self) -> Self:
        extras, selected = self.penstock, self.penstock.record_selection
        if (ranks := extras.by_record) is None:
            by_record = {"Limit: {Records: …}": selected.limit, "Split: {By: block}": selected.split}
            if given := [key for key, each in by_record.items() if each is not None]:
                raise ValueError(
                    f"{given[0]} needs to know where records are; add {BY_RECORD}, or select whole objects"
                )
            return self
        found = self.not_by_record
        records, wrapped = extras.records, self.record_wrapper_type != "None"
        known = wrapped or (records is not None and (records.index or records.record_format.size))
        if found is None and not known:
            found = (
                "needs to know where they are: add Records: {Format: TFRecord, Index: DIRECTORY}, with the "
                "format of the objects, or Records: {Format: fixed:BYTES} if all records have one size"
            )
        if found is None and extras.join == "tar" and ranks.fetch == "together":
            found = (
                "Join: tar ends a sample where the rank's next one begins, which with Fetch: together comes "
                "after those of the other ranks, so that ranks would wait for each other; remove Fetch"
            )
        if found is None and ranks.block is not None:
            if self.shuffle_config is None and extras.mix is None:
                found = "Block has no meaning without ShuffleConfig or Mix; remove it"
            elif selected.split is not None:
                found = (
                    "Block contradicts Split: {By: block}, whose blocks have 1 MiB on all hosts and in all "
                    "channels; remove it"
                )
        if found is not None:
            raise ValueError(f"GlobalBatch divides a channel by record, and {found}")
        return self

    @property
    def may_fetch_together(self) -> bool:
        """Whether several FIFOs share the channel by record, and may be one stream."""
        extras = self.penstock
        return (
            (ranks := extras.by_record) is not None
            and ranks.fetch != "separately"
            and ranks.count * ranks.workers > 1
            and extras.join is None
        )

    @property
    def not_by_record(self) -> str | None:
        """Why ranks cannot share the channel by record, and what to do; None if they can."""
        extras = self.penstock
        if self.compression_type != "None":
            return self.not_indexable
        if self.source.s3_data_type == "AugmentedManifestFile" and self.record_wrapper_type == "None":
            return f"{self.not_indexable}, and no reader sees its end; add RecordWrapperType: RecordIO"
        if self.record_wrapper_type != "None" and (extras.records or (extras.ranks and extras.ranks.block)):
            return f"{self.not_indexable}, and a block; remove Records and Block, which have no meaning then"
        if extras.joining not in {None, "Join: tar"}:
            return f"{extras.joining} joins whole objects; remove it"
        if extras.integrity == "checksum":
            return "Integrity: checksum compares whole objects, which no rank reads; remove it"
        return None

    @model_validator(mode="after")
    def _mixable(self) -> Self:
        if (mix := self.penstock.mix) is None:
            return self
        sources = len(self.sources)
        if sources == 1:
            raise ValueError(
                "Mix is for several prefixes, and the channel has one; add AlsoFrom, or remove Mix"
            )
        if len(mix.weights) != sources:
            raise ValueError(
                f"Mix has {len(mix.weights)} Weights, and the channel {sources} prefixes; write one weight "
                "for S3Uri and one for each prefix of AlsoFrom, in that order"
            )
        if self.penstock.by_record is None:
            raise ValueError(f"Mix needs to know where records are; add {BY_RECORD}, or remove Mix")
        if self.penstock.record_selection.limit is not None:
            raise ValueError(
                "Limit: {Records: …} takes the records of one prefix after the other, and Mix mixes them; "
                "remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _recorded(self) -> Self:
        if (records := self.penstock.records) is None:
            return self
        if self.record_wrapper_type != "None":
            raise ValueError(f"{self.not_indexable}, which readers know; remove Records")
        if (join := self.penstock.join) is not None and records.format != join:
            raise ValueError(
                f"Join: {join} contradicts Records.Format: {records.format}; correct one of the two"
            )
        if records.index is not None and (why := self.not_indexable) is not None:
            raise ValueError(f"Index needs records at fixed offsets of objects: {why}; remove Index")
        return self

    @property
    def records(self) -> RecordsConfig:
        """The section of a channel that has `Records`."""
        if self.penstock.records is None:
            raise AssertionError
        return self.penstock.records

    @property
    def record_format(self) -> RecordFormat:
        """The format of the records of such a channel."""
        return self.records.record_format

    @property
    def needs_index(self) -> bool:
        """Whether ranks that share the channel by record need a record index."""
        return self.record_wrapper_type == "None" and not self.record_format.size

    @property
    def learnt(self) -> RecordsConfig | None:
        """The records whose index the channel learns while it streams; None if it learns none."""
        extras = self.penstock
        return None if extras.index is None or extras.by_record is not None else extras.records

    @property
    def not_indexable(self) -> str | None:
        """Why no index can address the records of the channel's objects; None if one can."""
        if self.compression_type != "None":
            given = f"CompressionType: {self.compression_type}"
            return f"{given} has no records at fixed offsets; store the objects inflated"
        if self.record_wrapper_type != "None":
            return f"RecordWrapperType: {self.record_wrapper_type} makes every object one record"
        if self.source.s3_data_type == "AugmentedManifestFile":
            return "AugmentedManifestFile has a sample on each line of its manifest"
        return None

    @property
    def source(self) -> S3DataSource:
        return self.data_source.s3_data_source

    @property
    def sources(self) -> tuple[S3Uri, ...]:
        """The URI of the source and those of AlsoFrom, in stream order."""
        return (self.source.uri, *map(parse_address, self.penstock.also_from))

    def refusal_as_file(self) -> str | None:
        """Return why this channel cannot be in File mode, and what to do; None if it can."""
        name = self.channel_name
        if self.source.s3_data_type == "AugmentedManifestFile":
            return "AugmentedManifestFile is for Pipe mode only; set InputMode: Pipe"
        if self.record_wrapper_type != "None":
            return "RecordWrapperType is for Pipe mode only; remove it or set InputMode: Pipe"
        if self.compression_type != "None":
            return "CompressionType is for Pipe mode only; remove it or set InputMode: Pipe"
        if self.shuffle_config is not None:
            return "ShuffleConfig orders a stream, and files have no order; remove it or set InputMode: Pipe"
        if given := [key for key in self.penstock.given if key not in SELECTING_FILES]:
            return (
                f"its Penstock section has {', '.join(given)}, for Pipe mode only; remove that or set "
                "InputMode: Pipe"
            )
        if name.startswith("."):
            return f"{name!r} cannot be a directory of data; rename the channel so that it starts otherwise"
        return None


class AlgorithmSpecification(Model):
    ignored: ClassVar[frozenset[str]] = frozenset({
        "TrainingImage", "AlgorithmName", "MetricDefinitions", "EnableSageMakerMetricsTimeSeries",
        "ContainerEntrypoint", "ContainerArguments", "TrainingImageConfig",
    })  # fmt: skip

    training_input_mode: Annotated[InputMode, BeforeValidator(_no_fastfile)] = "Pipe"


class InstanceGroup(Model):
    instance_group_name: Annotated[StrictStr, Field(min_length=1, max_length=64)]
    instance_count: Annotated[int, Field(ge=0)]
    instance_type: StrictStr


class ResourceConfig(Model):
    """The cluster of the request; `sidecar.config.hosts` compares it with the environment."""

    ignored: ClassVar[frozenset[str]] = frozenset({
        "VolumeSizeInGB", "VolumeKmsKeyId", "KeepAlivePeriodInSeconds", "TrainingPlanArn",
        "InstancePlacementConfig", "InstancePreferences", "SelectedInstanceType", "SelectedInstanceCount",
    })  # fmt: skip

    instance_type: StrictStr | None = None
    instance_count: Annotated[int, Field(ge=0)] | None = None
    instance_groups: Annotated[tuple[InstanceGroup, ...], Field(max_length=5)] = ()

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        names = [group.instance_group_name for group in self.instance_groups]
        if len(set(names)) < len(names):
            raise ValueError("two InstanceGroups have one name; names must differ")
        if self.instance_groups and self.instance_count:
            raise ValueError("InstanceCount and InstanceGroups exclude each other; remove one")
        return self
