"""Plans a channel whose ranks share it by record (`Ranks` with `GlobalBatch`).

    job file ─▶ deal of this host's ranks, record index            before the objects are listed
    plan of all hosts' objects + record index ─▶ RecordTable ─▶ order, deal ─▶ RecordPlan of this host's ranks

Records of one size, and objects that are records, need no index. An index is read again at every start, and
never trusted over the bytes:

    every object    the index has a row of its size, ETag and version id; every request names this version
    every row       it ends within the object; its offsets are looked at when bytes of ranks are summed up
    a sample        one request each of a few bytes shows whether a record lies where the index has it
    lines           one request of a byte for each object: its last line has an end

The offsets stay in the file of the index, which is open while the job runs (`StoredIndex`).
"""

from __future__ import annotations

import contextlib
import random
from array import array
from functools import partial
from typing import TYPE_CHECKING

from sidecar.index.build import add_missing
from sidecar.index.check import Border, check_borders, check_rows, sample_borders
from sidecar.index.object import find_channel_index, open_channel_index
from sidecar.index.objects import Access, ChannelObjects
from sidecar.index.stored import check_format
from streamer.aio import in_thread, task_group
from streamer.errors import CorruptObject, PenstockError, SourceChanged
from streamer.formats.record_index import memory_of, object_name
from streamer.plan.mixed_order import MixedOrder
from streamer.plan.record_order import BLOCK, Deal, RecordOrder
from streamer.plan.record_plan import RecordPlan
from streamer.plan.record_selection import RecordSelection, memory_of_split, select_records
from streamer.plan.record_table import FixedRecords, IndexedRecords, ObjectRecords, only_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.config.records import RanksConfig
    from sidecar.config.request import ChannelConfig
    from sidecar.index.stored import StoredIndex
    from streamer.formats.record_index import RecordIndex
    from streamer.plan import Entries, Plan, Shard
    from streamer.plan.mixed_order import Order
    from streamer.plan.record_table import RecordTable
    from streamer.s3.pages.validation import PlanMemory

MOST_OBJECTS = 1000
"""Most objects whose last record is looked at."""
MOST_RECORDS = 250
"""Most further records that are looked at. With these the start takes about a second, most of it waiting."""


async def plan_by_record(
    plan: Plan,
    channel: ChannelConfig,
    deal: Deal,
    index: RecordIndex | None,
    access: Access,
    *,
    memory: PlanMemory,
    epoch: int,
    build: bool,
) -> RecordPlan:
    """Return the plan of this host's ranks. `plan`: of the channel. `memory`: counts a split's blocks.

    `index`: None if there is none yet, or the channel needs none. `build`: make the rows that it lacks,
    for which the objects without one are read. `epoch`: the first one, which is summed up while sampled
    records are looked at. Raises ConfigError for too few records or too many blocks, SourceChanged for an
    object that the index does not have, CorruptObject for a record that is not where it is indexed, and
    SourceError.
    """
    table: RecordTable
    objects: ChannelObjects | None = None
    if plan.framed:
        table = ObjectRecords(plan.entries)
    elif channel.record_format.size:
        table = await in_thread(FixedRecords, plan.entries, channel.record_format.size)
    else:
        objects = await in_thread(ChannelObjects, plan)
        try:
            if index is not None:
                await in_thread(check_rows, index, objects)
        except SourceChanged:
            if not build:
                raise
            index = None
        if index is None:
            place = channel.records.place
            await add_missing(place, channel.channel_name, channel.record_format, objects, access)
            index = await load_index(channel, memory, access)
            await in_thread(check_rows, index, objects)
        join = channel.penstock.join is not None
        table = await in_thread(partial(_table, index, plan, objects, join=join))

    if (split := channel.penstock.record_selection.split) is not None:
        size = await in_thread(memory_of_split, table.counts, plan.entries.sizes, split)
        memory.count_split(channel.channel_name, size)

    def arrange() -> RecordPlan:
        order = _order_of(channel, plan.entries, table.counts, deal.global_batch)
        return RecordPlan(plan.entries, table, order, deal)

    planned = await in_thread(arrange)

    async def sum_up() -> None:
        with contextlib.suppress(PenstockError):  # comes again when the sums are used
            await in_thread(planned.total_bytes, epoch)

    if index is not None and objects is not None:
        async with task_group() as tasks:
            summing = tasks.create_task(sum_up())
            try:
                await _check(index, objects, access)
            except BaseException:
                summing.cancel()
                raise
    planned.base, planned.strays = plan.base, plan.strays
    return planned


