"""Names of rank FIFOs, each of which a reader treats as a channel: `train-0`, `train-1` …"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamer.errors import ChannelError
from streamer.readers.core.config import channels_in, check_channel, directories
from streamer.trailer import channel_of_rank, rank_channel_name

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def check_one_host(rank: RankSteps | None, channels: Sequence[str], config_dir: str) -> None:
    """Raise ChannelError if workers of several hosts would change the batches of the optimizer.

    The ranks of a global batch are numbered host by host, and a loader takes a batch of each of its workers
    in turn. Copies of ranks, of which a host has more FIFOs than ranks, may pass. `rank`: steps of the FIFO
    that a worker has opened. `channels`: those of its process.
    """
    if rank is None or sum(channel_of_rank(name) == rank.channel for name in channels) < 2:
        return
    if rank.ranks > (here := len(rank_channels(rank.channel, config_dir=config_dir))):
        raise ChannelError(
            "DataLoader workers of several hosts would change the batches of the optimizer: "
            f"{rank.ranks} ranks share {rank.channel} by record, {here} of them on this host; set "
            "Ranks.Count to the number of processes of a host, and num_workers=1"
        )
