"""Arranges the records of a channel whose ranks share it by record: shuffle, selection, mix of prefixes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from streamer.plan.mixed_order import MixedOrder
from streamer.plan.record_order import BLOCK, RecordOrder
from streamer.plan.record_selection import RecordSelection, select_records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.config.request import ChannelConfig
    from streamer.plan import Entries
    from streamer.plan.mixed_order import Order


def record_order(channel: ChannelConfig, entries: Entries, counts: Sequence[int], batch: int) -> Order:
    """Return the order of a channel's records. `counts`: records of every entry; `batch`: of a global batch.

    Takes seconds for millions of blocks. Raises ConfigError if a split or a prefix of a mix has no record.
    """
    shuffle, ranks = channel.shuffle_config, channel.penstock.by_record
    seed = None if shuffle is None else shuffle.seed
    block = BLOCK if ranks is None else ranks.block_bytes
    selection = channel.penstock.record_selection
    if channel.penstock.mix is not None:
        mix = channel.penstock.mix.mix
        return MixedOrder(
            entries, counts, channel.sources, mix, seed=seed, block=block, split=selection.split, batch=batch
        )
    select = None
    if selection != RecordSelection():
        select = partial(select_records, entries, counts, selection)
    return RecordOrder(counts, entries.sizes, seed=seed, block=block, select=select)
