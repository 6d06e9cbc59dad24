"""The directories of a training container, and its list of channels (contract §1.1, §2.1).

All directories lie below one base directory: `$SAGEMAKER_BASE_DIR`, or `/opt/ml` if that is not set. The
variable is read when a reader is made, not when this module is imported.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from streamer.errors import ChannelError

_SHOWN = 20
"""Most channels that an error names."""


class PipeModeDatasetException(ChannelError):
    """No reader can be made for this channel with these arguments. The name is the incumbent's."""


@dataclass(frozen=True, slots=True)
class Directories:
    """The three directories that a reader uses."""

    pipe: str
    """Directory of the FIFOs and their trailers."""
    config: str
    """Directory of inputdataconfig.json."""
    state: str
    """Directory of the state files, which have the index of the next FIFO."""


def directories(pipe: str | None = None, config: str | None = None, state: str | None = None) -> Directories:
    """Return the given directories, with the defaults below the base directory for those not given."""
    base = os.environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml"
    return Directories(
        pipe=os.fspath(pipe or os.path.join(base, "input", "data")),
        config=os.fspath(config or os.path.join(base, "input", "config")),
        state=os.fspath(state or os.path.join(base, "pipe_state")),
    )


def channels_in(config_dir: str) -> dict[str, Any]:
    """Return the entries of inputdataconfig.json, by channel.

    Raises PipeModeDatasetException if the file is missing or cannot be read.
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


def check_channel(channel: str, config_dir: str) -> dict[str, Any]:
    """Return the entry of a Pipe channel in inputdataconfig.json.

    Raises PipeModeDatasetException with the incumbent's texts (contract §6.1), before the list of the Pipe
    channels, or as `channels_in`.
    """
    channels = channels_in(config_dir)
    if channel not in channels:
        ranks = sum(f"{channel}-{rank}" in channels for rank in range(len(channels)))
        instead = (
            f"; its rank FIFOs are the channels {channel}-0 to {channel}-{ranks - 1}" if ranks > 1 else ""
        )
        raise PipeModeDatasetException(
            f"Channel {channel} not found in Training Job InputDataConfig{instead or _others(channels)}"
        )
    entry = channels[channel]
    if not _is_pipe(entry):
        raise PipeModeDatasetException(f"Channel {channel} is not a PipeMode channel{_others(channels)}")
    found: dict[str, Any] = entry
    return found


def _is_pipe(entry: Any) -> bool:
    return isinstance(entry, dict) and str(entry.get("TrainingInputMode", "")).lower() == "pipe"


def _others(channels: dict[str, Any]) -> str:
    """Return the Pipe channels, as the end of an error text."""
    names = sorted(name for name, entry in channels.items() if _is_pipe(entry))
    if not names:
        return "; there is no Pipe channel"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"; the Pipe channels are {', '.join(names[:_SHOWN])}{more}"


def check_if_configured(channel: str, config_dir: str) -> dict[str, Any] | None:
    """Return as `check_channel`; None if inputdataconfig.json does not exist: any FIFO may be read then."""
    exists = os.path.exists(os.path.join(config_dir, "inputdataconfig.json"))
    return check_channel(channel, config_dir) if exists else None
