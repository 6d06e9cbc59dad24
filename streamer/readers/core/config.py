"""The directories of a training container, and its list of channels (contract §1.1, §2.1).

All directories lie below one base directory: `$SAGEMAKER_BASE_DIR`, or `/opt/ml` if that is not set. The
variable is read when a reader is made, not when this module is imported.

Rank FIFOs have names that a reader treats as channels: `train-0`, `train-1` …
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamer.errors import ChannelError
from streamer.trailer import rank_channel_name
from streamer.units import counted

if TYPE_CHECKING:
    from streamer.readers.core.position import RankSteps


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


def rank_channel(channel: str, index: int) -> str:
    """Return the channel name of rank FIFO `index`, from 0 on. Raises ValueError for an index below 0."""
    if index < 0:
        raise ValueError(f"rank {index}: ranks are counted from 0")
    return rank_channel_name(channel, index)


def is_rank_channel(name: str, config_dir: str) -> bool:
    """Return whether a channel is one of several rank FIFOs. Raises PipeModeDatasetException."""
    channel, _, rank = name.rpartition("-")
    channels = channels_in(config_dir)
    return rank.isdigit() and {name, rank_channel(channel, 0), rank_channel(channel, 1)} <= channels.keys()


def rank_channels(channel: str, *, config_dir: str | None = None) -> list[str]:
    """Return the names of all rank FIFOs of a channel, in order; the channel itself if it has none.

    The names are in inputdataconfig.json, in `config_dir` or else `input/config` below `$SAGEMAKER_BASE_DIR`
    (default /opt/ml). Raises PipeModeDatasetException if there is no such channel, or if it is not a Pipe
    channel.
    """
    config_dir = directories(config=config_dir).config
    channels = channels_in(config_dir)
    ranks: list[str] = []
    if channel not in channels:
        while (name := rank_channel(channel, len(ranks))) in channels:
            ranks.append(name)
    for name in ranks or [channel]:
        check_channel(name, config_dir)
    return ranks or [channel]


def check_turn(rank: RankSteps, fifos: int, *, worker: int | None, workers: int, records: int | None) -> None:
    """Raise ChannelError if a DataLoader would not return the global batches in their order.

    `fifos`: FIFOs of the channel that this process reads. `worker`: number of the FIFO whose turn it
    is; None if that is unknown. `workers`: those of the DataLoader, 1 for none. `records`: of an element;
    None if the DataLoader decides.
    """
    channel = rank.channel
    if (rank.workers, fifos) != (workers, workers) and (rank.workers > 1 or min(fifos, workers) > 1):
        raise ChannelError(
            f"{counted(workers, 'process', 'processes')} of a DataLoader would read "
            f"{counted(fifos, 'FIFO')} of {channel}, of which each rank has {rank.workers}, so the global "
            "batches would be others: set Ranks.Workers to num_workers (1 for 0), Ranks.Count to the number "
            f"of training processes of a host, and give the dataset rank_channels({channel!r})"
        )
    if rank.workers == 1:
        return
    if records not in (None, rank.records):
        raise ChannelError(
            f"a DataLoader takes an element of each worker in turn, and an element has "
            f"{counted(records or 0, 'record')} of {channel}, where a rank has {rank.records} in a global "
            "batch: with Ranks.Workers make both the same, by batch_size or by GlobalBatch"
        )
    if rank.worker != worker:
        raise ChannelError(
            f"this is not the turn of FIFO {rank.worker} of the {rank.workers} of a rank of {channel}: load "
            f"the state of --resume, and name the channels in the order of rank_channels({channel!r})"
        )
