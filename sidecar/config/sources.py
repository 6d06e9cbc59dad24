"""The source of a channel: a prefix or a manifest in S3, as in a CreateTrainingJob request (contract §3).

A URI of S3 is `s3://…`, or an `https://` address of Amazon S3.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, StrictStr, model_validator

from sidecar.config.model import Model, valid_for
from streamer.plan import S3Uri, parse_address

SourceUri = Annotated[StrictStr, Field(max_length=1024), valid_for(parse_address)]
"""A URI of objects, as text; `parse_address` parses it."""


def _no_converse(value: object) -> object:
    if value == "Converse":
        raise ValueError(
            "'Converse' is refused: it is chat data for SageMaker's own models, not a byte stream; "
            "use 'S3Prefix' to stream the objects as they are"
        )
    return value


def _refused(what: str) -> Any:
    """Return the validator of a data source other than S3: it accepts only an empty value."""

    def check(value: object) -> object:
        if value in (None, [], {}):
            return None
        raise ValueError(f"{what} is refused: Penstock reads S3 only; use S3DataSource")

    return BeforeValidator(check)


class S3DataSource(Model):
    ignored: ClassVar[frozenset[str]] = frozenset({"ModelAccessConfig", "HubAccessConfig"})

    s3_data_type: Annotated[
        Literal["S3Prefix", "ManifestFile", "AugmentedManifestFile"], BeforeValidator(_no_converse)
    ] = Field(alias="S3DataType")
    s3_uri: SourceUri = Field(alias="S3Uri")
    s3_data_distribution_type: Literal["FullyReplicated", "ShardedByS3Key"] = Field(
        "FullyReplicated", alias="S3DataDistributionType"
    )
    attribute_names: Annotated[
        tuple[Annotated[StrictStr, Field(min_length=1, max_length=256, pattern=r"^.+$")], ...],
        Field(max_length=16),
    ] = ()
    instance_group_names: Annotated[
        tuple[Annotated[StrictStr, Field(min_length=1, max_length=64)], ...], Field(max_length=5)
    ] = ()

    @model_validator(mode="after")
    def _attributes(self) -> Self:
        augmented = self.s3_data_type == "AugmentedManifestFile"
        if augmented and not self.attribute_names:
            raise ValueError(
                "AugmentedManifestFile needs AttributeNames: list the attributes to stream, in order"
            )
        if self.attribute_names and not augmented:
            raise ValueError(
                f"AttributeNames has no meaning with {self.s3_data_type}; "
                "remove it or use AugmentedManifestFile"
            )
        for names, what in (
            (self.attribute_names, "AttributeNames"),
            (self.instance_group_names, "InstanceGroupNames"),
        ):
            if len(set(names)) < len(names):
                raise ValueError(f"{what} names one twice; name each once")
        return self

    @property
    def uri(self) -> S3Uri:
        return parse_address(self.s3_uri)

    @property
    def sharded(self) -> bool:
        return self.s3_data_distribution_type == "ShardedByS3Key"


class DataSource(Model):
    s3_data_source: S3DataSource = Field(alias="S3DataSource")
    file_system_data_source: Annotated[None, _refused("FileSystemDataSource")] = None
    dataset_source: Annotated[None, _refused("DatasetSource")] = None
