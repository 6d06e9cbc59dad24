"""The check of `penstock doctor` that the record indexes of ranks are there, whole, and of every record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.doctor.machine import Finding, refused
from sidecar.job.index_objects import Access
from sidecar.job.record_ranks import load_index
from sidecar.process.memory import memory_limit
from streamer.errors import PenstockError
from streamer.s3.catalog.validation import PlanMemory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sidecar.config.job import Job
    from streamer.s3.client.session import Clients


async def record_indexes(job: Job, clients: Clients) -> AsyncIterator[Finding]:
    """Check the index of every channel that needs one; only `run` looks at the objects."""
    for channel in job.channels("Pipe"):
        ranks = channel.penstock.by_record
        if ranks is None or ranks.index is None:
            continue
        check, access = f"index {channel.channel_name}", Access(job, clients)
        try:
            index = await load_index(channel, ranks.index, PlanMemory(memory_limit() // 2), access)
        except PenstockError as error:
            yield refused(check, error, "Do what the error says, or correct Ranks.Index.")
            continue
        totals = index.totals()
        text = f"{totals.records} records of {index.format} in {totals.objects} objects"
        yield Finding(check, "ok", text)
