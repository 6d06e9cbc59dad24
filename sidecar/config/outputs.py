"""What a job writes to S3: SageMaker's `OutputDataConfig`, `CheckpointConfig`, and Penstock's keys for both.

    /opt/ml/model          <S3OutputPath>/<TrainingJobName>/output/model.tar.gz, or below output/model/
    /opt/ml/output/data    <S3OutputPath>/<TrainingJobName>/output/output.tar.gz
    LocalPath              <S3Uri>/<path below LocalPath>

The first host writes `output/model.tar.gz`, another one `output/<host>/model.tar.gz`. A `LocalPath` below
`/opt/ml` is below the base directory, which stands for `/opt/ml`. Pure.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    StrictStr,
    model_validator,
)

from sidecar.config.model import Model, Size
from sidecar.config.sources import SourceUri
from streamer.plan import S3Uri, parse_address

DEFAULT_BASE = "/opt/ml"
_OWN = ("input", "model", "output")
"""Directories of the base directory that have other contents than checkpoints."""


class OutputDataConfig(Model):
    """Where the model and the output data go after the training."""

    s3_output_path: SourceUri = Field(alias="S3OutputPath")
    kms_key_id: Annotated[StrictStr, Field(max_length=2048, pattern=r"^[a-zA-Z0-9:/_-]*$")] | None = None
    """Id or ARN of a KMS key, or of its alias. Empty or unset: the bucket's own encryption."""
    compression_type: Literal["GZIP", "NONE"] = "GZIP"
    """`NONE`: the files of the model are objects of their own; output data is an archive in both cases."""

    @property
    def encryption(self) -> dict[str, str]:
        """Parameters of a request that makes an object."""
        return {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": self.kms_key_id} if self.kms_key_id else {}

    def folder(self, job: str) -> S3Uri:
        """Return what the keys of all output of a training job begin with."""
        bucket, key = parse_address(self.s3_output_path)
        return S3Uri(bucket, f"{_as_folder(key)}{job}/output/")

    def target(self, what: Literal["model", "output"], job: str, host: str | None) -> S3Uri:
        """Return the URI of an archive; with `CompressionType: NONE`, the folder of the files of the model.

        `host`: the name of this host, None for the first one. All hosts have one folder of files.
        """
        bucket, folder = self.folder(job)
        if what == "model" and self.compression_type == "NONE":
            return S3Uri(bucket, f"{folder}model/")
        return S3Uri(bucket, f"{folder}{f'{host}/' if host else ''}{what}.tar.gz")


def _absolute(value: str) -> str:
    if not value.startswith("/") or ".." in value.split("/"):
        raise ValueError(
            f"{value!r} is no absolute path, or has '..' in it; write one such as /opt/ml/checkpoints"
        )
    return os.path.normpath("/" + value.strip("/"))


class CheckpointConfig(Model):
    """Where the checkpoints are: restored before the training, uploaded while it runs."""

    s3_uri: SourceUri = Field(alias="S3Uri")
    local_path: Annotated[StrictStr, Field(max_length=4096), AfterValidator(_absolute)] = (
        f"{DEFAULT_BASE}/checkpoints"
    )

    @property
    def uri(self) -> S3Uri:
        """Bucket, and what precedes the paths of the files in their keys."""
        bucket, key = parse_address(self.s3_uri)
        return S3Uri(bucket, _as_folder(key))

    def directory(self, base: str) -> str:
        """Return the directory of the checkpoints. `base`: the base directory."""
        path = self.local_path
        if _contains(base, path) or not _contains(DEFAULT_BASE, path):
            return path
        return os.path.normpath(os.path.join(base, os.path.relpath(path, DEFAULT_BASE)))

    def on_disk(self, path: str, base: str) -> str:
        """Return where `path` is, which the user may write below LocalPath. `base`: the base directory."""
        rest = path.removeprefix(self.local_path)
        return self.directory(base) + rest if rest != path and rest[:1] in ("", "/") else path

    def overlaps(self, base: str) -> str | None:
        """Return the directory of other contents that has, or is in, the checkpoints' one; None if none."""
        path = self.directory(base)
        own = (os.path.join(os.path.normpath(base), name) for name in _OWN)
        return next((each for each in own if _contains(each, path) or _contains(path, each)), None)


def _as_folder(key: str) -> str:
    return key if not key or key.endswith("/") else f"{key}/"


def _contains(directory: str, path: str) -> bool:
    return os.path.commonpath([directory, path]) == os.path.normpath(directory)


class _Ignorable(Model):
    """A section in whose place the job file may have the word `ignore`."""

    model_config = ConfigDict(json_schema_extra={"type": ["object", "string"], "pattern": "^ignore$"})

    _ignored: bool = PrivateAttr(default=False)

    @model_validator(mode="wrap")
    @classmethod
    def _or_ignore(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        section = handler({} if value == "ignore" else value)
        section._ignored = value == "ignore"  # noqa: SLF001 - of this class
        return section

    @property
    def is_ignored(self) -> bool:
        return self._ignored


class OutputExtras(_Ignorable):
    """What `OutputDataConfig` does not say. `ignore`: nothing is uploaded after the training."""

    replace: bool = False
    """Whether a model is replaced that is not of a training job of this name."""


class CheckpointExtras(_Ignorable):
    """What `CheckpointConfig` does not say. `ignore`: nothing is restored, or uploaded meanwhile."""

    restore: Literal["all", "newest"] = "all"
    """`newest`: of the directories in S3Uri only the one that was written last, and the files beside it."""


class UploadConfig(Model):
    """Limits of what is written to S3."""

    bandwidth: Annotated[Size, Field(gt=0)] | None = None
    """Bytes per second of all uploads. Unset: no limit."""