def deal_of(ranks: RanksConfig, shard: Shard) -> Deal:
    """Return the deal of this host's FIFOs. Raises ConfigError if a global batch has no equal slices."""
    count = ranks.count * shard.count
    first = ranks.count * shard.index
    end = first + ranks.count
    return Deal(ranks.global_batch or 0, count, first, end, ranks.remainder, ranks.workers)


def _table(index: RecordIndex, plan: Plan, objects: ChannelObjects, *, join: bool) -> IndexedRecords:
    """Return the offsets of the records of the plan's objects, which all have rows."""
    return IndexedRecords(index, plan.entries, _names(plan.entries, objects), join=join)


async def _check(index: RecordIndex, objects: ChannelObjects, access: Access) -> None:
    """Look at a sample of the records. Raises CorruptObject for one that is not where it is indexed."""
    numbers = range(len(objects))
    lasts = numbers if len(numbers) <= MOST_OBJECTS else random.sample(numbers, MOST_OBJECTS)
    borders = sample_borders(index, objects, MOST_RECORDS, lasts)
    faults: list[CorruptObject] = []
    await check_borders(index.format, borders, access, on_bad=faults.append)
    if not faults and index.format.kind == "lines":
        ends = (Border(ref, ref.size, ref.size) for ref in objects if ref.size)
        await check_borders(index.format, ends, access, on_bad=lambda bad: faults.append(_unended(bad)))
    if faults:
        raise faults[0]


async def load_index(channel: ChannelConfig, memory: PlanMemory, access: Access) -> RecordIndex:
    """Return the channel's index.

    `memory`: counts the index, on the event loop. Raises ConfigError, SinkError, SourceError.
    """
    name = channel.channel_name
    stored = await open_channel_index(
        channel.records.place,
        name,
        access,
        named_by="Records.Index",
        build=f"penstock index build -c JOB --channel {name}",
    )
    return await _read(stored, channel, memory, growing=False)


async def find_index(channel: ChannelConfig, memory: PlanMemory, access: Access) -> RecordIndex | None:
    """Return the channel's index for a start, which makes what it lacks; None if no row is stored yet.

    A build that was killed may have left a block that is not whole, which the next one removes. Raises as
    `load_index` for another fault.
    """
    stored = await find_channel_index(channel.records.place, channel.channel_name, access)
    return None if stored is None or not stored.size else await _read(stored, channel, memory, growing=True)


async def _read(
    stored: StoredIndex, channel: ChannelConfig, memory: PlanMemory, *, growing: bool
) -> RecordIndex:
    memory.count_index(stored.path, await in_thread(memory_of, stored))
    index = await in_thread(partial(stored.index, growing=growing))
    check_format(stored.path, index, channel.record_format)
    return index


def _order_of(channel: ChannelConfig, entries: Entries, counts: Sequence[int], batch: int) -> Order:
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
    selected = None
    if selection != RecordSelection():
        selected = select_records(entries, counts, entries.sizes, selection, block=block)
    return RecordOrder(counts, entries.sizes, seed=seed, block=block, selected=selected)


def _names(entries: Entries, objects: ChannelObjects) -> array[int]:
    """Return the names in the index of the plan's objects, by entry."""
    if len(objects) == len(entries):
        return objects.names
    refs = (only_object(entries, entry) for entry in range(len(entries)))
    return array("Q", [object_name(ref.bucket, ref.key) for ref in refs])


def _unended(bad: CorruptObject) -> CorruptObject:
    return CorruptObject(
        "the object's last line has no end, so a rank would read it and the next record as one; add a line "
        "feed to the object, and build the record index again",
        bad.context,
    )
