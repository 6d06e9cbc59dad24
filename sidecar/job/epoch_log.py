"""Logs the events of a channel while it streams: ended epochs, waits for this machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from sidecar.job.failures import FATES, advice, context_fields
from sidecar.observe.bottleneck import Sample, diagnose
from sidecar.process.logs import log
from streamer.relay.channel_spec import ChannelEvents
from streamer.units import decimal_bytes

if TYPE_CHECKING:
    from sidecar.index.learning import IndexLearner
    from sidecar.observe.state import JobState
    from streamer.errors import SinkError
    from streamer.plan import ObjectRef
    from streamer.relay.statistics import EpochRequests
    from streamer.trailer import Trailer


class EpochLog(ChannelEvents):
    """The observer of one channel, which writes the log lines of its FIFO `name`."""

    def __init__(self, state: JobState, name: str, learner: IndexLearner | None) -> None:
        """`learner`: learns the record index of the FIFO's channel."""
        self._state = state
        self._name = name
        self._learner = learner
        self._before: Sample | None = None
        """Sample at the end of the epoch before."""

    def unverifiable(self, ref: ObjectRef) -> None:
        log.warning(
            "not compared: S3 stores no checksum of the whole object, or the epoch was resumed within it; "
            "logged once for each channel",
            channel=self._name,
            object=f"s3://{ref.bucket}/{ref.key}",
        )

    def shortage(self, error: SinkError) -> None:
        log.warning("waiting for this machine", channel=self._name, error=str(error))

    def fifo_replaced(self, path: str) -> None:
        log.warning(
            "the FIFO was removed or replaced before its reader came, and is offered again",
            channel=self._name,
            path=path,
            do="let no other program remove or make FIFOs of channels",
        )

    def end_believed(self, epoch: int, offset: int) -> None:
        log.warning(
            "the reader left at the end of an object, before the end of the epoch, as at an end mark",
            channel=self._name,
            epoch=epoch,
            offset=offset,
            do="if it reads tar, add Penstock: {Join: tar} to the channel; "
            "if it reads Arrow, set RecordWrapperType: RecordIO and read the channel with TableReader",
        )

    def epoch_ended(self, trailer: Trailer, requests: EpochRequests) -> None:
        failed = trailer.state == "failed"
        (log.error if failed else log.info)(
            f"epoch {trailer.state}",
            channel=trailer.channel,
            epoch=trailer.epoch,
            delivered=decimal_bytes(trailer.bytes_delivered),
            **({} if trailer.bytes_total is None else {"of": decimal_bytes(trailer.bytes_total)}),
            **self._figures(requests),
            **({"error": trailer.error} if trailer.error else {}),
            **(self._failure() if failed else {}),
        )
        if failed:
            self._state.failed.set()
        if self._learner is not None:
            self._learner.epoch_ended(trailer)

    def _figures(self, requests: EpochRequests) -> dict[str, Any]:
        """Return the figures of an ended epoch: since the end of the one before it, without idle time."""
        now = Sample.of(self._state.channels[self._name].statistics(), time.monotonic())
        before, self._before = self._before, now
        if before is None:
            before = Sample.beginning(now.at - sum(now.seconds.values()))
        spent = {state: now.seconds[state] - before.seconds[state] for state in now.seconds}
        seconds = sum(spent.values()) - spent["idle"]
        written = now.written - before.written
        return {
            "seconds": round(seconds, 1),
            "mb_per_second": round(written / seconds / 1e6, 1) if seconds > 0 else 0.0,
            "waited_for_storage": round(spent["starved"], 1),
            "waited_for_trainer": round(spent["blocked"], 1),
            "requests": requests.ended,
            "retries": requests.repeated,
            "summary": diagnose(before, now, when="the epoch").text,
        }

    def _failure(self) -> dict[str, Any]:
        """Return the log fields of a failed epoch: error context, state of the FIFO, remedy."""
        channel = self._state.channels[self._name]
        failure = channel.failure
        if failure is None:
            return {}
        return context_fields(failure.error) | {
            "fifo": FATES[failure.fifo],
            "do": advice(failure.error, mendable=channel.mendable),
        }
