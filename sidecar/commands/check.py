"""`penstock check`: whether a job file is valid, without asking storage or this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidecar.config.document import FileMistakes
from sidecar.config.job import load_job, warnings
from sidecar.process.exits import Exit
from streamer.errors import ConfigError

if TYPE_CHECKING:
    from sidecar.config.job import Job


def check(path: str) -> dict[str, Any]:
    """Return the document of `penstock check --json`: whether the file is valid, mistakes and warnings."""
    mistakes: list[dict[str, Any]] = []
    document = {"file": path, "valid": False, "code": int(Exit.CONFIG), "mistakes": mistakes, "more": 0}
    try:
        job = load_job(path)
    except FileMistakes as error:
        mistakes += [{"line": each.line, "key": each.key, "message": each.message} for each in error.mistakes]
        return document | {"more": error.more}
    except ConfigError as error:
        mistakes.append({"line": None, "key": "", "message": str(error)})
        return document
    return document | {"valid": True, "code": 0, "warnings": warnings(job), "channels": _modes(job)}


def summary(path: str, job: Job) -> str:
    """Return what people read about a valid file: its warnings, then its channels."""
    channels = ", ".join(f"{name} ({mode})" for name, mode in _modes(job).items())
    warned = [f"{path}: warning: {warning}" for warning in warnings(job)]
    return "\n".join([*warned, f"{path}: no mistakes; channels: {channels}"])


def _modes(job: Job) -> dict[str, str]:
    return {channel.channel_name: job.mode(channel) for channel in job.input_data_config}
