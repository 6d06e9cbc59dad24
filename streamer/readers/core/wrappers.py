"""Refuses wrappers that divide among all processes what is one process's share already.

Loaders of other libraries assume that every process reads the whole data set. Over a rank FIFO they lose the
records of other ranks, and report success: a loader that dispatches reads one rank alone, and one that shards
keeps every n-th record of each rank. Nothing in a data set's own call shows them, but they are on its stack:

    DataLoaderDispatcher.__iter__ ─▶ DataLoader ─▶ data set ─▶ PipeIterableDataset.__iter__ ─▶ check

So a pass looks for them when it begins. A worker that was forked has the stack of its parent below its own;
for one that is spawned, the data set is checked while it is pickled. Where process 0 reads for all, and all
processes are of its host, it may read the FIFOs of all (`streamer.readers.torch`); else the pass is refused.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from streamer.errors import ChannelError
from streamer.readers.core.config import PipeModeDatasetException, channels_in, is_rank_channel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_OWN_LOADER = (
    "leave the loader out of Accelerator.prepare(), and with Trainer return it from a get_train_dataloader "
    "of your own"
)
_DISPATCHES = (
    "reads process 0's records alone and divides them (dispatch_batches=True; with False accelerate shards "
    f"each rank's records): {_OWN_LOADER}; or give the channel no Ranks and the data set share=(0, 1)"
)
_SHARDS = f"keeps this process's part of each batch (dispatch_batches=False): {_OWN_LOADER}"


class _Kind(NamedTuple):
    """How a wrapper is asked for the number of processes, what it does, and what is to be done."""

    processes: Callable[[Any], Any]
    text: str


_KINDS = {
    "accelerate.data_loader.DataLoaderDispatcher": _Kind(attrgetter("state.num_processes"), _DISPATCHES),
    "accelerate.data_loader.IterableDatasetShard": _Kind(attrgetter("num_processes"), _SHARDS),
    "transformers.trainer_pt_utils.IterableDatasetShard": _Kind(attrgetter("num_processes"), _SHARDS),
    "datasets.iterable_dataset.StepExamplesIterable": _Kind(
        attrgetter("step"),
        "keeps every n-th example: leave out split_dataset_by_node, or give each node its own channels by "
        "gen_kwargs",
    ),
    "torch.utils.data.datapipes.iter.sharding.ShardingFilterIterDataPipe": _Kind(
        attrgetter("num_of_instances"), "keeps every n-th element: leave out sharding_filter"
    ),
    "webdataset.shardlists.split_by_node": _Kind(
        lambda names: names["world_size"], "keeps every n-th sample: leave out split_by_node"
    ),
}
"""By class, or by function, whose names are those of its frame."""
_MODULES = {name.rpartition(".")[0] for name in _KINDS}


def divided(channel: str, config_dir: str) -> bool:
    """Return whether a channel has a part of the data alone: a rank's, or this host's."""
    with contextlib.suppress(PipeModeDatasetException, OSError, ValueError, TypeError):
        if is_rank_channel(channel, config_dir):
            return True
        if channels_in(config_dir)[channel].get("S3DistributionType") == "ShardedByS3Key":
            with open(os.path.join(config_dir, "resourceconfig.json"), "rb") as file:
                return len(json.load(file)["hosts"]) > 1
    return False


class Wrapper(NamedTuple):
    """A wrapper on the stack that divides records among several processes."""

    name: str
    text: str
    """What it does with the records, and what is to be done."""
    processes: int
    process: int | None
    """That of this process, if process 0 alone reads for all; else None."""

    def refusal(self, channel: str) -> ChannelError:
        """Return the error of a wrapper around a channel that is divided."""
        return ChannelError(
            f"channel {channel} has this process's part of the records, and {self.name} would divide it "
            f"among {self.processes} processes, so that records are lost: it {self.text}"
        )


def check_wrappers(channels: Iterable[str], config_dir: str, *, shared: bool = False) -> None:
    """Raise ChannelError if a wrapper on the stack divides the records of divided channels again.

    `shared`: this process has a share of a host's channels, so that all of them are divided.
    """
    if (found := wrapper()) is not None:
        for channel in channels:
            if shared or divided(channel, config_dir):
                raise found.refusal(channel)


def wrapper() -> Wrapper | None:
    """Return the innermost wrapper on this thread's stack that divides records; None if there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__")
        # Not of other frames: `f_locals` keeps a copy in the frame, with what the program deletes later.
        if module in _MODULES:
            names = frame.f_locals
            kinds: dict[str, Any] = {f"{module}.{frame.f_code.co_name}": names}
            for kind in type(names.get("self")).__mro__:
                kinds[f"{kind.__module__}.{kind.__qualname__}"] = names.get("self")
            for name in kinds.keys() & _KINDS.keys():
                with contextlib.suppress(AttributeError, KeyError, TypeError):
                    known, found = _KINDS[name], kinds[name]
                    if (processes := int(known.processes(found))) > 1:
                        process = found.state.process_index if known.text is _DISPATCHES else None
                        return Wrapper(name, known.text, processes, process)
        frame = frame.f_back
    return None
