"""A stream whose records are dealt to the FIFOs of all channels of a run, and what each of them must get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from streamer.plan import ObjectRef, Plan, Segment
from streamer.plan.record_order import Deal, RecordOrder
from streamer.plan.record_plan import RecordPlan
from streamer.plan.record_table import FixedRecords
from streamer.relay.channel_spec import StartPosition
from streamer.relay.shared_stream import SharedStream
from tests.kit.raw import etag
from tests.machines.schedules.trial import BUCKET, RECORD, ChannelTrial, SharedTrial

if TYPE_CHECKING:
    from streamer.relay.staging.stage import Stages
    from streamer.retry import RetryPolicy
    from streamer.s3.ranges import RangeSource


def shared_stream(
    shared: SharedTrial,
    channels: Sequence[ChannelTrial],
    source: RangeSource,
    stages: Stages,
    retry: RetryPolicy,
) -> SharedStream:
    """Return the stream of `channels`, which have the same objects; rank by rank, its copies after it."""
    refs = [ObjectRef(BUCKET, key, len(data), etag(data)) for key, data in channels[0].objects.items()]
    entries = Plan.of(refs).entries
    table = FixedRecords(entries, RECORD)
    order = RecordOrder(table.counts, entries.sizes, seed=shared.shuffle, block=8 * RECORD)
    batch, fifos = shared.batch * shared.ranks, shared.ranks * shared.workers
    deal = Deal(batch, shared.ranks, 0, shared.ranks, "drop", shared.workers)
    whole = RecordPlan(entries, table, order, deal)
    names = iter(channels)
    ranks = [{next(names).name: plan for _ in range(shared.copies)} for plan in whole.ranks(fifos)]
    starts = {each.name: StartPosition() for each in channels}
    return SharedStream(whole, ranks, starts, source=source, stages=stages, retry=retry)


def share(plan: Plan, objects: dict[str, bytes], epoch: int) -> bytes:
    """The bytes of one FIFO."""
    return b"".join(
        objects[each.object.key][each.start : each.end] if isinstance(each, Segment) else each
        for each in plan.segments(epoch)
    )
