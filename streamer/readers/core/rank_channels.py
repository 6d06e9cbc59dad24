"""Names of rank FIFOs, each of which a reader treats as a channel: `train-0`, `train-1` …"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamer.errors import ChannelError
from streamer.readers.core.config import channels_in, check_channel, directories
from streamer.trailer import rank_channel_name
from streamer.units import counted

if TYPE_CHECKING:
    from streamer.readers.core.rank_steps import RankSteps


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
