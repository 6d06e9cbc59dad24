"""Rules between `OutputDataConfig`, `CheckpointConfig` and Penstock's keys for both. Pure.

`sidecar.config.outputs` has these sections.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from sidecar.config.mistakes import RuleError
from sidecar.config.outputs import DEFAULT_BASE

if TYPE_CHECKING:
    from sidecar.config.outputs import CheckpointConfig, OutputDataConfig
    from sidecar.config.settings import PenstockConfig

_JOB_NAME = re.compile(r"(?!\.\.?\Z)[A-Za-z0-9._-]+")
"""A name that can be a folder of keys, and the value of a header."""


def check_written(
    job: str, output: OutputDataConfig | None, checkpoints: CheckpointConfig | None, penstock: PenstockConfig
) -> None:
    """Raise RuleError for keys that contradict each other. `job`: the name of the training job."""
    written = []
    for key, section, name, config in (
        ("Output", penstock.output, "OutputDataConfig", output),
        ("Checkpoints", penstock.checkpoints, "CheckpointConfig", checkpoints),
    ):
        if section is not None and config is None:
            raise RuleError(f"has no meaning without {name}; add it, or remove this", at=("Penstock", key))
        if config is not None and not (section is not None and section.is_ignored):
            written.append(name)
    if penstock.upload.bandwidth is not None and not written:
        raise RuleError(
            "has no meaning in a job that writes nothing to S3; add OutputDataConfig or CheckpointConfig, "
            "or remove this",
            at=("Penstock", "Upload"),
        )
    if written and not _JOB_NAME.fullmatch(job):
        raise RuleError(
            f"{job!r} is part of the keys or the metadata of what {written[0]} uploads; use letters of "
            "ASCII, digits, '.', '-' and '_'",
            at=("TrainingJobName",),
        )
    if checkpoints is not None:
        base = penstock.base_directory or DEFAULT_BASE
        if (other := checkpoints.overlaps(base)) is not None:
            raise RuleError(
                f"{checkpoints.directory(base)} overlaps {other}, which has other files than checkpoints; "
                "leave LocalPath out, or name a directory of its own",
                at=("CheckpointConfig", "LocalPath"),
            )


def written_warnings(
    job: str | None, output: OutputDataConfig | None, checkpoints: CheckpointConfig | None
) -> list[str]:
    """Return warnings about what is written. `job`: the name of the training job, None if it has none."""
    if output is None:
        return []
    texts = []
    if job is None:
        texts.append(
            "OutputDataConfig without TrainingJobName: such jobs replace each other's model; add a name"
        )
    elif checkpoints is not None and str(output.folder(job)).startswith(str(checkpoints.uri)):
        texts.append(
            f"models go to {output.s3_output_path}, in {checkpoints.uri}, from where each start restores "
            "them as checkpoints; give CheckpointConfig a prefix of its own"
        )
    return texts
