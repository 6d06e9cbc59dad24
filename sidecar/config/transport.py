"""The transport of a job, by its job file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.process.logs import log
from sidecar.process.resources import granted_cores
from streamer.relay.transport import TransportSpec
from streamer.retry import RetryPolicy

if TYPE_CHECKING:
    from sidecar.config.job import Job
    from streamer.s3.range_gets import LeftToAiobotocore


def transport_spec(
    job: Job, buckets: set[str], channels: list[str | None], *, fifos: int = 0
) -> TransportSpec:
    """Return the spec of the transport by the job file. `channels`, `fifos`: see `TransportSpec`."""
    return TransportSpec(
        wish=job.penstock.transport,
        buckets=buckets,
        channels=channels,
        fifos=fifos,
        budget=job.budget,
        requests_in_flight=job.penstock.requests_in_flight,
        part_size=job.penstock.part_size,
        bandwidth=job.penstock.bandwidth,
        hedge=job.penstock.hedge_budget,
        cores=granted_cores(),
        retry=retry_policy(job),
        on_fallback=_log_fallback,
    )


def retry_policy(job: Job) -> RetryPolicy:
    """Return for how long the requests of a job's streams are repeated."""
    return RetryPolicy(give_up_after=job.penstock.give_up_after)


def _log_fallback(left: LeftToAiobotocore) -> None:
    ref = left.context
    log.warning(
        "aiobotocore fetches what Penstock's client does not support",
        why=left.message,
        object=f"s3://{ref.bucket}/{ref.key}",
    )
