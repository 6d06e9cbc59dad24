"""Where a training container keeps its channels, and what it says about them (contract §1.1, §2.1).

Everything hangs off one base directory: `$SAGEMAKER_BASE_DIR`, `/opt/ml` where that is not set. It is
looked up when a reader is made, not when this module is imported.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from streamer.errors import ChannelError


class PipeModeDatasetException(ChannelError):
    """A reader cannot be made for this channel with these arguments. The name is the incumbent's."""


@dataclass(frozen=True, slots=True)
class Directories:
    """The three directories that a reader uses."""

    pipe: str
    """Holds the FIFOs and their trailers."""
    config: str
    """Holds inputdataconfig.json."""
    state: str
    """Holds the file that says which FIFO is next."""


def directories(pipe: str | None = None, config: str | None = None, state: str | None = None) -> Directories:
    """The directories given, and for those not given the places below the base directory."""
    base = os.environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml"
    return Directories(
        pipe=os.fspath(pipe or os.path.join(base, "input", "data")),
        config=os.fspath(config or os.path.join(base, "input", "config")),
        state=os.fspath(state or os.path.join(base, "pipe_state")),
    )


def channels_in(config_dir: str) -> dict[str, Any]:
    """What inputdataconfig.json says, by channel.

    Raises PipeModeDatasetException if there is no such file, or none that can be read.
    """
    path = os.path.join(config_dir, "inputdataconfig.json")
    try:
        with open(path, "rb") as file:
            channels: Any = json.load(file)
    except FileNotFoundError as error:
        raise PipeModeDatasetException(
            f"{path} does not exist: the sidecar has not started yet, or it uses another base directory"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise PipeModeDatasetException(f"{path} cannot be read: {error}") from error
    return channels if isinstance(channels, dict) else {}


def check_channel(channel: str, config_dir: str) -> None:
    """Make sure that inputdataconfig.json knows `channel` and that it is a Pipe channel.

    Raises PipeModeDatasetException, with the incumbent's words for the two cases (contract §6.1), or as
    `channels_in`.
    """
    channels = channels_in(config_dir)
    if channel not in channels:
        raise PipeModeDatasetException(f"Channel {channel} not found in Training Job InputDataConfig")
    entry = channels[channel]
    if not isinstance(entry, dict) or str(entry.get("TrainingInputMode", "")).lower() != "pipe":
        raise PipeModeDatasetException(f"Channel {channel} is not a PipeMode channel")
